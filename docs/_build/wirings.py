"""What wirings.md says of each wiring, made from the wirings themselves.

python docs/_build/wirings.py            replaces what stands between the wirings comments of the page
python docs/_build/wirings.py --check    changes nothing; 1 if the page is not what the wirings say
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import page

from addnorm import wirings
from addnorm.nn import Wiring
from addnorm.wirings.equation import one_line

PAGE = Path(__file__).parent.parent / "wirings.md"


def table() -> str:
    """All of them, a line each."""
    rows = [
        [f"[{one.name}](#{one.name})", f"`{re.sub(' +', ' ', one_line(one))}`", one.use.rstrip("."), linked(one.source)]
        for one in wirings.every()
    ]
    return page.table(["wiring", "equation", "when", "source"], rows)


def each() -> str:
    """A section for each."""
    return "\n\n".join(map(section, wirings.every()))


def section(one: Wiring) -> str:
    """The call, the equation, the drawing, the words."""
    return "\n".join([
        f"### {one.name}", "",
        f"`{signature(one.name)}`", "",
        "```", one.equation(), "", one.draw(), "```", "",
        one.describe(), "",
        f"Use it {one.use} Source: {linked(one.source)}.",
    ])  # fmt: skip


def signature(name: str) -> str:
    """How it is called, with its defaults."""
    options = inspect.signature(wirings.CONSTRUCTORS[name]).parameters.values()
    return f"addnorm.wirings.{name}({', '.join(map(option, options))})"


def option(parameter: inspect.Parameter) -> str:
    """An option and its default."""
    default = parameter.default
    if default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={default.__name__ if inspect.isfunction(default) else repr(default)}"


def not_offered() -> str:
    """What is missing, and why."""
    return "\n".join(f"- **{name}**: {why}." for name, why in wirings.NOT_OFFERED.items())


def linked(source: str) -> str:
    """The source, its papers as links."""
    return re.sub(r"arXiv ([\d.]+)", r"[arXiv \1](https://arxiv.org/abs/\1)", source)


SECTIONS = {"wirings:table": table, "wirings:each": each, "wirings:not-offered": not_offered}


def main(words: Sequence[str]) -> int:
    """Replace, or check."""
    return page.main(words, PAGE, SECTIONS, "the wirings say")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
