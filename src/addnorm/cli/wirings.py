"""`addnorm wirings`: the list of the wirings, and one wiring with its constants at a depth."""

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

import addnorm
from addnorm._util.blocks import Block, Column, Paragraph, Table, TableRow
from addnorm._util.numbers import format_count, format_number
from addnorm._util.render import WIDTH, print_blocks
from addnorm.cli._output import (
    ArgumentError,
    argument_errors,
    print_json,
    print_notes,
    print_unwrapped,
    stdout,
    working,
)
from addnorm.nn import Learned, Place, Wiring
from addnorm.wirings.equation import explain, wrap_equation
from addnorm.wirings.factors import format_factor
from addnorm.wirings.init import ROLES, RULES
from addnorm.wirings.spec import list_places
from addnorm.wirings.stage import Computed, Head, Stage

SAMPLED = 12, 24  # depths from which the streams of deeper stacks are estimated
MAX_STREAMS, MAX_COEFFICIENTS = 256, 5_000_000  # beyond, a stack takes minutes to describe
MOST_ROWS = 8  # of a table; of more only the first three, the middle one and the last are printed
FACTORS = {"a": "of the stream", "b": "of the write", "c": "of the read"}


class _Stack(NamedTuple):
    """Wiring of a stack with a certain number of layers."""

    title: str  # "Encoder"; empty if there is one stack
    wiring: Wiring
    num_layers: int
    sublayers: int  # of each layer


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
    with argument_errors(), working(f"compute the constants of {name}"):
        wiring = make_wiring(name, settings=settings)
        for depth in filter(None, (layers, decoder_layers)):
            check_depth(wiring, depth)
        stacks = _make_stacks(wiring, layers, decoder_layers)
        content = _to_dict(wiring, stacks) if as_json else _describe(wiring, stacks)  # raise for impossible options
    if isinstance(content, dict):
        print_json(content)
    else:
        console = stdout()
        for item in content:
            if isinstance(item, Text):
                print_unwrapped(console, item)
            else:
                print_blocks(console, item)


def make_wiring(spec: str, example: str = "--set k=3", settings: Iterable[str] = (), argument: str = "NAME") -> Wiring:
    """Return the wiring of that name with options as they were typed: `k=3`.

    Args:
        spec: NAME or NAME:OPTION=VALUE,...
        settings: more texts OPTION=VALUE.
        example: an example of a correct setting, for errors.
        argument: the command line's argument that has the name, for errors.

    Raises:
        ValueError: there is no such wiring or option, or its value is wrong.
    """
    name, _, more = spec.partition(":")
    options: dict[str, Any] = {}
    for setting in (*(more.split(",") if more else ()), *settings):
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
            f"--layers is {num_layers}, for which {wiring.name} has about {format_number(count, 1)} coefficients, expected at "
            f"most {MAX_COEFFICIENTS:,}: use fewer layers."
        )


def _estimate_coefficients(wiring: Wiring, num_layers: int) -> float:
    """Return about how many entries the mixing matrices have. Wirings that keep earlier states have more at each sublayer."""
    early, late = (wiring.stages(depth)[-1].n_out for depth in SAMPLED)
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
    """Return the stacks whose constants are printed: none, one, or an encoder and a decoder."""
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
    return {
        **_summary(wiring), "drawing": wiring.draw(), "description": wiring.describe(), "has_rows": wiring.has_rows,
        "embedding": list(wiring.embedding), "embedding_norm": wiring.embedding_norm,
        "stacks": [_stack_to_dict(stack) for stack in stacks],
    }  # fmt: skip


def _stack_to_dict(stack: _Stack) -> dict[str, Any]:
    wiring, num_layers = stack.wiring, stack.num_layers
    head = wiring.last_read(Place(num_layers, 0, num_layers, stack.sublayers))
    stages = [
        {
            "layer": place.layer, "sublayer": place.sublayer, **_stage_to_dict(wiring.stage(*place), wiring),
            "init": {role: wiring.init(role, place, **dict(wiring.options))._asdict() for role in ROLES},
        }
        for place in list_places(num_layers, stack.sublayers)
    ]  # fmt: skip
    return {
        "stack": stack.title.lower() or None, "call": repr(wiring), "equation": wiring.equation(num_layers),
        "layers": num_layers, "sublayers_per_layer": stack.sublayers, "final_norm": wiring.ends_in_norm(num_layers),
        "rows" if wiring.has_rows else "stages": stages, "head": None if head is None else _stage_to_dict(head, wiring),
    }  # fmt: skip


def _stage_to_dict(stage: Stage | Head, wiring: Wiring) -> dict[str, Any]:
    """Return the fields of a row, a stage or the head, and the number of streams after a stage."""

    def to_json(value: Any) -> Any:
        if isinstance(value, Computed):
            return {"kind": value.kind.__name__, "options": dict(value.options)}
        if isinstance(value, Learned):
            start = "measured" if wiring.profile else value.init
            return {"learned": True, "start": start, "per_feature": value.per_feature, "shared": value.shared}
        return [*map(to_json, value)] if isinstance(value, tuple) else value

    names = [field.name for field in fields(stage) if field.init and "names" not in field.name]
    document = {name: to_json(getattr(stage, name)) for name in names}
    return document | ({"n_out": stage.n_out} if type(stage) is Stage else {})


# Text.


def _print_list(console: Console) -> None:
    """Print each wiring with its equation, and below it when to use it and its source."""
    catalog = addnorm.wirings.list_all()
    names_width = max(len(wiring.name) for wiring in catalog) + 2
    rows: list[TableRow] = []
    for wiring in catalog:
        equation = wrap_equation(wiring, max(min(console.width, WIDTH) - names_width, 24))
        source = re.sub(r",? arXiv [\d.]+", "", wiring.source)  # `addnorm wirings NAME` prints the number on arXiv
        rows += [TableRow([wiring.name, "\n".join(equation)]), TableRow(["", f"Use it {wiring.use} {source}."], "dim")]
    legend = explain(" ".join(wiring.equation() for wiring in catalog))
    more = "`addnorm wirings NAME` describes one; with --layers N it shows the constants too."
    columns = [Column("wiring", style="accent"), Column("equation, when to use it, source", fold=True)]
    print_blocks(console, Table(columns, rows))
    print_notes(console, legend, more)


def _describe(wiring: Wiring, stacks: Sequence[_Stack]) -> list[Text | Block]:
    """Return the text of a wiring, and of its constants in each stack. Lines of a `Text` are not wrapped."""
    equation = wiring.equation()
    parts: list[Text | Block] = [
        Text(repr(wiring), "bold cyan"), Text(equation, "bold"), Text(f"\n{wiring.draw()}\n"), Paragraph(wiring.describe()),
        Paragraph(f"Use it {wiring.use}", space=True), Paragraph(f"Source: {wiring.source}."),
    ]  # fmt: skip
    equations = [stack.wiring.equation(stack.num_layers) for stack in stacks]
    for stack, at_depth in zip(stacks, equations, strict=True):
        title = f"{stack.title}: " if stack.title else ""
        parts += [
            Text(f"\n{title}{format_count(stack.num_layers, 'layer')} of {stack.sublayers} sublayers", "bold"),
            Text("─" * min(stdout().width, WIDTH), "dim"), Text(f"{at_depth}\n"),
            _constants(stack), Paragraph(),
            Table([Column("weights", style="accent"), Column("drawn from", fold=True)], _inits(stack)),
        ]  # fmt: skip
    meanings = explain(" ".join([equation, *equations]))
    more = "" if stacks else " The constants at a depth: --layers N."
    return [*parts, Paragraph(meanings + more, style="dim", space=True)]


def _constants(stack: _Stack) -> Table:
    """Return a table of the factors by layer, or by sublayer if they differ within a layer.

    If the wiring has stages in place of rows, the table has the number of streams instead of the factors.
    """
    stages, unit = stack.wiring.stages(stack.num_layers, stack.sublayers), "sublayer"
    headings, texts = ["streams after it"], [[str(stage.n_out)] for stage in stages]
    if stack.wiring.has_rows:
        headings = [f"{name}, {of}" for name, of in FACTORS.items()]
        texts = [[_factor(getattr(row, name), stack.wiring) for name in FACTORS] for row in stages]
    if all(own == texts[k - k % stack.sublayers] for k, own in enumerate(texts)):
        texts, unit = texts[:: stack.sublayers], "layer"
    rows, end = [], 0
    for own, run in groupby(texts):
        begin, end = end + 1, end + len([*run])
        rows.append([f"{begin} to {end}" if begin < end else str(end), *own])
    few = rows if len(rows) <= MOST_ROWS else [*rows[:3], rows[len(rows) // 2 - 1], rows[-1]]
    return Table([Column(unit, style="accent"), *(Column(heading, fold=True) for heading in headings)], few)


def _factor(factor: float | Learned, wiring: Wiring) -> str:
    """Return a factor in words."""
    if isinstance(factor, float):
        return format_factor(factor)
    start = "as measured" if wiring.profile else f"at {format_factor(factor.init)}"
    return f"a learned {'vector' if factor.per_feature else 'number'} that starts {start}"


def _inits(stack: _Stack) -> list[list[str]]:
    """Return how the weights are drawn, with the roles that are drawn alike in one row."""
    wiring, places = stack.wiring, list_places(stack.num_layers, stack.sublayers)[:: stack.sublayers]
    roles_of: dict[str, list[str]] = {}
    for role in ROLES:
        draws = [str(wiring.init(role, place, **dict(wiring.options))) for place in places]
        text = draws[0] if len({*draws}) == 1 else f"{draws[0]} in layer 1 ... {draws[-1]} in layer {len(draws)}"
        roles_of.setdefault(text, []).append(role)
    return [[", ".join(roles), text] for text, roles in roles_of.items()]
