"""The values of a run by which another model is compared with it: collected, saved, and fed to the other model, term by term.

A *term* is one value of a stream: its start, the norm that a sublayer reads, the sublayer's output (its branch), the norm of
this output, the sum, the norm after it, the final norm. Each term of a model is computed again, in the model's own dtypes, from
the reference's terms before it. So no error accumulates, and a term that differs is wrong by itself.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
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
from addnorm.stream.find.inspection import Inspection, Site, Stream
from addnorm.stream.models.hf import first_line

SCHEMA = "addnorm.states"
WORDS = {
    "embedding": "at the embedding, before its norm", "start": "at the start of the stream", "read": "at the norm before {}",
    "branch": "inside {}", "norm_branch": "at the norm of the output of {}", "sum": "at the add after {}",
    "norm_out": "at the norm after {}", "final": "at the final norm",
}  # fmt: skip
RANDOM = "its values are not those of the run when it is computed again, as with dropout: use evaluation mode"
FAILED = "its operators cannot run on the reference's values, as if these choose other experts ({})"
States = Mapping[str, Any]
Orders = tuple[tuple[int, ...], tuple[int, ...]]  # of the dimensions of a reference's tensor, and of the model's


@dataclass(frozen=True)
class TermError:
    """A term of a model compared with the same term of the reference.

    Attributes:
        term: "embedding", "start", "read", "branch", "norm_branch", "sum", "norm_out" or "final".
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
    name: str
    site: Site | None
    value: Value
    shape: tuple[int, ...]  # of the stream
    path: paths.Path | None = None  # leads from the value to the add; None for a value in the layout of the add


def _list_terms(stream: Stream) -> Iterator[_Term]:
    """Yield the terms of a stream in the order of depth."""
    chain, shape = stream.chain, stream.chain.adds[0].out.shape
    first = chain.adds[0].residual_path
    if chain.first_norm is not None:
        yield _Term("embedding", None, chain.first_norm.x, shape, first)
    yield _Term("start", None, chain.adds[0].x, shape, first)
    for site, after in zip(stream.sites, (*stream.sites[1:], None), strict=True):
        sublayer, reads = site.sublayer, site.sublayer.reads
        if len(reads.norms) == 1 and not reads.direct:
            yield _Term("read", site, reads.norms[0].y, shape, sublayer.add.residual_path)
        yield _Term("branch", site, sublayer.raw, shape, sublayer.write_path)
        if sublayer.norm is not None:
            yield _Term("norm_branch", site, sublayer.norm.y, shape, sublayer.write_path)
        if after is None or after.sublayer.place != sublayer.place:
            yield _Term("sum", site, chain.adds[sublayer.place].out, shape)
            yield from (_Term("norm_out", site, norm.y, shape) for norm in chain.norms_out[sublayer.place][-1:])
    yield from (_Term("final", None, norm.y, shape) for norm in chain.final_norms[-1:])


def _key_terms(inspection: Inspection) -> Iterator[tuple[str, Stream, _Term]]:
    """Yield the terms of all streams with keys that do not depend on names of modules."""
    for k, stream in enumerate(inspection.streams):
        for term in _list_terms(stream):
            place = "" if term.site is None else stream.sites.index(term.site)
            yield f"{k}.{place}.{term.name}", stream, term


def collect_states(inspection: Inspection) -> States:
    """Return the equations and the terms of a run, as `save_states` writes them."""
    terms = {key: _place(term, term.value.tensor.detach()) for key, _, term in _key_terms(inspection)}
    return {"schema": SCHEMA, "schema_version": 1, "inspection": inspection.to_dict(), "terms": terms}


def save_states(inspection: Inspection, path: str | Path) -> Path:
    """Save the equations and the states of a run, so that another process can compare its model with it.

    Args:
        inspection: result of `addnorm.inspect`.
        path: the file, written by `torch.save`. Pass it as `addnorm.verify(model, *inputs, like=path)`.

    Returns:
        The path.

    Raises:
        ValueError: the inspection has no stream.

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
    inspection.require_streams("save_states")
    if not inspection.streams:
        raise ValueError("inspection has no residual stream, expected one whose states can be saved.")
    states = collect_states(inspection)
    terms = {key: tensor.cpu().clone(memory_format=torch.contiguous_format) for key, tensor in states["terms"].items()}
    with atomic_path(path) as temporary:
        torch.save({**states, "terms": terms}, temporary)
    return Path(path)


def load_states(path: str | Path) -> States:
    """Return the states in a file of `save_states`.

    Raises:
        ValueError: the file cannot be read, or is another one.
    """
    try:
        states = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0] or "it is empty"
        raise ValueError(f"like is {str(path)!r}, expected a file of `addnorm record --states`: {reason}") from None
    if not isinstance(states, dict) or (states.get("schema"), states.get("schema_version")) != (SCHEMA, 1):
        raise ValueError(f"like is {str(path)!r}, expected a file of `addnorm record --states`, of this version.")
    return states


def measure_terms(inspection: Inspection, reference: States) -> list[TermError]:
    """Return the error of each term, computed again from the reference's terms before it, in the order of the run."""
    found: list[TermError] = []
    known: dict[Value, Tensor] = {}  # the reference's terms
    before: dict[Stream, float] = {}  # the size of each stream's state, to which the error of a sum is relative
    keyed = [*_key_terms(inspection)]
    starts = {stream: (reference["terms"][key], term) for key, stream, term in keyed if term.name == "start"}
    orders = {
        stream: _find_orders(_place(term, term.value.tensor.detach()), theirs)
        for stream, (theirs, term) in starts.items()
    }
    with torch.no_grad(), fork_rng():
        for key, stream, term in sorted(keyed, key=lambda entry: entry[2].value.index):
            value, theirs = term.value, reference["terms"].get(key)
            if theirs is None or value in known:
                continue
            known_start, start = starts[
                stream
            ]  # a norm may compute in a wider dtype than that of the stream, which it reads
            dtypes = value.tensor.dtype, theirs.dtype, start.value.tensor.dtype, known_start.dtype
            tolerance = get_tolerance(*dtypes)
            place, site = (
                _name_place(term, stream, len(inspection.streams) > 1),
                None if term.site is None else term.site.id,
            )
            fed: dict[Value, Tensor] = {}
            try:
                theirs = _reorder(theirs.to(value.tensor.device), _place(term, value.tensor.detach()), orders[stream])
                fed[value] = _unplace(term, theirs)
                error = relative_error(_place(term, recompute(value, known)), theirs)
                if error > tolerance:
                    again = recompute(value, {own: own.tensor for own in known})
                    if relative_error(again, value.tensor) > tolerance:
                        raise NotImplementedError(RANDOM)
            except Exception as failure:  # an operator raises any type
                reason = str(failure) if str(failure) == RANDOM else FAILED.format(first_line(failure))
                found.append(TermError(term.name, place, site, None, tolerance, reason=reason))
                continue
            finally:
                known |= fed
            size = float(theirs.double().norm())
            if term.name == "sum":  # its operands, which are rounded, may be larger
                error *= min(1.0, size / max(before.get(stream, size), 1e-30))
            if term.name != "read" and "branch" not in term.name:
                before[stream] = size
            eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
            found.append(TermError(term.name, place, site, error, tolerance, error / eps))
    return found


def _name_place(term: _Term, stream: Stream, several: bool) -> str:
    """Return where a term is: "inside the attention of layer 3 (layers.2.self_attn)"."""
    site = term.site
    if site is None:
        return WORDS[term.name] + f" of {stream.name}" * several
    name = site.id if site.kind == "other" else f"the {site.kind} of layer {site.layer + 1} ({site.id})"
    return WORDS[term.name].format(name)


# Layouts. An implementation may have its tokens in another order of dimensions, and a sublayer other views before its add.


def _place(term: _Term, tensor: Tensor) -> Tensor:
    """Return a term in the layout of the add that reads it: apply the views of its path, without the factors."""
    if term.path is not None and tensor.numel() == math.prod(term.path.source.shape):
        tensor = tensor.reshape(term.path.source.shape)
        for op in reversed(term.path.ops):
            tensor = replay_op(op, tensor) if is_view(op) else tensor
    is_flat = len(tensor.shape) != len(term.shape) and tensor.numel() == math.prod(term.shape)
    return tensor.reshape(term.shape) if is_flat and tensor.shape[-1] == term.shape[-1] else tensor


def _unplace(term: _Term, placed: Tensor) -> Tensor:
    """Return the contents of a value from those in the layout of its add: the inverse of `_place`."""
    tensor = term.value.tensor.detach()
    labels = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device).reshape(tensor.shape)
    contents = tensor.flatten().clone()
    contents[_place(term, labels).flatten().long()] = placed.flatten().to(tensor.dtype)
    return tensor.clone().copy_(contents.reshape(tensor.shape))  # with the strides that views need


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


def _reorder(theirs: Tensor, ours: Tensor, orders: Orders) -> Tensor:
    """Return a tensor of the reference in the layout of one of the model."""
    first, second = orders
    if len(first) != theirs.dim() and theirs.shape == ours.shape:  # a pooled end
        return theirs
    back = sorted(range(len(second)), key=second.__getitem__)
    return theirs.permute(first).reshape([ours.shape[k] for k in second]).permute(back)
