"""The balance sheet of a stream: what each source has in it in the end, in the units of the stream's own length.

    |x| = <c_0, x> / |x| + <c_1, x> / |x| + ...        since x = c_0 + c_1 + ...

x is the recorded stream after the last sublayer, c_s what source s has in it, carried through every norm on its way. Both sides
are means over the same tokens, so the amounts add up to the length but for rounding; by how much they do not is `error`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Balance"]


@dataclass(frozen=True)
class Balance:
    """The sheet of one stream at the last recorded step; where components do not add up there is none: `refused` says why.

    Args:
        sources: "x_0", the ids of the sublayers, and "norm biases" where norms on the stream have any.
        amounts: of each source, the mean over the tokens of <c_s, x> / |x|; one that points against the stream is negative.
        length: the mean over the same tokens of |x|, the recorded stream after the last sublayer, before a final norm.
        tokens: how many tokens were taken.
        closure: over all depths, the largest relative error of the components' sum against the recorded stream.
        refused: why there is no sheet; empty where there is one.

    Example:
        >>> from addnorm.stream.record.balance import Balance
        >>> sheet = Balance(("x_0", "0.attn", "0.mlp"), (1.0, 2.5, -0.5), length=3.0, tokens=8, closure=1e-7)
        >>> sheet.error, dict(zip(sheet.sources, sheet.amounts))["0.attn"] / sheet.length
        (0.0, 0.8333333333333334)
    """

    sources: tuple[str, ...] = ()
    amounts: tuple[float, ...] = ()
    length: float = math.nan
    tokens: int = 0
    closure: float = math.nan
    refused: str = ""

    @property
    def error(self) -> float:
        """|length - sum of the amounts| / length; NaN where there is no sheet."""
        off = abs(self.length - math.fsum(self.amounts)) if all(map(math.isfinite, self.amounts)) else math.nan
        return off / self.length if self.length else off
