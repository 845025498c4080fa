"""Norms, module paths and learned factors as short texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from addnorm._util.numbers import format_number
from addnorm.stream.find.norm import Norm
from addnorm.wirings import spec
from addnorm.wirings.row import FACTORS, format_interval

__all__ = ["MAX_PATHS", "NORM_NAMES", "describe_learned", "format_norm", "mask_numbers", "merge_paths"]

NORM_NAMES = {"layer": "LayerNorm", "rms": "RMSNorm", "scale": "ScaleNorm", "own": "norm of its own formula"}
MAX_PATHS = 3  # paths named in one line


def format_norm(norm: Norm) -> str:
    """Return the norm's kind and eps as text."""
    more = " (d - 1)" * norm.unbiased + " (eps outside the root)" * norm.eps_outside
    more += " (eps bounds the root)" * (norm.eps_role == "bound" and norm.kind != "scale" and not norm.uses_length)
    more += " of x - mean(x)" * (norm.kind == "scale" and norm.is_centred)
    return f"{NORM_NAMES[norm.kind]} {format_number(norm.eps, trim=True) if norm.eps is not None else ''}{more}".strip()


def mask_numbers(path: str) -> str:
    """Return a path with `*` for its numbers: layers.*.attention."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def merge_paths(paths: Sequence[str]) -> str:
    """Return paths that differ only in their numbers as one: layers.0-11.attention."""
    parts = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(part[0] if len({*part}) == 1 else _merge_numbers(part) for part in parts)


def _merge_numbers(parts: Sequence[str]) -> str:
    """Return sorted numbers in a few characters: 0-11, or 0,2 where some are missing."""
    parts = sorted({*parts}, key=lambda part: int(part) if part.isdigit() else -1)
    numbers = [int(part) if part.isdigit() else -1 for part in parts]
    if numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
        return f"{parts[0]}-{parts[-1]}"
    return ",".join(parts) if len(parts) <= MAX_PATHS else f"{parts[0]},{parts[1]},...,{parts[-1]}"


def describe_learned(rows: Sequence[spec.Row], symbols: Mapping[str, tuple[str, str]] | None = None) -> list[str]:
    """Return the learned factors of rows with their means: what they are in this model, wherever they started."""
    texts = []
    for name in FACTORS:
        means = [factor.init for row in rows if isinstance(factor := getattr(row, name), spec.Learned)]
        letter = (symbols or {}).get(name, (name, ""))[0]
        texts += [f"{letter} learned, mean {format_interval(means)}"] if means else []
    return texts
