"""`addnorm wirings`: the list of the wirings, and one wiring with its constants at a depth."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from rich.console import Console

import addnorm
from addnorm._util.blocks import Column, Paragraph, Table
from addnorm._util.numbers import format_count
from addnorm._util.render import WIDTH
from addnorm.cli._output import ArgumentError, print_blocks, print_json, print_unwrapped, stdout, working
from addnorm.nn import Learned, Place, Row, Wiring
from addnorm.wirings.equation import explain, wrap_equation
from addnorm.wirings.factors import format_factor
from addnorm.wirings.init import ROLES, RULES
from addnorm.wirings.stage import Computed, Head, Stage

__all__ = ["check_depth", "make_wiring", "run"]

SOURCES = ((96, 28), (78, 21), (0, 0))  # columns of a terminal, and columns of the source in it
SAMPLED = 12, 24  # depths from which the streams of deeper stacks are estimated
MAX_STREAMS, MAX_COEFFICIENTS = 256, 5_000_000  # beyond, a stack takes minutes to describe
MOST_ROWS = 8  # with more layers only the first three, the middle one and the last are printed
FACTORS = {"a": "of the stream", "b": "of the write", "c": "of the read"}


class _Stack(NamedTuple):
    """Wiring at a depth."""

    title: str  # "Encoder"; empty if there is one stack
    wiring: Wiring
    num_layers: int
    sublayers: int  # of each layer

    def places(self, each: bool = True) -> list[Place]:
        """Return the places of all sublayers, or of the first sublayer of each layer."""
        sublayers = range(self.sublayers if each else 1)
        return [Place(layer, k, self.num_layers, self.sublayers) for layer in range(self.num_layers) for k in sublayers]


def run(
    name: str | None, layers: int | None, decoder_layers: int | None, settings: tuple[str, ...], as_json: bool
) -> None:
    """Print the list of the wirings, or describe one."""
    if name is None:
        if layers or decoder_layers or settings:
            raise ArgumentError(
                "NAME is missing, expected the wiring to which the options belong: `addnorm wirings` lists them"
            )
        if as_json:
            print_json([_summary(wiring) for wiring in addnorm.wirings.list_all()])
        else:
            _print_list(stdout())
        return
    try:
        wiring = make_wiring(name, settings)
        for depth in (layers, decoder_layers):
            if depth is not None:
                check_depth(wiring, depth)
        stacks = _make_stacks(wiring, layers, decoder_layers)
        with working(f"compute the constants of {name}"):  # some impossible options raise only when a row is made
            if as_json:
                document = _to_dict(wiring, stacks)
            else:
                texts = [_stack_text(stack) for stack in stacks]
    except (ValueError, OverflowError) as error:
        raise ArgumentError(error) from None
    if as_json:
        print_json(document)
    else:
        _print_wiring(wiring, texts, stdout())


def make_wiring(name: str, settings: Iterable[str], example: str = "--set k=3", argument: str = "NAME") -> Wiring:
    """Return the wiring of that name with options as they were typed: `k=3`.

    Args:
        name: of the wiring.
        settings: texts OPTION=VALUE.
        example: of a correct setting, for errors.
        argument: of the command line that has the name, for errors.

    Raises:
        ValueError: there is no such wiring or option, or its value is wrong.
    """
    options: dict[str, Any] = {}
    for setting in settings:
        option, equals, text = (part.strip() for part in setting.partition("="))
        if not (option and equals):
            raise ValueError(f"the setting is {setting!r}, expected OPTION=VALUE, as in {example}.")
        if option in options:
            raise ValueError(f"{option} is set twice, expected it once.")
        options[option] = _parse_value(option, text)
    n = options.get("n")
    if isinstance(n, int) and n > MAX_STREAMS:
        raise ValueError(f"n is {n}, expected at most {MAX_STREAMS} streams.")
    try:
        return addnorm.wirings.get(name, **options)
    except (TypeError, ValueError) as error:
        sentence = re.sub(r"^wiring is", f"{argument} is", str(error))
        written = example.replace("k=3", r"\1=VALUE").replace("mix_ln", name)
        raise ValueError(re.sub(r"addnorm\.wirings\.\w+\((\w+)=\.\.\.\)", f"write {written}", sentence)) from None


def check_depth(wiring: Wiring, num_layers: int) -> None:
    """Raise a ValueError if a wiring has more post-LN layers than a stack has layers, or too many coefficients."""
    k = dict(wiring.options).get("k") if wiring.name == "mix_ln" else None
    if k is not None and k > num_layers:
        raise ValueError(f"k of mix_ln is {k}, expected at most {num_layers}, the number of layers.")
    count = _estimate_coefficients(wiring, num_layers)
    if count > MAX_COEFFICIENTS:
        raise ValueError(
            f"--layers is {num_layers}, for which {wiring.name} has about {count:.0e} coefficients, expected at most "
            f"{MAX_COEFFICIENTS:.0e}: use fewer layers."
        )


def _estimate_coefficients(wiring: Wiring, num_layers: int) -> float:
    """Return about how many entries the mixing matrices have. Wirings that keep earlier states have more at each sublayer."""
    if wiring.has_rows:
        return 0.0
    ends = (wiring.stages(depth)[-1] for depth in SAMPLED)
    early, late = (end.n_out if isinstance(end, Stage) else 1 for end in ends)
    growth = (late - early) / (SAMPLED[1] - SAMPLED[0])
    last = early + growth * (num_layers - SAMPLED[0])
    return 2 * num_layers * (last**2 / 3 if growth else late**2)


def _parse_value(option: str, text: str) -> Any:
    """Return a Python value for the text of a setting."""
    if option == "init":
        if text not in RULES:
            raise ValueError(f"init is {text!r}, expected one of {', '.join(RULES)}.")
        return RULES[text]
    try:
        return ast.literal_eval({"none": "None", "true": "True", "false": "False"}.get(text.lower(), text))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _make_stacks(wiring: Wiring, layers: int | None, decoder_layers: int | None) -> list[_Stack]:
    """Return the stacks whose constants are printed."""
    if decoder_layers is None:
        return [] if layers is None else [_Stack("", wiring, layers, 2)]
    if layers is None:
        raise ValueError(
            f"--decoder-layers is {decoder_layers} without --layers, expected both: add --layers of the encoder."
        )
    encoder, decoder = wiring.paired(layers, decoder_layers)
    return [_Stack("Encoder", encoder, layers, 2), _Stack("Decoder", decoder, decoder_layers, 3)]


# JSON.


def _summary(wiring: Wiring) -> dict[str, Any]:
    return {
        "name": wiring.name, "call": repr(wiring), "equation": wiring.equation(), "source": wiring.source, "use": wiring.use,
    }  # fmt: skip


def _to_dict(wiring: Wiring, stacks: Sequence[_Stack]) -> dict[str, Any]:
    more = {
        "drawing": wiring.draw(), "description": wiring.describe(), "has_rows": wiring.has_rows,
        "embedding": list(wiring.embedding), "embedding_norm": wiring.embedding_norm,
        "stacks": [_stack_to_dict(stack) for stack in stacks],
    }  # fmt: skip
    return _summary(wiring) | more


def _stack_to_dict(stack: _Stack) -> dict[str, Any]:
    wiring, num_layers = stack.wiring, stack.num_layers
    head = wiring.last_read(Place(num_layers, 0, num_layers, stack.sublayers))
    return {
        "stack": stack.title.lower() or None,
        "call": repr(wiring),
        "equation": wiring.equation(num_layers),
        "layers": num_layers,
        "sublayers_per_layer": stack.sublayers,
        "final_norm": wiring.ends_in_norm(num_layers),
        "rows" if wiring.has_rows else "stages": [
            {
                "layer": place.layer,
                "sublayer": place.sublayer,
                **(_row_to_dict(stage, wiring) if isinstance(stage, Row) else _stage_to_dict(stage, wiring)),
                "init": {role: wiring.init(role, place, **dict(wiring.options))._asdict() for role in ROLES},
            }
            for place, stage in zip(stack.places(), wiring.stages(num_layers, stack.sublayers), strict=True)
        ],
        "head": None if head is None else _stage_to_dict(head, wiring),
    }


def _row_to_dict(row: Row, wiring: Wiring) -> dict[str, Any]:
    norms = {norm: getattr(row, norm) for norm in ("norm_in", "norm_branch", "norm_out")}
    return {**norms, "shares": row.shares, **{name: _factor_to_dict(getattr(row, name), wiring) for name in FACTORS}}


def _stage_to_dict(stage: Stage | Head, wiring: Wiring) -> dict[str, Any]:
    """Return the fields of a stage or of the head, and the number of streams after a stage."""

    def to_json(value: Any) -> Any:
        if isinstance(value, Computed):
            return {"kind": value.kind.__name__, "options": dict(value.options)}
        if isinstance(value, tuple):
            return [to_json(entry) for entry in value]
        return _factor_to_dict(value, wiring) if isinstance(value, Learned) else value

    document = {field.name: to_json(getattr(stage, field.name)) for field in fields(stage) if "names" not in field.name}
    return document | ({"n_out": stage.n_out} if isinstance(stage, Stage) else {})


def _factor_to_dict(factor: float | Learned, wiring: Wiring) -> Any:
    if isinstance(factor, float):
        return factor
    start = "measured" if wiring.profile else factor.init
    return {"learned": True, "start": start, "per_feature": factor.per_feature, "shared": factor.shared}


# Text.


def _print_list(console: Console) -> None:
    """Print a line for each wiring; the source has a column where the terminal is wide enough."""
    width = min(console.width, WIDTH)
    source_width = next(columns for least, columns in SOURCES if width >= least)
    catalog = addnorm.wirings.list_all()
    equation_width = max(
        width - max(len(wiring.name) for wiring in catalog) - 2 - source_width - 2 * bool(source_width), 24
    )
    columns = [
        Column("wiring", style="accent"),
        Column("equation", fold=True),
        Column("source", style="dim", fold=True),
    ]
    rows = []
    for wiring in catalog:
        authors = re.sub(r",? arXiv [\d.]+", "", wiring.source)  # the page of the wiring has the number
        rows.append(
            [wiring.name, "\n".join(wrap_equation(wiring, equation_width)), authors][: 3 if source_width else 2]
        )
    legend = Paragraph(explain(" ".join(wiring.equation() for wiring in catalog)), style="dim", space=True)
    more = Paragraph("`addnorm wirings NAME` describes one; with --layers N it shows the constants too.", style="dim")
    print_blocks(console, Table(columns if source_width else columns[:2], rows), legend, more)


class _StackText(NamedTuple):
    """What is printed of a stack."""

    heading: str
    equation: str
    constants: list[list[str]]
    inits: list[list[str]]


def _stack_text(stack: _Stack) -> _StackText:
    """Return the equation, the factors of rows or the number of streams, and the initialization of a stack."""
    heading = f"{format_count(stack.num_layers, 'layer')} of {stack.sublayers} sublayers"
    return _StackText(
        f"{stack.title}: {heading}" if stack.title else heading,
        stack.wiring.equation(stack.num_layers),
        _factor_rows(stack) if stack.wiring.has_rows else _stream_rows(stack),
        _inits(stack),
    )


def _print_wiring(wiring: Wiring, stacks: Sequence[_StackText], console: Console) -> None:
    """Print a wiring, and its constants in each stack."""
    equation = wiring.equation()
    print_unwrapped(console, repr(wiring), "bold cyan")
    print_unwrapped(console, equation, "bold")
    print_unwrapped(console, f"\n{wiring.draw()}\n")
    source = Paragraph(f"Source: {wiring.source}.")
    print_blocks(console, Paragraph(wiring.describe()), Paragraph(f"Use it {wiring.use}", space=True), source)
    for stack in stacks:
        _print_stack(stack, console)
    meanings = explain(" ".join([equation, *(stack.equation for stack in stacks)]))
    legend = meanings if stacks else f"{meanings} The constants at a depth: --layers N."
    print_blocks(console, Paragraph(legend, style="dim", space=True))


def _print_stack(stack: _StackText, console: Console) -> None:
    """Print the texts of a stack."""
    print_unwrapped(console, f"\n{stack.heading}", "bold")
    print_unwrapped(console, "─" * min(console.width, WIDTH), "dim")
    print_unwrapped(console, f"{stack.equation}\n")
    inits = [["weights", "drawn from"], *stack.inits]
    print_blocks(console, _two_columns(stack.constants), Paragraph(), _two_columns(inits))


def _stream_rows(stack: _Stack) -> list[list[str]]:
    """Return the number of streams over the stack."""
    stages = stack.wiring.stages(stack.num_layers, stack.sublayers)
    numbers = [len(stack.wiring.embedding), *(stage.n_out for stage in stages if isinstance(stage, Stage))]
    first, last = numbers[0], numbers[-1]
    rows = [["streams", f"{first} everywhere" if {*numbers} == {first} else f"{first} at first, {last} at the end"]]
    return rows + [["", f"at most {max(numbers)}"]] * (max(numbers) > max(first, last))


def _factor_rows(stack: _Stack) -> list[list[str]]:
    """Return the factors over the layers, or over the sublayers where they differ in a layer; those without change first."""
    rows, unit = stack.wiring.rows(stack.num_layers, stack.sublayers), "sublayer"
    numbers = [tuple(getattr(row, name) for name in FACTORS) for row in rows]
    if all(number == numbers[k - k % stack.sublayers] for k, number in enumerate(numbers)):
        rows, unit = rows[:: stack.sublayers], "layer"
    factors = {name: [_factor(getattr(row, name), stack.wiring) for row in rows] for name in FACTORS}
    constant = {name: texts[0] for name, texts in factors.items() if len({*texts}) == 1}
    ones = [name for name, text in constant.items() if text == "1"]
    lines = [[f"{name}, {FACTORS[name]}", f"{constant[name]} in every layer"] for name in constant if name not in ones]
    lines += [[", ".join(ones), "1 in every layer"]] * bool(ones)
    varied = {name: texts for name, texts in factors.items() if name not in constant}
    if varied:
        lines.append([unit, "  ".join(f"{name}, {FACTORS[name]}" for name in varied)])
        few = range(len(rows)) if len(rows) <= MOST_ROWS else (0, 1, 2, len(rows) // 2 - 1, len(rows) - 1)
        lines += [[str(k + 1), "  ".join(texts[k] for texts in varied.values())] for k in few]
    return lines


def _two_columns(rows: Sequence[Sequence[str]]) -> Table:
    return Table([Column("", style="accent"), Column("", fold=True)], rows, header=False)


def _factor(factor: float | Learned, wiring: Wiring) -> str:
    """Return a factor in words."""
    if isinstance(factor, float):
        return format_factor(factor)
    start = "as measured" if wiring.profile else f"at {format_factor(factor.init)}"
    return f"a learned {'vector' if factor.per_feature else 'number'} that starts {start}"


def _inits(stack: _Stack) -> list[list[str]]:
    """Return how the weights are drawn, with the roles that are drawn alike in one row."""
    roles_of: dict[str, list[str]] = {}
    for role in ROLES:
        draws = [
            str(stack.wiring.init(role, place, **dict(stack.wiring.options))) for place in stack.places(each=False)
        ]
        text = draws[0] if len({*draws}) == 1 else f"{draws[0]} in layer 1 ... {draws[-1]} in layer {len(draws)}"
        roles_of.setdefault(text, []).append(role)
    return [[", ".join(roles), text] for text, roles in roles_of.items()]
