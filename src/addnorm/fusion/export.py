"""Exported programs of fused models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from addnorm.fusion.backend import fuse_graph, warn_of_failures
from addnorm.fusion.fuse import is_fused
from addnorm.stream.dataflow.snapshot import StateSnapshot


def export_fused(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
) -> torch.export.ExportedProgram:
    """Export a fused model with its fused calls.

    `torch.export.export` records a model without what `torch.compile` makes of it, so the program of a model that `fuse` has
    fused has the separate add and norm of the original: correct, and not fused. This function exports the model, replaces the
    Add & Norms in the graph as `fuse` does, and exports the graph. Gradients survive; the program computes nothing for a
    backward unless one is required.

    Args:
        model: a module that `fuse` has fused, and whose fused calls it has proven.
        args: positional arguments of an example call.
        kwargs: keyword arguments of an example call.
        dynamic_shapes: as in `torch.export.export`.
        strict: as in `torch.export.export`.

    Returns:
        The program. Its parameters have the names of the model's.

    Raises:
        ValueError: the model is not fused.
        Exception: any error of `torch.export.export` for this model.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> x = torch.randn(2, 5, 16)
        >>> fusion = addnorm.fuse(model, x, benchmark=False)
        >>> program = addnorm.export_fused(model, (x,))
        >>> [str(node.target) for node in program.graph.nodes if "addnorm" in str(node.target)]
        ['addnorm.add_norm.default', 'addnorm.add_norm.default']
    """
    if not is_fused(model):
        raise ValueError(f"model is {type(model).__name__}, which is not fused: fuse it with addnorm.fuse first.")
    with StateSnapshot(
        model, (args, kwargs), contents=False
    ).restored():  # a cache that it fills would hold fake tensors
        program = torch.export.export(
            model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=strict
        )
    graph = program.module()
    warn_of_failures(fuse_graph(graph).differences)
    return torch.export.export(graph, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=strict)
