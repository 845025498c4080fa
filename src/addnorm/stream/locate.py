"""`locate`: name a captured tensor, such as `hidden_states[k]` of another engine: a state, a read or a write of a stream."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm._util.numbers import format_number
from addnorm._util.torch_internals import FakeTensor
from addnorm.ops.validation import check_tensor
from addnorm.stream.dataflow.arithmetic import strip_views
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.replay import relative_error
from addnorm.stream.find.equation_errors import get_tolerance
from addnorm.stream.find.sites import Site, Stream
from addnorm.stream.inspection import Inspection
from addnorm.stream.program.maps import join_streams
from addnorm.stream.program.result import Program
from addnorm.stream.states import list_terms
from addnorm.stream.write_terms import find_write_term

MAX_PAIRS = 1 << 24  # pairs of tokens whose distance is computed at a time
NAMES = {
    "embedding": "the embedding{of} before its norm", "start": "the start of the stream{of}",
    "read": "what {site} reads, the norm of the stream", "factored": "the norm of the stream before {site}, without the factor",
    "input": "what {site} reads", "branch": "the output of {site} alone, without the residual",
    "norm_branch": "the norm of the output of {site}, without the residual", "write": "what {site} writes",
    "sum": "the stream after {site}", "norm_out": "the stream after {site} and its norm",
    "final": "the end of the stream{of} after the final norm",
}  # fmt: skip


@dataclass(frozen=True)
class Location:
    """Value of a run that a captured tensor equals, or to which it is nearest.

    Attributes:
        name: the value of the run in words, such as "the stream after layers.3.mlp"; the nearest one if `found` is False.
        stream: name of the stream.
        site: id of the sublayer; None for the start and the end of a stream.
        found: whether the tensor is this value, up to roundings of the coarser of both dtypes.
        distance: relative distance, |tensor - value| / |value|, over the tokens of the tensor.
        tokens: "all tokens" or "some tokens", perhaps followed by ", in another order".
        others: names of other values that the tensor could be too, nearest first.

    Example:
        >>> x = torch.randn(2, 5, 16)
        >>> place = addnorm.locate(addnorm.inspect(addnorm.nn.Encoder(2, 16, nhead=2).eval(), x), x)
        >>> place.found, str(place)
        (True, 'the start of the stream, to the bit')
    """

    name: str
    stream: str
    site: str | None
    found: bool
    distance: float
    tokens: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.found:
            return f"no value of a stream; nearest: {self.name}, relative distance {format_number(self.distance, 2)}"
        how = "to the bit" if self.distance == 0.0 else f"relative distance {format_number(self.distance, 2)}"
        text = self.name + f" ({self.tokens})" * (self.tokens != "all tokens")
        return f"{text}, {how}" + f"; also {', '.join(self.others)}" * bool(self.others)

    def to_dict(self) -> dict[str, Any]:
        """Return the location as JSON types."""
        return {**vars(self), "others": [*self.others], "sentence": str(self)}


def locate(inspection: Inspection, tensor: Tensor) -> Location:
    """Name a tensor that was captured in the run of an inspection, or in the same run of another program.

    Each token of the tensor is compared with each token of every state, read and write of the streams. So the tensor may have
    some of the tokens, another order of tokens (a sequence before the batch), or another dtype. Between two values that are equal
    up to roundings the nearer one is the name, and the other one is in `others`, as the places of the tensor in what the model
    returned: with `output_hidden_states=True` a model of transformers returns its states by index.

    Args:
        inspection: result of `addnorm.inspect` on the same inputs. It holds the values of its run.
        tensor: the captured tensor. A dimension of the size of the stream's width has the features, or one of n times this size
            those of n streams, one stream after the other.

    Raises:
        TypeError: `tensor` is not an ordinary tensor of real floating-point numbers.
        ValueError: no dimension has the width of a stream, the tensor has no numbers, or the inspection has no stream.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model, x = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval(), torch.randn(2, 5, 16)
        >>> captured = model.layers[0](x).detach().transpose(0, 1)
        >>> print(addnorm.locate(addnorm.inspect(model, x), captured).name)
        the stream after layers.0 and its norm
    """
    check_tensor("tensor", tensor.float() if isinstance(tensor, Tensor) and _is_float8(tensor.dtype) else tensor)
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        raise TypeError("tensor is a meta or fake tensor, which has no values, expected the one of a run.")
    if not tensor.numel():
        raise ValueError("tensor has no numbers, expected a state.")
    known = [value for value in _list_values(inspection) if len(value.rows)]  # a stream of no tokens has none
    if not known:
        raise ValueError("the inspection has no stream to compare with.")
    for part in inspection.parts:
        tensor = tensor if isinstance(part, Stream) else _split_streams(part, tensor)
    candidates = [
        (tensor.detach().movedim(axis, -1).reshape(-1, size), value)
        for value in known for axis, size in enumerate(tensor.shape) if size == value.rows.shape[-1]
    ]  # fmt: skip
    found = [one for candidate in candidates if (one := _compare_in_order(*candidate)) is not None]
    found = found or [_compare_tokens(*candidate) for candidate in candidates]
    if not found:
        widths = " or ".join(str(width) for width in sorted({value.rows.shape[-1] for value in known}))
        raise ValueError(
            f"tensor has shape {tuple(tensor.shape)}, expected a dimension of size {widths}: the stream's features."
        )
    best, *rest = sorted(found, key=lambda one: (one.distance, one.tokens.startswith("some")))
    others = tuple(dict.fromkeys(one.name for one in rest if best.found and one.found and one.name != best.name))
    return Location(**{**vars(best), "others": others})


def _split_streams(program: Program, tensor: Tensor) -> Tensor:
    """Return a tensor with its dimension `n * d`, in which n streams lie one after the other, split into n and d."""
    if program.width in tensor.shape:
        return tensor
    n, d = max(program.sizes), program.width
    axis = next((axis for axis, size in enumerate(tensor.shape) if size == n * d), None)
    return tensor if axis is None else tensor.movedim(axis, -1).unflatten(-1, (n, d))


class _Named(NamedTuple):
    """Value of the run: its name, its sublayer, its stream, and its tokens, `(tokens, d)`."""

    name: str
    site: str | None
    stream: str
    rows: Tensor


def _list_values(inspection: Inspection) -> Iterator[_Named]:
    """Yield the values of all streams and programs, and the tensors that the model returned."""
    for part in inspection.parts:
        yield from _name_stream(part) if isinstance(part, Stream) else _name_program(part)
    widths = {part.width for part in inspection.parts}
    for name, value in inspection.results.items():
        if value.shape[-1:] and value.shape[-1] in widths and value.tensor.is_floating_point():
            yield _Named(f"the model's {name}", None, "", value.tensor.detach().reshape(-1, value.shape[-1]))


def _name_program(program: Program) -> Iterator[_Named]:
    """Yield the values of a residual program: the streams before each sublayer, its reads and its output, and the end."""

    def cut(name: str, site: str | None, *values: Value) -> _Named:
        streams = join_streams(program.carrier, values, [value.tensor.detach() for value in values])
        return _Named(name, site, "streams", streams.reshape(-1, program.width))

    places = ["at the start", *(f"after {site.id}" for site in program.sites)]
    for place, state, n in zip(places, program.spine.states, program.sizes, strict=True):
        yield cut(f"the {n} streams {place}, not collapsed" if n > 1 else f"the stream {place}", None, *state)
        streams = cut("", None, *state).rows.unflatten(0, (-1, n))
        yield from (_Named(f"stream {j + 1} of {n} {place}", None, "streams", streams[:, j]) for j in range(n) if n > 1)
    for site in program.sites:
        for part in site.reads:
            if part.norm is not None:
                yield cut(f"what {site.id} reads, before its norm", site.id, part.norm.x)
            yield cut(f"what {site.id} reads", site.id, part.target)
        yield cut(f"the output of {site.id} alone", site.id, site.write.value)
    if program.final_norm is not None:
        yield cut("the last read, before the final norm", None, program.final_norm.x)
    yield cut("the end of the streams, after the last read", None, program.spine.end)


def _name_stream(stream: Stream) -> Iterator[_Named]:
    """Yield the values of a stream, each once."""
    of = "" if stream.name == "stream" else f" of {stream.name}"
    seen: set[Value] = set()

    def cut(name: str, site: Site | None, tensor: Tensor) -> Iterator[_Named]:
        if stream.width in tensor.shape:
            is_alike = tensor.dim() >= -stream.axis and tensor.shape[stream.axis] == stream.width
            axis = stream.axis if is_alike else [*tensor.shape].index(stream.width)
            rows = tensor.detach().movedim(axis, -1).reshape(-1, stream.width)
            place = None if site is None else site.id
            yield _Named(name.format(site=place, of=of), place, stream.name, rows)

    for term in list_terms(stream):
        (value,) = term.values
        root = strip_views(value)
        if root in seen or stream.width not in value.shape:
            continue
        seen.add(root)
        site = term.site
        name = NAMES["factored" if term.name == "read" and site.sublayer.reads.factors else term.name]
        is_normed = term.name == "sum" and bool(stream.chain.norms_out[site.sublayer.place])
        yield from cut(name + ", before its norm" * is_normed, site, value.tensor)
        placed = term.place([value.tensor.detach()])
        if placed.numel() > value.tensor.numel():  # learned tokens are broadcast before the add
            yield from cut(name, site, placed)
    for site in stream.sites:
        reads, write = site.sublayer.reads, find_write_term(site.sublayer)
        if reads.value is not None and reads.factors:
            yield from cut(NAMES["input"], site, reads.value.tensor)
        is_product = write.factor != 1.0 or bool(write.scales)
        if not write.obstacle and (is_product or strip_views(write.value) not in seen):
            product = write.value.tensor.detach() * write.factor
            for scale in write.scales:
                product = product * scale.tensor.detach()
            yield from cut(NAMES["write"], site, product)


def _is_float8(dtype: torch.dtype) -> bool:
    return str(dtype).startswith("torch.float8")


def _match_dtypes(rows: Tensor, known: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the tokens of both tensors in the coarser of their dtypes, and the tolerance of this dtype."""
    coarse = max((rows.dtype, known.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    wide = torch.float32 if _is_float8(coarse) else coarse  # for operators that do not take float8
    return rows.to(known.device, wide), known.to(coarse).to(wide), get_tolerance(coarse)


def _compare_in_order(rows: Tensor, value: _Named) -> Location | None:
    """Return `value` as the location of `rows` if both have the same tokens in the same order; otherwise None."""
    a, b, tolerance = _match_dtypes(rows, value.rows)
    distance = relative_error(a, b) if a.shape == b.shape else math.inf
    return (
        Location(value.name, value.stream, value.site, True, distance, "all tokens") if distance <= tolerance else None
    )


def _compare_tokens(rows: Tensor, value: _Named) -> Location:
    """Return `value` as the location of `rows`, each row compared with the nearest token of the value."""
    a, b, tolerance = _match_dtypes(rows, value.rows)
    place = _find_nearest(a, b)
    distance = relative_error(a, b[place])
    found = distance <= tolerance and _are_taken_once(place, b)
    order = "" if bool((place.diff() > 0).all()) else ", in another order"
    tokens = ("all tokens" if len(a) == len(b) else "some tokens") + order
    return Location(value.name, value.stream, value.site, found, distance, tokens)


def _are_taken_once(place: Tensor, known: Tensor) -> bool:
    """Return whether indices of tokens take none of `known` more often than there are tokens equal to it."""
    kinds = torch.unique(known, dim=0, return_inverse=True)[1]  # equal tokens have one kind
    return bool((kinds[place].bincount(minlength=len(known)) <= kinds.bincount(minlength=len(known))).all())


def _find_nearest(a: Tensor, b: Tensor) -> Tensor:
    """Return for each token of `a` the index of the nearest token of `b`."""
    known = b.double()  # cdist uses matrix products, which lose digits where tokens have a large offset
    step = max(1, MAX_PAIRS // max(1, len(b)))
    return torch.cat([torch.cdist(part.double(), known).argmin(1) for part in a.split(step)])
