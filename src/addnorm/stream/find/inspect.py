"""`inspect`: find the residual wiring of a model from the data flow of one run, and prove it by computing it again.

Names of modules and classes decide nothing. The steps, each in a file that imports only those before it:

    dataflow/          capture every operator of one run
    operators.py, views.py     the meaning of torch's operators: views, factors, sums; their replay
    functions.py       parts of the run as functions, computed again with other inputs
    norm.py, norms.py, decomposed_norms.py     find norms by what they compute
    next_norms.py      the norms that follow the end of a stream, and the tokens that they read
    moves.py           remove cuts and joins that cancel
    paths.py, interpolation.py, adds.py     find residual adds: x + f(x)
    sublayers.py       what each sublayer reads, computes and writes; its kind, layer and row
    chain.py           join the adds into streams
    passages.py        check that whole tokens pass from one sublayer to the next
    sums.py            say why a sum is no residual add
    coverage.py        find the steps on the streams' paths that are in no row
    closure.py         compute every row in float64 and compare it with the run
    inspection.py      the result
    naming.py, diagnostics.py     the name of the wiring; notes, remarks and reasons
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from addnorm import wirings
from addnorm.stream.dataflow.capture import Capture
from addnorm.stream.dataflow.graph import Flow
from addnorm.stream.dataflow.state import UNINITIALIZED, find_tensors
from addnorm.stream.dataflow.wrappers import find_fsdp_modules
from addnorm.stream.find import naming
from addnorm.stream.find.chain import Chain, SublayerNames, find_chains, list_ids
from addnorm.stream.find.closure import compute_closure, compute_total_closure, get_tolerance
from addnorm.stream.find.coverage import SUM, find_gaps
from addnorm.stream.find.diagnostics import (
    explain_gaps,
    explain_no_stream,
    format_source,
    list_notes,
    list_reasons,
)
from addnorm.stream.find.inspection import Inspection, Site, Stream, Unknown
from addnorm.stream.find.moves import remove_redundant_moves, remove_saved_copies
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.norms import find_norms
from addnorm.stream.find.passages import check_passages
from addnorm.stream.find.remarks import list_remarks, remark_on_start
from addnorm.stream.find.sublayers import Sublayer, assign_layers, build_row, find_common_frame, has_zero_factor
from addnorm.stream.find.sums import CENTRED, LONE_ADD
from addnorm.stream.layout.stream_layout import StreamLayout
from addnorm.wirings.spec import Wiring

__all__ = ["build_inspection", "capture_flow", "check_inputs", "check_parameters", "inspect", "to_float64"]

NO_GRADIENTS = "None of the inputs have requires_grad"  # warning of a reentrant checkpoint without gradients
USAGE = "addnorm.inspect(model, *args, **kwargs)"
ZERO_FACTOR = "what the sublayer reads or returns is multiplied by 0"
APART = (CENTRED, LONE_ADD, SUM)  # sums that change no stream if no stream has them
SEVERAL_NORMS = (
    "several norms read the end of the stream and lead to the output: which one is the final norm is not clear"
)
POOLED = "no norm reads the tokens at the end of the stream: the norm in {} reads what {} and later operators compute from them"
RESI_DUAL = "a second stream has the same writes and no norms; the output is the sum of both"


def inspect(model: nn.Module, *args: Any, float64: bool = False, **kwargs: Any) -> Inspection:
    r"""Find the residual streams of a model and the row of every sublayer, and prove each row by computing it again.

    The model runs once, in its current mode (training or evaluation), on `args` and `kwargs`. Parameters, buffers, inputs and
    the states of the random generators are restored afterwards. All activations of the run are in memory at the same time; a
    short input is enough.

    Args:
        model: any `torch.nn.Module`, compiled or not.
        args: positional arguments of the model. Use realistic shapes and values: the closures are computed with them.
        float64: run a copy of the model in float64, in which the equations close to 1e-10.
        kwargs: keyword arguments of the model.

    Returns:
        An `Inspection`: `streams` and their `sites`, the name of the `wiring`, the `closure`, and `unknown`: the parts that are
        not understood, each with the reason. It prints as a table, also in notebooks; `to_dict()` returns JSON types.

    Raises:
        TypeError: `model` is not a module, or cannot be copied for `float64=True`.
        ValueError: parameters are uninitialized or on the meta device, or an input is a nested tensor.
        Exception: any error that the model raises on these inputs.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> found = addnorm.inspect(torch.nn.TransformerEncoder(layer, 3).eval(), torch.randn(2, 5, 16))
        >>> found.wiring, len(found.sites), found.closes
        ('post_ln', 6, True)
        >>> found.sites[0].path, found.sites[0].kind, str(found.sites[0].row)
        ('layers.0.self_attn', 'attention', "x' = N(x + f(x))")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module: {USAGE}.")
    check_inputs(model, args, kwargs, USAGE)
    inner = getattr(model, "_orig_mod", model)  # of a module that torch.compile wraps
    if float64:
        inner, args, kwargs = to_float64(inner, args, kwargs)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", NO_GRADIENTS)
        flow = capture_flow(inner, args, kwargs)
    return build_inspection(inner, flow, target=model)


def check_inputs(model: nn.Module, args: Any, kwargs: Any, usage: str) -> None:
    """Check that parameters, buffers and inputs have values; `usage` is the call that error messages recommend."""
    check_parameters(model, usage)
    for tensor in find_tensors((args, kwargs)):
        if tensor.is_nested:
            raise ValueError(
                "an input of the model is a nested tensor, expected a padded one: use Tensor.to_padded_tensor."
            )


def check_parameters(model: nn.Module, usage: str) -> None:
    """Check that parameters and buffers have values."""
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(parameter, UNINITIALIZED):
            raise ValueError(f"model has {name}, which is not initialized yet: call the model once, and then {usage}.")
        if parameter.is_meta:
            raise ValueError(f"model has {name} on the meta device, which has no values: load the weights first.")


def capture_flow(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
    """Return the data flow of one call of a model."""
    return Capture(model).run(args, kwargs)


def to_float64(model: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, Any, Any]:
    """Return a copy of the model and its arguments in float64."""
    if find_fsdp_modules(model):
        raise TypeError("model is sharded by FSDP and cannot be copied, which float64=True needs: pass float64=False.")
    try:
        twin = copy.deepcopy(model).double()
    except Exception as error:  # __deepcopy__ may raise anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise TypeError(f"model cannot be copied, which float64=True needs: {reason}") from None
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, (args, kwargs))
    return twin, args, kwargs


def build_inspection(model: nn.Module, flow: Flow, target: nn.Module | None = None) -> Inspection:
    """Return the inspection of a captured run of a model; `target` is the user's model if the run is one of a copy."""
    remove_saved_copies(flow)
    remove_redundant_moves(flow)
    norms = find_norms(flow)
    adds = find_chains(flow, norms)
    chains = adds.chains
    for chain in chains:
        chain.layout = StreamLayout(chain)
        for _, sublayer in chain.numbered():
            if sublayer.kind == "feed-forward" and chain.layout.mixes_tokens(sublayer):
                sublayer.kind = "other"
        chain.passages = check_passages(chain)
    gaps = find_gaps(flow, norms, adds)
    names = _name_streams(chains)
    ids = list_ids(chains, names)
    layers = [assign_layers([sublayer for _, sublayer in chain.numbered()]) for chain in chains]
    streams: list[Stream] = []
    unknown: list[Unknown] = []
    for k, chain in enumerate(chains):
        other_layers = max(layers[1 - k]) + 1 if len(chains) == 2 else None
        own_gaps = explain_gaps([gap for gap in gaps if k in gap.chains])
        report = _build_report(chain, layers[k], ids[k], names[k], other_layers, own_gaps, model, flow)
        report.stream.remarks += tuple(remark_on_start(report.stream, streams))
        streams.append(report.stream)
        unknown += report.unknown
    apart = [gap for gap in gaps if not gap.chains and gap.reason in APART] if streams else []
    unknown += (
        explain_gaps([gap for gap in gaps if gap not in apart]) if streams else explain_no_stream(flow, norms, gaps)
    )
    target = model if target is None else target
    for index, site in enumerate(site for stream in streams for site in stream.sites):
        site.index, site.owner = index, weakref.ref(target)
    mode = "training" if model.training else "evaluation"
    return Inspection(
        type(model).__name__, tuple(streams), tuple(unknown), mode, len(flow.ops), target, tuple(explain_gaps(apart))
    )


@dataclass
class _StreamReport:
    """A stream and the parts of it that are not understood."""

    stream: Stream
    unknown: list[Unknown]


def _build_report(
    chain: Chain, layers: Sequence[int], ids: Sequence[str], name: str, other_layers: int | None,
    gaps: Sequence[Unknown], model: nn.Module, flow: Flow,
) -> _StreamReport:  # fmt: skip
    """Return the report of one stream.

    Args:
        chain: the stream in the captured run.
        layers: layer of each sublayer.
        ids: id of each sublayer.
        name: name of the stream.
        other_layers: number of layers of the other stream if there are two.
        gaps: what changes it and is in no row.
        model: the model.
        flow: the captured run.
    """
    names = SublayerNames(chain)
    closures = [
        compute_closure(add, sublayers, _first(norms))
        for add, sublayers, norms in zip(chain.adds, chain.sublayers, chain.norms_out, strict=True)
    ]
    unknown: list[Unknown] = []
    sites, summaries, tolerances = [], [], []
    for n, ((k, sublayer), layer) in enumerate(zip(chain.numbered(), layers, strict=True)):
        add, reads, norm_out = chain.adds[k], sublayer.reads, _first(chain.norms_out[k])
        reasons = list_reasons(chain, k, sublayer)
        if has_zero_factor(sublayer):
            reasons[ZERO_FACTOR] = add.op
        row = build_row(sublayer, norm_out, chain.sum_factors(k))
        tolerances.append(_get_row_tolerance(sublayer, norm_out))
        closes = closures[k] <= tolerances[-1]
        site = Site(
            id=ids[n], path=sublayer.module, modules=names.list_modules(sublayer), kind=sublayer.kind,
            layer=layer, index=n, stream=name, row=row, norm_in=None if reads.direct else _first(reads.norms),
            norm_branch=sublayer.norm, norm_out=norm_out, closure=closures[k], closes=closes,
            parallel=sum(part.role != "bias" for part in chain.sublayers[k]), shared=names.count_shared(sublayer),
            call=sublayer.frame.call, add_path=add.op.frame.path, notes=tuple(list_notes(chain, k, sublayer)), role=sublayer.role,
            sublayer=sublayer, add_index=k,
        )  # fmt: skip
        sites.append(site)
        summaries.append(naming.summarize_sublayer(chain, k, sublayer, layer, row, bool(reasons) or not closes))
        if not closes:
            error = _explain_error(closures[k], tolerances[-1], sublayer)
            reasons = {f"{site.equation} does not close: {error}": add.op, **reasons}
        unknown += [Unknown(site.id, reason, format_source(op)) for reason, op in reasons.items()]
    first = chain.adds[0]
    ends = [*([SEVERAL_NORMS] if chain.has_other_norms else []), *chain.passages[-1].reasons]
    unknown += [Unknown(name, reason) for reason in ends]
    wiring, remarks = (None, []) if gaps or ends else _identify_wiring(chain, summaries, other_layers)
    total = compute_total_closure(chain) if all(summary.row.is_sum for summary in summaries) else None
    total_closes = total is None or total <= max(tolerances) * len(chain.adds) ** 0.5
    if total is not None and not total_closes and all(site.closes for site in sites):
        unknown.append(Unknown(name, f"x_L = x_0 + all writes does not close: relative error {total:.1e}"))
        wiring = None
    remarks = [*dict.fromkeys([*remarks, *list_remarks(chain, sites, model, wiring, flow)])]
    stream = Stream(
        name, chain.layout.width, str(first.x.tensor.dtype).removeprefix("torch."), tuple(sites), layers[-1] + 1, wiring,
        chain.first_norm, chain.final_norms[-1] if chain.final_norms else None, total, total_closes, (*unknown, *gaps),
        tuple(remarks), chain, chain.layout, chain.layout.axis,
    )  # fmt: skip
    return _StreamReport(stream, unknown)


def _first(norms: Sequence[Norm]) -> Norm | None:
    return norms[0] if norms else None


def _get_row_tolerance(sublayer: Sublayer, norm_out: Norm | None) -> float:
    """Return the tolerance of the coarsest dtype in which the row is computed."""
    add = sublayer.add
    on_paths = [op.outputs[0] for op in (*add.residual_path.ops, *sublayer.write_path.ops)]
    norms = [norm for norm in (norm_out, sublayer.norm, *sublayer.reads.norms) if norm is not None]
    values = (add.x, add.out, sublayer.raw, *on_paths)
    return get_tolerance(*(value.tensor.dtype for value in values), *(norm.dtype for norm in norms))


def _explain_error(closure: float, tolerance: float, sublayer: Sublayer) -> str:
    """Explain why an equation does not close."""
    out = sublayer.add.out.tensor
    if not out.numel():
        return "the inputs hold no token, so nothing is proven"
    if not out.isfinite().any():
        return "no number of the stream is finite"
    return f"relative error {closure:.1e}, tolerance {tolerance:.0e}"


def _identify_wiring(
    chain: Chain, summaries: Sequence[naming.SublayerSummary], other_layers: int | None
) -> tuple[Wiring | None, list[str]]:
    has_embedding_norm = chain.first_norm is not None
    wiring, remarks = naming.identify_wiring(summaries, bool(chain.final_norms), has_embedding_norm, other_layers)
    if chain.dual_norm is not None and wiring is not None and wiring.name == "post_ln":
        return wirings.resi_dual(), [RESI_DUAL]
    if chain.pooled is not None:
        norm, op = chain.pooled
        pooled = POOLED.format(norm.path or "the model", op.name)
        remarks = [pooled if remark == naming.WITHOUT_FINAL_NORM else remark for remark in remarks]
    return wiring, remarks


def _name_streams(chains: Sequence[Chain]) -> list[str]:
    """Return the name of each stream: "stream", or the modules that contain them if there are several."""
    if len(chains) == 1:
        return ["stream"]
    paths = [
        find_common_frame([add.op for add in chain.adds], chain.adds[0].op.frame).path or "stream" for chain in chains
    ]
    counts, used = Counter(paths), Counter[str]()
    names = []
    for path in paths:
        used[path] += 1
        names.append(f"{path} ({used[path]})" if counts[path] > 1 else path)
    return names
