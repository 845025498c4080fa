"""Modules whose programs the tests of deployment export: many calls of the operation at once, and small models."""

from dataclasses import replace

import torch
from torch import nn

from support.cases import DTYPES, make

WIDTH = 12


class Calls(nn.Module):
    """Calls of several variants on one residual and one branch; their other tensors are parameters."""

    def __init__(self, variants, dtypes):
        super().__init__()
        self.dtypes = DTYPES[dtypes] if isinstance(dtypes, str) else dtypes
        self.calls, self.values = {}, nn.ParameterDict()
        for number, (name, variant) in enumerate(variants.items()):
            # A tensor of one element a row cannot be a parameter, since the number of rows changes.
            rows = {key: value for key, value in variant.options.items() if value in ("(*)", "(n, 1...)")}
            options = {key: value for key, value in variant.options.items() if key not in rows}
            call = make(replace(variant, options=options), self.dtypes, (2, 3, WIDTH), seed=number)
            for key, tensor in call.tensors.items():
                if key not in ("residual", "branch"):
                    self.values[f"{number} {key}"] = nn.Parameter(tensor)
            self.calls[name] = number, call, rows

    def forward(self, residual, branch):
        results = {}
        for name, (number, call, rows) in self.calls.items():
            tensors = {key: self.values[f"{number} {key}"] for key in call.tensors if f"{number} {key}" in self.values}
            for key, shape in rows.items():
                tensors[key] = residual[..., 0] if shape == "(*)" else residual[:, :1, 0]
            results[name] = replace(call, tensors={"residual": residual, "branch": branch, **tensors})()
        return results

    def inputs(self, *sizes, seed=0):
        generator = torch.Generator().manual_seed(seed)
        residual, branch = (torch.randn(*sizes, WIDTH, generator=generator) for _ in range(2))
        return residual.to(self.dtypes.residual), branch.to(self.dtypes.branch)


def dynamic(count):
    """Return the dynamic shapes of `count` inputs `(batch, tokens, width)`."""
    shape = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("tokens", max=64)}
    return (shape,) * count


def operators(program):
    """Return the operators of this library in a program."""
    return [str(node.target) for node in program.graph.nodes if "addnorm" in str(node.target)]
