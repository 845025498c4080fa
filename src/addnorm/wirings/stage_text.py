"""A stage in symbols, made from its data.

    u' = N(u + f(u)),   v' = v + f(u)                              streams with names, and an equation for each that changes
    X' = A X + b f(N(c X)),   c = ...                              one tensor of n streams
    x_{n+1} = f(N(Σ_i p_i x_i)),   p_i = ...                       counted states: x_0, the embedding, to x_n, the newest

A factor of 1 and a term of 0 are not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from addnorm.wirings.row import GAP, Factor, FactorText, Learned, Row, RowText, factor_text, format_factor, join_terms
from addnorm.wirings.stage_form import (
    base_name,
    counted_rows,
    default_names,
    find_entries,
    is_counted,
    is_matrix,
    is_sum,
    names_of,
)

__all__ = ["StageText", "equation", "make_text"]

LETTERS = {"collapse": "c", "mix": "a", "inject": "b"}
LONG = 16  # characters of a write that is not repeated in several equations
Symbols = Mapping[str, tuple[str, str]]


def equation(stage: Any) -> str:
    """Return a stage in symbols."""
    text = make_text([stage], [stage], {})
    return GAP.join([*text.equations, *text.definitions])


def make_text(
    specs: Sequence[Any],
    deeper_specs: Sequence[Any],
    symbols: Symbols,
    *,
    exact: bool = False,
    measured: bool = False,
    carried: Any = None,
    as_matrix: bool = False,
) -> StageText:
    """Return the common text of stages (or heads) that differ in their numbers alone.

    Args:
        specs: the stages of one sublayer over the layers.
        deeper_specs: the same stages in a stack of another depth; an entry that differs there is no constant.
        symbols: letters and formulas by the name of a learned entry or by its place, such as "inject_0", "inject" or "b".
        exact: write numbers in place of letters.
        measured: learned factors start at measured values.
        carried: the notation of the C that the stage before computed.
        as_matrix: write the streams as one X.
    """
    last = specs[-1]
    texts = {}
    sums = {place: row for place, row in counted_rows(last) if is_sum(row)} if is_counted(last) else {}
    for place, entry in find_entries(last).items():
        symbol = _find_symbol(symbols, place, entry)
        if place in sums:
            texts[place] = _sum_text(place, sums[place], symbol)
        else:
            values = [find_entries(spec)[place] for spec in specs]
            deeper = [find_entries(spec)[place] for spec in deeper_specs]
            texts[place] = factor_text(
                _letter(last, place, entry), values, deeper, symbol, exact=exact, measured=measured
            )
    return StageText(last, texts, carried, as_matrix or is_matrix(last))


def _find_symbol(symbols: Symbols, place: str, entry: Factor) -> tuple[str, str] | None:
    kind = place.partition("_")[0]
    names = [entry.name, base_name(entry.name)] if isinstance(entry, Learned) else []
    letter = {"collapse": "c", "mix": "a", "inject": "b"}[kind]
    return next((symbols[name] for name in (*names, place, kind, letter) if name in symbols), None)


def _letter(spec: Any, place: str, entry: Factor) -> str:
    """Return the letter of an entry that has no symbol."""
    if isinstance(entry, Learned) and entry.name:
        return entry.name
    kind, *numbers = place.split("_")
    if kind == "collapse":
        numbers = numbers[spec.reads == 1 :] if hasattr(spec, "reads") else numbers[1:]
    is_single = spec.n == 1 or is_counted(spec)
    return LETTERS[kind] + ("" if is_single else "_" + "".join(str(int(number) + 1) for number in numbers))


def _sum_text(place: str, row: Sequence[Factor], symbol: tuple[str, str] | None) -> FactorText:
    """Return the letter of the weights of counted states, with its definition."""
    letter, formula = symbol or (LETTERS[place.partition("_")[0]], "")
    weights = [(len(row) - 1 - j, entry) for j, entry in enumerate(row) if entry != 0.0][::-1]
    numbers = [entry.init if isinstance(entry, Learned) else entry for _, entry in weights]
    verb = "starts at" if isinstance(row[-1], Learned) else "="
    if formula:
        definition = f"{letter}_i {verb} {formula}"
    elif len({*numbers}) == 1:
        definition = f"{letter}_i {verb} {format_factor(numbers[0])}"
    elif len({*numbers[1:]}) == 1 and verb != "=":
        definition = (
            f"{letter}_n {verb} {format_factor(numbers[0])}, the other {letter}_i at {format_factor(numbers[1])}"
        )
    else:
        definition = f"{letter}_i {verb} {' ... '.join(format_factor(number) for number in (numbers[-1], numbers[0]))}"
    step = weights[1][0] - weights[0][0] if len(weights) > 1 else 1
    return FactorText(letter, definition + f" for i = n, n-{step}, n-{2 * step}, ..." * (step > 1))


@dataclass(frozen=True)
class StageText:
    """A stage, or a head, with its entries as text.

    Attributes:
        stage: the stage.
        factors: the texts of the entries, by the names of their places.
        carried: the notation of the C that the stage before computed.
        is_matrix: whether the streams are written as one X.
    """

    stage: Any
    factors: Mapping[str, FactorText] = field(hash=False)
    carried: Any = None
    is_matrix: bool = False

    @property
    def is_counted(self) -> bool:
        """Whether the streams are counted states."""
        return is_counted(self.stage)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the streams before the sublayer."""
        if self.is_matrix:
            return ("X",)
        return (f"{self.base}_n",) if self.is_counted else names_of(self.stage)

    @property
    def base(self) -> str:
        """The letter of counted states."""
        return self.stage.names or "x"

    @property
    def names_after(self) -> tuple[str, ...]:
        """The names of the streams after the sublayer, with a prime where there was one of that name before."""
        stage = self.stage
        if self.is_counted:
            return (f"{self.base}_{{n+1}}" if stage.n_out > stage.n else f"{self.base}_n'",)
        if self.is_matrix:
            return ("X'",)
        after = stage.names_out or (names_of(stage) if stage.n_out == stage.n else default_names(stage.n_out))
        return tuple(name + "'" * (name in names_of(stage)) for name in after)

    @property
    def labels_after(self) -> tuple[str, ...]:
        """The names of the streams after the sublayer, with a prime only where they changed."""
        plain = [name.removesuffix("'") for name in self.names_after]
        return tuple(
            plain[k] if self._new_stream(k, "w") == plain[k] else name for k, name in enumerate(self.names_after)
        )

    @property
    def notation(self) -> Any:
        """The notation of what the stage's module computes, or None."""
        return None if self.stage.coefficients is None else self.stage.coefficients.notation

    @property
    def read_notation(self) -> Any:
        """The notation of the module that computes C, at this stage or the one before; None if C is constant."""
        if self.stage.delayed:
            return self.carried or self.notation
        return self.notation if self.stage.collapse is None else None

    def read(self, q: int = 0, m: str = "", end: str = "") -> str:
        """Return C P(X): the sum that a sublayer reads, before its norm.

        Args:
            q: the number of the read.
            m: "m" in the text of all reads at once.
            end: "_L" after the last sublayer.
        """
        stage, notation = self.stage, self.read_notation
        operand = ("X" + end if self.is_matrix else f"{self.base}_i") if self.is_matrix or self.is_counted else ""
        if any(stage.norm_streams) and operand:
            operand = f"N({operand})"
        if notation is None:
            return self._sum(f"collapse_{q}", stage.collapse[q], end)
        default = "{c} {x}" if self.is_matrix else "Σ_i {c}_{m}i {x}"
        letter = f"{notation.collapse}⁻" if stage.delayed else notation.collapse
        return str(notation.terms.get("collapse", default).format(c=letter, x=operand or "X_i", m=m))

    def _sum(self, place: str, row: Sequence[Factor], end: str = "") -> str:
        """Return the sum of streams with the weights of a row; "" if all are 0."""
        is_read = place.startswith("collapse")
        flags = self.stage.norm_streams if is_read else (False,) * self.stage.n
        if self.is_counted:
            if place not in self.factors:
                return ""
            sums = is_sum(row)
            operand = f"{self.base}_{'i' if sums else 'n'}"
            operand = f"N({operand})" if flags[-1] else operand
            factor = self.factors[place]
            return f"Σ_i {factor.text}_i {operand}" if sums else factor.times(operand)
        if self.is_matrix and is_read and (short := _short_sum(row, "N(X_i)" if all(flags) else "X_i", flags)):
            return short
        names = names_of(self.stage)
        if self.is_matrix:
            names = tuple(f"X_{j + 1}" for j in range(len(row))) if len(row) > 1 else ("X",)
        if len(names) == 1:
            names = (names[0] + end,)
        operands = [f"N({name})" if flag else name for name, flag in zip(names, flags, strict=True)]
        terms = [
            self.factors[f"{place}_{j}"].times(x) for j, x in enumerate(operands) if f"{place}_{j}" in self.factors
        ]
        return join_terms(*terms)

    @property
    def reads(self) -> tuple[list[str], list[str]]:
        """The arguments of f, and the equations of those that have a letter."""
        stage = self.stage
        if stage.reads == 1:
            return [self._normed(self.read())], []
        arguments = [f"r_{q + 1}" for q in range(stage.reads)]
        if self.read_notation is not None:
            return arguments, [f"r_m = {self._normed(self.read(m='m'), 'm')}"]
        texts = [self.read(q) for q in range(stage.reads)]
        if len({*texts}) == 1:
            return arguments, [f"r_m = {self._normed(texts[0], 'm')}"]
        return arguments, [f"r_{q} = {self._normed(text, str(q))}" for q, text in enumerate(texts, 1)]

    def _normed(self, text: str, number: str = "") -> str:
        norm = f"N_{number}" if number else "N"
        return f"{norm}({text})" if self.stage.norm_in else text

    @property
    def equations(self) -> list[str]:
        """The equations of the streams that change, and those of the reads and of the write that have letters."""
        arguments, more = self.reads
        write = f"f({', '.join(arguments)})"
        write = f"N({write})" if self.stage.norm_branch else write
        changes = self.changes(write)
        if len(changes) > 1 and len(write) > LONG:
            return [f"w = {write}", *(f"{target} = {text}" for target, text in self.changes("w")), *more]
        return [*(f"{target} = {text}" for target, text in changes), *more]

    def changes(self, write: str) -> list[tuple[str, str]]:
        """Return the streams that change, and what each becomes; streams that become the same share an entry."""
        targets: dict[str, list[str]] = {}
        for k, name in enumerate(self.names_after):
            text = self._new_stream(k, write)
            if text != name.removesuffix("'"):
                targets.setdefault(text, []).append(name)
        return [(" = ".join(names), text) for text, names in targets.items()]

    def _new_stream(self, k: int, write: str) -> str:
        """Return what new stream k becomes."""
        stage = self.stage
        terms = [self.mixed(k), self.injected(k, write)]
        total = join_terms(*filter(None, terms)) or "0"
        flag = any(stage.norm_out) if self.is_matrix else stage.norm_out[-1 if self.is_counted else k]
        return f"N({total})" if flag else total

    def mixed(self, k: int) -> str:
        """Return row k of A X."""
        stage, notation = self.stage, self.notation
        if stage.mix is None and notation is not None and "mix" in stage.coefficients.computes:
            x = "X" if self.is_matrix else f"{self.base}_i" if self.is_counted else names_of(stage)[k]
            default = "{a} {x}" if self.is_matrix else "Σ_i {a}_i {x}" if self.is_counted else "{a} ⊙ {x}"
            return str(notation.terms.get("mix", default).format(a=notation.mix, x=x))
        if stage.mix is None:
            return self.names[0 if self.is_matrix or self.is_counted else k]
        if self.is_matrix:
            return "A X"
        return self._sum("mix" if self.is_counted else f"mix_{k}", stage.mix[-1 if self.is_counted else k])

    def injected(self, k: int, write: str) -> str:
        """Return entry k of B W."""
        stage, notation = self.stage, self.notation
        if stage.inject is None:
            default = "{b} {w}" if self.is_matrix else "{b} ⊙ {w}"
            return str(notation.terms.get("inject", default).format(b=notation.inject, w=write, x=write))
        if self.is_matrix:
            return f"b {write}"
        factor = self.factors.get("inject" if self.is_counted else f"inject_{k}")
        return "" if factor is None else factor.times(write)

    @property
    def definitions(self) -> list[str]:
        """The definitions of the letters."""
        stage, notation = self.stage, self.notation
        letter = self.read_notation.collapse if stage.delayed else ""
        texts = [f"{letter}⁻ the {letter} of the sublayer before (in the first: stream 1)"] if letter else []
        if notation is not None:
            m = {"m": "m", "_m": "_m"} if getattr(stage, "reads", 1) > 1 else {"m": "", "_m": ""}
            texts += [formula.format(**m) for formula in notation.formulas]
            texts += [f"{notation.learned} learned"] * bool(notation.learned)
            if not (notation.formulas or notation.learned):
                letters = [getattr(notation, name) for name in stage.coefficients.computes if name in LETTERS]
                texts.append(f"{', '.join(letters)} computed by {stage.coefficients.kind.__name__}")
        if self.is_matrix:
            for letter, value in (("A", getattr(stage, "mix", None)), ("b", getattr(stage, "inject", None))):
                texts += [f"{letter} = {_format_entries(value)}"] if value is not None else []
            return texts
        return list(
            dict.fromkeys([*texts, *(factor.definition for factor in self.factors.values() if factor.definition)])
        )

    def as_row(self) -> RowText | None:
        """Return the text of the row that is this stage, if it has one stream and one read that is the stream."""
        stage, notation = self.stage, self.notation
        if self.is_matrix or self.is_counted or stage.n != 1 or stage.n_out != 1 or stage.reads != 1:
            return None
        if stage.delayed or stage.collapse != ((1.0,),) or any(stage.norm_streams):
            return None
        factors = {
            "a": self.factors.get("mix_0_0", FactorText()),
            "b": self.factors.get("inject_0", FactorText()),
        }
        a: Factor = 1.0 if stage.mix is None else stage.mix[0][0]
        b: Factor = 1.0 if stage.inject is None else stage.inject[0]
        for letter, name in (("a", "mix"), ("b", "inject")):
            if notation is not None and name in stage.coefficients.computes:
                term = notation.terms.get(name, "")
                factors[letter] = FactorText(getattr(notation, name), "", True, term, notation.boxes.get(name, ()))
                a, b = (Learned(1.0, per_feature=True), b) if letter == "a" else (a, Learned(1.0, per_feature=True))
        row = Row(stage.norm_in, stage.norm_branch, stage.norm_out[0], a=a, b=b)
        return RowText(row, factors["a"], factors["b"], FactorText())


def _short_sum(row: Sequence[Factor], operand: str, flags: Sequence[bool]) -> str:
    """Return a sum of all streams with equal weights; "" for other weights."""
    if len({*row}) > 1 or len({*flags}) > 1 or not isinstance(row[0], float) or len(row) == 1:
        return ""
    if row[0] == 1.0:
        return f"Σ_i {operand}"
    return f"Σ_i {operand} / n" if row[0] == 1.0 / len(row) else f"{format_factor(row[0])} Σ_i {operand}"


def _format_entries(value: Any) -> str:
    """Return a vector or a matrix of numbers."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_format_entries, value))})"
    return value.name or "learned" if isinstance(value, Learned) else format_factor(value)
