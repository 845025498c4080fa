"""Worked examples by name: the lessons' examples with their printed numbers, and common mismatches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .calculation import trace
from .steps import Trace, Vector, show

FREE = {"grad", "read_grad", "digits", "title"}
"""Options of `trace` that do not change the forward of a preset."""


@dataclass(frozen=True, slots=True)
class Printed:
    """Numbers of one step as a lesson prints them, with an optional explanation.

    Example:
        >>> from addnorm.trace import Printed
        >>> Printed(("2.33", "-0.67")).rounded((7 / 3, -2 / 3))
        ('2.33', '-0.67')
    """

    values: tuple[str, ...]
    because: str = ""

    def agrees(self, value: float | Vector) -> bool:
        """Return whether the value, rounded to the printed decimals, is the printed number.

        Example:
            >>> Printed(("2.33",)).agrees(7 / 3), Printed(("2.34",)).agrees(7 / 3)
            (True, False)
        """
        return self.values == self.rounded(value)

    def rounded(self, value: float | Vector) -> tuple[str, ...]:
        """Return the value, rounded to the printed decimals, as texts."""
        numbers = value if isinstance(value, tuple) else (value,)
        places = [len(text.partition(".")[2]) for text in self.values]
        return tuple(f"{number:.{digits}f}" for number, digits in zip(numbers, places, strict=True))

    def note(self, value: float | Vector) -> str:
        """Return a note with the printed numbers and, if they differ from `value`, the exact digits and the reason."""
        note = f"the lesson prints {_text(self.values)}"
        if not self.agrees(value):
            note += f", the exact digits are {_text(self.rounded(value))}"
        return f"{note}: {self.because}" if self.because else note


@dataclass(frozen=True, slots=True)
class Preset:
    """Worked example: a token, its sublayer's output, options of `trace`, and printed numbers and notes by step.

    Example:
        >>> from addnorm.trace import PRESETS
        >>> preset = PRESETS["lesson-001"]
        >>> preset.x, preset.sublayer
        ((1.8, -0.3, 0.8), (1.36, 0.91, 1.07))
    """

    name: str
    title: str
    x: Vector
    sublayer: Vector
    options: Mapping[str, Any] = field(default_factory=dict)
    printed: Mapping[str, Printed] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def trace(self, **changes: Any) -> Trace:
        """Return the trace with changed options. If they change the forward, the preset's printed numbers and notes are left out.

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
            notes = filter(None, [step.note, *printed, self.notes.get(step.name)])
            steps.append(replace(step, note="; ".join(notes)))
        return replace(followed, steps=tuple(steps))


def _printed(**numbers: str) -> dict[str, Printed]:
    """Return the `Printed` numbers of each step, from texts such as "1.5 1.0 4.5"."""
    return {step: Printed(tuple(text.split())) for step, text in numbers.items()}


def _text(values: tuple[str, ...]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


_FIRST: tuple[Vector, Vector] = (1.0, 2.0, 3.0), (0.5, -1.0, 1.5)
_STUDYING: tuple[Vector, Vector] = (1.8, -0.3, 0.8), (1.36, 0.91, 1.07)
_LAYER, _PLAIN = trace(*_STUDYING), trace(*_FIRST)
_MEAN, _VARIANCE = (float(_LAYER[name].value) for name in ("mean", "variance"))  # type: ignore[arg-type]

#: The worked examples by name, each a `Preset`. `print(PRESETS["lesson-001"])`.
PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "lesson-000",
            "First worked example: z = [1.5, 1, 4.5]",
            *_FIRST,
            printed=_printed(
                x="1.0 2.0 3.0", sublayer="0.5 -1.0 1.5", z="1.5 1.0 4.5", mean="2.33", variance="2.39",
                normalized="-0.54 -0.86 1.40", shifted="-0.54 -0.86 1.40",
            ),
        ),
        Preset(
            "lesson-001",
            'Second worked example: "studying" after attention',
            *_STUDYING,
            printed={
                **_printed(
                    x="1.8 -0.3 0.8", sublayer="1.36 0.91 1.07", z="3.16 0.61 1.87", mean="1.88",
                    centred="1.28 -1.27 -0.01", squares="1.6384 1.6129 0.0001",
                ),
                "variance": Printed(("1.08",), "1.0838, rounded"),
                "root": Printed(("1.04",), "computed from the rounded 1.08: √1.08 = 1.0392, while √1.0838 = 1.0411"),
                "normalized": Printed(
                    ("1.23", "-1.22", "-0.01"),
                    "divided by the rounded 1.04, which gives [1.2308, -1.2212, -0.0096]; the printed places are right",
                ),
            },
        ),
        Preset(
            "undo",
            "Second example with γ = √σ², β = μ, which undoes the norm",
            *_STUDYING,
            {"weight": math.sqrt(_VARIANCE), "bias": _MEAN},
            notes={"shifted": "equal to z within 5.9e-6: γ multiplies by √σ², the norm divided by √(σ² + ε)"},
        ),
        Preset(
            "unbiased",
            "Mismatch: variance divided by d - 1, as in torch.std",
            *_FIRST,
            {"variance": "unbiased"},
            notes={
                "variance": f"LayerNorm divides by d and gives {show(_PLAIN['variance'].value)}",
                "normalized": f"0.8165 = √((d - 1)/d) times LayerNorm's {show(_PLAIN['normalized'].value)}",
            },
        ),
        Preset(
            "annotated-transformer",
            "Mismatch: (x - mean) / (std + eps), std with d - 1",
            *_FIRST,
            {"variance": "unbiased", "eps_place": "outside", "eps": 1e-6},
            notes={
                "root": "The Annotated Transformer: a_2 * (x - mean) / (std + eps) + b_2, std with d - 1",
                "normalized": f"LayerNorm gives {show(_PLAIN['normalized'].value)}",
                "shifted": "its sublayers also normalize first (--placement pre)",
            },
        ),
        Preset(
            "rms-norm",
            "RMSNorm: z divided by its root mean square",
            *_FIRST,
            {"norm": "rms"},
            notes={"normalized": f"LayerNorm gives {show(_PLAIN['normalized'].value)}"},
        ),
        Preset(
            "pre-ln",
            "Pre-LN: the norm at the sublayer's input",
            *_FIRST,
            {"placement": "pre"},
        ),
        Preset(
            "constant",
            "Equal features: nothing to normalize",
            (1.0, 2.0, 3.0),
            (1.0, 0.0, -1.0),
            notes={"dz": "(g - mean(g)) times 1/√ε = 316: only ε bounds it"},
        ),
    )
}  # fmt: skip
"""Worked examples by name; `addnorm trace --list` lists them."""
