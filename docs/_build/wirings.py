"""The generated part of wirings.md: the table of wirings and a section for each."""

from __future__ import annotations

import inspect
import re

import page

from addnorm import wirings
from addnorm.nn import Wiring
from addnorm.wirings.equation import equation_lines


def table() -> str:
    """Return the table of all wirings."""
    rows = []
    for one in wirings.list_all():
        whole, short = (re.sub(" +", " ", ";  ".join(equation_lines(one, defines=flag))) for flag in (True, False))
        equation = whole if one.has_rows else short
        rows.append([f"[{one.name}](#{one.name})", f"`{equation}`", one.use.rstrip("."), linked(one.source)])
    return page.table(["wiring", "equation", "when", "source"], rows)


def each() -> str:
    """Return one section for each wiring."""
    return "\n\n".join(map(section, wirings.list_all()))


def section(one: Wiring) -> str:
    """Return a wiring's section: call, equation, drawing, description."""
    return "\n".join([
        f"### {one.name}", "",
        f"`{signature(one.name)}`", "",
        "```", one.equation(), "", one.draw(), "```", "",
        one.describe(), "",
        f"Use it {one.use} Source: {linked(one.source)}.",
    ])  # fmt: skip


def signature(name: str) -> str:
    """Return the call of a constructor with its defaults."""
    options = inspect.signature(wirings.CONSTRUCTORS[name]).parameters.values()
    return f"addnorm.wirings.{name}({', '.join(map(option, options))})"


def option(parameter: inspect.Parameter) -> str:
    """Return an option and its default."""
    default = parameter.default
    if default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={default.__name__ if inspect.isfunction(default) else repr(default)}"


def not_offered() -> str:
    """Return the list of wirings that are not offered, with the reasons."""
    return "\n".join(f"- **{name}**: {why}." for name, why in wirings.NOT_OFFERED.items())


def linked(source: str) -> str:
    """Return the source with links to its papers."""
    return re.sub(r"arXiv ([\d.]+)", r"[arXiv \1](https://arxiv.org/abs/\1)", source)


SECTIONS = {"wirings:table": table, "wirings:each": each, "wirings:not-offered": not_offered}
