"""A model of the user's own: what `module.path:factory` returns. This is the one kind of model whose code is run."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from addnorm.stream.models.hf import Refused, first_line, seeded

__all__ = ["FACTORY", "from_factory"]

FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
FORMS = "an nn.Module, (model, args) or (model, args, kwargs)"


def from_factory(name: str, seed: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model in eval mode, its positional inputs and those by keyword."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # and left there, as python -m leaves it: a model may import more when it runs
    with seeded(seed):
        factory = _found(name, here)
        try:
            result = factory()
        except (Exception, SystemExit) as error:
            raise Refused(f"MODEL is {name!r}, whose call without arguments fails ({first_line(error)}).") from error
    return _parts(name, result)


def _found(name: str, here: str) -> Any:
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # SystemExit: a script that parses its arguments at once
        raise Refused(
            f"MODEL is {name!r}, whose module {module_name} cannot be imported from '{here}' ({first_line(error)})."
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1)
            meant = f"; near it is {near[0]}" if near else ""
            raise Refused(f"MODEL is {name!r}, but {module_name} has no {path}, expected a function{meant}.")
        found = getattr(found, part)
    if not callable(found) or isinstance(found, nn.Module):
        raise Refused(f"MODEL is {name!r}, which is {type(found).__name__}, expected a function that returns {FORMS}.")
    return found


def _parts(name: str, result: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise Refused(f"{name} returned {f'({kinds})' if isinstance(result, tuple) else kinds}, expected {FORMS}.")
    model: nn.Module = parts[0]
    args: Any = parts[1] if len(parts) > 1 else ()
    kwargs: Any = parts[2] if len(parts) > 2 else {}
    if isinstance(args, Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        raise Refused(
            f"{name} returned args as {type(args).__name__}, expected a tuple; keywords come third: (model, (), kwargs)."
        )
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise Refused(f"{name} returned kwargs as {type(kwargs).__name__}, expected a dict with names as its keys.")
    return model.eval(), tuple(args), dict(kwargs)
