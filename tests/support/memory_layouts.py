"""Views of one tensor's values with different strides and offsets, surrounded by NaN in memory."""

import torch


def make_view(t, begin, width):
    """Return a copy of t as a view whose rows are `width` elements apart and whose storage offset is `begin` elements."""
    memory = t.new_full((begin + t.numel() // t.shape[-1] * width,), torch.nan)
    rows = memory[begin:].view(*t.shape[:-1], width)[..., : t.shape[-1]]
    rows.copy_(t)
    return rows


def make_layouts(t):
    """Return views with the same values and different layouts; a tensor without rows only gets another offset."""
    t = t.detach()
    if t.dim() < 2:
        return {"an element later": make_view(t.reshape(-1), 1, t.numel()).reshape(t.shape)}
    d = t.shape[-1]
    wide = (d // 16 + 1) * 16
    return {
        "an element later": make_view(t, 1, d),
        "rows of a tensor that is wider by one": make_view(t, 0, d + 1),
        "rows of a tensor whose width is a multiple of 16": make_view(t, 0, wide),
        "such rows, an element later": make_view(t, 1, wide),
        "columns first": t.transpose(-1, -2).contiguous().transpose(-1, -2),
        "every other element": torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0],
    }


# Functions that copy a tensor of two dimensions into another memory layout; each result is a view.
LAYOUTS = {name: lambda t, name=name: make_layouts(t)[name] for name in make_layouts(torch.zeros(2, 2))}
