"""Norms, sublayers and learned factors as short texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from addnorm._util.norms import KINDS
from addnorm._util.numbers import format_number
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.sublayers import Sublayer
from addnorm.wirings import spec
from addnorm.wirings.factors import FACTORS, format_interval

NORM_NAMES: dict[str, str] = {
    **{name: kind.title for name, kind in KINDS.items()},
    "scale": "ScaleNorm",
    "own": "norm of its own formula",
}


def format_norm(norm: Norm) -> str:
    """Return the norm's kind and eps as text."""
    more = " (d - 1)" * norm.unbiased + " (eps outside the root)" * norm.eps_outside
    more += " (eps bounds the root)" * (norm.eps_role == "bound" and norm.kind != "scale" and not norm.uses_length)
    more += " of x - mean(x)" * (norm.kind == "scale" and norm.is_centred)
    return f"{NORM_NAMES[norm.kind]} {format_number(norm.eps, trim=True) if norm.eps is not None else ''}{more}".strip()


def format_norms(norms: Iterable[Norm | None]) -> str:
    """Return the distinct norms with their eps as text, such as "LayerNorm 1e-12"."""
    return ", ".join(dict.fromkeys(format_norm(norm) for norm in norms if norm is not None))


def describe_learned(rows: Sequence[spec.Row], symbols: Mapping[str, tuple[str, str]] | None = None) -> list[str]:
    """Return a text for each learned factor of the rows, with its mean in this model: "b learned, mean 0.1".

    `symbols` maps the name of a factor to a pair whose first item is its letter. Without an entry the text has the name.
    """
    texts = []
    for name in FACTORS:
        means = [factor.init for row in rows if isinstance(factor := getattr(row, name), spec.Learned)]
        letter = (symbols or {}).get(name, (name, ""))[0]
        texts += [f"{letter} learned, mean {format_interval(means)}"] if means else []
    return texts


class SublayerNames:
    """Names of the sublayers of a chain, unique within the chain."""

    def __init__(self, chain: Chain) -> None:
        sublayers = chain.list_sublayers()
        self._paths = Counter(sublayer.module for sublayer in sublayers)
        self._calls = Counter(path for path, _ in {(sublayer.module, sublayer.frame.call) for sublayer in sublayers})
        self._used: Counter[str] = Counter()

    def is_call(self, sublayer: Sublayer) -> bool:
        """Return whether every call of the sublayer's module contains no other sublayer."""
        return self._paths[sublayer.module] == self._calls[sublayer.module]

    def make_id(self, sublayer: Sublayer) -> str:
        """Return a name that no other sublayer of the chain has."""
        path = sublayer.module
        if self._paths[path] == 1:
            name = path or sublayer.kind
        elif self.is_call(sublayer):
            name = f"{path}#{sublayer.frame.call + 1}"
        else:
            name = f"{path}/{sublayer.kind}" if path else sublayer.kind
        self._used[name] += 1
        return f"{name}#{self._used[name]}" if self._used[name] > 1 else name

    def list_modules(self, sublayer: Sublayer) -> tuple[str, ...]:
        """Return the child modules in which the sublayer ran, if a call of its module contains several sublayers; else ()."""
        if self.is_call(sublayer):
            return ()
        paths: dict[str, None] = {}
        for op in sublayer.own_ops:
            frames = [*op.frame.chain()]
            if sublayer.frame in frames and op.frame is not sublayer.frame:
                paths[frames[frames.index(sublayer.frame) - 1].path] = None
        return tuple(paths)

    def count_shared(self, sublayer: Sublayer) -> int:
        """Return how many sublayers of the chain are calls of the sublayer's module; 1 if its calls have other sublayers too."""
        path = sublayer.module
        return self._paths[path] if self._calls[path] > 1 and self.is_call(sublayer) else 1


def list_ids(chains: Sequence[Chain], streams: Sequence[str]) -> list[list[str]]:
    """Return the ids of the sublayers of each chain, unique over all chains.

    Where two streams have the same id, the name of the stream precedes the id: "blocks.0 (2)/blocks.0.attn".
    """
    ids = [[*map(SublayerNames(chain).make_id, chain.list_sublayers())] for chain in chains]
    counts = Counter(["x_0", *(name for names in ids for name in names)])  # x_0 is the start of a stream
    return [
        [f"{stream}/{name}" if counts[name] > 1 else name for name in names]
        for stream, names in zip(streams, ids, strict=True)
    ]
