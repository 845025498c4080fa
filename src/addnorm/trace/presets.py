"""Worked examples by name: those of the lessons with the numbers that they print, and the mismatches learners meet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .follow import trace
from .steps import Trace, Vector, show

FREE = {"grad", "read_grad", "digits", "title"}
"""What may change in a preset without changing its forward."""


@dataclass(frozen=True, slots=True)
class Printed:
    """Numbers as a lesson prints them, and what there is to say about how it came by them."""

    values: tuple[str, ...]
    because: str = ""

    def agrees(self, value: float | Vector) -> bool:
        """Whether the value, rounded to the places that each number was printed with, is that number.

        Example:
            >>> Printed(("2.33",)).agrees(7 / 3), Printed(("2.34",)).agrees(7 / 3)
            (True, False)
        """
        return self.values == self.rounded(value)

    def rounded(self, value: float | Vector) -> tuple[str, ...]:
        """The value, to the places that each number was printed with."""
        numbers = value if isinstance(value, tuple) else (value,)
        places = [len(text.partition(".")[2]) for text in self.values]
        return tuple(f"{number:.{digits}f}" for number, digits in zip(numbers, places, strict=True))

    def note(self, value: float | Vector) -> str:
        """What the lesson prints, and where it is off, what would be right and why."""
        said = f"the lesson prints {_text(self.values)}"
        if not self.agrees(value):
            said += f", which to that precision is {_text(self.rounded(value))}"
        return f"{said}: {self.because}" if self.because else said


@dataclass(frozen=True, slots=True)
class Preset:
    """A token, what its sublayer returned, the options of `trace`, and by step what was printed and what to note."""

    name: str
    title: str
    x: Vector
    sublayer: Vector
    options: Mapping[str, Any] = field(default_factory=dict)
    printed: Mapping[str, Printed] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def trace(self, **changes: Any) -> Trace:
        """The trace, with options of `trace` changed; printed numbers and notes show while the forward is as it was.

        Example:
            >>> PRESETS["lesson-000"].trace()["mean"].note
            'the lesson prints 2.33'
        """
        same = changes.keys() <= FREE
        title = self.title if same else f"{self.title}; changed: {', '.join(sorted(changes.keys() - FREE))}"
        followed = trace(self.x, self.sublayer, **{"title": title, **self.options, **changes})
        if not same:
            return followed
        steps = []
        for step in followed:
            printed = [self.printed[step.name].note(step.value)] if step.name in self.printed else []
            said = filter(None, [step.note, *printed, self.notes.get(step.name)])
            steps.append(replace(step, note="; ".join(said)))
        return replace(followed, steps=tuple(steps))


def _text(values: tuple[str, ...]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


_FIRST: tuple[Vector, Vector] = (1.0, 2.0, 3.0), (0.5, -1.0, 1.5)
_STUDYING: tuple[Vector, Vector] = (1.8, -0.3, 0.8), (1.36, 0.91, 1.07)
_LAYER, _PLAIN = trace(*_STUDYING), trace(*_FIRST)
_MEAN, _VARIANCE = (float(_LAYER[name].value) for name in ("mean", "variance"))  # type: ignore[arg-type]

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "lesson-000",
            "First worked example: z = [1.5, 1, 4.5]",
            *_FIRST,
            printed={
                "x": Printed(("1.0", "2.0", "3.0")),
                "sublayer": Printed(("0.5", "-1.0", "1.5")),
                "z": Printed(("1.5", "1.0", "4.5")),
                "mean": Printed(("2.33",)),
                "variance": Printed(("2.39",)),
                "normalized": Printed(("-0.54", "-0.86", "1.40")),
                "shifted": Printed(("-0.54", "-0.86", "1.40")),
            },
        ),
        Preset(
            "lesson-001",
            'Second worked example: "studying" after attention',
            *_STUDYING,
            printed={
                "x": Printed(("1.8", "-0.3", "0.8")),
                "sublayer": Printed(("1.36", "0.91", "1.07")),
                "z": Printed(("3.16", "0.61", "1.87")),
                "mean": Printed(("1.88",)),
                "centred": Printed(("1.28", "-1.27", "-0.01")),
                "squares": Printed(("1.6384", "1.6129", "0.0001")),
                "variance": Printed(("1.08",), "1.0838, rounded, behind a plain ="),
                "root": Printed(("1.04",), "the root of 1.08, already rounded, 1.0392, where √1.0838 = 1.0411"),
                "normalized": Printed(
                    ("1.23", "-1.22", "-0.01"),
                    "divided by the rounded 1.04, that is [1.2308, -1.2212, -0.0096]; the places printed are right",
                ),
            },
        ),
        Preset(
            "undo",
            "Second example with γ = √σ², β = μ: undoes the norm",
            *_STUDYING,
            {"weight": math.sqrt(_VARIANCE), "bias": _MEAN},
            notes={"shifted": "z again, but for 5.9e-06: γ gives back √σ² where the norm divided by √(σ² + ε)"},
        ),
        Preset(
            "unbiased",
            "Mismatch: variance by d - 1, as torch.std has it",
            *_FIRST,
            {"variance": "unbiased"},
            notes={
                "variance": f"LayerNorm divides by d and has {show(_PLAIN['variance'].value)}",
                "normalized": f"0.8165 = √((d - 1)/d) times LayerNorm's {show(_PLAIN['normalized'].value)}",
            },
        ),
        Preset(
            "annotated-transformer",
            "Mismatch: (x - mean) / (std + eps), std by d - 1",
            *_FIRST,
            {"variance": "unbiased", "eps_place": "outside", "eps": 1e-6},
            notes={
                "root": "The Annotated Transformer: a_2 * (x - mean) / (std + eps) + b_2, std by d - 1",
                "normalized": f"LayerNorm has {show(_PLAIN['normalized'].value)}",
                "shifted": "its sublayers also normalize first (--placement pre), as its text says",
            },
        ),
        Preset(
            "rms-norm",
            "RMSNorm: z over the root of its mean square",
            *_FIRST,
            {"norm": "rms"},
            notes={"normalized": f"LayerNorm has {show(_PLAIN['normalized'].value)}"},
        ),
        Preset(
            "pre-ln",
            "Pre-LN: the norm on what the sublayer reads",
            *_FIRST,
            {"placement": "pre"},
        ),
        Preset(
            "constant",
            "Equal features: there is nothing to normalize",
            (1.0, 2.0, 3.0),
            (1.0, 0.0, -1.0),
            notes={"dz": "g less its mean, times 1/√ε = 316: only ε bounds it"},
        ),
    )
}
"""The worked examples by name; `addnorm trace --list` shows them."""
