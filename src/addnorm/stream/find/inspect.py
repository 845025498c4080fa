"""`inspect`: which residual wiring a model has, found by the data flow of one run and proven by computing it again.

Nothing is judged by the names of modules or classes. The model runs once on the inputs given; every operator is seen (flow.py);
norms are recognized by their formula (norms.py), residual adds by what depends on what (adds.py), and each row that comes of
it (sites.py, rows.py) is computed in float64 from what the sublayer returned and compared with the stream the model has
(closure.py).
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from addnorm.stream.dataflow.capture import Capture
from addnorm.stream.dataflow.graph import DATA, Flow
from addnorm.stream.dataflow.state import UNMADE, tensors_in
from addnorm.stream.find.build import tell
from addnorm.stream.find.chain import Found, found_in
from addnorm.stream.find.chains import find_streams
from addnorm.stream.find.diagnostics import left_over, no_stream
from addnorm.stream.find.inspection import Inspection
from addnorm.stream.find.layers import layers_of
from addnorm.stream.find.norms import find_norms
from addnorm.stream.find.ops import mixing, up
from addnorm.stream.find.sites import common

__all__ = ["Found", "capture", "doubled", "inspect", "refuse", "understand"]

NO_GRADIENTS = "None of the inputs have requires_grad"  # what a reentrant checkpoint says without gradients
USUAL = "addnorm.inspect(model, *args, **kwargs)"


def inspect(model: nn.Module, *args: Any, float64: bool = False, **kwargs: Any) -> Inspection:
    r"""Finds the residual streams of any model, the Row of every sublayer, and proves each by computing it again.

    The model runs once, as it is (in training or evaluation mode), on `args` and `kwargs`. Its parameters and buffers, the
    inputs and the state of the random generators are left as they were. Every value of that run is kept until it is understood,
    so memory is that of all activations at once: a short input tells as much as a long one.

    Args:
        model: any `torch.nn.Module`, compiled or not.
        args: what the model is called with, shapes and values that mean something to it: the closures are of these values.
        float64: run a copy of the model in float64, where the equations close to 1e-10.
        kwargs: the keyword arguments of that call.

    Returns:
        An `Inspection`: `streams` and their `sites`, the name of the `wiring`, `closure`, and `unknown`: what is not
        understood, with the reason. It prints as a table, in a notebook too; `to_dict()` for JSON.

    Raises:
        TypeError: `model` is no module.
        ValueError: there are no numbers to look at: parameters on the meta device or not made yet, nested tensors.
        Whatever the model raises on these inputs.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> found = addnorm.inspect(torch.nn.TransformerEncoder(layer, 3).eval(), torch.randn(2, 5, 16))
        >>> found.wiring, len(found.sites), found.closes
        ('post_ln', 6, True)
        >>> found.sites[0].path, found.sites[0].kind, str(found.sites[0].row)
        ('layers.0.self_attn', 'attention', "x' = N(x + f(x))")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module: {USUAL}.")
    refuse(model, args, kwargs, USUAL)
    runs = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if float64:
        runs, args, kwargs = doubled(runs, args, kwargs)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", NO_GRADIENTS)
        flow = capture(runs, args, kwargs)
    return understand(runs, flow, target=model)


def refuse(model: nn.Module, args: Any, kwargs: Any, usual: str) -> None:
    """Refuses what has no numbers, or none in rows; `usual` is the call to make."""
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(parameter, UNMADE):
            raise ValueError(f"model has {name}, which is not made yet: call the model once, and then {usual}.")
        if parameter.is_meta:
            raise ValueError(
                f"model has {name} on the meta device, where there are no numbers: load its weights first."
            )
    for tensor in tensors_in((args, kwargs)):
        if tensor.is_nested:
            raise ValueError(
                "the model is given a nested tensor, expected a padded one: its tokens are looked at in rows."
            )


def capture(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
    """The data flow of one call."""
    return Capture(model).run(args, kwargs)


def understand(model: nn.Module, flow: Flow, target: nn.Module | None = None) -> Inspection:
    """What a data flow says."""
    norms = find_norms(flow)
    chains, single = find_streams(flow, norms)
    found = found_in(chains)
    names = _names(found)
    layers = [layers_of([branch for _, branch in one.sublayers()]) for one in found]
    streams, unknown = [], []
    first = 0
    for k, one in enumerate(found):
        other = max(layers[1 - k]) + 1 if len(found) == 2 else None
        told = tell(one, layers[k], names[k], first, other, _torn(one, found), model)
        first += len(told.stream.sites)
        streams.append(told.stream)
        unknown += told.unknown
    unknown += left_over(flow, norms, single, found) if streams else no_stream(flow, norms, single)
    target = model if target is None else target
    for stream in streams:
        for site in stream.sites:
            site.owner = weakref.ref(target)
    mode = "training" if model.training else "evaluation"
    return Inspection(type(model).__name__, tuple(streams), tuple(unknown), mode, len(flow.ops), target)


def _torn(one: Found, found: Sequence[Found]) -> bool:
    """Whether a stream begins with an elementwise function of where another one ends."""
    ends = {other.adds[-1].out for other in found}
    value = up(one.adds[0].x)
    while value not in ends:
        data = [v for v in value.op.inputs if v.kind & DATA] if value.op is not None else []
        if (
            len(data) != 1
            or value.op is None
            or mixing(value.op)
            or value.norm is not None
            or data[0].shape != value.shape
        ):
            return False
        value = up(data[0])
    return True


def _names(found: Sequence[Found]) -> list[str]:
    """A stream is called by the module that contains it, where there are several."""
    if len(found) == 1:
        return ["stream"]
    names = [common([add.op for add in one.adds], one.adds[0].op.frame).path or "stream" for one in found]
    counts = Counter(names)
    seen: Counter[str] = Counter()
    for k, name in enumerate(names):
        if counts[name] > 1:
            seen[name] += 1
            names[k] = f"{name} ({seen[name]})"
    return names


def doubled(model: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, Any, Any]:
    """A copy in float64."""
    try:
        twin = copy.deepcopy(model).double()
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"model cannot be copied, which float64=True needs: {str(error).splitlines()[0]}") from None
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, (args, kwargs))
    return twin, args, kwargs
