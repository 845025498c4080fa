"""The matrices of a stage of the catalog: constants, or what its module computes with the parameters of a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from addnorm.stream.dataflow.arithmetic import get_number
from addnorm.stream.dataflow.graph import Op, Value
from addnorm.wirings.coefficients import ManifoldConnection
from addnorm.wirings.factors import Learned, Place
from addnorm.wirings.stage import Computed, Head, Stage

MOST = 300  # assignments of parameters that are tried


@dataclass(frozen=True, eq=False)
class _Part:
    """Columns of a parameter that joins C and A, or A and B.

    Attributes:
        name: the name of the parameter, and the index of the columns.
        tensor: the columns. Those after the first are transposed, as A is where C is joined with it.
        role: "collapse" or "mix": the matrix in these columns if the parameter joins C and A.
    """

    name: str
    tensor: Tensor
    role: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions."""
        return tuple(self.tensor.shape)


_Leaf = Value | _Part
_Candidate = tuple[
    tuple[_Leaf, ...], Tensor
]  # parameters of the model, and the tensor that they make for a parameter of the wiring's module


@dataclass
class Expected:
    """The matrices of a stage of the catalog, `(tokens, rows, columns, d)`. NaN is a learned entry, which may be any number."""

    collapse: Tensor
    mix: Tensor
    inject: Tensor
    bias: Tensor | None = None


def build_expected(stage: Stage | Head, computed: Any) -> Expected:
    """Return the matrices of a stage: those that its module computed (`computed`), and its constants for the others."""
    n_out = getattr(stage, "n_out", stage.n)

    def choose(name: str, constant: Any) -> Any:
        value = getattr(computed, name, None) if computed is not None else None
        return constant if value is None else value

    collapse = choose("collapse", stage.collapse)
    rows = collapse if isinstance(collapse, Tensor) or isinstance(collapse[0], Sequence) else (collapse,)
    mix = choose("mix", stage.mix)
    if mix is None:
        mix = torch.eye(n_out, stage.n, dtype=torch.float64)
    inject = choose("inject", stage.inject)
    c = _to_tensor(rows, 2 if isinstance(rows, Tensor) else 0, stage.n)
    if inject is None:
        return Expected(c, c, c)
    a = _to_tensor(mix, 3, stage.n)
    b = (
        _to_tensor(inject, 1, 1)
        if isinstance(inject, Tensor)
        else _to_tensor(tuple((entry,) for entry in inject), 0, 1)
    )
    bias = choose("bias", None)
    v = None if bias is None else torch.stack([_to_entry(entry) for entry in bias], 1)
    return Expected(c, a, b, v)


def _to_tensor(entries: Any, form: int, columns: int) -> Tensor:
    """Return a matrix as `(tokens, rows, columns, d)`.

    `form` says what a tensor is: 1 for `(*, rows)`, 2 for `(*, columns)` or `(*, columns, d)`, 3 for `(*, rows, columns)`.
    """
    if isinstance(entries, Tensor):
        t = entries.double()
        if form == 1:
            return t.reshape(-1, t.shape[-1], 1, 1)
        if form == 2:
            t = t if t.dim() > 2 or t.shape[-1] != columns else t[..., None]
            return t.reshape(-1, 1, columns, t.shape[-1])
        return t.reshape(-1, *t.shape[-2:], 1)
    rows = [[_to_entry(entry) for entry in row] for row in entries]
    flat = [entry for row in rows for entry in row]
    tokens, features = (max(entry.shape[k] for entry in flat) for k in (0, 1))
    return torch.stack([torch.stack([entry.expand(tokens, features) for entry in row], 1) for row in rows], 1)


def _to_entry(entry: Any) -> Tensor:
    if isinstance(entry, Learned):
        return torch.full((1, 1), float("nan"), dtype=torch.float64)
    t = torch.as_tensor(entry, dtype=torch.float64)
    return t.reshape(1, -1) if t.dim() < 2 else t.reshape(-1, t.shape[-1])


# Modules with the model's parameters.


def list_modules(
    computed: Computed, d: int, stage: Stage | Head, place: Place, leaves: Sequence[Value], ops: Sequence[Op]
) -> Iterator[tuple[Any, Mapping[str, str]]]:
    """Yield the wiring's module of coefficients with the model's parameters, in each assignment that fits by shape.

    The second item maps the names of the module's parameters to those of the model's.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # the caller's generator keeps its state
            module = computed.make(d, stage.n, stage.reads, place).double().requires_grad_(False)
    except (ValueError, TypeError):
        return
    names = [name for name, _ in module.named_parameters()]
    own: list[_Leaf] = [*leaves, *(part for leaf in leaves for part in _split(leaf, stage.n))]
    candidates = [
        sorted(_list_tensors(parameter.shape, own, ops), key=lambda item: -_compare_names(name, item[0][0]))
        for name, parameter in module.named_parameters()
    ]
    for chosen in itertools.islice(_list_assignments(candidates), MOST):
        for parameter, (_, tensor) in zip(module.parameters(), chosen, strict=True):
            parameter.data.copy_(tensor)
        assigned = {name: " + ".join(leaf.name for leaf in own) for name, (own, _) in zip(names, chosen, strict=True)}
        yield module, assigned
        if isinstance(module, ManifoldConnection):
            module.transpose_mix()
            yield module, {**assigned, "layout": "A transposed"}


def _split(leaf: Value, n: int) -> list[_Part]:
    """Split a matrix of n + 1 columns into its first or last column and the n others; return no parts for other sizes.

    Such a parameter may join A, which has n columns, with C or B, which have one. A matrix of n + 1 rows is transposed first.
    """
    tensor = leaf.tensor.detach()
    if tensor.dim() != 2 or n + 1 not in tensor.shape:
        return []
    is_turned = tensor.shape[1] != n + 1
    tensor, form = (tensor.mT, "{}.T[:, {}]") if is_turned else (tensor, "{}[:, {}]")
    parts = {"0": tensor[:, 0], "1:": tensor[:, 1:].mT, ":-1": tensor[:, :-1], "-1": tensor[:, -1]}
    return [_Part(form.format(leaf.name, k), part, ("collapse", "mix")[part.dim() - 1]) for k, part in parts.items()]


def _compare_names(own: str, leaf: _Leaf) -> float:
    """Return how similar the names of two parameters are. The most similar ones are tried first, which saves time."""
    if isinstance(leaf, _Part):
        return float(leaf.role in own)
    return SequenceMatcher(None, own, leaf.name.rpartition(".")[2]).ratio()


def _list_assignments(candidates: Sequence[Sequence[_Candidate]]) -> Iterator[tuple[_Candidate, ...]]:
    """Yield each choice of one candidate for each parameter that uses no parameter of the model twice."""
    if not candidates:
        yield ()
        return
    for first in candidates[0]:
        used = {*first[0]}
        others = [[item for item in own if used.isdisjoint(item[0])] for own in candidates[1:]]
        yield from ((first, *rest) for rest in _list_assignments(others))


def _list_tensors(shape: Sequence[int], leaves: Sequence[_Leaf], ops: Sequence[Op]) -> list[_Candidate]:
    """Return candidates for a parameter of this shape: the model's as they are, transposed, plus 1 or concatenated."""
    found: list[_Candidate] = []
    size = torch.Size(shape).numel()
    squeezed = [n for n in shape if n > 1]
    for leaf in leaves:
        tensor = leaf.tensor.detach().cpu().double()
        if tensor.numel() != size:
            continue
        own = [n for n in leaf.shape if n > 1]
        if own == squeezed or {len(own), len(squeezed)} == {1, 2}:
            found.append(((leaf,), tensor.reshape(shape) + float(any(_adds_one(op, leaf) for op in ops))))
        if len(own) == 2 and own == squeezed[::-1]:
            found.append(((leaf,), tensor.squeeze().mT.reshape(shape)))
    if found:
        return found
    for count in (2, 3):
        wholes = [leaf for leaf in leaves if isinstance(leaf, Value)]
        for parts in itertools.permutations(wholes, count):
            if sum(leaf.tensor.numel() for leaf in parts) == size:
                pieces = [_to_rows(leaf.tensor.detach().cpu().double(), shape) for leaf in parts]
                if all(piece is not None for piece in pieces):
                    found.append((parts, torch.cat([piece for piece in pieces if piece is not None]).reshape(shape)))
    return found


def _adds_one(op: Op, leaf: _Leaf) -> bool:
    """Return whether an operator adds 1 to a parameter, as norms with a weight near 0 do."""
    return op.name == "add" and leaf in op.inputs and len(op.args) > 1 and get_number(op.args[1]) == 1.0


def _to_rows(tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return a parameter as rows of a matrix of this shape; None if its sizes do not fit."""
    if len(shape) == 1:
        return tensor.flatten()
    if tensor.shape[-1:] == shape[-1:]:
        return tensor.reshape(-1, shape[-1])
    return tensor.mT if tensor.dim() == 2 and tensor.shape[0] == shape[-1] else None
