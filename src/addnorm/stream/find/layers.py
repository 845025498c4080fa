"""The layer of each sublayer: told by the numbers in the modules' paths, else by what repeats."""

from __future__ import annotations

from collections.abc import Sequence

from addnorm.stream.find.sites import Branch

__all__ = ["layers_of"]


def layers_of(parts: Sequence[Branch]) -> list[int]:
    """Counted from 0. A skip or an injection belongs to the sublayer after it, but for one within a layer."""
    usual = [part for part in parts if part.role == "branch"] or parts
    known = dict(zip(usual, _of_sublayers(usual), strict=True))
    after: list[int | None] = [known.get(part) for part in parts]  # of the sublayer itself, or of the next one
    for k in reversed(range(len(parts) - 1)):
        if after[k] is None:
            after[k] = after[k + 1]
    entered = {part.add.x: known[part] for part in reversed(parts) if part in known}
    layers: list[int] = []
    for part, layer in zip(parts, after, strict=True):
        before = layers[-1] if layers else None
        within = (
            part.role == "skip" and before is not None and entered.get(part.raw) == before
        )  # from where its own layer began
        layers.append((before if within or layer is None else layer) or 0)
    return layers


def _of_sublayers(found: Sequence[Branch]) -> list[int]:
    """Those of sublayers alone."""
    for depth in range(_deepest(found)):
        keys = [tuple(_numbers(branch)[depth : depth + 1]) for branch in found]
        if len({key for key in keys if key}) > 1:
            layers = _in_order([key or k for k, key in enumerate(keys)])
            if len({*layers}) < len(found):
                return layers
            break
    kinds = [branch.kind for branch in found]  # each sublayer has its number, or none has: told by what repeats
    for period in (3, 2):
        if (
            len(kinds) % period == 0
            and kinds == kinds[:period] * (len(kinds) // period)
            and len({*kinds[:period]}) == period
        ):
            return [k // period for k in range(len(kinds))]
    return [*range(len(found))]


def _numbers(branch: Branch) -> list[tuple[str, str]]:
    """The numbered components of a path, each with what stands before it."""
    parts = branch.add.op.frame.path.split(".")
    mine = branch.frame.path.split(".")
    parts = mine if len(mine) >= len(parts) else parts
    return [(".".join(parts[:k]), part) for k, part in enumerate(parts) if part.isdigit()]


def _deepest(found: Sequence[Branch]) -> int:
    return max((len(_numbers(branch)) for branch in found), default=0)


def _in_order(keys: Sequence[object]) -> list[int]:
    """The number of each run of equal keys."""
    layers: list[int] = []
    for k, key in enumerate(keys):
        layers.append(0 if not k else layers[-1] + (key != keys[k - 1]))
    return layers
