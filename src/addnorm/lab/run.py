"""Training runs as data: the settings of one run, its key, and the protocols that say which runs make a comparison."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from addnorm import wirings
from addnorm._util.arguments import check_choice, check_int, check_positive
from addnorm._util.norms import KINDS, Norm
from addnorm._util.numbers import format_count
from addnorm.lab.data import Text
from addnorm.nn import Wiring
from addnorm.wirings.factors import format_factor
from addnorm.wirings.init import xavier, xavier_packed
from addnorm.wirings.spec import Place, Row

MAXIMA = {"num_layers": 10_000, "steps": 1_000_000, "seed": 2**31 - 1}
VARIED = ("num_layers", "rates", "warm_ups", "seeds")  # settings of a protocol in which its runs differ
SCHEMA = 2  # version of a run's result; results of another version are not reused


def as_lab_wiring(wiring: Wiring | Row | str) -> Wiring:
    """Return a wiring with the lab's initialization: instead of plain Xavier, Xavier with queries, keys and values as one matrix.

    PyTorch's and fairseq's transformers do the same. With three matrices the tokens of post-LN become similar sooner, and a
    model of twelve layers learns little even with warm-up. A wiring with its own rule keeps that rule.
    """
    chosen = wirings.as_wiring(wiring)
    return replace(chosen, init=xavier_packed) if chosen.init is xavier else chosen


def wiring_label(wiring: Wiring) -> str:
    """Return the name of a wiring with the options that differ from their defaults.

    Example:
        >>> from addnorm import wirings
        >>> from addnorm.lab.run import wiring_label
        >>> wiring_label(wirings.no_residual()), wiring_label(wirings.no_residual(norm=False))
        ('no_residual', 'no_residual(norm=False)')
    """
    text = repr(replace(wiring, init=xavier) if wiring.init is xavier_packed else wiring)
    return wiring.name if text.startswith("Wiring(") else text.removesuffix("()")


def describe_behaviour(wiring: Wiring, num_layers: int) -> list[str]:
    """Return lines that state what a wiring computes at a depth: each `Row` or `Stage` and how its weights are drawn."""
    profile = getattr(wiring.profile, "__qualname__", wiring.profile)
    ends = f"{wiring.embedding_norm}, {wiring.ends_in_norm(num_layers)}, {profile}"
    after = Place(num_layers, 0, num_layers, 2)
    lines = [f"{'rows' if wiring.is_sequential else (wiring.embedding, wiring.last_read(after))}, {ends}"]
    for i, row in enumerate(wiring.stages(num_layers)):
        place = Place(*divmod(i, 2), num_layers, 2)
        roles = ("query", "key", "value", "out") if i % 2 == 0 else ("up", "down")
        draws = [repr(wiring.init(role, place, **dict(wiring.options))) for role in roles]
        lines.append(f"{row!r}: {', '.join(draws)}")
    return lines


def hash_json(document: dict[str, Any]) -> str:
    """Return the first 16 hex digits of the SHA-256 of a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Run:
    """Settings of one training run of a character model.

    The optimizer is Adam with a linear warm-up to a constant learning rate. There is no weight decay and no gradient clipping:
    clipping would hide the differences between wirings.

    Args:
        wiring: the wiring of the model, or its name.
        num_layers: number of layers, each an attention and a feed-forward sublayer.
        d_model: width of the model.
        nhead: number of attention heads.
        tokens: length of a sequence in characters.
        batch: number of sequences in a step.
        steps: number of steps.
        lr: learning rate after warm-up.
        warm_up: number of steps in which the learning rate rises to `lr`.
        seed: seed of the weights and of the batches.
        norm: "layer" or "rms".
        every: interval in steps at which the streams are recorded, from the first step on; 0 records nothing.

    Raises:
        ValueError, TypeError: an argument has a wrong value. The message names the argument.

    Example:
        >>> from addnorm.lab import Run
        >>> str(Run("pre_ln", lr=3e-3))
        'pre_ln, 12 layers, lr 0.003, no warm-up, seed 0'
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
    norm: Norm = "layer"
    every: int = 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "wiring", as_lab_wiring(self.wiring))
        for name in ("num_layers", "d_model", "nhead", "tokens", "batch", "steps"):
            check_int(name, getattr(self, name), 1)
        for name in ("warm_up", "seed", "every"):
            check_int(name, getattr(self, name), 0)
        for name, maximum in MAXIMA.items():
            if getattr(self, name) > maximum:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at most {maximum}.")
        if self.warm_up > self.steps:
            raise ValueError(
                f"warm_up is {self.warm_up}, expected at most steps = {self.steps}: the rate would never be reached."
            )
        object.__setattr__(self, "lr", check_positive("lr", self.lr))
        if self.d_model % self.nhead:
            raise ValueError(f"nhead is {self.nhead}, expected a divisor of d_model = {self.d_model}.")
        if self.wiring.profile is not None and not self.wiring.has_rows:
            raise ValueError(
                f"wiring is {self.name!r}, whose factors are measured, expected constant factors or a wiring of rows."
            )
        check_choice("norm", self.norm, KINDS)

    @property
    def name(self) -> str:
        """Name of the wiring, with the options that differ from their defaults."""
        return wiring_label(self.wiring)

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON types."""
        return vars(self) | {"wiring": self.name}

    def key(self, text: Text) -> str:
        """Return the hash of the settings, the text and what the wiring computes. The wiring's name does not change the hash."""
        does = describe_behaviour(self.wiring, self.num_layers)
        document = {"schema": SCHEMA, **self.settings(), "text": text.digest, "does": does}
        del document["wiring"]
        return hash_json(document)

    def __str__(self) -> str:
        warm_up = f"warm-up {self.warm_up}" if self.warm_up else "no warm-up"
        return f"{self.name}, {format_count(self.num_layers, 'layer')}, lr {format_factor(self.lr)}, {warm_up}, seed {self.seed}"


@dataclass(frozen=True)
class Protocol:
    """Settings of a comparison: each wiring is trained with every combination of depth, learning rate, warm-up and seed.

    Args:
        num_layers: the depths, or one depth.
        rates: the learning rates. Each wiring is judged at its best rate.
        warm_ups: the numbers of warm-up steps. An empty tuple means two: 0, and 100 (half of `steps` if that is less).
        seeds: the seeds of weights and batches, not their number: `range(3)` for three.
        steps, d_model, nhead, tokens, batch, norm, every: see `Run`.

    Raises:
        ValueError: a list is empty, or a setting is wrong.
        TypeError: a setting has the wrong type.

    Example:
        >>> from addnorm.lab import Protocol
        >>> len(Protocol(num_layers=(6, 12), rates=(1e-3, 3e-3), warm_ups=0).runs(["pre_ln"]))
        4
    """

    num_layers: tuple[int, ...] = (12,)
    rates: tuple[float, ...] = (1e-3,)
    warm_ups: tuple[int, ...] = ()
    seeds: tuple[int, ...] = (0,)
    steps: int = 200
    d_model: int = 64
    nhead: int = 4
    tokens: int = 64
    batch: int = 16
    norm: Norm = "layer"
    every: int = 20

    def __post_init__(self) -> None:
        for name in VARIED:
            values = getattr(self, name)
            if isinstance(values, int | float):
                values = (values,)
            if name == "warm_ups" and values == ():
                check_int("steps", self.steps, 1)
                values = (0, min(100, self.steps // 2))
            if not tuple(values):
                raise ValueError(f"{name} is empty, expected at least one number.")
            object.__setattr__(self, name, tuple(dict.fromkeys(values)))
        self.runs([wirings.get("pre_ln")])  # checks each setting

    def runs(self, compared: Sequence[Wiring]) -> list[Run]:
        """Return the runs sorted by seed first, so that an interrupted comparison has complete seeds."""
        shared = {name: value for name, value in vars(self).items() if name not in VARIED}
        varied = itertools.product(self.seeds, self.num_layers, self.rates, self.warm_ups, compared)
        return [
            Run(wiring, num_layers=n, lr=lr, warm_up=warm_up, seed=seed, **shared)
            for seed, n, lr, warm_up, wiring in varied
        ]

    @property
    def is_illustration(self) -> bool:
        """Whether the protocol has fewer than three seeds or fewer than two learning rates, too few for evidence."""
        return len(self.seeds) < 3 or len(self.rates) < 2

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON types."""
        return {name: [*value] if isinstance(value, tuple) else value for name, value in vars(self).items()}


#: The default protocol: one depth, one rate, with and without warm-up, one seed. `lab.compare("pre_ln", lab.ILLUSTRATION)`.
ILLUSTRATION = Protocol()
#: The full protocol: three depths, four rates, with and without warm-up, three seeds. `lab.compare("pre_ln", lab.FULL)`.
FULL = Protocol(num_layers=(6, 12, 24), rates=(3e-4, 1e-3, 3e-3, 1e-2), seeds=(0, 1, 2), steps=500)
