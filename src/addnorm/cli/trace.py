"""`addnorm trace`: one token through Add & Norm, step by step."""

import re
from contextlib import suppress
from typing import Any

from rich.text import Text

from addnorm._util.render import STYLES, WIDTH, make_console
from addnorm.cli._output import ArgumentError, argument_errors, option_names, print_json, print_unwrapped
from addnorm.trace import PRESETS, Trace, trace

# Words of errors of `addnorm.trace`, as they are typed in a shell.
TYPED = {
    "pass a list of numbers, such as [1.5, -1, 4.5]": "separate numbers by commas, as in 1.5,-1,4.5",
    "requires placement 'pre', got 'post'": "requires --placement pre",
    "use placement='pre', or grad": "use --placement pre, or --grad",
    "use norm='layer'": "use --norm layer",
    "the length of x": "the length of X",
}


def run(vectors: tuple[str, ...], preset: str | None, listing: bool, as_json: bool, **options: Any) -> None:
    """Print the steps of one token through Add & Norm, or the list of worked examples."""
    flags = option_names()
    if listing:
        set_options = {"preset": preset, **options}
        others = [repr(value) for value in vectors]
        others += [flags[name] for name, value in set_options.items() if value is not None]
        if others:
            raise ArgumentError(f"--list is set beside {others[0]}, expected one of them: leave --list out")
        _list_presets(as_json)
        return
    with argument_errors(flags | {"x": "X", "sublayer": "SUBLAYER"}, TYPED):
        result = _compute(vectors, preset, {name: value for name, value in options.items() if value is not None})
    if as_json:
        print_json(result.to_dict())
    else:
        console = make_console()
        spans = ((text, STYLES[style][0]) for text, style in result.spans(min(console.width, WIDTH)))
        print_unwrapped(console, Text.assemble(*spans))


def _compute(vectors: tuple[str, ...], preset: str | None, options: dict[str, Any]) -> Trace:
    """Return the trace of the vectors, or of the worked example."""
    for name, parse in (("weight", _scale), ("bias", _scale), ("grad", _vector), ("read_grad", _vector)):
        if name in options:
            options[name] = parse(options[name])
    if preset is None:
        if len(vectors) != 2:
            raise ValueError(
                f"the command has {len(vectors) or 'no'} vector{'s' * (len(vectors) != 1)}, expected two, X and SUBLAYER, or "
                "--preset: separate numbers by commas, as in 1,2,3 0.5,-1,1.5."
            )
        return trace(*map(_vector, vectors), **options)
    if vectors:
        raise ValueError(
            f"--preset is {preset!r} beside vectors, expected one of the two: a preset has its own vectors."
        )
    preset = preset.lower().replace("_", "-")
    if preset not in PRESETS:
        raise ValueError(
            f"--preset is {preset!r}, expected one of {', '.join(PRESETS)}: `addnorm trace --list` lists them."
        )
    return PRESETS[preset].trace(**options)


def _vector(text: str) -> list[Any]:
    """Return the entries of a vector, with or without brackets, as texts. `addnorm.trace` names those that are not numbers."""
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    if text[:1] + text[-1:] in ("[]", "()"):
        text = text[1:-1].strip()
    return re.split(r"\s*,\s*|\s+", text) if text else []


def _scale(text: str) -> Any:
    """Return a vector, or one number for all features."""
    entries = _vector(text)
    with suppress(ValueError):
        return float(entries[0]) if len(entries) == 1 else entries
    return entries


def _list_presets(as_json: bool) -> None:
    """Print the worked examples."""
    if as_json:
        print_json([{"name": preset.name, "title": preset.title} for preset in PRESETS.values()])
        return
    console = make_console()
    for preset in PRESETS.values():
        console.print(Text.assemble((f"{preset.name:23}", "cyan"), preset.title))
