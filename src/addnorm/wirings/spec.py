"""Residual wirings as data: a named rule that gives the row of every sublayer.

    x' = N_out(a * x + b * N_branch(f(c * N_in(x))))          and N_final after the last sublayer

`addnorm.wirings` has the published wirings. Define your own in one line:

    Wiring("mine", Row(norm_in=True, b=0.5), final_norm=True)
    Wiring("mine", lambda place: Row(norm_in=True, b=1 / place.number), final_norm=True)

Constants are Python floats, not buffers.
"""

from __future__ import annotations

import difflib
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from addnorm._util.arguments import check_bool, check_float, check_int
from addnorm.wirings import description, drawing, equation
from addnorm.wirings.decay import find_no_decay
from addnorm.wirings.factors import FACTORS, Factor, Learned, Place, changed_fields, format_call
from addnorm.wirings.init import InitRule, init_, xavier
from addnorm.wirings.stage import Head, Row, Stage, unit

__all__ = ["CONSTRUCTORS", "FACTORS", "Factor", "Learned", "Place", "Row", "Stage", "Wiring", "as_wiring", "get"]

DEFAULT_DEPTH = 12  # layers of a stack whose rows are looked at when no depth is known
CONSTRUCTORS: dict[str, Callable[..., Wiring]] = {}  # of the published wirings, by name; catalog.py fills it

Rule = Callable[..., Stage]


@dataclass(frozen=True)
class Wiring:
    """A named rule for the rows of a stack, with its norms at both ends, its initialization and its source.

    Args:
        name: the wiring's name.
        rule: one `Row` (or `Stage`, with several streams) for every sublayer, or a function that returns that of a `Place`.
        final_norm: whether the stream is normalized after the last sublayer; or a function of the number of layers.
        embedding_norm: whether x_0 is normalized before the first sublayer.
        init: the rule of `init_`: `init(role, place)` returns the `Draw` for weights of that role (`addnorm.wirings.init`).
        embedding: a factor for each stream at the start: the stream is x_0 times the factor. If `rule` is one `Stage`, the
            default is 1 for each of its streams.
        head: the read of several streams after the last sublayer, which the final norm normalizes; or a function of the
            `Place` after it. Not needed with one stream.
        options: keyword arguments for `rule`, `final_norm`, `head` and `init`.
        symbols: for `equation`: `{"a": ("α", "(2L)^(1/4)")}`, the letter of a factor and its formula, in which L is the number of
            layers, l a layer's number from 1 and S the number of sublayers. An entry of a `Stage` is found by the name of its
            parameter, or by its place, such as "inject_0".
        source: the paper.
        use: when to use the wiring, in one sentence.
        pair: for an encoder-decoder: a function of both numbers of layers that returns the wirings of the two stacks.
        profile: for an initialization that measures data: a function of the stack and its inputs.

    Wirings are equal if all fields are equal. Two functions are equal only if they are the same object.

    Example:
        >>> mine = addnorm.Wiring("mine", lambda place: addnorm.Row(norm_in=True, b=1 / place.number), final_norm=True)
        >>> mine.row(1, 0, num_layers=12)
        Row(norm_in=True, b=0.5)
        >>> print(mine)
        mine: x' = x + b_l f(N(x)),   y = N(x_L)
    """

    name: str
    rule: Stage | Rule
    final_norm: bool | Callable[..., bool] = False
    embedding_norm: bool = False
    init: InitRule = xavier
    embedding: tuple[float, ...] = (1.0,)
    head: Head | Callable[..., Head] | None = None
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    symbols: Mapping[str, tuple[str, str]] | tuple[tuple[str, tuple[str, str]], ...] = ()
    source: str = ""
    use: str = ""
    pair: Callable[[Wiring, int, int], tuple[Wiring, Wiring]] | None = None
    profile: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        rule, head, final_norm = self.rule, self.head, self.final_norm
        for name, is_valid, expected in (
            ("name", isinstance(self.name, str) and self.name, "a text: what the wiring is called"),
            ("rule", isinstance(rule, Stage) or callable(rule), "a Row or a Stage, or a function that returns that of a Place"),
            ("head", head is None or isinstance(head, Head) or callable(head), "None, a Head, or a function of a Place"),
            (
                "final_norm", isinstance(final_norm, bool) or callable(final_norm),
                "True or False, or a function of the number of layers",
            ),
            ("init", callable(self.init), "a function of a role and a Place, as in addnorm.wirings.init"),
            ("pair", self.pair is None or callable(self.pair), "None or a function"),
            ("profile", self.profile is None or callable(self.profile), "None or a function"),
        ):  # fmt: skip
            if not is_valid:
                raise TypeError(f"{name} is {getattr(self, name)!r}, expected {expected}.")
        check_bool("embedding_norm", self.embedding_norm)
        embedding = self.embedding if isinstance(self.embedding, Sequence) and len(self.embedding) > 0 else (None,)
        embedding = tuple(check_float("an entry of embedding", factor) for factor in embedding)
        if embedding == (1.0,) and isinstance(rule, Stage):
            embedding *= rule.n
        object.__setattr__(self, "embedding", embedding)
        for name in ("options", "symbols"):
            try:
                pairs = sorted(dict(getattr(self, name)).items())
            except (TypeError, ValueError):
                raise TypeError(
                    f"{name} is {getattr(self, name)!r}, expected a mapping from names, such as {{'k': 3}}."
                ) from None
            pairs = [(key, tuple(value) if isinstance(value, list) else value) for key, value in pairs]
            object.__setattr__(self, name, tuple(pairs))  # sorted pairs can be hashed and compared
        for name in dict(self.symbols):
            if name not in FACTORS and not (isinstance(name, str) and name.isidentifier() and len(name) > 1):
                raise ValueError(
                    f"a key of symbols is {name!r}, expected 'a', 'b' or 'c', or an entry of a stage, such as 'inject_0'."
                )

    def stage(self, layer: int, sublayer: int, num_layers: int, sublayers_per_layer: int = 2) -> Stage:
        """Return the row of one sublayer, or its stage if it has no row; layers and sublayers are counted from 0."""
        place = Place(*(operator.index(n) for n in (layer, sublayer, num_layers, sublayers_per_layer)))
        if not (0 <= place.layer < place.num_layers and 0 <= place.sublayer < place.sublayers_per_layer):
            raise ValueError(
                f"layer {place.layer} of {place.num_layers}, sublayer {place.sublayer} of {place.sublayers_per_layer}: expected "
                "each below its number, counted from 0."
            )
        stage = self.rule if isinstance(self.rule, Stage) else self.rule(place, **dict(self.options))
        if not isinstance(stage, Stage):
            raise TypeError(f"the rule of wiring {self.name!r} gave {stage!r} for {place}, expected a Row or a Stage.")
        return stage

    def stages(self, num_layers: int, sublayers_per_layer: int = 2) -> list[Stage]:
        """Return the rows or stages of a whole stack, in order."""
        return [self.stage(*place) for place in list_places(num_layers, sublayers_per_layer)]

    @property
    def has_rows(self) -> bool:
        """Whether every sublayer has a `Row`: one stream, whose factors are numbers or learned."""
        return len(self.embedding) == 1 and isinstance(self.stage(0, 0, DEFAULT_DEPTH), Row)

    @property
    def is_sequential(self) -> bool:
        """Whether there is one stream, and every sublayer reads it after the write of the sublayer before."""
        return self.has_rows and not any(row.shares for row in self.rows(DEFAULT_DEPTH))

    def row(self, layer: int, sublayer: int, num_layers: int, sublayers_per_layer: int = 2) -> Row:
        """Return the row of one sublayer; layers and sublayers are counted from 0.

        Raises:
            ValueError: the sublayer has a `Stage`: several streams, or computed coefficients.
        """
        stage = self.stage(layer, sublayer, num_layers, sublayers_per_layer)
        if not isinstance(stage, Row):
            raise ValueError(
                f"wiring {self.name!r} has a Stage at {sublayer=} of {layer=}, expected a Row: use stage()."
            )
        return stage

    def last_read(self, place: Place) -> Head | None:
        """Return the read after the last sublayer, or None for a wiring of rows, whose single stream is read as it is.

        Args:
            place: the position after the last sublayer, such as `Place(num_layers, 0, num_layers, 2)`.
        """
        head = self.head(place, **dict(self.options)) if callable(self.head) else self.head
        if head is None and self.has_rows:
            return None
        last = self.stage(*divmod(place.position - 1, place.sublayers_per_layer), *place[2:])
        if head is None:
            head = Head(last.n_out, unit(last.n_out, 0))
        names = last.names_out or last.names
        has_names = not head.names and isinstance(names, tuple) and len(names) == head.n
        return replace(head, names=names) if has_names else head

    def rows(self, num_layers: int, sublayers_per_layer: int = 2) -> list[Row]:
        """Return the rows of a whole stack, in order."""
        return [self.row(*place) for place in list_places(num_layers, sublayers_per_layer)]

    def ends_in_norm(self, num_layers: int) -> bool:
        """Return whether a stack of that many layers has a final norm."""
        if isinstance(self.final_norm, bool):
            return self.final_norm
        return bool(self.final_norm(num_layers, **dict(self.options)))

    def paired(self, num_encoder_layers: int, num_decoder_layers: int) -> tuple[Wiring, Wiring]:
        """Return the wirings of the encoder and the decoder of an encoder-decoder."""
        return (self, self) if self.pair is None else self.pair(self, num_encoder_layers, num_decoder_layers)

    @cached_property
    def shown_depth(self) -> int:
        """The number of layers that equations, descriptions and drawings show unless one is passed."""
        return equation.shown_depth(self)

    def equation(self, num_layers: int | None = None) -> str:
        """Return the wiring in symbols; with `num_layers`, the constants as numbers.

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
        return equation.format_equation(self, num_layers)

    def describe(self) -> str:
        """Return the wiring in words: what a sublayer reads, what it adds, and what happens to the stream.

        Example:
            >>> for sentence in addnorm.wirings.pre_ln().describe().split(". "):
            ...     print(sentence)
            Each sublayer reads the norm of the stream; what it returns is added to the stream
            So the stream is a plain sum: x_0 and every write
            The output is the norm of the stream.
        """
        return description.describe(self)

    def draw(self) -> str:
        """Return the wiring as a drawing in text.

        Example:
            >>> print(addnorm.wirings.no_norm().draw())
            x ──┬─────────⊕──► x'
                │  ┌───┐  │
                └──┤ f ├──┘
                   └───┘
        """
        return drawing.draw(self)

    def init_(self, stack: Any, *inputs: Any, **context: Any) -> None:
        """Initialize a stack as the wiring's source does: weights by role, norms and factors (see `addnorm.wirings.init`).

        Args:
            stack: a `ResidualStack`, or an encoder, decoder or transformer of `addnorm.nn`, built with this wiring.
            inputs: for `admin`, whose factors are measured: the inputs of a call of the stack.
            context: the keyword arguments of that call.
        """
        init_(self, stack, *inputs, **context)

    def no_decay(self, module: Any) -> set[str]:
        """Return the names of the parameters that weight decay should leave out, in all stacks of a module.

        As the wirings' sources advise, they are norms, learned factors, and static coefficients, biases and scales.
        The sublayers' parameters are not among them.

        Example:
            >>> stack = addnorm.ResidualStack([torch.nn.Linear(8, 8)], 8, "layer_scale")
            >>> sorted(stack.wiring.no_decay(stack))[:2]
            ['layers.0.connections.0.b', 'layers.0.connections.0.norm_in.bias']
        """
        return find_no_decay(module)

    def __repr__(self) -> str:
        """Return the call of the constructor that makes this wiring. Without one return a call of `Wiring`."""
        if self.name in CONSTRUCTORS:
            make = CONSTRUCTORS[self.name]
            values = {**dict(self.options), "init": self.init}
            parameters = inspect.signature(make).parameters.items()
            changed = {name: values[name] for name, p in parameters if name in values and values[name] != p.default}
            with suppress(TypeError, ValueError):  # custom options that the constructor refuses
                if make(**changed) == self:
                    return format_call(self.name, changed.items())
        return format_call("Wiring", changed_fields(self))

    def __str__(self) -> str:
        return f"{self.name}: {';  '.join(equation.equation_lines(self))}"


def list_places(num_layers: int, sublayers_per_layer: int) -> list[Place]:
    """Return the places of all sublayers of a stack, in order."""
    n = operator.index(num_layers) * operator.index(sublayers_per_layer)
    return [Place(*divmod(i, sublayers_per_layer), num_layers, sublayers_per_layer) for i in range(n)]


def normalize_name(name: str) -> str:
    """Return the name of a wiring as options take it: "post_ln" for common spellings such as "post-LN" or "Post LN"."""
    return re.sub(r"[\s-]+", "_", name.strip()).lower() if isinstance(name, str) else name


def get(name: str, /, **options: Any) -> Wiring:
    """Return the wiring with that name.

    Raises:
        ValueError: the name or an option is unknown, or a required option is missing.
    """
    name = normalize_name(name)
    if name not in CONSTRUCTORS:
        close = difflib.get_close_matches(str(name), CONSTRUCTORS, 1)
        expected = repr(close[0]) if close else f"one of {', '.join(CONSTRUCTORS)}"
        raise ValueError(f"wiring is {name!r}, expected {expected}.")
    make = CONSTRUCTORS[name]
    parameters = inspect.signature(make).parameters
    for option in options:
        if option not in parameters:
            raise ValueError(f"{name} has no option {option!r}, expected {', '.join(parameters) or 'none'}.")
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in options:
            raise ValueError(f"{name} needs its option {option!r}: addnorm.wirings.{name}({option}=...).")
    return make(**options)


def as_wiring(wiring: Wiring | Stage | str) -> Wiring:
    """Return the wiring itself, the wiring of one row or stage for every sublayer, or the wiring with that name."""
    if isinstance(wiring, Stage):
        return Wiring(type(wiring).__name__.lower(), wiring)
    if not isinstance(wiring, Wiring | str):
        raise TypeError(
            f"wiring is {wiring!r}, expected a Wiring or a name, such as addnorm.wirings.pre_ln() or 'pre_ln'."
        )
    return get(wiring) if isinstance(wiring, str) else wiring
