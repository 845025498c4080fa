"""Recordings of small models, for tests of the recording view."""

import torch
from torch import nn

import addnorm

D, STEPS = 16, 4


class Scaled(nn.Module):
    """Model whose stream is multiplied by a parameter between the adds: no known wiring and no balance."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x):
        x = (x + torch.tanh(self.one(x))) * self.scale
        return x + torch.tanh(self.two(x))


def encoder(norm_first):
    """Return a PyTorch encoder of three layers."""
    layer = nn.TransformerEncoderLayer(D, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    final = nn.LayerNorm(D) if norm_first else None
    return nn.TransformerEncoder(layer, 3, final, enable_nested_tensor=False)


def write_recordings(folder):
    """Write recordings and return them by path: several steps of post-LN, one of pre-LN with a final norm, one that does not close."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = {"post_ln": (encoder(False), STEPS), "pre_ln": (encoder(True), 1), "scaled": (Scaled(), 1)}
        recordings = {}
        for name, (model, steps) in models.items():
            with addnorm.record(model) as rec:
                for step in range(steps):
                    (model(torch.randn(2, 5, D) * (1 + step)).square().mean()).backward()
            recordings[rec.save(folder / f"{name}.json")] = rec
    return recordings
