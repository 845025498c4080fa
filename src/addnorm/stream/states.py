"""The values of a run by which another model is compared with it: collected, saved, and fed to the other model, term by term.

A *term* is one value of a stream: its start, the norm that a sublayer reads, the sublayer's output (its branch), the norm of
this output, the sum, the norm after it, the final norm. Each term of a model is computed again, in the model's own dtypes, from
the reference's terms before it. So no error accumulates, and a term that differs is wrong by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm._util.files import atomic_path
from addnorm._util.numbers import format_number
from addnorm.stream.dataflow.arithmetic import is_view
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.replay import recompute, relative_error, replay_op
from addnorm.stream.dataflow.state import fork_rng
from addnorm.stream.find import paths
from addnorm.stream.find.equation_errors import get_tolerance
from addnorm.stream.find.sites import Site, Stream
from addnorm.stream.inspection import Inspection
from addnorm.stream.layout.dimensions import apply_layout, find_layout
from addnorm.stream.models.hf import first_line
from addnorm.stream.program.maps import join_streams
from addnorm.stream.program.result import Program, ProgramSite

SCHEMA = "addnorm.states"
WORDS = {
    "embedding": "at the embedding, before its norm", "start": "at the start of the stream", "read": "at the norm before {}",
    "branch": "inside {}", "norm_branch": "at the norm of the output of {}", "sum": "at the add after {}",
    "norm_out": "at the norm after {}", "final": "at the final norm", "end": "at the last read of the streams",
}  # fmt: skip
RANDOM = (
    "its values are not those of the run when it is computed again, as with dropout or after a step of an optimizer: "
    "use evaluation mode, and inspect again"
)
FAILED = "its operators cannot run on the reference's values, as if these choose other experts ({})"
OF_ONE_SUBLAYER = ("read", "branch", "norm_branch")  # the terms that no other sublayer of a sum shares
MAX_PARALLEL = 6  # sublayers of one sum whose orders are all tried
States = Mapping[str, Any]
Orders = tuple[tuple[int, ...], tuple[int, ...]]  # of the dimensions of a reference's tensor, and of the model's


@dataclass(frozen=True)
class TermError:
    """A term of a model compared with the same term of the reference.

    Attributes:
        term: "embedding", "start", "read", "branch", "norm_branch", "sum", "norm_out", "final" or "end".
        place: where it is, in words.
        site: id of the sublayer; None for the ends of a stream.
        error: relative error; None if the term could not be compared.
        tolerance: the tolerance, from the coarser of both dtypes.
        roundings: `error` in units of this dtype's eps.
        reason: why the term could not be compared.
    """

    term: str
    place: str
    site: str | None
    error: float | None
    tolerance: float
    roundings: float = math.nan
    reason: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error is not None and self.error <= self.tolerance

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.place}: {self.reason}"
        error = f"{self.place}: relative error {format_number(self.error, 2)}"
        if self.agrees:
            return f"{error}, {format_number(self.roundings, 2)} roundings"
        return f"{error}, tolerance {format_number(self.tolerance, 1)}"


class _Term(NamedTuple):
    """Term of a stream, or of a residual program, where it may have several values. `place` joins and arranges them."""

    name: str
    site: Any  # a `Site` or a `ProgramSite`; None for the ends of a stream
    values: list[Value]
    place: Callable[[Sequence[Tensor]], Tensor]  # returns the term from its values


def list_terms(stream: Stream) -> Iterator[_Term]:
    """Yield the terms of a stream in the order of depth, in the layout of the add that reads each."""
    chain, shape = stream.chain, stream.chain.adds[0].out.shape
    first = chain.adds[0].residual_path

    def term(name: str, site: Site | None, value: Value, at: paths.Path | Value) -> _Term:
        state, ops = (at, []) if isinstance(at, Value) else (at.source, at.ops)
        layout = find_layout(value, state)
        if layout is None and state is not at and math.prod(value.shape) == math.prod(state.shape):
            layout = [*state.shape], [*range(len(state.shape))]

        def place(tensors: Sequence[Tensor]) -> Tensor:
            (tensor,) = tensors
            if layout is not None:  # that of the state, then after the views of the path to the add
                tensor = apply_layout(layout, tensor).reshape(state.shape)
                for op in reversed(ops):
                    tensor = replay_op(op, tensor) if is_view(op) else tensor
            is_flat = len(tensor.shape) != len(shape) and tensor.numel() == math.prod(shape)
            return tensor.reshape(shape) if is_flat and tensor.shape[-1] == shape[-1] else tensor

        return _Term(name, site, [value], place)

    if chain.first_norm is not None:
        yield term("embedding", None, chain.first_norm.x, first)
    yield term("start", None, chain.adds[0].x, first)
    for site, after in zip(stream.sites, (*stream.sites[1:], None), strict=True):
        sublayer, reads = site.sublayer, site.sublayer.reads
        if reads.norms and not reads.direct:
            yield term("read", site, reads.norms[0].y, sublayer.add.residual_path)
        yield term("branch", site, sublayer.raw, sublayer.write_path)
        if sublayer.norm is not None:
            yield term("norm_branch", site, sublayer.norm.y, sublayer.write_path)
        if after is None or after.sublayer.place != sublayer.place:
            total = chain.adds[sublayer.place].out
            yield term("sum", site, total, total)
            yield from (term("norm_out", site, norm.y, total) for norm in chain.norms_out[sublayer.place])
    yield from (term("final", None, norm.y, chain.adds[-1].out) for norm in chain.final_norms)


def _list_program_terms(program: Program) -> Iterator[_Term]:
    """Yield the terms of a residual program in the order of depth, as streams `(*tokens, n, d)`."""
    carrier, spine = program.carrier, program.spine
    tokens = carrier.list_sizes(spine.states[0][0])

    def term(name: str, site: ProgramSite | None, values: list[Value]) -> _Term:
        def place(tensors: Sequence[Tensor]) -> Tensor:
            whole = join_streams(carrier, values, tensors, spine.states[0])
            return whole.reshape(*tokens, *whole.shape[1:]) if len(whole) == math.prod(tokens) else whole

        return _Term(name, site, values, place)

    yield term("start", None, spine.states[0])
    for site in program.sites:
        yield term("read", site, [part.target for part in site.reads])
        yield term("branch", site, [site.write.value])
        yield term("sum", site, [part.target if part.norm is None else part.norm.x for part in site.sums])
        if any(norm is not None for norm in site.norms_out):
            yield term("norm_out", site, [part.target for part in site.sums])
    yield term("end" if program.final_norm is None else "final", None, [spine.end])


def _key_terms(inspection: Inspection) -> Iterator[tuple[str, str, _Term]]:
    """Yield the terms of all streams, each with a key that does not depend on names of modules, and the name of its stream."""
    for k, part in enumerate(inspection.parts):
        terms = list_terms(part) if isinstance(part, Stream) else _list_program_terms(part)
        sites: Sequence[Any] = part.sites
        places = {None: "", **{site.id: str(j) for j, site in enumerate(sites)}}
        # Of several norms one after the other, the last one has the key.
        keyed = {f"{k}.{places[term.site and term.site.id]}.{term.name}": term for term in terms}
        yield from ((key, part.name, term) for key, term in keyed.items())


def _read(term: _Term) -> Tensor:
    """Return the tensor of a term as the run computed it."""
    return term.place([value.tensor.detach() for value in term.values])


def collect_states(inspection: Inspection) -> States:
    """Return the equations and the terms of a run, as `save_states` writes them."""
    terms = {key: _read(term) for key, _, term in _key_terms(inspection)}
    return {"schema": SCHEMA, "schema_version": 1, "inspection": inspection.to_dict(), "terms": terms}


def save_states(inspection: Inspection, path: str | Path) -> Path:
    """Save the equations and the states of a run, so that another process can compare its model with it.

    Args:
        inspection: result of `addnorm.inspect`.
        path: the file, written by `torch.save`. Pass it as `addnorm.verify(model, *inputs, like=path)`.

    Returns:
        The path.

    Raises:
        ValueError: the inspection has no stream, or is that of an empty batch.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model, x = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval(), torch.randn(2, 5, 16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = addnorm.save_states(addnorm.inspect(model, x), Path(folder) / "states.pt")
        ...     addnorm.verify(model, x, like=path).agrees
        True
    """
    if not inspection.list_sites():
        raise ValueError("inspection has no residual stream, expected one whose states can be saved.")
    states = collect_states(inspection)
    terms = {key: tensor.cpu().clone(memory_format=torch.contiguous_format) for key, tensor in states["terms"].items()}
    if not any(tensor.numel() for tensor in terms.values()):
        raise ValueError("inspection has no numbers, expected one of inputs that hold a token.")
    with atomic_path(path) as temporary:
        torch.save({**states, "terms": terms}, temporary)
    return Path(path)


def load_saved(path: str | Path, name: str, expected: str) -> Any:
    """Return the content of a file of `torch.save`. Another file raises a ValueError with `name` and `expected`."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of any kind: the bytes of another file are read as a pickle
        is_readable = isinstance(error, OSError | EOFError | RuntimeError | ValueError)
        reason = str(error).partition("\n")[0] if is_readable else "it is another file, or has more than tensors"
        raise ValueError(f"{name} is {str(path)!r}, expected {expected}: {reason or 'it is empty'}") from None


def load_states(path: str | Path) -> States:
    """Return the states in a file of `save_states`.

    Raises:
        ValueError: the file cannot be read, or is another one.
    """
    states = load_saved(path, "like", "a file of `addnorm record --states`")
    if not isinstance(states, dict) or (states.get("schema"), states.get("schema_version")) != (SCHEMA, 1):
        raise ValueError(f"like is {str(path)!r}, expected a file of `addnorm record --states`, of this version.")
    return states


def match_parallel(inspection: Inspection, reference: States) -> States:
    """Return the states of the reference with parallel sublayers in the order of the model.

    The reference may have run the sublayers of one sum in another order. Sublayers of equal kind are matched, and among these
    those whose outputs have the nearest norms.
    """
    theirs, terms = reference["inspection"], dict(reference["terms"])
    streams = [*theirs["streams"]]
    for k, (stream, their) in enumerate(zip(inspection.streams, streams, strict=False)):
        sites = their["sites"]
        if len(stream.sites) != len(sites):
            continue
        order = [*_order_sites(stream.sites, sites, [terms[f"{k}.{j}.branch"] for j in range(len(sites))])]
        for j, i in enumerate(order):
            terms |= {f"{k}.{j}.{name}": reference["terms"].get(f"{k}.{i}.{name}") for name in OF_ONE_SUBLAYER}
        streams[k] = their | {"sites": [sites[i] for i in order]}
    return {**reference, "inspection": theirs | {"streams": streams}, "terms": terms}


def _order_sites(ours: Sequence[Site], theirs: Sequence[dict[str, Any]], branches: Sequence[Tensor]) -> Iterator[int]:
    """Yield for each sublayer of the model the index of its match in the reference, whose outputs are `branches`."""
    sizes = [float(branch.double().norm()) for branch in branches]
    start = 0
    while start < len(ours):
        group = range(start, min(start + ours[start].parallel, len(ours)))

        def mismatch(order: Sequence[int], group: range = group) -> tuple[int, float]:
            pairs = [(ours[j], i) for j, i in zip(group, order, strict=True)]
            kinds = sum(own.kind != theirs[i]["kind"] for own, i in pairs)
            return kinds, sum(abs(float(own.sublayer.raw.tensor.double().norm()) - sizes[i]) for own, i in pairs)

        is_same_sum = len(group) <= MAX_PARALLEL and all(theirs[i]["parallel"] == len(group) for i in group)
        yield from min(permutations(group), key=mismatch) if is_same_sum else group
        start = group.stop


# Longer than 60 lines, since each step needs what the terms before it have left.
def measure_terms(inspection: Inspection, reference: States) -> list[TermError]:
    """Return the error of each term, computed again from the reference's terms before it, in the order of the run."""
    found: list[TermError] = []
    known: dict[Value, Tensor] = {}  # the reference's terms
    before: dict[str, float] = {}  # the size of each stream's state, to which the error of a sum is relative
    rounded: dict[str, list[torch.dtype]] = {}  # the coarser dtypes of each stream's terms since its last sum
    keyed = [*_key_terms(inspection)]
    starts = {
        stream: (_match_copies(inspection, _read(term), reference["terms"][key]), term)
        for key, stream, term in keyed if term.name == "start"
    }  # fmt: skip
    orders = {stream: _find_orders(_read(term), theirs) for stream, (theirs, term) in starts.items()}
    with torch.no_grad(), fork_rng():
        for key, stream, term in sorted(keyed, key=lambda entry: max(value.index for value in entry[2].values)):
            theirs = starts[stream][0] if term.name == "start" else reference["terms"].get(key)
            if theirs is None or not theirs.numel() or all(value in known for value in term.values):
                continue
            known_start, start = starts[stream]
            # A norm may compute in a wider dtype than that of the stream, which it reads.
            own_dtypes = [value.tensor.dtype for one in (term, start) for value in one.values]
            coarser = rounded.setdefault(stream, [])
            dtypes = [*own_dtypes, theirs.dtype, known_start.dtype, *coarser]
            tolerance = get_tolerance(*dtypes)
            place = _name_place(term, stream if len(starts) > 1 else "")
            site = None if term.site is None else term.site.id
            fed: dict[Value, Tensor] = {}
            try:
                theirs = _reorder(theirs.to(term.values[0].tensor.device), _read(term), orders[stream])
                fed = _unplace(term, theirs)
                error = relative_error(term.place([recompute(value, known) for value in term.values]), theirs)
                if error > tolerance:
                    own = {value: value.tensor for value in known}
                    for value in term.values:
                        if relative_error(recompute(value, own), value.tensor) > tolerance:
                            raise NotImplementedError(RANDOM)
            except Exception as failure:  # an operator raises any type
                reason = str(failure) if str(failure) == RANDOM else FAILED.format(first_line(failure))
                found.append(TermError(term.name, place, site, None, tolerance, reason=reason))
                continue
            finally:
                known |= fed
            size = float(theirs.double().norm())
            if term.name == "sum":  # its operands, which are rounded, may be larger
                coarser.clear()
                error *= min(1.0, size / max(before.get(stream, size), 1e-30))
            own_dtypes = [value.tensor.dtype for value in fed]
            coarser += [one for one in own_dtypes if torch.finfo(one).eps > torch.finfo(theirs.dtype).eps]
            if term.name != "read" and "branch" not in term.name:
                before[stream] = size
            eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
            found.append(TermError(term.name, place, site, error, tolerance, error / eps))
    return found


def _name_place(term: _Term, stream: str) -> str:
    """Return where a term is: "inside the attention of layer 3 (layers.2.self_attn)". `stream` is a name, or empty."""
    site = term.site
    if site is None:
        return WORDS[term.name] + f" of {stream}" * bool(stream)
    name = site.id if site.kind == "other" else f"the {site.kind} of layer {site.layer + 1} ({site.id})"
    return WORDS[term.name].format(name)


# Layouts. An implementation may have its tokens in another order of dimensions, and a sublayer other views before its add.


def _unplace(term: _Term, placed: Tensor) -> dict[Value, Tensor]:
    """Return the contents of each value of a term, given those of the term as one tensor: the inverse of `place`."""
    ends = pairwise([0, *accumulate(value.tensor.numel() for value in term.values)])
    spans = [(value, slice(*span)) for value, span in zip(term.values, ends, strict=True)]
    labels = [
        torch.arange(span.start, span.stop, dtype=torch.float64, device=value.tensor.device).reshape(value.shape)
        for value, span in spans
    ]
    contents = torch.cat([value.tensor.detach().flatten() for value in term.values])
    contents[term.place(labels).flatten().long()] = placed.flatten().to(contents.dtype)
    return {  # with the strides that views need
        value: torch.empty_like(value.tensor).copy_(contents[span].reshape(value.shape)) for value, span in spans
    }


def _find_orders(ours: Tensor, theirs: Tensor) -> Orders:
    """Return the orders of dimensions in which two starts of a stream are nearest to each other.

    Raises:
        ValueError: the starts have other numbers of tokens.
    """
    if ours.numel() != theirs.numel():
        raise ValueError(
            f"the stream has shape {tuple(ours.shape)}, expected {tuple(theirs.shape)} as the reference: use the same inputs."
        )
    theirs = theirs.to(ours.device)
    same = tuple(range(theirs.dim())), tuple(range(ours.dim()))
    errors: dict[Orders, float] = {}
    for orders in product(permutations(same[0]), permutations(same[1])):  # the first one is `same`
        errors[orders] = relative_error(ours, _reorder(theirs, ours, orders))
        if errors[orders] <= get_tolerance(ours.dtype, theirs.dtype):
            return orders
    best = min(errors, key=errors.__getitem__)
    return same if ours.shape == theirs.shape and errors[best] > errors[same] / 2 else best


def _match_copies(inspection: Inspection, ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the start of a reference with as many streams as the model's; one value of either may stand for all."""
    if inspection.program is None or theirs.dim() < 3:  # one stream: the dimension before the last is one of tokens
        return theirs
    n, m = ours.shape[-2], theirs.shape[-2]
    if n == m or 1 not in (n, m) or ours.shape[:-2] != theirs.shape[:-2]:
        return theirs
    return theirs.expand(*ours.shape) if m == 1 else theirs[..., :1, :]


def _reorder(theirs: Tensor, ours: Tensor, orders: Orders) -> Tensor:
    """Return a tensor of the reference in the layout of one of the model."""
    first, second = orders
    if len(first) != theirs.dim() and theirs.shape == ours.shape:  # a pooled end
        return theirs
    back = sorted(range(len(second)), key=second.__getitem__)
    return theirs.permute(first).reshape([ours.shape[k] for k in second]).permute(back)
