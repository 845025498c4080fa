"""One token through Add & Norm, forward and backward: every step by name, in plain Python floats.

    post-LN: y = Norm(x + Sublayer(x))            pre-LN: z = x + Sublayer(Norm(x))

What it guarantees:

- It needs the standard library only, and nothing else of addnorm.
- Sums run from left to right with plain `+`, so that every Python gives the same numbers (since 3.12 the built-in `sum`
  compensates for rounding, and no longer gives what a pencil or a kernel gives).
- The backward is the derivative of the forward that is shown, also with variance by d - 1 or eps outside the root.
- Overflow and 0/0 follow IEEE 754: inf or nan, with a note at the step where it happens; never an exception.
"""

from .follow import trace
from .presets import PRESETS, Preset, Printed
from .steps import SECTIONS, Step, Trace, show

__all__ = ["PRESETS", "SECTIONS", "Preset", "Printed", "Step", "Trace", "show", "trace"]
