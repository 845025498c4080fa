"""Steps of a trace, each with formula, numbers and value, and their text."""

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Placement = Literal["post", "pre"]
PLACEMENTS: dict[str, Placement] = {"post_ln": "post", "pre_ln": "pre"}  # the wirings' names
Norm = Literal["layer", "rms"]
Variance = Literal["biased", "unbiased"]
EpsPlace = Literal["inside", "outside"]
Section = Literal["forward", "checks", "backward"]
Vector = tuple[float, ...]

#: The sections of a trace, in their order. `[step for step in found.steps if step.section == SECTIONS[0]]`.
SECTIONS: tuple[Section, ...] = get_args(Section)
Style = Literal["", "strong", "accent", "dim"]
MARGIN = 16  # columns on the left of the steps, with their names
SCHEMA = {"schema": "addnorm.trace", "schema_version": 1}
"""Name and version of the layout of `Trace.to_dict`."""

_NAMES = {"layer": "LayerNorm", "rms": "RMSNorm"}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a trace: `symbol = formula = numbers = value`.

    Example:
        >>> from addnorm.trace import trace
        >>> step = trace([1.0, 2.0], [3.0, 4.0])["mean"]
        >>> step.symbol, step.value
        ('μ', 5.0)
    """

    name: str
    section: Section
    symbol: str
    value: float | Vector
    formula: str = ""
    numbers: str = ""
    note: str = ""

    @property
    def finite(self) -> bool:
        """Whether the value has no inf or nan."""
        return all(map(math.isfinite, _flat(self.value)))

    def lines(self, digits: int = 5, width: int = 64) -> list[str]:
        """Return `symbol = formula = numbers = value` as lines, broken before a `=` or between two features."""
        parts = filter(None, [self.formula, *self.numbers.split(" = "), show(self.value, digits)])
        lines = [self.symbol]
        for part in parts:
            if len(lines[-1]) + len(part) + 3 <= width:
                lines[-1] += f" = {part}"
            else:
                # inside brackets a line may break only after a comma
                glued = re.sub(r"(?<!,) (?=[^\[]*\])", "\0", part)
                wrapped = textwrap.wrap(f"= {glued}", width, subsequent_indent="   ", break_on_hyphens=False)
                lines += [line.replace("\0", " ") for line in wrapped]
        return lines


@dataclass(frozen=True, slots=True)
class Trace:
    """Trace of one token: its steps in order. `t["mean"]` is a step, `str(t)` a table, `t.to_dict()` is for JSON.

    Example:
        >>> from addnorm.trace import trace
        >>> t = trace([1.0, 2.0], [3.0, 4.0])
        >>> t["z"].value, t["variance"].value
        ((4.0, 6.0), 1.0)
    """

    placement: Placement
    norm: Norm
    variance: Variance
    eps_place: EpsPlace
    eps: float
    weight: Vector
    bias: Vector
    digits: int
    steps: tuple[Step, ...]
    title: str = ""

    def __getitem__(self, name: str) -> Step:
        steps = {step.name: step for step in self.steps}
        if name not in steps:
            raise KeyError(f"{name!r} is no step of this trace, expected one of: {', '.join(steps)}.")
        return steps[name]

    def __contains__(self, name: object) -> bool:
        return any(step.name == name for step in self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def section(self, section: Section) -> tuple[Step, ...]:
        """Return the steps of "forward", "checks" or "backward"."""
        return tuple(step for step in self.steps if step.section == section)

    @property
    def equation(self) -> str:
        """The computation in one line."""
        norm = _NAMES[self.norm]
        return f"y = {norm}(x + Sublayer(x))" if self.placement == "post" else f"z = x + Sublayer({norm}(x))"

    @property
    def output(self) -> Vector:
        """The result of Add & Norm: y in post-LN, the stream z in pre-LN."""
        return _flat(self["shifted" if self.placement == "post" else "z"].value)

    @property
    def heading(self) -> str:
        """The equation with all options that change the numbers."""
        choices = [f"{self.placement}-LN", f"ε = {show(self.eps)}"]
        choices += ["variance divided by d - 1"] if self.variance == "unbiased" else []
        choices += ["ε outside the root"] if self.eps_place == "outside" else []
        return f"{self.equation}   ({', '.join(choices)})"

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as JSON types. inf and nan become None, and `finite` of their step is False.

        Example:
            >>> from addnorm.trace import trace
            >>> trace([1, 2, 3], [0.5, -1, 1.5]).to_dict()["steps"][2]["value"]
            [1.5, 1.0, 4.5]
        """
        steps = [{**asdict(step), "value": _json(step.value), "finite": step.finite} for step in self.steps]
        lists = {"weight": _json(self.weight), "bias": _json(self.bias), "output": _json(self.output), "steps": steps}
        return {**SCHEMA, "equation": self.equation, **asdict(self), **lists}

    def spans(self, width: int = 80) -> Iterator[tuple[str, Style]]:
        """Yield the table of the steps in pieces, each with its style."""
        room, margin = max(width - MARGIN, 24), " " * MARGIN
        yield "".join(f"{line}\n" for line in textwrap.wrap(self.title, width)), "strong"
        yield "\n".join(textwrap.wrap(self.heading, width)), ""
        for section in SECTIONS:
            yield f"\n\n{section.capitalize()}\n", "strong"
            yield "─" * width, "dim"
            for step in self.section(section):
                derivation, value = f"\n{margin}".join(step.lines(self.digits, room)), show(step.value, self.digits)
                value = value if derivation.endswith(value) else ""  # a long vector is broken into lines
                yield f"\n{step.name:{MARGIN}}{derivation.removesuffix(value)}", ""
                yield value, "accent"
                yield "".join(f"\n{margin}{line}" for line in textwrap.wrap(step.note, room)), "dim"

    def __str__(self) -> str:
        return "".join(text for text, _ in self.spans())


def show(value: float | Sequence[float], digits: int = 5) -> str:
    """Return a number or a vector as text with `digits` significant digits. Long vectors are shortened.

    Example:
        >>> show(7 / 3), show([1.5, -1, 4.5]), show(range(768))
        ('2.3333', '[1.5, -1, 4.5]', '[0, 1, 2, 3, …, 767] (768 numbers)')
        >>> show(1e-5), show(1.5e300)
        ('1e-5', '1.5e300')
    """
    if not isinstance(value, Sequence):
        text = f"{value + 0.0:.{digits}g}"  # + 0.0: no -0
        return re.sub(r"e(-?)\+?0*(?=\d)", r"e\1", text)  # 1e-5, not 1e-05
    numbers = [show(v, digits) for v in (value if len(value) <= 12 else [*value[:4], value[-1]])]
    if len(value) <= 12:
        return f"[{', '.join(numbers)}]"
    return f"[{', '.join(numbers[:4])}, …, {numbers[4]}] ({len(value)} numbers)"


def _flat(value: float | Vector) -> Vector:
    return value if isinstance(value, tuple) else (value,)


def _json(value: float | Vector) -> float | list[Any] | None:
    if isinstance(value, tuple):
        return [_json(v) for v in value]
    return value if math.isfinite(value) else None
