"""Where a tensor may lie in memory: the same values, in views of other memory, with nan around them."""

import torch
from torch import Tensor


def lying(t: Tensor, begin: int, width: int) -> Tensor:
    """Rows that are `width` apart; the first begins so many elements after its memory does."""
    memory = t.new_full((begin + t.numel() // t.shape[-1] * width,), torch.nan)
    rows = memory[begin:].view(*t.shape[:-1], width)[..., : t.shape[-1]]
    rows.copy_(t)
    return rows


def places(t: Tensor) -> dict[str, Tensor]:
    """The same values in each place; what has no rows only begins elsewhere."""
    t = t.detach()
    if t.dim() < 2:
        return {"an element later": lying(t.reshape(-1), 1, t.numel()).reshape(t.shape)}
    d = t.shape[-1]
    wide = (d // 16 + 1) * 16
    return {
        "an element later": lying(t, 1, d),
        "rows of a tensor that is wider by one": lying(t, 0, d + 1),
        "rows of a tensor whose width is a multiple of 16": lying(t, 0, wide),
        "such rows, an element later": lying(t, 1, wide),
        "columns first": t.transpose(-1, -2).contiguous().transpose(-1, -2),
        "every other element": torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0],
    }
