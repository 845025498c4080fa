"""`inspect`: find the residual wiring of a model from the data flow of one run, and prove it by computing it again.

Names of modules and classes decide nothing. The steps, each in a file that imports only those before it:

    dataflow/          capture every operator of one run; operators.py has what each operator of torch does
    layout/            follow the dimensions of values through views
    functions.py       parts of the run as functions, computed again with other inputs
    norm.py, norms.py, decomposed_norms.py     find norms by what they compute
    paths.py, adds.py  find residual adds: x + f(x)
    kinds.py, sublayers.py     what each sublayer reads, computes and writes; its kind, layer and `Row`
    next_norms.py      the norms that follow the end of a stream, and the tokens that they read
    chain.py           join the adds into streams
    stream_layout.py   the dimensions of a stream that are features, tokens and sequences
    passages.py        check that whole tokens pass from one sublayer to the next
    unexplained.py     find the operators that change a stream and that no `Row` describes
    equation_errors.py compute every equation in float64 and compare it with the run
    labels.py, naming.py, sites.py     names of norms, modules and wirings; the streams with their sites
    reasons.py, remarks.py     reasons why a part is not understood; remarks on the parts that are

Where rows do not describe the run, `program/` describes it by matrices. The result is in inspection.py.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from addnorm import wirings
from addnorm._util.numbers import format_number
from addnorm.stream.dataflow.flow_capture import FlowCapture
from addnorm.stream.dataflow.graph import Flow
from addnorm.stream.dataflow.observers import Editor
from addnorm.stream.dataflow.replay import simplify
from addnorm.stream.dataflow.state import UNINITIALIZED, find_tensors
from addnorm.stream.dataflow.wrappers import find_fsdp_modules
from addnorm.stream.find import naming
from addnorm.stream.find.chain import Chain, find_chains
from addnorm.stream.find.equation_errors import get_tolerance, measure_row_error, measure_sum_error
from addnorm.stream.find.labels import SublayerNames, list_ids
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.norms import find_norms
from addnorm.stream.find.passages import PlacedChain, place_chain
from addnorm.stream.find.reasons import explain_no_stream, format_source, list_reasons, report_unexplained
from addnorm.stream.find.remarks import remark_on_start, remark_on_stream, remark_on_sublayer
from addnorm.stream.find.sites import Site, Stream
from addnorm.stream.find.sublayers import Sublayer, assign_layers, build_row, find_common_frame
from addnorm.stream.find.unexplained import CENTRED, LONE_ADD, SUM, find_unexplained
from addnorm.stream.find.unknown import Unknown
from addnorm.stream.inspection import Inspection
from addnorm.stream.program.build import are_parts, find_program
from addnorm.stream.program.naming import identify
from addnorm.stream.program.result import Program
from addnorm.wirings.spec import Wiring

NO_GRADIENTS = "None of the inputs have requires_grad"  # warning of a reentrant checkpoint without gradients
USAGE = "addnorm.inspect(model, *args, **kwargs)"
APART = (CENTRED, LONE_ADD, SUM)  # reasons of sums that are listed in `outside` if they are in no stream
SEVERAL_NORMS = (
    "several norms read the end of the stream and lead to the output: which one is the final norm is not clear"
)
POOLED = "no norm reads the tokens at the end of the stream: the norm in {} reads what {} and later operators compute from them"
NO_NUMBERS = Unknown(
    "the model", "no number of its output is finite, so no equation can be proven: call it with other inputs"
)
NO_MATRICES = "no wiring has the matrices of its mix: it may be a wiring of several streams, such as x0_residual"
MIXED_STREAMS = (
    "the streams begin with sums of the states of others: the rows describe parts of a model of several streams"
)
RESI_DUAL = "a second stream has the same writes and no norms; the output is the sum of both"


def inspect(model: nn.Module, *args: Any, float64: bool = False, **kwargs: Any) -> Inspection:
    r"""Find the residual streams of a model and the equation of every sublayer, and prove each by computing it again.

    The equation of one stream is a `Row`. Of several streams, or of computed coefficients, the matrices are measured.

    The model runs once, in its current mode (training or evaluation), on `args` and `kwargs`; in inference mode once more if its
    equations do not close there. Parameters, buffers, inputs and the states of the random generators are restored afterwards. All
    activations of the run are in memory at the same time; a short input is enough.

    Args:
        model: any `torch.nn.Module`, compiled or not.
        args: positional arguments of the model. Use realistic shapes and values: the equations are computed with them.
        float64: run a copy of the model in float64, in which the equations hold to 1e-10.
        kwargs: keyword arguments of the model.

    Returns:
        An `Inspection`: `streams` and their `sites`, the name of the `wiring`, the largest relative error of an equation
        (`closure`), and the parts that are not understood, each with the reason (`unknown`). If no rows describe the model,
        `streams` is empty, and `program` has the matrices C, A and B of every sublayer, the error of the end computed with
        them (`expansion`), and the `wiring` of the catalog with its options, or None. An inspection prints as a table, also
        in notebooks; `to_dict()` returns JSON types.

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
        >>> model = addnorm.nn.Encoder(2, 16, nhead=2, wiring="mhc").eval()
        >>> program = addnorm.inspect(model, torch.randn(2, 5, 16)).program
        >>> program.wiring.name, program.sizes, program.sites[0].mix.source
        ('mhc', [4, 4, 4, 4, 4], 'computed')
    """
    return inspect_run(model, args, kwargs, float64)


def inspect_run(
    model: nn.Module, args: Any, kwargs: dict[str, Any], float64: bool = False, as_program: bool | None = None
) -> Inspection:
    """Inspect a model as `inspect` does; `as_program` is that of `inspect_flow`."""
    check_inputs(model, args, kwargs, USAGE)

    def run() -> Inspection:
        inner = getattr(model, "_orig_mod", model)  # the module that torch.compile wraps
        inner, *inputs = to_float64(inner, args, kwargs) if float64 else (inner, args, kwargs)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", NO_GRADIENTS)
            flow = capture_flow(inner, *inputs)
        inspection = inspect_flow(inner, flow, model, as_program)
        results = [] if inspection.closes or inspection.streams else flow.list_results()
        proves_nothing = results and not any(_has_numbers(value.tensor) for value in results)
        return replace(inspection, unknown=(NO_NUMBERS, *inspection.unknown)) if proves_nothing else inspection

    found = run()
    if found.closes or not torch.is_inference_mode_enabled():
        return found
    with leave_inference_mode(), suppress(RuntimeError):  # a model that writes into its inputs cannot run there
        outside = run()
        found = outside if outside.with_program().program is not None else found
    return found


@contextmanager
def leave_inference_mode() -> Iterator[None]:
    """Run the block without gradients and outside inference mode, in which torch hides the steps of products from observers."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def inspect_flow(
    model: nn.Module, flow: Flow, target: nn.Module | None = None, as_program: bool | None = None
) -> Inspection:
    """Return the inspection of a captured run, with its residual program where rows do not describe it.

    Args:
        model: the model that ran.
        flow: the run.
        target: the model of the user, if `model` is a copy.
        as_program: True to find the residual program even where rows describe the run; False to keep such rows.
    """
    inspection = build_inspection(model, flow, target)
    is_named = len(inspection.streams) == 1 and inspection.streams[0].wiring is not None
    is_mixed = any(naming.SCALED_SKIP in stream.remarks for stream in inspection.streams)  # as in x0_residual
    is_clear = inspection.closes and is_named and not any(map(_reads_several, inspection.sites))
    is_enough = is_clear and not as_program and (as_program is not None or not is_mixed)
    return inspection if is_enough else prefer_program(inspection, flow, bool(as_program))


def _has_numbers(result: Tensor) -> bool:
    """Return whether a result has a finite number, or is empty or not floating-point."""
    return not (result.is_floating_point() and result.numel()) or bool(result.isfinite().any())


def _reads_several(site: Site) -> bool:
    """Return whether a sublayer reads the stream through a norm of more values: those of other states, or of other tokens."""
    sublayer = site.sublayer
    return any(norm.x.tensor.numel() > sublayer.add.x.tensor.numel() for norm in sublayer.reads.norms)


def prefer_program(inspection: Inspection, flow: Flow, as_program: bool = False) -> Inspection:
    """Return the inspection with the residual program of the run, if the program contains all residual sums.

    A program with a wiring of the catalog replaces the streams, unless their equations close and the wiring has rows. With
    `as_program` any program replaces them. A program of several streams without a wiring becomes `unnamed` if the inspection does
    not close; it replaces streams of which none has a wiring. A program of only a part of the model may add its reason to
    `unknown`. A stream that mixes in an earlier state loses its wiring if no program contains the whole model.
    """
    with torch.no_grad():
        mixed = [stream for stream in inspection.streams if naming.SCALED_SKIP in stream.remarks]
        program = find_program(flow, {stream.width for stream in mixed} or None)
        if program is not None and not as_program:
            identify(program)
        if program is None or program.outside:
            for stream in mixed:  # only its matrices determine its wiring
                stream.wiring, stream.remarks = None, (*stream.remarks, NO_MATRICES)
        if program is None:
            return inspection
    adds = [[site.sublayer.add for site in stream.sites] for stream in inspection.streams]
    if max(program.sizes) > 1 and not program.outside and are_parts(adds, program):
        inspection = replace(inspection, unknown=(*inspection.unknown, Unknown("the model", MIXED_STREAMS)))
    is_several = program.wiring is None and max(program.sizes) > 1 and not inspection.closes
    if program.outside:
        is_new = not inspection.closes and (is_several or (program.wiring is not None and not program.wiring.has_rows))
        return replace(inspection, unknown=(program.explain_outside(), *inspection.unknown)) if is_new else inspection
    if as_program or (program.wiring is not None and not (inspection.closes and program.wiring.has_rows)):
        return replace(inspection, streams=(), unknown=(), program=program)
    if not is_several:
        return inspection
    streams = inspection.streams if any(stream.wiring for stream in inspection.streams) else ()
    return replace(inspection, streams=streams, unnamed=program)


def find_repeated_program(flow: Flow) -> Program | None:
    """Return the residual program of a second run of a model; None if its equations differ from the run's values."""
    simplify(flow)
    find_norms(flow)
    return find_program(flow)


def check_inputs(model: nn.Module, args: Any, kwargs: Any, usage: str) -> None:
    """Check that parameters have values and no input is a nested tensor. Error messages recommend the call `usage`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module: {usage}.")
    check_parameters(model, usage)
    for tensor in find_tensors((args, kwargs)):
        if tensor.is_nested:
            raise ValueError(
                "an input of the model is a nested tensor, expected a padded one: use Tensor.to_padded_tensor."
            )


@contextmanager
def hint_inputs(args: Any, kwargs: Any) -> Iterator[None]:
    """Add a note to an error of a model that is called without inputs."""
    try:
        yield
    except Exception as error:
        if not args and not kwargs:
            error.add_note("The model was called without inputs: pass them after it, (model, *args, **kwargs).")
        raise


def check_parameters(model: nn.Module, usage: str) -> None:
    """Check that parameters and buffers have values. Error messages recommend the call `usage`."""
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(parameter, UNINITIALIZED):
            raise ValueError(f"model has {name}, which is not initialized yet: call the model once, and then {usage}.")
        if parameter.is_meta:
            raise ValueError(f"model has {name} on the meta device, which has no values: load the weights first.")


def capture_flow(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], edits: Sequence[Editor] = ()) -> Flow:
    """Return the data flow of the call `model(*args, **kwargs)`, with the edits of operators in it."""
    has_cache = torch.is_autocast_cache_enabled()  # a cached cast has no operator that leads to the parameter
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()  # an autocast block in the model switches the cache on
    try:
        with hint_inputs(args, kwargs):
            return FlowCapture(model, editors=edits).run(args, kwargs)
    finally:
        torch.set_autocast_cache_enabled(has_cache)


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
    """Build the inspection of `flow`, a run of `model`. If `model` is a copy, `target` is the model of the user."""
    simplify(flow)
    norms = find_norms(flow)
    adds = find_chains(flow, norms)
    chains = [place_chain(chain) for chain in adds.chains]
    found = find_unexplained(flow, norms, adds, chains)
    names = _name_streams(chains)
    layers = [assign_layers(chain.list_sublayers()) for chain in chains]
    streams: list[Stream] = []
    unknown: list[Unknown] = []
    for k, (chain, name, ids) in enumerate(zip(chains, names, list_ids(chains, names), strict=True)):
        other_layers = max(layers[1 - k]) + 1 if len(chains) == 2 else None
        own = report_unexplained([one for one in found if k in one.chains])
        places = [*zip(ids, layers[k], strict=True)]
        stream, reasons = _build_stream(chain, name, places, other_layers, own, streams, model, flow)
        streams.append(stream)
        unknown += reasons
    apart = [one for one in found if not one.chains and one.reason in APART] if chains else []
    unknown += report_unexplained([one for one in found if one not in apart])
    return Inspection(
        type(model).__name__, tuple(streams), tuple(unknown if chains else explain_no_stream(flow, norms, found)),
        "training" if model.training else "evaluation", len(flow.ops), model if target is None else target,
        tuple(report_unexplained(apart)), flow.name_results(),
    )  # fmt: skip


# Longer than 60 lines, since a stream and its sites need the same intermediate results.
def _build_stream(
    chain: PlacedChain, name: str, places: Sequence[tuple[str, int]], other_layers: int | None,
    unexplained: Sequence[Unknown], before: Sequence[Stream], model: nn.Module, flow: Flow,
) -> tuple[Stream, list[Unknown]]:  # fmt: skip
    """Build one stream of an inspection, with its sites, wiring and remarks.

    Args:
        chain: the stream in the captured run.
        name: the name of the stream.
        places: the id and the layer of each sublayer.
        other_layers: number of layers of the other stream; None unless there are two streams.
        unexplained: operators that change the stream and that no `Row` describes.
        before: the streams that begin earlier.
        model: the model that ran.
        flow: the captured run.

    Returns:
        The stream, and its unknown parts besides `unexplained`.
    """
    names = SublayerNames(chain)
    norms_out = [next(iter(norms), None) for norms in chain.norms_out]
    errors = [*map(measure_row_error, chain.adds, chain.sublayers, norms_out)]
    unknown: list[Unknown] = []
    sites, summaries, tolerances = [], [], []
    for sublayer, (site_id, layer) in zip(chain.list_sublayers(), places, strict=True):
        k, add, reads = sublayer.place, sublayer.add, sublayer.reads
        reasons = list_reasons(chain, sublayer)
        row = build_row(sublayer, norms_out[k], chain.sum_factors(k))
        tolerances.append(_get_row_tolerance(sublayer, norms_out[k]))
        closes = errors[k] <= tolerances[-1]
        site = Site(
            id=site_id, path=sublayer.module, modules=names.list_modules(sublayer), kind=sublayer.kind, layer=layer, stream=name,
            row=row, norm_in=None if reads.direct else next(iter(reads.norms), None), norm_branch=sublayer.norm,
            norm_out=norms_out[k], closure=errors[k], closes=closes,
            parallel=sum(part.role != "bias" for part in chain.sublayers[k]), shared=names.count_shared(sublayer),
            call=sublayer.frame.call, add_path=add.op.frame.path, notes=tuple(remark_on_sublayer(chain, sublayer)),
            role=sublayer.role, sublayer=sublayer,
        )  # fmt: skip
        sites.append(site)
        summaries.append(naming.summarize_sublayer(chain, sublayer, layer, row, bool(reasons) or not closes))
        if not closes:
            error = _explain_error(errors[k], tolerances[-1], sublayer)
            reasons = {f"{site.equation} does not close: {error}": add.op, **reasons}
        unknown += [Unknown(site.id, reason, format_source(op)) for reason, op in reasons.items()]
    ends = [*([SEVERAL_NORMS] if chain.has_other_norms else []), *chain.passages[-1].reasons]
    unknown += [Unknown(name, reason) for reason in ends]
    is_clear = not unexplained and not ends
    wiring, remarks = _identify_wiring(chain, summaries, other_layers) if is_clear else (None, [])
    total = measure_sum_error(chain) if all(summary.row.is_sum for summary in summaries) else None
    total_closes = total is None or total <= max(tolerances) * len(chain.adds) ** 0.5
    if total is not None and not total_closes and all(site.closes for site in sites):
        unknown.append(
            Unknown(name, f"x_L = x_0 + all writes does not close: relative error {format_number(total, 2)}")
        )
        wiring = None
    remarks += remark_on_stream(chain, sites, model, wiring, flow)
    remarks += remark_on_start(chain, sites, wiring, before)
    dtype = str(chain.adds[0].x.tensor.dtype).removeprefix("torch.")
    stream = Stream(
        name, chain.layout.width, dtype, tuple(sites), places[-1][1] + 1, wiring, chain.first_norm,
        chain.final_norms[-1] if chain.final_norms else None, total, total_closes, (*unknown, *unexplained),
        tuple(dict.fromkeys(remarks)), chain, chain.layout, chain.layout.axis,
    )  # fmt: skip
    return stream, unknown


def _get_row_tolerance(sublayer: Sublayer, norm_out: Norm | None) -> float:
    """Return the tolerance of the coarsest dtype in which the model computes the equation of a sublayer."""
    add = sublayer.add
    on_paths = [op.outputs[0] for op in (*add.residual_path.ops, *sublayer.write_path.ops)]
    norms = [norm for norm in (norm_out, sublayer.norm, *sublayer.reads.norms) if norm is not None]
    values = (add.x, add.out, sublayer.raw, *on_paths)
    return get_tolerance(*(value.tensor.dtype for value in values), *(norm.dtype for norm in norms))


def _explain_error(error: float, tolerance: float, sublayer: Sublayer) -> str:
    """Explain why the equation of a sublayer does not hold within `tolerance`."""
    out = sublayer.add.out.tensor
    if not out.numel():
        return "the inputs hold no token, so nothing is proven"
    if not out.isfinite().any():
        return "no number of the stream is finite"
    return f"relative error {format_number(error, 2)}, tolerance {format_number(tolerance, 1)}"


def _identify_wiring(
    chain: Chain, summaries: Sequence[naming.SublayerSummary], other_layers: int | None
) -> tuple[Wiring | None, list[str]]:
    has_embedding_norm = chain.first_norm is not None
    wiring, remarks = naming.identify_wiring(summaries, bool(chain.final_norms), has_embedding_norm, other_layers)
    if chain.dual_adds and wiring is not None and wiring.name == "post_ln":
        return wirings.resi_dual(), [RESI_DUAL]
    if chain.pooled is not None:
        norm, op = chain.pooled
        pooled = POOLED.format(norm.path or "the model", op.name)
        remarks = [pooled if remark == naming.WITHOUT_FINAL_NORM else remark for remark in remarks]
    return wiring, remarks


def _name_streams(chains: Sequence[Chain]) -> list[str]:
    """Return a name for each stream: "stream" if it is the only one, else the path of the module that ran its adds.

    That is the smallest module that ran all of them. Equal paths are numbered.
    """
    if len(chains) == 1:
        return ["stream"]
    paths = [
        find_common_frame([add.op for add in chain.adds], chain.adds[0].op.frame).path or "stream" for chain in chains
    ]
    return [f"{path} ({paths[: k + 1].count(path)})" if paths.count(path) > 1 else path for k, path in enumerate(paths)]
