"""One token through Add & Norm, forward and backward, step by step in plain Python floats.

    post-LN: y = Norm(x + Sublayer(x))            pre-LN: z = x + Sublayer(Norm(x))

- It imports only the standard library, and no other module of addnorm.
- Sums run from left to right with plain `+`, so every Python version gives the same numbers. (Since 3.12 the built-in `sum`
  compensates for round-off.)
- The backward is the exact derivative of the forward, also with variance divided by d - 1 or eps outside the root.
- Overflow and 0/0 follow IEEE 754: they give inf or nan, with a note at the first such step, and never an exception.
"""

from .calculation import trace
from .presets import PRESETS, Preset, Printed
from .steps import SECTIONS, Step, Trace, show

__all__ = ["PRESETS", "SECTIONS", "Preset", "Printed", "Step", "Trace", "show", "trace"]
