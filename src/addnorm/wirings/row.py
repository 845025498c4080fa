"""One sublayer's row of a wiring, with its factors, and its equation in symbols.

x' = N_out(a * x + b * N_branch(f(c * N_in(x))))
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from addnorm._util.arguments import check_bool, check_choice, check_float
from addnorm._util.numbers import format_number

__all__ = [
    "FACTORS", "GAP", "PER_LAYER", "Factor", "FactorText", "Learned", "Place", "Row", "RowText", "Shares", "changed_fields",
    "equation", "factor_text", "format_call", "format_factor", "join_terms", "row_text",
]  # fmt: skip

FACTORS = ("a", "b", "c")
PER_LAYER = ", one a layer"
FINE = 8  # significant digits of a factor near 1
GAP = ",   "  # between an equation and the definitions of its letters


@dataclass(frozen=True, repr=False)
class Learned:
    """A factor that is trained, with its initial value.

    Args:
        init: the initial value.
        per_feature: whether each of the `d_model` features has its own factor, shape `(d_model,)`, instead of a scalar.
        shared: whether all sublayers of a layer share one factor (as in ReZero).
        name: in a `Stage`, the name of the parameter; entries with the same name are one parameter.
    """

    init: float
    per_feature: bool = False
    shared: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "init", check_float("init", self.init))
        for name in ("per_feature", "shared"):
            check_bool(name, getattr(self, name))
        if not (self.name == "" or (isinstance(self.name, str) and self.name.isidentifier())):
            raise ValueError(f"name is {self.name!r}, expected a Python identifier: the parameter's name.")

    def __repr__(self) -> str:
        return format_call("Learned", changed_fields(self))


Factor = float | Learned
Shares = Literal["", "state", "read"]


@dataclass(frozen=True, repr=False)
class Row:
    """The norms and factors of one sublayer: x' = N_out(a * x + b * N_branch(f(c * N_in(x)))).

    Args:
        norm_in: whether the sublayer reads the norm of the stream.
        norm_branch: whether the sublayer's output is normalized.
        norm_out: whether the stream is normalized after the add.
        a: factor of the stream; 0 removes the residual connection.
        b: factor of the sublayer's output.
        c: factor of the sublayer's input.
        shares: what this sublayer has in common with the one before it in its layer: "" for nothing, it reads the stream after
            that one's write; "state" if it reads the same state, by a norm of its own; "read" if it has the same input. Such
            sublayers are parallel, and only plain sums can be: a = 1 and no norm_out.

    Each factor is a number or a `Learned` factor.

    Example:
        >>> print(addnorm.Row(norm_in=True))
        x' = x + f(N(x))
        >>> print(addnorm.Row(norm_out=True, a=2.0))
        x' = N(2 x + f(x))
    """

    norm_in: bool = False
    norm_branch: bool = False
    norm_out: bool = False
    a: Factor = 1.0
    b: Factor = 1.0
    c: Factor = 1.0
    shares: Shares = ""

    def __post_init__(self) -> None:
        for name in ("norm_in", "norm_branch", "norm_out"):
            check_bool(name, getattr(self, name), ": whether the row has that norm")
        check_choice("shares", self.shares, ("", "state", "read"))
        for name in FACTORS:
            value = getattr(self, name)
            if not isinstance(value, Learned):
                alternative = ", or Learned(...) for a factor that trains"
                object.__setattr__(self, name, check_float(name, value, alternative))
        for name, consequence in (("b", "the sublayer would never write"), ("c", "the sublayer would read only zeros")):
            if getattr(self, name) == 0.0:
                raise ValueError(
                    f"{name} is 0, expected another number: {consequence}; for a start at zero use Learned(0.0)."
                )

        if self.shares and not self.is_sum:
            raise ValueError(
                f"shares is {self.shares!r} with a = {self.a!r} and norm_out = {self.norm_out}, expected a = 1 and no norm_out: "
                "the writes of parallel sublayers are added to the same state."
            )
        if self.shares == "read" and (self.norm_in or self.c != 1.0):
            raise ValueError(
                f"shares is 'read' with norm_in = {self.norm_in} and c = {self.c!r}, expected no norm_in and c = 1: the input is "
                "that of the sublayer before."
            )

    @property
    def is_sum(self) -> bool:
        """Whether the stream stays a plain sum of writes: a = 1, and no norm_out."""
        return self.a == 1.0 and not self.norm_out

    def __repr__(self) -> str:
        return format_call("Row", changed_fields(self))

    def __str__(self) -> str:
        return equation(self)


class Place(NamedTuple):
    """A sublayer's position in a stack, counted from 0."""

    layer: int
    sublayer: int  # in its layer
    num_layers: int
    sublayers_per_layer: int

    @property
    def number(self) -> int:
        """The layer's number counted from 1, as in the papers' formulas."""
        return self.layer + 1

    @property
    def n_sublayers(self) -> int:
        """The number of sublayers in a stack of whole layers."""
        return self.num_layers * self.sublayers_per_layer


class FactorText(NamedTuple):
    """A factor as text."""

    text: str = ""  # a letter, a number, or "(1 ... 0.2887)"; empty for 1
    definition: str = ""  # the letter and its formula
    is_vector: bool = False
    term: str = ""  # "a ⊙ ({x} + v)" where the product is no plain one
    boxes: tuple[str, ...] = ()  # of a drawing, where there is not one with the text

    def times(self, operand: str) -> str:
        """Return the product of the factor and an operand."""
        if self.term:
            return self.term.format(x=operand)
        if self.text in ("", "-1"):
            return self.text.removesuffix("1") + operand
        return f"{self.text} {'⊙ ' if self.is_vector else ''}{operand}"


class RowText(NamedTuple):
    """A row with its factors as text."""

    row: Row
    a: FactorText
    b: FactorText
    c: FactorText

    def branch(self, read: str, f: str = "f") -> str:
        """Return the term that is added if the sublayer reads `read`, times c."""
        return self.added(self.c.times(read), f)

    def added(self, argument: str, f: str = "f") -> str:
        """Return the term that is added if the sublayer is called with `argument`."""
        returned = f"{f}({argument})"
        return self.b.times(f"N({returned})" if self.row.norm_branch else returned)

    def read(self, stream: str, norm: str = "N") -> str:
        """Return the sublayer's input before the factor c."""
        return f"{norm}({stream})" if self.row.norm_in else stream

    def out(self, stream: str, *added: str) -> str:
        """Return the stream after the add."""
        total = join_terms(*([] if self.row.a == 0.0 else [self.a.times(stream)]), *added)
        return f"N({total})" if self.row.norm_out else total

    @property
    def equation(self) -> str:
        """The equation of the row, without the definitions of its letters."""
        return f"x' = {self.out('x', self.branch(self.read('x')))}"

    @property
    def definitions(self) -> list[str]:
        """The definitions of the letters."""
        return [factor.definition for factor in (self.a, self.b, self.c) if factor.definition]


def equation(row: Row, symbols: Mapping[str, tuple[str, str]] | None = None) -> str:
    """Return a row in symbols.

    Args:
        row: the row.
        symbols: `{"a": ("α", "(2L)^(1/4)")}`, the letter of a factor and its formula. A factor without an entry is written as
            its number, a learned one as a, b or c.

    Example:
        >>> from addnorm.wirings.row import equation
        >>> print(equation(addnorm.Row(norm_in=True, b=addnorm.Learned(0.1, per_feature=True))))
        x' = x + b ⊙ f(N(x)),   b starts at 0.1
        >>> print(equation(addnorm.Row(norm_out=True, a=3.0), {"a": ("α", "√S")}))
        x' = N(α x + f(x)),   α = √S
    """
    text = row_text([row], [row], symbols or {})
    return GAP.join([text.equation, *text.definitions])


def row_text(
    rows: Sequence[Row],
    deeper_rows: Sequence[Row],
    symbols: Mapping[str, tuple[str, str]],
    *,
    exact: bool = False,
    measured: bool = False,
) -> RowText:
    """Return the common text of rows that differ in their numbers alone.

    Args:
        rows: the rows of one sublayer over the layers.
        deeper_rows: the same rows in a stack of another depth; a factor that differs there is no constant.
        symbols: letters and formulas of factors, as in `equation`.
        exact: write numbers in place of letters.
        measured: learned factors start at measured values.
    """
    texts = []
    for name in FACTORS:
        values, deeper_values = ([getattr(row, name) for row in stack] for stack in (rows, deeper_rows))
        texts.append(factor_text(name, values, deeper_values, symbols.get(name), exact=exact, measured=measured))
    return RowText(rows[0], *texts)


def factor_text(
    name: str,
    values: Sequence[Factor],
    deeper_values: Sequence[Factor],
    symbol: tuple[str, str] | None,
    *,
    exact: bool = False,
    measured: bool = False,
) -> FactorText:
    """Return the text of a factor that has these values over the layers, and those others in a deeper stack.

    Args:
        name: the letter if there is no symbol.
        values, deeper_values, exact, measured: as in `row_text`.
        symbol: the letter and its formula.
    """
    letter, formula = symbol or (name, "")
    is_constant = len({*values, *deeper_values}) == 1
    first = values[0]
    if isinstance(first, Learned):
        numbers = [value.init for value in values if isinstance(value, Learned)]
        start = format_interval(numbers) if exact or is_constant else "a value that depends on depth"
        start = "as measured" if measured else f"at {start if exact else formula or start}"
        return FactorText(letter, f"{letter} starts {start}{PER_LAYER * first.shared}", first.per_feature)
    numbers = [value for value in values if not isinstance(value, Learned)]
    if is_constant and first == 1.0:
        return FactorText()
    if exact:
        return FactorText(text if " " not in (text := format_interval(numbers)) else f"({text})")
    if formula:
        return FactorText(letter, f"{letter} = {formula}")
    if is_constant:
        return FactorText(format_factor(first))
    return FactorText(f"{letter}{',' if '_' in letter else '_'}{'l' if len({*values}) > 1 else 'L'}")


def format_factor(value: float) -> str:
    """Return a number with at most four significant digits, with more if it would be rounded to 1.

    Example:
        >>> from addnorm.wirings.row import format_factor
        >>> format_factor(200**0.25), format_factor(1e-5), format_factor(2.0), format_factor(1.0001)
        ('3.761', '1e-5', '2', '1.0001')
    """
    text = format_number(float(value), trim=True)
    return format_number(float(value), FINE, trim=True) if text in ("1", "-1") else text


def format_interval(values: Iterable[float]) -> str:
    """Return one number, the first and last if the others lie between them, or else the smallest and largest."""
    values = [*values]
    ends, limits = (values[0], values[-1]), (min(values), max(values))
    if limits[0] == limits[1]:
        return format_factor(values[0])
    separator, pair = (" ... ", ends) if tuple(sorted(ends)) == limits else (" to ", limits)
    return separator.join(map(format_factor, pair))


def join_terms(*terms: str) -> str:
    """Return the sum of terms, which may begin with a minus."""
    return " + ".join(terms).replace("+ -", "- ")


def changed_fields(instance: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass that differ from their defaults."""
    values = [(field, getattr(instance, field.name)) for field in fields(instance)]
    return [(field.name, value) for field, value in values if value != field.default]


def format_call(name: str, arguments: Iterable[tuple[str, Any]]) -> str:
    """Return the source text of a call with keyword arguments."""
    texts = (f"{key}={value.__name__ if inspect.isfunction(value) else repr(value)}" for key, value in arguments)
    return f"{name}({', '.join(texts)})"
