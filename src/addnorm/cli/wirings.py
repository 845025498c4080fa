"""What `addnorm wirings` shows: the list of the wirings, and one of them with its constants at a depth."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from addnorm import wirings
from addnorm.nn import Learned, Place, Wiring
from addnorm.wirings.equation import in_lines, number
from addnorm.wirings.init import ROLES, RULES

__all__ = ["Stack", "listed", "made", "show", "show_all", "stacks", "to_dict"]

WIDEST = 100
SOURCE = ((96, 28), (78, 21), (0, 0))  # of the table: from so many columns it has so many
FEW = 8  # so many different layers are all shown, of more the first, the middle and the last
FACTORS = {"a": "of the stream", "b": "of what is added", "c": "of what is read"}
LEGEND = "N is a norm, f the sublayer, L the number of layers, l a layer's number from 1, S the number of sublayers."


class Stack(NamedTuple):
    """A wiring at a depth."""

    title: str  # "Encoder"; empty if there is one stack
    wiring: Wiring
    num_layers: int
    sublayers: int  # a layer

    @property
    def places(self) -> list[Place]:
        """Of the first sublayer of each layer."""
        return [Place(layer, 0, self.num_layers, self.sublayers) for layer in range(self.num_layers)]


def made(name: str, settings: Iterable[str]) -> Wiring:
    """The wiring of that name, with options as they were typed: `k=3`. Raises ValueError with a sentence."""
    options = {}
    for setting in settings:
        option, equals, text = setting.partition("=")
        if not (option and equals):
            raise ValueError(f"--set came with {setting!r}, expected OPTION=VALUE, as in --set k=3.")
        if option in options:
            raise ValueError(f"--set came with {option} twice, expected it once.")
        options[option] = _value(option, text)
    try:
        return wirings.get(name, **options)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _value(option: str, text: str) -> Any:
    if option == "init":
        if text not in RULES:
            raise ValueError(f"init is {text!r}, expected one of {', '.join(RULES)}.")
        return RULES[text]
    try:
        return ast.literal_eval({"none": "None", "true": "True", "false": "False"}.get(text.lower(), text))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def stacks(wiring: Wiring, layers: int | None, decoder_layers: int | None) -> list[Stack]:
    """The stacks whose constants are shown."""
    if decoder_layers is None:
        return [] if layers is None else [Stack("", wiring, layers, 2)]
    if layers is None:
        raise ValueError("--decoder-layers came without --layers, expected both: the encoder's number of layers too.")
    encoder, decoder = wiring.paired(layers, decoder_layers)
    return [Stack("Encoder", encoder, layers, 2), Stack("Decoder", decoder, decoder_layers, 3)]


# What a program reads.


def listed() -> list[dict[str, str]]:
    """Every wiring, for JSON."""
    return [
        {"name": one.name, "call": repr(one), "equation": one.equation(), "source": one.source, "use": one.use}
        for one in wirings.every()
    ]


def to_dict(wiring: Wiring, found: Sequence[Stack]) -> dict[str, Any]:
    """One wiring, for JSON."""
    return {
        "name": wiring.name,
        "call": repr(wiring),
        "equation": wiring.equation(),
        "drawing": wiring.draw(),
        "description": wiring.describe(),
        "use": wiring.use,
        "source": wiring.source,
        "flow": wiring.flow,
        "embedding_norm": wiring.embedding_norm,
        "stacks": [_stack_dict(stack) for stack in found],
    }


def _stack_dict(stack: Stack) -> dict[str, Any]:
    wiring, n, per_layer = stack.wiring, stack.num_layers, stack.sublayers
    places = [Place(layer, k, n, per_layer) for layer in range(n) for k in range(per_layer)]
    return {
        "stack": stack.title.lower() or None,
        "call": repr(wiring),
        "equation": wiring.equation(n),
        "layers": n,
        "sublayers_per_layer": per_layer,
        "final_norm": wiring.ends_in_norm(n),
        "rows": [
            {
                "layer": at.layer,
                "sublayer": at.sublayer,
                **{norm: getattr(row, norm) for norm in ("norm_in", "norm_branch", "norm_out")},
                **{name: _factor_dict(getattr(row, name), wiring) for name in FACTORS},
                "init": {role: wiring.init(role, at, **dict(wiring.options))._asdict() for role in ROLES},
            }
            for at, row in zip(places, wiring.rows(n, per_layer), strict=True)
        ],
    }


def _factor_dict(factor: float | Learned, wiring: Wiring) -> Any:
    if isinstance(factor, float):
        return factor
    start = "measured" if wiring.profile else factor.init
    return {"learned": True, "start": start, "per_feature": factor.per_feature, "shared": factor.shared}


# What a reader sees.


def show_all(screen: Console) -> None:
    """The list: a table where there is room for one."""
    width = min(screen.width, WIDEST)
    for_source = next(columns for least, columns in SOURCE if width >= least)
    every = wirings.every()
    names = max(len(one.name) for one in every)
    for_equation = max(width - names - 2 - for_source - 2 * bool(for_source), 24)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("wiring", style="cyan", width=names)
    table.add_column("equation", width=for_equation)
    if for_source:
        table.add_column("source", style="dim", width=for_source)
    for one in every:
        authors = re.sub(r",? arXiv [\d.]+", "", one.source)  # the number is shown with the wiring
        texts = [one.name, "\n".join(in_lines(one, for_equation)), authors]
        table.add_row(*map(Text, texts[: len(table.columns)]))
    screen.print(table)
    screen.print()
    for text in (LEGEND, "`addnorm wirings NAME` tells more; with --layers N the constants too."):
        _paragraph(screen, text, "dim")


def show(wiring: Wiring, found: Sequence[Stack], screen: Console) -> None:
    """One wiring, and its constants in each stack."""
    screen.print(Text(repr(wiring), "bold cyan"))
    _as_it_is(screen, wiring.equation(), "bold")
    screen.print()
    _as_it_is(screen, wiring.draw())
    screen.print()
    _paragraph(screen, wiring.describe())
    screen.print()
    _paragraph(screen, f"Use it {wiring.use}")
    _paragraph(screen, f"Source: {wiring.source}.")
    screen.print()
    for stack in found:
        _show_stack(stack, screen)
    _paragraph(screen, LEGEND if found else f"{LEGEND} The constants at a depth: --layers N.", "dim")


def _show_stack(stack: Stack, screen: Console) -> None:
    what = f"{stack.num_layers} layer{'s' * (stack.num_layers > 1)} of {stack.sublayers} sublayers"
    title = f"{stack.title}: {what}" if stack.title else what
    screen.print(Text(title, "bold"), Text("─" * min(screen.width, WIDEST), "dim"), sep="\n")
    _as_it_is(screen, stack.wiring.equation(stack.num_layers))
    screen.print()
    rows = stack.wiring.rows(stack.num_layers, stack.sublayers)[:: stack.sublayers]
    columns = {name: [_factor(getattr(row, name), stack.wiring) for row in rows] for name in FACTORS}
    alike = {name: texts[0] for name, texts in columns.items() if len({*texts}) == 1}
    ones = [name for name, text in alike.items() if text == "1"]
    lines = [(f"{name}, {FACTORS[name]}", f"{alike[name]} in every layer") for name in alike if name not in ones]
    _lines(screen, [*lines, *[(", ".join(ones), "1 in every layer")] * bool(ones)])
    varied = {name: texts for name, texts in columns.items() if name not in alike}
    if varied:
        shown = range(len(rows)) if len(rows) <= FEW else (0, 1, 2, len(rows) // 2 - 1, len(rows) - 1)
        head = ("layer", "  ".join(f"{name}, {FACTORS[name]}" for name in varied))
        _lines(screen, [head, *((str(k + 1), "  ".join(texts[k] for texts in varied.values())) for k in shown)])
    screen.print()
    _lines(screen, [("weights", "drawn from"), *_inits(stack)])
    screen.print()


def _factor(factor: float | Learned, wiring: Wiring) -> str:
    if isinstance(factor, float):
        return number(factor)
    start = "as measured" if wiring.profile else f"at {number(factor.init)}"
    return f"a learned {'vector' if factor.per_feature else 'number'} that starts {start}"


def _inits(stack: Stack) -> list[tuple[str, str]]:
    """How the weights are drawn, roles that are drawn alike together."""
    found: dict[str, list[str]] = {}
    for role in ROLES:
        draws = [str(stack.wiring.init(role, at, **dict(stack.wiring.options))) for at in stack.places]
        text = draws[0] if len({*draws}) == 1 else f"{draws[0]} in layer 1 ... {draws[-1]} in layer {len(draws)}"
        found.setdefault(text, []).append(role)
    return [(", ".join(roles), text) for text, roles in found.items()]


def _lines(screen: Console, lines: Sequence[tuple[str, str]]) -> None:
    """A name and what it is, a line each, or more where it is too long."""
    left = max([21, *(len(name) for name, _ in lines)]) + 2
    for name, text in lines:
        first, *others = textwrap.wrap(text, max(min(screen.width, WIDEST) - left, 20), break_on_hyphens=False)
        screen.print(Text.assemble((f"{name:{left}}", "cyan"), first))
        for line in others:
            screen.print(Text(f"{'':{left}}{line}"))


def _paragraph(screen: Console, text: str, style: str = "") -> None:
    """A text, wrapped without trailing blanks."""
    _as_it_is(screen, textwrap.fill(text, min(screen.width, WIDEST)), style)


def _as_it_is(screen: Console, text: str, style: str = "") -> None:
    """Lines that are not to be broken."""
    screen.print(Text(text, style), no_wrap=True, overflow="ignore", crop=False)
