"""Write the generated part of api.md: every public name, its signature and the first line of its docstring.

A public name is one of `addnorm.__all__`, or of the `__all__` of a module that MODULES says is imported by itself. It is in
the section of the module that defines it. A new name needs no line here, a new module needs one line in MODULES.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import addnorm

SOURCE = Path(addnorm.__file__).parent.parent


class Module(NamedTuple):
    """Section of the page: the names that a module, or one below it, defines."""

    module: str
    title: str
    who: str
    alone: bool = False  # has names besides those of `addnorm`: its own `__all__`


MODULES = (
    Module("addnorm.functional", "The operation", "For model builders: add and norm in one call."),
    Module("addnorm.boundary", "The boundary of several streams", "For the model builder: write, coefficients, read "
           "and norm of n streams in one call. [several_streams.md](several_streams.md) explains."),
    Module("addnorm.inplace", "In place", "For inference without new memory: the same calls, over their inputs."),
    Module("addnorm.ops", "Kernels and compilation", "Which kernels are available, and which files deployed programs need."),
    Module("addnorm.wirings", "Wirings", "For the model builder: residual wirings as data. [wirings.md](wirings.md) lists them."),
    Module("addnorm.nn", "Modules, stacks, transformers", "For the model builder: a residual wiring in one line, over any "
           "sublayers.", alone=True),
    Module("addnorm.stream", "The stream of an existing model", "For the engineer with a model: which wiring it uses, and "
           "what each sublayer writes. [streams.md](streams.md) explains.", alone=True),
    Module("addnorm.fusion", "Fusing an existing model", "For the engineer with a model: its Add & Norms as fused calls, "
           "with a proof. [fusing.md](fusing.md) explains."),
    Module("addnorm.onnx", "ONNX files", "For deployment: `import addnorm.onnx`. [deploying.md](deploying.md) explains.",
           alone=True),
    Module("addnorm.lab", "Wirings compared", "For the researcher: `from addnorm import lab`. "
           "[comparing.md](comparing.md) explains.",
           alone=True),
    Module("addnorm.distributed", "Several processes", "For the training team: `import addnorm.distributed`, with PyTorch's "
           "DTensor.", alone=True),
    Module("addnorm.report", "The report", "For reports on models and comparisons: `from addnorm import report`.", alone=True),
    Module("addnorm.trace", "One token, step by step", "For the learner: `import addnorm.trace`. It computes in Python floats. "
           "[add_norm.md](add_norm.md) explains.", alone=True),
)  # fmt: skip

CONSTANTS = {
    "addnorm.lab.FULL": "The full `Protocol`: three depths, four rates, with and without warm-up, three seeds.",
    "addnorm.lab.ILLUSTRATION": "The default `Protocol`: one depth, one rate, with and without warm-up, one seed.",
    "addnorm.onnx.FORMS": "The forms of an Add & Norm in ONNX.",
    "addnorm.trace.PRESETS": "The worked examples by name, each a `Preset`.",
    "addnorm.trace.SECTIONS": "The sections of a trace, in their order.",
}
NOT_OURS = {"extra_repr"}  # methods that torch calls, not a user
GLUE = "\0"  # a space at which a line does not end


class Name(NamedTuple):
    """Public name: its path, a second path, and its value."""

    path: str
    also: str
    value: Any


def names() -> dict[Module, list[Name]]:
    """Return every public name once, in the section of the module that defines it."""
    results: dict[Module, list[Name]] = {one: [] for one in MODULES}
    for short in addnorm.__all__:
        value = getattr(addnorm, short)
        home = section(short, value)
        also = f"{home.module}.{short}" if home.alone and short in importlib.import_module(home.module).__all__ else ""
        results[home].append(Name(f"addnorm.{short}", also, value))
    for home in MODULES:
        if home.alone:
            module = importlib.import_module(home.module)
            known = {one.also for one in results[home]}
            own = (Name(f"{home.module}.{short}", "", getattr(module, short)) for short in module.__all__)
            results[home] += [one for one in own if one.path not in known]
    return results


def section(short: str, value: Any) -> Module:
    """Return the module of MODULES that defines a name, the longest where one is below another."""
    defined = value.__name__ if isinstance(value, ModuleType) else value.__module__
    homes = [one for one in MODULES if f"{defined}.".startswith(f"{one.module}.")]
    if not homes:
        raise SystemExit(f"addnorm.{short} is defined in {defined}, which has no section: add a line to MODULES.")
    return max(homes, key=lambda one: len(one.module))


def index() -> str:
    """Return a line for each section: its names as links."""
    seen: Counter[str] = Counter()
    lines = []
    for home, own in names().items():
        title = linked(home.title, home.title, seen)
        lines.append(f"- {title}: {', '.join(linked(f'`{one.path}`', one.path, seen) for one in own)}")
    return "\n".join(lines)


def linked(words: str, heading: str, seen: Counter[str]) -> str:
    """Return a link to a heading of the page. Case does not count, so the second of two equal anchors gets a number."""
    anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    seen[anchor] += 1
    return f"[{words}](#{anchor}{f'-{seen[anchor] - 1}' if seen[anchor] > 1 else ''})"


def each() -> str:
    """Return the sections."""
    return "\n\n".join("\n\n".join([f"## {home.title}", home.who, *map(entry, own)]) for home, own in names().items())


def entry(one: Name) -> str:
    """Return the entry of a name: its signature, its first line, its methods."""
    parts = [f"### `{one.path}`"]
    if callable(one.value):
        parts.append(f"```text\n{signature(one.path, one.value)}\n```")
    parts.append(f"{first_line(one)}{f' Also `{one.also}`.' if one.also else ''}{source(one.value)}")
    if isinstance(one.value, type) and (methods := "\n".join(members(one.value))):
        parts.append(methods)
    if one.value is addnorm.wirings:
        parts.append(", ".join(f"[`{name}`](wirings.md#{name})" for name in addnorm.wirings.CONSTRUCTORS) + ".")
    return "\n\n".join(parts)


def signature(path: str, value: Any) -> str:
    """Return the signature, with a function's return type, in lines of at most 100 characters."""
    if isinstance(value, type) and issubclass(value, BaseException) and "__init__" not in vars(value):
        return f"{path}(message)"
    results = inspect.signature(value)
    words, named = [], False
    for one in results.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not named:
            words.append("*")
        named = named or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        words.append(parameter(one))
    returned = results.return_annotation
    text = f"{path}({', '.join(words)})"
    if inspect.isgeneratorfunction(inspect.unwrap(value)):
        text = f"with {text}:"
    elif returned is not results.empty and not isinstance(value, type):
        text += f" -> {str(returned).strip(chr(39))}".replace(" ", GLUE)
    if " at 0x" in text:
        raise SystemExit(f"{path} has a default that is another in every run: {text}")
    lines = textwrap.wrap(text, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(GLUE, " ")


def parameter(one: inspect.Parameter) -> str:
    """Return a parameter's name and default."""
    stars = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
    if one.default is one.empty:
        return f"{stars}{one.name}"
    return f"{one.name}={one.default.__name__ if inspect.isfunction(one.default) else repr(one.default)}"


def first_line(one: Name) -> str:
    """Return the first line of the docstring, or the text of CONSTANTS."""
    if callable(one.value) or isinstance(one.value, ModuleType):
        return line_of(one.path, one.value)
    if one.path not in CONSTANTS:
        raise SystemExit(f"{one.path} is a constant, and has no docstring: say in CONSTANTS what it is.")
    return CONSTANTS[one.path]


def line_of(path: str, value: Any) -> str:
    """Return the first line of a docstring that must exist."""
    words = inspect.getdoc(value)
    if not words:
        raise SystemExit(f"{path} is public and has no docstring: write one.")
    return words.splitlines()[0]


def source(value: Any) -> str:
    """Return a link to the source file."""
    try:
        path = Path(inspect.getsourcefile(inspect.unwrap(value)) or "")
    except TypeError:  # a constant
        return ""
    return f" [Source](../src/{path.relative_to(SOURCE).as_posix()})"


def members(kind: type) -> Iterator[str]:
    """Yield a line for each public method and property with a docstring."""
    seen = NOT_OURS | {*getattr(kind, "__dataclass_fields__", ())}  # fields are in the signature
    for base in kind.__mro__:
        if not base.__module__.startswith("addnorm"):
            continue
        for name, member in vars(base).items():
            plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            shown = isinstance(plain, property | functools.cached_property) or inspect.isfunction(plain)
            if name.startswith("_") or name in seen or not shown or not plain.__doc__:
                continue
            seen.add(name)
            called = "" if not inspect.isfunction(plain) else call_of(getattr(kind, name), member)
            yield f"- `.{name}{called}`: {line_of(name, plain)}"


def call_of(bound: Any, member: Any) -> str:
    """Return the parameters of a method without self, in parentheses."""
    words = [parameter(one) for one in inspect.signature(bound).parameters.values()]
    return f"({', '.join(words if isinstance(member, classmethod | staticmethod) else words[1:])})"


SECTIONS = {"api:index": index, "api:names": each}
