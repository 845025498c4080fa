"""What `addnorm trace` reads and shows: vectors, the list of the examples, the steps."""

from __future__ import annotations

import json
import re
import textwrap
from contextlib import suppress
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from addnorm.trace import PRESETS, SECTIONS, Trace, show

__all__ = ["list_presets", "numbers", "scale", "show_steps", "two"]


def two(vectors: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
    """X and SUBLAYER."""
    if len(vectors) != 2:
        came = {0: "no vectors came", 1: "one vector came"}.get(len(vectors), f"{len(vectors)} vectors came")
        raise ValueError(
            f"{came}, expected two, X and SUBLAYER (or --preset): put commas between numbers, as in 1,2,3 0.5,-1,1.5."
        )
    return numbers(vectors[0]), numbers(vectors[1])


def numbers(text: str) -> list[Any]:
    """The entries of a vector, with or without brackets, as texts: `addnorm.trace` says which is no number."""
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    if text[:1] + text[-1:] in ("[]", "()"):
        text = text[1:-1].strip()
    return re.split(r"\s*,\s*|\s+", text) if text else []


def scale(text: str) -> Any:
    """A vector, or one number for all features."""
    found = numbers(text)
    with suppress(ValueError):
        return float(found[0]) if len(found) == 1 else found
    return found


def list_presets(as_json: bool, screen: Console) -> None:
    """The worked examples by name."""
    if as_json:
        click.echo(json.dumps([{"name": preset.name, "title": preset.title} for preset in PRESETS.values()], indent=2))
        return
    for preset in PRESETS.values():
        screen.print(Text.assemble((f"{preset.name:23}", "cyan"), preset.title))


def show_steps(followed: Trace, screen: Console) -> None:
    """The steps as derivations under their section's name, the values set off."""
    width = min(screen.width, 100)
    room = max(width - 16, 24)
    screen.print(*filter(None, (Text(followed.title, "bold"), Text(followed.heading))), sep="\n")
    for section in SECTIONS:
        screen.print(Text(f"\n{section.capitalize()}", "bold"), Text("─" * width, "dim"), sep="\n")
        for step in followed.section(section):
            derivation = "\n".join(step.lines(followed.digits, room))
            value = show(step.value, followed.digits)
            value = value if derivation.endswith(value) else ""  # a long vector, broken
            text = Text.assemble(derivation.removesuffix(value), (value, "bold cyan"))
            text.append("".join(f"\n{line}" for line in textwrap.wrap(step.note, room)), "dim")
            for k, line in enumerate(text.split()):
                name = "" if k else step.name
                screen.print(Text.assemble(f"{name:16}", line), no_wrap=True, overflow="ignore", crop=False)
