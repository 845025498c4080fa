"""A residual wiring as data: what happens at every sublayer, as a row of a table, and the rule that names the rows.

    x' = N_out(a * x + b * N_branch(f(c * N_in(x))))          and N_final after the last sublayer

`addnorm.wirings` has those of the papers; one's own is as short as theirs:

    Wiring("mine", Row(norm_in=True, b=0.5), final_norm=True)
    Wiring("mine", lambda at: Row(norm_in=True, b=1 / at.number), final_norm=True)

The constants are Python floats: there is no buffer of a model that could lose them.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from addnorm._util.arguments import check_bool, check_choice, check_float, check_int
from addnorm.wirings import description, drawing, equation
from addnorm.wirings.init import InitRule, xavier

__all__ = ["Factor", "Learned", "Place", "Row", "Wiring"]

Flow = Literal["rows", "parallel", "two_streams", "bottom_to_top"]
FLOWS: tuple[Flow, ...] = ("rows", "parallel", "two_streams", "bottom_to_top")


@dataclass(frozen=True, repr=False)
class Learned:
    """A factor that trains, and its value before training.

    Args:
        init: the initial value.
        per_feature: one for each of the `d_model` features, shape `(d_model,)`, instead of a scalar.
        shared: one for all sublayers of a layer (ReZero's), instead of one for each sublayer.
    """

    init: float
    per_feature: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "init", check_float("init", self.init))
        for name in ("per_feature", "shared"):
            check_bool(name, getattr(self, name))

    def __repr__(self) -> str:
        return _call("Learned", _changed(self))


Factor = float | Learned


@dataclass(frozen=True, repr=False)
class Row:
    """One sublayer's line: x' = N_out(a * x + b * N_branch(f(c * N_in(x)))).

    Args:
        norm_in: the sublayer reads the norm of the stream.
        norm_branch: what the sublayer returns is normalized.
        norm_out: the stream is normalized after the add.
        a: factor of the stream; 0 leaves the residual connection out.
        b: factor of what is added.
        c: factor of what the sublayer reads.

    Each factor is a number, or a `Learned` one.

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

    def __post_init__(self) -> None:
        for name in ("norm_in", "norm_branch", "norm_out"):
            check_bool(name, getattr(self, name), ": whether that norm stands")
        for name in ("a", "b", "c"):
            value = getattr(self, name)
            if not isinstance(value, Learned):
                or_learned = ", or Learned(...) for a factor that trains"
                object.__setattr__(self, name, check_float(name, value, or_learned))
        for name, what in (("b", "the sublayer would never write"), ("c", "the sublayer would read only zeros")):
            if getattr(self, name) == 0.0:
                raise ValueError(f"{name} is 0, expected another number: {what}; for a start at zero use Learned(0.0).")

    @property
    def is_sum(self) -> bool:
        """Whether the stream is passed on as it is, so that it is a plain sum of writes: a = 1, and no N_out."""
        return self.a == 1.0 and not self.norm_out

    def __repr__(self) -> str:
        return _call("Row", _changed(self))

    def __str__(self) -> str:
        return equation.equation(self)


class Place(NamedTuple):
    """Where a sublayer stands; counted from 0."""

    layer: int
    sublayer: int  # in its layer
    num_layers: int
    sublayers_per_layer: int

    @property
    def number(self) -> int:
        """Of the layer, counted from 1, as in the papers' formulas."""
        return self.layer + 1

    @property
    def n_sublayers(self) -> int:
        """In a stack of whole layers."""
        return self.num_layers * self.sublayers_per_layer


Rule = Callable[..., Row]


@dataclass(frozen=True)
class Wiring:
    """A named rule for the rows of a stack, with what else belongs to it.

    Args:
        name: of the wiring.
        rule: one `Row` for every sublayer, or a function that gives the row of a `Place`.
        final_norm: whether the stream is normalized after the last sublayer; or a function of the number of layers.
        embedding_norm: whether x_0 is normalized before the first sublayer.
        init: the rule of `init_`: `init(role, place)` says how weights of that role are drawn (`addnorm.wirings.init`).
        flow: which loop runs the rows; "rows" but for the wirings that are none (parallel sublayers, two streams).
        options: given to `rule`, `final_norm` and `init` by name.
        symbols: for `equation`: `{"a": ("α", "(2L)^(1/4)")}`, the letter of a factor and its formula, in which L is the number of
            layers, l a layer's number from 1 and S the number of sublayers.
        source: the paper.
        use: when to use it, in a sentence.
        pair: for an encoder-decoder: a function of both numbers of layers that gives the wirings of the two stacks.
        profile: for an init that looks at data: a function of the stack and its inputs.

    Equal if all of this is. Two functions are equal only if they are the same one.

    Example:
        >>> mine = addnorm.Wiring("mine", lambda at: addnorm.Row(norm_in=True, b=1 / at.number), final_norm=True)
        >>> mine.row(1, 0, num_layers=12)
        Row(norm_in=True, b=0.5)
        >>> print(mine)
        mine: x' = x + b_l f(N(x)),   y = N(x_L)
    """

    name: str
    rule: Row | Rule
    final_norm: bool | Callable[..., bool] = False
    embedding_norm: bool = False
    init: InitRule = xavier
    flow: Flow = "rows"
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    symbols: Mapping[str, tuple[str, str]] | tuple[tuple[str, tuple[str, str]], ...] = ()
    source: str = ""
    use: str = ""
    pair: Callable[[Wiring, int, int], tuple[Wiring, Wiring]] | None = None
    profile: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise TypeError(f"name is {self.name!r}, expected a text: what the wiring is called.")
        if not (isinstance(self.rule, Row) or callable(self.rule)):
            raise TypeError(f"rule is {self.rule!r}, expected a Row, or a function that gives the Row of a Place.")
        if not (isinstance(self.final_norm, bool) or callable(self.final_norm)):
            raise TypeError(
                f"final_norm is {self.final_norm!r}, expected True or False, or a function of the number of layers."
            )
        check_bool("embedding_norm", self.embedding_norm)
        if not callable(self.init):
            raise TypeError(
                f"init is {self.init!r}, expected a function of a role and a Place, as in addnorm.wirings.init."
            )
        check_choice("flow", self.flow, FLOWS)
        for name in ("pair", "profile"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise TypeError(f"{name} is {getattr(self, name)!r}, expected None or a function.")
        for name in ("options", "symbols"):
            try:
                dict(getattr(self, name))
            except (TypeError, ValueError):
                raise TypeError(
                    f"{name} is {getattr(self, name)!r}, expected a mapping from names, such as {{'k': 3}}."
                ) from None
        for name in dict(self.symbols):
            check_choice("a key of symbols", name, equation.FACTORS)
        for name in (
            "options",
            "symbols",
        ):  # as pairs in the order of names, so that a wiring can be hashed and compared
            object.__setattr__(self, name, tuple(sorted(dict(getattr(self, name)).items())))

    def row(self, layer: int, sublayer: int, num_layers: int, sublayers_per_layer: int = 2) -> Row:
        """The row of one sublayer; layers and sublayers are counted from 0."""
        at = Place(*(operator.index(n) for n in (layer, sublayer, num_layers, sublayers_per_layer)))
        if not (0 <= at.layer < at.num_layers and 0 <= at.sublayer < at.sublayers_per_layer):
            raise ValueError(
                f"layer {at.layer} of {at.num_layers}, sublayer {at.sublayer} of {at.sublayers_per_layer}: expected each "
                "below its number, counted from 0."
            )
        found = self.rule if isinstance(self.rule, Row) else self.rule(at, **dict(self.options))
        if not isinstance(found, Row):
            raise TypeError(f"the rule of wiring {self.name!r} gave {found!r} for {at}, expected a Row.")
        return found

    def rows(self, num_layers: int, sublayers_per_layer: int = 2) -> list[Row]:
        """Those of a whole stack, in its order."""
        return [
            self.row(layer, sublayer, num_layers, sublayers_per_layer)
            for layer in range(operator.index(num_layers))
            for sublayer in range(operator.index(sublayers_per_layer))
        ]

    def ends_in_norm(self, num_layers: int) -> bool:
        """Whether N_final stands after the last of so many layers."""
        if isinstance(self.final_norm, bool):
            return self.final_norm
        return bool(self.final_norm(num_layers, **dict(self.options)))

    def paired(self, num_encoder_layers: int, num_decoder_layers: int) -> tuple[Wiring, Wiring]:
        """The wirings of the two stacks of an encoder-decoder with so many layers each."""
        return (self, self) if self.pair is None else self.pair(self, num_encoder_layers, num_decoder_layers)

    def equation(self, num_layers: int | None = None) -> str:
        """The wiring in symbols; with `num_layers` the constants as numbers.

        Example:
            >>> print(addnorm.wirings.deepnorm().equation())
            x' = N(α x + f(x)),   α = (2L)^(1/4)
            >>> print(addnorm.wirings.deepnorm().equation(num_layers=100))
            x' = N(3.761 x + f(x))
            >>> print(addnorm.wirings.mix_ln(k=2).equation())
            layers 1 to 2 of 12:  x' = N(x + f(x))
            layers 3 to 12:       x' = x + f(N(x))
            at the end:           y = N(x_L)
        """
        if num_layers is not None:
            check_int("num_layers", num_layers, 1)
        return equation.equation_of(self, num_layers)

    def describe(self) -> str:
        """The wiring in words: what a sublayer reads, what it adds, what becomes of the stream.

        Example:
            >>> for sentence in addnorm.wirings.pre_ln().describe().split(". "):
            ...     print(sentence)
            Each sublayer reads the norm of the stream; what it returns is added to the stream, which is passed on as it is
            So the stream is a plain sum: x_0 and every write
            A final norm follows the last sublayer.
        """
        return description.describe(self)

    def draw(self) -> str:
        """The wiring as a drawing in text.

        Example:
            >>> print(addnorm.wirings.no_norm().draw())
            x ──┬─────────⊕──► x'
                │  ┌───┐  │
                └──┤ f ├──┘
                   └───┘
        """
        return drawing.draw(self)

    def init_(self, stack: Any, *inputs: Any, **context: Any) -> None:
        """Initializes a stack as the wiring's source does: weights by role, norms, factors; `addnorm.wirings.init` has the rules.

        Args:
            stack: a `ResidualStack`, or an encoder, decoder or transformer of `addnorm.nn`, built with this wiring.
            inputs: for `admin`, whose factors are measured: what the stack is called with.
            context: the keyword arguments of that call.
        """
        from addnorm.wirings.init import init_  # that file knows modules, which know this one

        init_(self, stack, *inputs, **context)

    def __repr__(self) -> str:
        """The constructor's call, where that gives this wiring; else the fields that are not at their default."""
        from addnorm.wirings.catalog import CONSTRUCTORS  # that file stands on this one

        if self.name in CONSTRUCTORS:
            make = CONSTRUCTORS[self.name]
            had = {**dict(self.options), "init": self.init}
            taken = inspect.signature(make).parameters.items()
            given = {name: had[name] for name, option in taken if name in had and had[name] != option.default}
            with suppress(TypeError, ValueError):  # options of one's own that the constructor refuses
                if make(**given) == self:
                    return _call(self.name, given.items())
        return _call("Wiring", _changed(self))

    def __str__(self) -> str:
        return f"{self.name}: {equation.one_line(self)}"


def _changed(instance: Any) -> list[tuple[str, Any]]:
    """The fields that are not at their default."""
    found = [(field, getattr(instance, field.name)) for field in fields(instance)]
    return [(field.name, value) for field, value in found if value != field.default]


def _call(name: str, given: Iterable[tuple[str, Any]]) -> str:
    """What one writes to make it."""
    texts = (f"{key}={value.__name__ if inspect.isfunction(value) else repr(value)}" for key, value in given)
    return f"{name}({', '.join(texts)})"
