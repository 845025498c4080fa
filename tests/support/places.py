"""Views of one tensor's values with different strides and offsets, surrounded by NaN in memory."""

import torch
from torch import Tensor


def lying(t: Tensor, begin: int, width: int) -> Tensor:
    """Return a copy of t as a view whose rows are `width` elements apart and whose storage offset is `begin` elements."""
    memory = t.new_full((begin + t.numel() // t.shape[-1] * width,), torch.nan)
    rows = memory[begin:].view(*t.shape[:-1], width)[..., : t.shape[-1]]
    rows.copy_(t)
    return rows


def places(t: Tensor) -> dict[str, Tensor]:
    """Return views with the same values and different layouts; a tensor without rows only gets another offset."""
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
