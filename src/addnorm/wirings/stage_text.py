"""A stage in symbols, made from its data.

    x' = N(α x + f(x)),   α = ...                                  one stream
    u' = N(u + f(u)),   v' = v + f(u)                              streams with names, and an equation for each that changes
    X' = A X + b f(N(c X)),   c = ...                              one tensor of n streams
    x_{n+1} = f(N(Σ_i p_i x_i)),   p_i = ...                       counted states: x_0, the embedding, to x_n, the newest

A factor of 1 and a term of 0 are not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from addnorm.wirings.factors import Factor, Learned, format_factor, format_interval
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

__all__ = ["GAP", "PER_LAYER", "FactorText", "StageText", "equation", "join_terms", "make_text"]

GAP = ",   "  # between an equation and the definitions of its letters
PER_LAYER = ", one a layer"
LETTERS = {"collapse": "c", "mix": "a", "inject": "b", "c": "c"}  # of the entries, by the first word of their places
LONG = 16  # characters of a write that is not repeated in several equations
Symbols = Mapping[str, tuple[str, str]]


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


def equation(stage: Any, symbols: Symbols | None = None, *, defines: bool = True) -> str:
    """Return a stage in symbols.

    Args:
        stage: a `Row` or another `Stage`.
        symbols: `{"a": ("α", "(2L)^(1/4)")}`, the letter of a factor and its formula. A factor without an entry is written as
            its number, a learned one as a, b or c.
        defines: whether the definitions of the letters follow.

    Example:
        >>> from addnorm.wirings.stage_text import equation
        >>> print(equation(addnorm.Row(norm_in=True, b=addnorm.Learned(0.1, per_feature=True))))
        x' = x + b ⊙ f(N(x)),   b starts at 0.1
        >>> print(equation(addnorm.Row(norm_out=True, a=3.0), {"a": ("α", "√S")}))
        x' = N(α x + f(x)),   α = √S
    """
    text = make_text([stage], [stage], symbols or {})
    return GAP.join([*text.equations, *text.definitions * defines])


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
            letter, formula = symbol or (_letter(last, place, entry), "")
            texts[place] = _factor_text(letter, formula, values, deeper, exact=exact, measured=measured)
    return StageText(last, texts, carried, as_matrix or is_matrix(last))


def _find_symbol(symbols: Symbols, place: str, entry: Factor) -> tuple[str, str] | None:
    kind = place.partition("_")[0]
    names = [entry.name, base_name(entry.name)] if isinstance(entry, Learned) else []
    return next((symbols[name] for name in (*names, place, kind, LETTERS[kind]) if name in symbols), None)


def _letter(spec: Any, place: str, entry: Factor) -> str:
    """Return the letter of an entry that has no symbol."""
    if isinstance(entry, Learned) and entry.name:
        return entry.name
    kind, *numbers = place.split("_")
    if kind == "collapse" and spec.reads == 1:
        del numbers[0]
    is_single = spec.n == 1 or is_counted(spec)
    return LETTERS[kind] + ("" if is_single else "_" + "".join(str(int(number) + 1) for number in numbers))


def _factor_text(
    letter: str, formula: str, values: Sequence[Factor], deeper: Sequence[Factor], *, exact: bool, measured: bool
) -> FactorText:
    """Return the text of a factor that has these values over the layers, and those others in a deeper stack."""
    is_constant = len({*values, *deeper}) == 1
    first = values[0]
    if isinstance(first, Learned):
        numbers = [value.init for value in values if isinstance(value, Learned)]
        start = format_interval(numbers) if exact or is_constant else "a value that depends on depth"
        start = "as measured" if measured else f"at {start if exact else formula or start}"
        return FactorText(letter, f"{letter} starts {start}{PER_LAYER * first.shared}", first.per_feature)
    if is_constant and first == 1.0:
        return FactorText()
    if exact:
        text = format_interval([value for value in values if not isinstance(value, Learned)])
        return FactorText(f"({text})" if " " in text else text)
    if formula:
        return FactorText(letter, f"{letter} = {formula}")
    if is_constant:
        return FactorText(format_factor(first))
    return FactorText(f"{letter}{',' if '_' in letter else '_'}{'l' if len({*values}) > 1 else 'L'}")


def _sum_text(place: str, row: Sequence[Factor], symbol: tuple[str, str] | None) -> FactorText:
    """Return the letter of the weights of counted states, with its definition."""
    letter, formula = symbol or (LETTERS[place.partition("_")[0]], "")
    weights = [(len(row) - 1 - j, entry) for j, entry in enumerate(row) if entry != 0.0][::-1]
    numbers = [entry.init if isinstance(entry, Learned) else entry for _, entry in weights]
    verb = "starts at" if isinstance(row[-1], Learned) else "="
    newest, *others = map(format_factor, numbers)
    if formula:
        definition = f"{letter}_i {verb} {formula}"
    elif len({*numbers}) == 1:
        definition = f"{letter}_i {verb} {newest}"
    elif len({*numbers[1:]}) == 1 and verb != "=":
        definition = f"{letter}_n {verb} {newest}, the other {letter}_i at {others[0]}"
    else:
        definition = f"{letter}_i {verb} {others[-1]} ... {newest}"
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
    def is_single(self) -> bool:
        """Whether there is one stream, which is read and written as it is: x' = N(a x + b N(f(c N(x))))."""
        stage = self.stage
        is_one = not (self.is_matrix or self.is_counted or stage.delayed or any(stage.norm_streams))
        return bool(is_one and stage.n == stage.n_out == 1 and stage.collapse == ((1.0,),))

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
    def plain_names_after(self) -> list[str]:
        """The names of the streams after the sublayer, without primes."""
        return [name.removesuffix("'") for name in self.names_after]

    @property
    def labels_after(self) -> tuple[str, ...]:
        """The names of the streams after the sublayer, with a prime only where they changed."""
        return tuple(
            plain if self._new_stream(k, "w") == plain else name
            for k, (name, plain) in enumerate(zip(self.names_after, self.plain_names_after, strict=True))
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

    def factor(self, name: str) -> FactorText:
        """Return a factor of a single stream: of "mix", "inject" or "c"."""
        notation = self.notation
        if notation is not None and name in self.stage.computes:
            term, boxes = notation.terms.get(name, ""), notation.boxes.get(name, ())
            return FactorText(getattr(notation, name), "", True, term, boxes)
        return self.factors.get({"mix": "mix_0_0", "inject": "inject_0"}.get(name, name), FactorText())

    @property
    def has_stream(self) -> bool:
        """Whether a single stream is kept: A is not 0."""
        return bool(self.mixed(0))

    @property
    def is_sum(self) -> bool:
        """Whether a single stream stays a plain sum of writes."""
        return self.has_stream and self.factor("mix") == FactorText() and not any(self.stage.norms_out)

    def read(self, q: int = 0, m: str = "", end: str = "") -> str:
        """Return C P(X): the sum that a sublayer reads, before its norm.

        Args:
            q: the number of the read.
            m: "m" in the text of all reads at once.
            end: "_L" after the last sublayer.
        """
        stage, notation = self.stage, self.read_notation
        if notation is None:
            return self._sum(f"collapse_{q}", stage.collapse[q], end)
        operand = f"X{end}" if self.is_matrix else f"{self.base}_i" if self.is_counted else "X_i"
        if any(stage.norm_streams) and operand != "X_i":
            operand = f"N({operand})"
        default = "{c} {x}" if self.is_matrix else "Σ_i {c}_{m}i {x}"
        letter = f"{notation.collapse}⁻" if stage.delayed else notation.collapse
        return str(notation.terms.get("collapse", default).format(c=letter, x=operand, m=m))

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
        found = ((self.factors.get(f"{place}_{j}"), x) for j, x in enumerate(operands))
        return join_terms(*(factor.times(x) for factor, x in found if factor is not None))

    @property
    def reads(self) -> tuple[list[str], list[str]]:
        """The arguments of f, and the equations of those that have a letter."""
        stage = self.stage
        if stage.reads == 1:
            return [self.normed(self.read())], []
        arguments = [f"r_{q + 1}" for q in range(stage.reads)]
        if self.read_notation is not None:
            return arguments, [f"r_m = {self.normed(self.read(m='m'), 'N_m')}"]
        texts = [self.read(q) for q in range(stage.reads)]
        if len({*texts}) == 1:
            return arguments, [f"r_m = {self.normed(texts[0], 'N_m')}"]
        return arguments, [f"r_{q} = {self.normed(text, f'N_{q}')}" for q, text in enumerate(texts, 1)]

    def normed(self, text: str, norm: str = "N") -> str:
        """Return what f is called with where C P(X) is `text`."""
        return self.factor("c").times(f"{norm}({text})" if self.stage.norm_in else text)

    def write(self, *arguments: str, f: str = "f") -> str:
        """Return W = N_branch(f(R))."""
        write = f"{f}({', '.join(arguments)})"
        return f"N({write})" if self.stage.norm_branch else write

    @property
    def equations(self) -> list[str]:
        """The equations of the streams that change, and those of the reads and of the write that have letters."""
        arguments, more = self.reads
        write = self.write(*arguments)
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
        norms = self.stage.norms_out
        total = join_terms(*filter(None, [self.mixed(k), self.injected(k, write)])) or "0"
        return f"N({total})" if (any(norms) if self.is_matrix else norms[-1 if self.is_counted else k]) else total

    def mixed(self, k: int) -> str:
        """Return row k of A X."""
        stage, notation = self.stage, self.notation
        if stage.mix is None and "mix" in stage.computes:
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
        notation = self.notation
        if self.stage.inject is None:
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
            m = {"m": "m", "_m": "_m"} if stage.reads > 1 else {"m": "", "_m": ""}
            texts += [formula.format(**m) for formula in notation.formulas]
            texts += [f"{notation.learned} learned"] * bool(notation.learned)
            if not (notation.formulas or notation.learned):
                letters = [getattr(notation, name) for name in stage.computes if name in LETTERS]
                texts.append(f"{', '.join(letters)} computed by {stage.coefficients.kind.__name__}")
        if self.is_matrix:
            given = (("A", stage.mix), ("b", stage.inject))
            return texts + [f"{letter} = {_format_entries(value)}" for letter, value in given if value is not None]
        own = [factor.definition for factor in self.factors.values() if factor.definition]
        return list(dict.fromkeys([*texts, *own]))


def join_terms(*terms: str) -> str:
    """Return the sum of terms, which may begin with a minus."""
    return " + ".join(terms).replace("+ -", "- ")


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
