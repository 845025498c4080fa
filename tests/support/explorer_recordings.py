"""Recordings of small models, for tests of the recording view."""

import torch
from torch import nn

import addnorm
from support.stacks import torch_encoder
from support.stream_steps import make_steps

D, STEPS = 16, 4


def scaled(m, x):
    """Multiply the stream by a parameter between the adds: no known wiring and no balance."""
    x = (x + torch.tanh(m.gates[0](x))) * m.last.weight
    return x + torch.tanh(m.gates[1](x))


def encoder(norm_first):
    """Return a PyTorch encoder of three layers."""
    return torch_encoder(norm_first, 3, nn.LayerNorm(D) if norm_first else None, dropout=0.0).train()


def write_recordings(folder):
    """Write recordings and return them by path.

    They are several steps of post-LN, one of pre-LN with a final norm, one that does not close, and one with two streams.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        two_streams = nn.Transformer(
            D, 2, 2, 2, 32, custom_encoder=encoder(True), dropout=0.0, batch_first=True, norm_first=True
        )
        two_streams.register_forward_pre_hook(lambda m, args: (*args, args[0][:, 1:]))
        models = {
            "post_ln": encoder(False),
            "pre_ln": encoder(True),
            "scaled": make_steps(scaled),
            "two_streams": two_streams,
        }
        recordings = {}
        for name, model in models.items():
            with addnorm.record(model) as rec:
                for step in range(STEPS if name == "post_ln" else 1):
                    (model(torch.randn(2, 5, D) * (1 + step)).square().mean()).backward()
            recordings[rec.save(folder / f"{name}.json")] = rec
    return recordings
