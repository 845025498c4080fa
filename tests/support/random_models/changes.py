"""Functions that change the features of a stream `(B, T, D)` on its way: moves, masks of its data, guards that bind beyond a bound."""

import torch
from torch.nn import functional as F


def written(change):
    """Return a function that changes a copy of the stream in place."""

    def run(x):
        y = x.clone()
        change(y, x)
        return y

    return run


def turned(x):
    """Return the numbers of the features in the opposite order."""
    return torch.arange(x.shape[-1]).flip(0)


def swap_halves(y, x):
    half = x.shape[-1] // 2
    y[..., :half].copy_(x[..., half:])
    y[..., half:].copy_(x[..., :half])


# Functions that give a feature the numbers of another one, or none.
MOVES = {
    "roll": lambda x: x.roll(1, -1),
    "index": lambda x: x[..., turned(x)],
    "index_select": lambda x: x.index_select(-1, turned(x)),
    "gather": lambda x: x.gather(-1, turned(x).expand_as(x)),
    "channel shuffle": lambda x: x.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2),
    "halves swapped by cat": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "halves swapped by writes": written(swap_halves),
    "some features of the token before": written(lambda y, x: y[:, 1:, :3].copy_(x[:, :-1, :3])),
    "gather of a token by feature": lambda x: x.gather(1, (turned(x) % x.shape[1]).expand_as(x)),
    "scatter": lambda x: torch.zeros_like(x).scatter(-1, turned(x).expand_as(x), x),
    "some features zeroed": written(lambda y, x: y[..., 3:].zero_()),
    "some features masked": lambda x: x.masked_fill(turned(x) < 3, 0.0),
    "features cut and padded": lambda x: F.pad(x[..., :-3], (0, 3)),
    "numbers in one row": lambda x: x.flatten(1).roll(1, 1).view(x.shape),
    "sorted": lambda x: x.sort(-1).values,
    "unfold": lambda x: x.unfold(-1, 2, 2).transpose(-1, -2).flatten(-2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.reshape(-1, 1, 2, x.shape[-1] // 2), 2).reshape(x.shape),
    "some features negated": lambda x: torch.cat((x[..., :3], -x[..., 3:]), -1),
    "tokens in the place of features": lambda x: x.flatten(1).unflatten(1, (x.shape[2], -1)).transpose(1, 2),
}

# Masks and gates that are computed from the stream.
MASKS = {
    "relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "relu by masked_fill": lambda x: x.masked_fill(x < 0, 0.0),
    "relu by a product": lambda x: x * (x > 0),
    "token gate, where": lambda x: torch.where(x.mean(-1, keepdim=True) > 0, x, torch.zeros_like(x)),
    "sign of the mean": lambda x: x * torch.sign(x.mean(-1, keepdim=True)),
    "magnitude": lambda x: x.abs(),
    "largest features": lambda x: x * torch.zeros_like(x).scatter(-1, x.abs().topk(x.shape[-1] // 2).indices, 1.0),
}

# Functions that return their input where it is between -c and c.
GUARDS = {
    "clamp(-{c}, {c})": lambda x, c: x.clamp(-c, c),
    "clamp": lambda x, c: x.clamp(torch.full_like(x[0, 0], -c), torch.full_like(x[0, 0], c)),
    "clamp_max({c})": lambda x, c: x.clamp_max(c),
    "hardtanh(-{c}, {c})": lambda x, c: F.hardtanh(x, -c, c),
    "minimum({c})": lambda x, c: torch.minimum(x, torch.tensor(float(c))),
    "maximum(-{c})": lambda x, c: torch.maximum(x, torch.tensor(-float(c))),
    "where": lambda x, c: torch.where(x.abs() < c, x, torch.zeros_like(x)),
    "masked_fill(0)": lambda x, c: x.masked_fill(x.abs() > c, 0.0),
    "threshold(-{c}, 0)": lambda x, c: F.threshold(x, -c, 0.0),
}
