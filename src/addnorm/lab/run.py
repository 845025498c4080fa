"""One training run as data: what is trained on what and how, and a key that says when two runs are the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, replace
from typing import Any

from addnorm import wirings
from addnorm._util.arguments import check_choice, check_float, check_int
from addnorm.lab.data import Text
from addnorm.nn import Wiring
from addnorm.nn.norm import NormKind
from addnorm.wirings.init import xavier, xavier_packed
from addnorm.wirings.row import format_factor as number
from addnorm.wirings.spec import Place, Row

__all__ = ["SCHEMA", "Run", "digest", "does", "label", "wired"]

MOST = {"num_layers": 10_000, "seed": 2**31 - 1}
SCHEMA = 2  # of what a run leaves behind: another number, and the runs of before are not taken for these


def wired(wiring: Wiring | Row | str) -> Wiring:
    """The wiring as the lab trains it: where its rule is plain Xavier, queries, keys and values are drawn as one matrix.

    So PyTorch's and fairseq's transformers draw them. It matters: with three matrices post-LN's tokens become alike sooner, and
    of twelve layers it learns little even with warm-up. A wiring with a rule of its own keeps it.
    """
    found = wirings.as_wiring(wiring)
    return replace(found, init=xavier_packed) if found.init is xavier else found


def label(wiring: Wiring) -> str:
    """What a wiring is called here: its name, and its options where they are not at their default."""
    found = repr(replace(wiring, init=xavier) if wiring.init is xavier_packed else wiring)
    return wiring.name if found.startswith("Wiring(") else found.removesuffix("()")


def does(wiring: Wiring, num_layers: int) -> list[str]:
    """What a wiring does at a depth, whatever it is called: its rows, and how their weights are drawn."""
    profile = getattr(wiring.profile, "__qualname__", wiring.profile)
    ends = f"{wiring.embedding_norm}, {wiring.ends_in_norm(num_layers)}, {profile}"
    found = [f"{wiring.flow}, {ends}"]
    for i, row in enumerate(wiring.rows(num_layers)):
        at = Place(*divmod(i, 2), num_layers, 2)
        roles = ("query", "key", "value", "out") if i % 2 == 0 else ("up", "down")
        draws = [repr(wiring.init(role, at, **dict(wiring.options))) for role in roles]
        found.append(f"{row!r}: {', '.join(draws)}")
    return found


def digest(what: dict[str, Any]) -> str:
    """A short text that is the same for the same JSON, and for no other."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Run:
    """A character model that is trained with Adam: at a constant rate, after a linear warm-up; no weight decay, no clipping.

    Clipping would hide what a comparison of wirings is about.

    Args:
        wiring: of the model.
        num_layers: each an attention and a feed-forward block.
        d_model: the width.
        nhead: of the attention.
        tokens: in a sequence.
        batch: sequences in a step.
        steps: how many.
        lr: the learning rate.
        warm_up: over so many steps it rises to `lr`.
        seed: of weights and batches.
        norm: "layer" or "rms".
        every: the streams are recorded at each so many steps, at the first too; 0: never.
    """

    wiring: Wiring
    num_layers: int = 12
    d_model: int = 64
    nhead: int = 4
    tokens: int = 64
    batch: int = 16
    steps: int = 200
    lr: float = 1e-3
    warm_up: int = 0
    seed: int = 0
    norm: NormKind = "layer"
    every: int = 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "wiring", wired(self.wiring))
        for name in ("num_layers", "d_model", "nhead", "tokens", "batch", "steps"):
            check_int(name, getattr(self, name), 1)
        for name in ("warm_up", "seed", "every"):
            check_int(name, getattr(self, name), 0)
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at most {most}.")
        if self.warm_up > self.steps:
            raise ValueError(
                f"warm_up is {self.warm_up}, expected at most steps = {self.steps}: the rate would never be reached."
            )
        object.__setattr__(self, "lr", check_float("lr", self.lr))
        if self.lr <= 0:
            raise ValueError(f"lr is {self.lr:g}, expected a number above 0.")
        if self.d_model % self.nhead:
            raise ValueError(f"nhead is {self.nhead}, expected a divisor of d_model = {self.d_model}.")
        if self.wiring.profile is not None and self.wiring.flow != "rows":
            raise ValueError(f"wiring {self.name!r} measures its factors, which the lab can do of rows only.")
        check_choice("norm", self.norm, ("layer", "rms"))

    @property
    def name(self) -> str:
        """The wiring's, with its options where they are not at their default."""
        return label(self.wiring)

    def settings(self) -> dict[str, Any]:
        """The numbers by which runs differ, as JSON types."""
        return {"wiring": self.name} | {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "wiring"
        }

    def key(self, text: Text) -> str:
        """What tells this run from others: its settings, the text, and what the wiring does, not what it is called."""
        what = {"schema": SCHEMA, **self.settings(), "text": text.digest, "does": does(self.wiring, self.num_layers)}
        del what["wiring"]
        return digest(what)

    def __str__(self) -> str:
        warm_up = f"warm-up {self.warm_up}" if self.warm_up else "no warm-up"
        return f"{self.name}, {self.num_layers} layers, lr {number(self.lr)}, {warm_up}, seed {self.seed}"
