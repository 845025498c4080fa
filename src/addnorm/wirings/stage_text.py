"""A stage in symbols: its terms, from which equation, description and drawing of a wiring are printed.

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
from addnorm.wirings.matrices import Vector
from addnorm.wirings.stage_form import base_name, default_names, find_entries, is_counted, is_matrix, names_of

GAP = ",   "  # between an equation and the definitions of its letters
PER_LAYER = ", one a layer"
LETTERS = {"collapse": "c", "mix": "a", "inject": "b", "c": "c"}  # of the entries, by the first word of their places
MATRICES = {"mix": "A", "inject": "b"}  # letters of whole matrices
LONG = 16  # a write with more characters is not repeated in several equations
Symbols = Mapping[str, tuple[str, str]]


class FactorText(NamedTuple):
    """A factor as text."""

    text: str = ""  # a letter, a number, or "(1 ... 0.2887)"; empty for 1
    definition: str = ""  # the letter and its formula
    is_vector: bool = False
    term: str = ""  # the product with an operand {x}, unless it is "text {x}": "a ⊙ ({x} + v)" or "Σ_i p_i {x}"
    boxes: tuple[str, ...] = ()  # texts of the boxes in a drawing, unless it is one box with `text`

    @property
    def is_sum(self) -> bool:
        """Whether the factor stands for the weights of a sum over all streams or states."""
        return self.term.startswith("Σ")

    def times(self, operand: str) -> str:
        """Return the product of the factor and an operand."""
        if self.term:
            return self.term.format(x=operand)
        if self.text in ("", "-1"):
            return self.text.removesuffix("1") + operand
        return f"{self.text} {'⊙ ' if self.is_vector else ''}{operand}"

    def in_words(self, operand: str) -> str:
        """Return the product of the factor and an operand in words."""
        if self.term:
            return self.term.format(x=operand)
        return f"{self.text} times {operand}" if self.text else operand


ONE = FactorText()


class Product(NamedTuple):
    """Term of a sum of streams: the product of a factor and an operand."""

    factor: FactorText
    operand: str  # "v", "N(v)", "X"; "x_i" in a sum over all states
    stream: int = 0

    def __str__(self) -> str:
        return self.factor.times(self.operand)


class NewStream(NamedTuple):
    """A stream after the sublayer: N_out(kept + factor * write)."""

    name: str  # with a prime if a stream before the sublayer has the same name: "u'"
    kept: Sequence[Product]
    factor: FactorText | None  # None if the write is not added
    norm: bool

    @property
    def plain(self) -> str:
        """The name without the prime."""
        return self.name.removesuffix("'")

    @property
    def is_same(self) -> bool:
        """Whether the new stream is the old one of the same name plus the write, perhaps normalized."""
        return join_terms(self.kept) == self.plain

    @property
    def is_sum(self) -> bool:
        """Whether the stream stays a plain sum of writes."""
        return self.is_same and not self.norm

    def becomes(self, write: str) -> str:
        """Return the stream in symbols after a write with this text: "x + f(N(x))" for "f(N(x))"."""
        total = join_terms([*self.kept, *([] if self.factor is None else [self.factor.times(write)])])
        return f"N({total or 0})" if self.norm else total or "0"


def join_terms(terms: Sequence[object]) -> str:
    """Return the sum of terms, which may begin with a minus."""
    return " + ".join(map(str, terms)).replace("+ -", "- ")


def equation(stage: Any, *, defines: bool = True) -> str:
    """Return a stage in symbols.

    Args:
        stage: a `Row` or another `Stage`.
        defines: whether the definitions of the letters follow.

    Example:
        >>> from addnorm.wirings.stage_text import equation
        >>> print(equation(addnorm.Row(norm_in=True, b=addnorm.Learned(0.1, per_feature=True))))
        x' = x + b ⊙ f(N(x)),   b starts at 0.1
    """
    text = make_text([stage], [stage], {})
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
    last, factors = specs[-1], {}
    own, deeper = ([find_entries(spec) for spec in some] for some in (specs, deeper_specs))
    for place, entry in own[-1].items():
        letter, formula = _find_symbol(last, symbols, place, entry)
        if isinstance(entry, tuple):
            factors[place] = _sum_text(letter, formula, entry)
        else:
            values = [[entries[place] for entries in some] for some in (own, deeper)]
            factors[place] = _factor_text(letter, formula, *values, exact=exact, measured=measured)
    whole = as_matrix or is_matrix(last)
    for matrix, place in (("mix", "mix_0_0"), ("inject", "inject_0")):
        if matrix in last.computes:
            notation = last.coefficients.notation
            term, boxes = notation.terms.get(matrix, ""), notation.boxes.get(matrix, ())
            factors[place] = FactorText(getattr(notation, matrix), "", not whole, term, boxes)
        elif whole and getattr(last, matrix) is not None:
            factors[place] = FactorText(MATRICES[matrix])
    return StageText(last, factors, carried, whole)


def _find_symbol(spec: Any, symbols: Symbols, place: str, entry: Factor | Vector) -> tuple[str, str]:
    """Return the letter that stands for an entry, and the formula of its value, which may be empty."""
    kind, *numbers = place.split("_")
    newest = entry[-1] if isinstance(entry, tuple) else entry
    name = newest.name if isinstance(newest, Learned) else ""
    known = [symbols[key] for key in (name, base_name(name), place, kind, LETTERS[kind]) if key in symbols]
    if known:
        return known[0]
    if name and newest is entry:
        return name, ""
    if spec.n == 1 or is_counted(spec):
        return LETTERS[kind], ""
    if kind == "collapse" and spec.reads == 1:
        del numbers[0]
    return f"{LETTERS[kind]}_{''.join(str(int(number) + 1) for number in numbers)}", ""


def _factor_text(
    letter: str, formula: str, values: Sequence[Any], deeper: Sequence[Any], *, exact: bool, measured: bool
) -> FactorText:
    """Return the text of a factor that is `values` over the layers, and `deeper` in a stack of another depth."""
    is_constant = len({*values, *deeper}) == 1
    first = values[0]
    if isinstance(first, Learned):
        start = "a value that depends on depth"
        if exact or is_constant:
            start = format_interval([value.init for value in values])
        start = "as measured" if measured else f"at {start if exact else formula or start}"
        return FactorText(letter, f"{letter} starts {start}{PER_LAYER * first.shared}", first.per_feature)
    if is_constant and first == 1.0:
        return ONE
    if exact:
        text = format_interval(values)
        return FactorText(f"({text})" if " " in text else text)
    if formula:
        return FactorText(letter, f"{letter} = {formula}")
    if is_constant:
        return FactorText(format_factor(first))
    return FactorText(f"{letter}{',' if '_' in letter else '_'}{'l' if len({*values}) > 1 else 'L'}")


def _sum_text(letter: str, formula: str, row: Vector) -> FactorText:
    """Return the text of the weights with which `row` sums counted states, with the definition of their letter."""
    ages = [age for age, entry in enumerate(row[::-1]) if entry != 0.0]
    numbers = [entry.init if isinstance(entry, Learned) else entry for entry in row if entry != 0.0]
    step = ages[1] - ages[0] if len(ages) > 1 else 1
    states = f" (i = n, n-{step}, n-{2 * step}, ...)" * (step > 1)
    verb = "starts at" if isinstance(row[-1], Learned) else "="
    definition = f"{letter}_i{states} {verb} {formula or format_interval(numbers)}"
    return FactorText(letter, definition, term=f"Σ_i {letter}_i {{x}}")


@dataclass(frozen=True)
class StageText:
    """A stage, or a head, as text.

    Attributes:
        stage: the stage.
        factors: the texts of its entries, by the names of their places. For X and for counted states entry 0 stands for all.
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
    def base(self) -> str:
        """Letter with which numbered states are written: the x of x_0 .. x_n."""
        return self.stage.names or "x"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the streams before the sublayer."""
        if self.is_matrix:
            return ("X",)
        return (f"{self.base}_n",) if self.is_counted else names_of(self.stage)

    @property
    def notation(self) -> Any:
        """The `Notation` of the module that computes coefficients of the stage, or None without such a module."""
        return None if self.stage.coefficients is None else self.stage.coefficients.notation

    @property
    def read_notation(self) -> Any:
        """The notation of the module that computes C, at this stage or the one before; None if C is constant."""
        if self.stage.delayed:
            return self.carried or self.notation
        return self.notation if self.stage.collapse is None else None

    @property
    def streams(self) -> list[NewStream]:
        """The streams after the sublayer. A name has a prime if a stream before the sublayer has the same name."""
        stage, names, after = self.stage, self.names, self.names
        if self.is_counted and stage.n_out > stage.n:
            after = (f"{self.base}_{{n+1}}",)
        elif not self.is_matrix and not self.is_counted:
            after = stage.names_out or (names if stage.n_out == stage.n else default_names(stage.n_out))
        norms = (any(stage.norms_out),) if self.is_matrix else stage.norms_out[-len(after) :]
        has_mix = stage.mix is not None or "mix" in stage.computes
        return [
            NewStream(
                name + "'" * (name in names),
                self._weigh(f"mix_{k}", names) if has_mix else [Product(ONE, names[k])],
                self.factors.get(f"inject_{k}"),
                norm,
            )
            for k, (name, norm) in enumerate(zip(after, norms, strict=True))
        ]

    def read(self, q: int = 0) -> list[Product]:
        """Return the terms of C P(X), the sum that is read, before its norm; `q` is the number of the read, from 0."""
        stage, notation = self.stage, self.read_notation
        flags, operands = stage.norm_streams, self.names
        if notation is None:
            short = _short_sum(stage.collapse[q], flags) if self.is_matrix else None
            if short is not None:
                return [Product(short, "N(X_i)" if all(flags) else "X_i")]
            if self.is_matrix and stage.n > 1:
                operands = tuple(f"X_{j + 1}" for j in range(stage.n))
            operands = tuple(f"N({x})" if flag else x for x, flag in zip(operands, flags, strict=False))
            return self._weigh(f"collapse_{q}", operands)
        letter, m = notation.collapse + "⁻" * stage.delayed, "m" * (stage.reads > 1)
        term = notation.terms.get("collapse", "" if self.is_matrix else f"Σ_i {letter}_{{m}}i {{x}}")
        factor = FactorText(letter, term=term.format(x="{x}", m=m))
        operand = operands[0] if self.is_matrix or self.is_counted else "X_i"
        return [_weigh(factor, f"N({operand})" if any(flags) and operand != "X_i" else operand)]

    def _weigh(self, place: str, operands: Sequence[str]) -> list[Product]:
        """Return the terms of the sum of `operands`, each with its factor in the row `place`, without terms of 0."""
        factors = [self.factors.get(f"{place}_{j}") for j in range(len(operands))]
        return [_weigh(factor, operands[j], j) for j, factor in enumerate(factors) if factor is not None]

    @property
    def reads(self) -> tuple[list[str], list[str]]:
        """The arguments of f in symbols; if there are several, also the equations that define their letters."""
        texts = [join_terms(self.read(q)) for q in range(self.stage.reads)]
        if len(texts) == 1:
            return [self.normed(texts[0])], []
        arguments = [f"r_{q + 1}" for q in range(len(texts))]
        if len({*texts}) == 1:
            return arguments, [f"r_m = {self.normed(texts[0], 'N_m')}"]
        return arguments, [f"r_{q} = {self.normed(text, f'N_{q}')}" for q, text in enumerate(texts, 1)]

    def normed(self, text: str, norm: str = "N") -> str:
        """Return the argument of f in symbols; `text` is that of C P(X), before N_in and the factor c."""
        return self.factors.get("c", ONE).times(f"{norm}({text})" if self.stage.norm_in else text)

    def write(self, *arguments: str, f: str = "f") -> str:
        """Return the write, W = N_branch(f(R)), in symbols."""
        write = f"{f}({', '.join(arguments)})"
        return f"N({write})" if self.stage.norm_branch else write

    @property
    def equations(self) -> list[str]:
        """The equations, one a line: a long write that several streams share, streams that change, several reads."""
        arguments, more = self.reads
        write, letter = self.write(*arguments), []
        changes = self.changes(write)
        if len(changes) > 1 and len(write) > LONG:
            changes, letter = self.changes("w"), [f"w = {write}"]
        lines = [f"{' = '.join(stream.name for stream in streams)} = {text}" for text, streams in changes.items()]
        return [*letter, *lines, *more]

    def changes(self, write: str) -> dict[str, list[NewStream]]:
        """Return the streams that change, grouped by the text of their new value."""
        found: dict[str, list[NewStream]] = {}
        for stream in self.streams:
            text = stream.becomes(write)
            if text != stream.plain:
                found.setdefault(text, []).append(stream)
        return found

    @property
    def definitions(self) -> list[str]:
        """The definitions of the letters."""
        stage, notation, texts = self.stage, self.notation, []
        if stage.delayed:
            letter = self.read_notation.collapse
            texts = [f"{letter}⁻ the {letter} of the sublayer before (in the first: stream 1)"]
        if notation is not None:
            m = {"m": "m", "_m": "_m"} if stage.reads > 1 else {"m": "", "_m": ""}
            texts += [formula.format(**m) for formula in notation.formulas]
            texts += [f"{notation.learned} learned"] * bool(notation.learned)
            if not (notation.formulas or notation.learned):
                letters = [getattr(notation, name) for name in stage.computes if name in LETTERS]
                texts.append(f"{', '.join(letters)} computed by {stage.coefficients.kind.__name__}")
        if self.is_matrix:
            given = (("A", stage.mix), ("b", stage.inject))
            return texts + [f"{letter} = {format_entries(value)}" for letter, value in given if value is not None]
        own = [factor.definition for factor in self.factors.values() if factor.definition]
        return list(dict.fromkeys([*texts, *own]))


def _weigh(factor: FactorText, operand: str, stream: int = 0) -> Product:
    """Return the product of a factor and a stream; in a sum over all states the stream is written x_i."""
    return Product(factor, operand.replace("_n", "_i") if factor.is_sum else operand, stream)


def _short_sum(row: Sequence[Factor], flags: Sequence[bool]) -> FactorText | None:
    """Return the factor of a sum of all streams with equal weights; None for other weights."""
    if len({*row}) > 1 or len({*flags}) > 1 or not isinstance(row[0], float) or len(row) == 1:
        return None
    if row[0] in (1.0, 1.0 / len(row)):
        return FactorText(term="Σ_i {x}" + " / n" * (row[0] != 1.0))
    weight = format_factor(row[0])
    return FactorText(weight, term=f"{weight} Σ_i {{x}}")


def format_entries(value: Any) -> str:
    """Return a vector or a matrix of numbers."""
    if isinstance(value, tuple):
        return f"({', '.join(map(format_entries, value))})"
    return value.name or "learned" if isinstance(value, Learned) else format_factor(value)
