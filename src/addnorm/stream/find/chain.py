"""A stream as values of the run: its adds, its sublayers, and which of the norms between them are whose.

A norm after an add is the row's (N_out) where the add of the same step in other layers has it too; the others that follow the
last add are final norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from addnorm.stream.dataflow.graph import Value
from addnorm.stream.find.adds import Add
from addnorm.stream.find.layers import layers_of
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.ops import Factor, factor_of, up
from addnorm.stream.find.sites import Branch, branches

__all__ = ["Found", "found_in"]

DEEP = 8  # views, casts and factors between a sum and its norm


@dataclass(eq=False)
class Found:
    """What `record`, `decompose` and `ablate` work with."""

    adds: list[Add]
    branches: list[list[Branch]]
    norms_out: list[list[Norm]]  # after each add, in the order in which they are applied
    final: list[Norm]
    last: list[Factor]  # factors between the last add and the norm after it
    dual: Norm | None  # of a second stream that has the same writes

    def sublayers(self) -> list[tuple[int, Branch]]:
        """All but biases, each with the number of its add."""
        return [(k, branch) for k, parts in enumerate(self.branches) for branch in parts if branch.role != "bias"]

    def scaled(self, k: int) -> list[Factor]:
        """The factors of the whole sum, before its norm or, where it has none, before the next sublayer."""
        if k + 1 == len(self.adds):
            factors = self.last
        else:
            after = self.adds[k + 1]
            factors = after.early if after.norms else after.late
        return [factor for factor in factors if factor.kind in ("constant", "learned")]


def found_in(chains: list[list[Add]]) -> list[Found]:
    """The streams that these chains of adds are; two that have the same writes are one (ResiDual)."""
    return [_found(chain, dual) for chain, dual in _single(chains)]


def _found(chain: list[Add], dual: Norm | None) -> Found:
    parts = [branches(add) for add in chain]
    between = [[*reversed(after.norms)] for after in chain[1:]]
    after, final, factors = _after(chain, parts, between)
    return Found(chain, parts, [*between, after], [*final, dual] if dual else final, factors if after else [], dual)


def _single(chains: list[list[Add]]) -> list[tuple[list[Add], Norm | None]]:
    """Each stream; and where the writes of one are also added to a second (ResiDual), the norm of the second at the end."""
    raws = [{write.path.source for add in chain for write in add.writes if write.role == "branch"} for chain in chains]
    found: list[tuple[list[Add], Norm | None]] = []
    for k, chain in enumerate(chains):
        twins = [other for j, other in enumerate(chains) if j != k and raws[j] & raws[k]]
        if not twins:
            found.append((chain, None))
        elif any(add.norms for add in chain[1:]):
            end = chain[-1].writes[0]
            norm = end.path.source.norm if end.role == "injection" else None
            joined = norm is not None and any(up(norm.x) is other[-1].out for other in twins)
            found.append((chain[:-1], norm) if joined else (chain, None))
        elif not any(add.norms for other in twins for add in other[1:]):
            found.append((chain, None))
    return found


def _after(
    chain: list[Add], parts: list[list[Branch]], between: list[list[Norm]]
) -> tuple[list[Norm], list[Norm], list[Factor]]:
    """The norms after the last add: those that are its row's, as with the sublayers before it, and the final ones."""
    norms: list[Norm] = []
    factors: list[Factor] = []
    value = chain[-1].out
    while (norm := _next_norm(value, factors if not norms else [])) is not None:
        norms.append(norm)
        value = norm.y
    reads = [_signature(add, of_add) for add, of_add in zip(chain, parts, strict=True)]
    flat = [part for of_add in parts for part in of_add]
    layers = dict(zip((part.add for part in flat), layers_of(flat), strict=True))
    alike = [k for k, signature in enumerate(reads[:-1]) if signature == reads[-1]]
    ends = [k for k in alike if layers[chain[k]] != layers[chain[k + 1]]]  # those that end a layer too
    same = ends or alike
    usual = (
        len(between[same[-1]]) if same else int(not reads[-1][1])
    )  # alone: after one that reads no norm it is its own
    return norms[:usual], norms[usual:], factors


def _signature(add: Add, parts: Sequence[Branch]) -> tuple[Any, ...]:
    """What two adds have in common that are the same step of two layers: the module without its number, and the norms."""
    path = tuple(part for part in add.op.frame.path.split(".") if not part.isdigit())
    return path, any(b.reads.norms for b in parts), any(b.norm is not None for b in parts), [b.role for b in parts]


def _next_norm(value: Value, factors: list[Factor], depth: int = 0) -> Norm | None:
    """The first norm that a value goes through as it is; `factors` takes what it is multiplied by before."""
    for op in dict.fromkeys(value.users):
        if not op.outputs or depth > DEEP:
            continue
        if op.norms:
            return min(op.norms, key=lambda norm: norm.y.index)  # type: ignore[no-any-return]  # norms, which graph.py does not know
        out = op.outputs[0]
        passed = factor_of(op)
        if up(out) is not out or (passed is not None and passed[0] is value):
            found = _next_norm(out, factors, depth + 1)
            if found is not None:
                factors += [passed[1]] if passed is not None else []
                return found
    return None
