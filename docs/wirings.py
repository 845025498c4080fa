"""What wirings.md says of each wiring, made from the wirings themselves.

python docs/wirings.py            replaces what stands between the wirings comments of the page
python docs/wirings.py --check    changes nothing; 1 if the page is not what the wirings say
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from addnorm.nn import Wiring, wirings
from addnorm.nn.equation import one_line

PAGE = Path(__file__).parent / "wirings.md"


def table() -> str:
    """All of them, a line each."""
    head = "| wiring | equation | when | source |\n| :-- | :-- | :-- | :-- |"
    lines = (
        f"| [{one.name}](#{one.name}) | `{re.sub(' +', ' ', one_line(one))}` | {one.use.rstrip('.')} | {linked(one.source)} |"
        for one in wirings.every()
    )
    return "\n".join([head, *lines])


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


SECTIONS = {"table": table, "each": each, "not-offered": not_offered}


def replaced(text: str) -> str:
    """The page with each section between its two comments."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- wirings:{name} -->", f"<!-- /wirings:{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(
                f"{PAGE.name} needs one {begin} and one {end}: add the two lines where the section belongs."
            )
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def main(words: Sequence[str]) -> int:
    """Replace, or check."""
    text = PAGE.read_text(encoding="utf-8")
    wanted = replaced(text)
    if list(words) != ["--check"]:
        PAGE.write_text(wanted, encoding="utf-8")
    elif text != wanted:
        print(f"{PAGE.name} is not what the wirings say: run docs/wirings.py")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
