"""One token through Add & Norm, for programs: the page's own trace is computed in the page, and is the same to the bit."""

from __future__ import annotations

from typing import Any

from addnorm.explorer.params import shown
from addnorm.trace import trace

__all__ = ["LENGTH", "answer"]

LENGTH = 16  # numbers of a token
VECTORS = ("x", "sublayer", "weight", "bias", "grad", "read_grad")
OTHERS = ("placement", "norm", "eps", "variance", "eps_place")


def answer(given: Any) -> dict[str, Any]:
    """The steps of the trace that a request asks for.

    Raises:
        ValueError: something in it does not fit.
    """
    known = (*VECTORS, *OTHERS)
    if not isinstance(given, dict) or not {"x", "sublayer"} <= given.keys():
        raise ValueError(
            f"the request is {shown(given)}, expected an object with x and sublayer, and perhaps {', '.join(known[2:])}."
        )
    for name in given:
        if name not in known:
            raise ValueError(f"the request has {shown(name)}, which is unknown, expected {', '.join(known)}.")
    for name in VECTORS:
        value = given.get(name)
        scalar = name in ("weight", "bias") and _number(value)
        if value is not None and not scalar and not (isinstance(value, list) and all(map(_number, value))):
            raise ValueError(f"{name} is {shown(value)}, expected a list of numbers.")
        if isinstance(value, list) and len(value) > LENGTH:
            raise ValueError(f"{name} has {len(value)} numbers, expected at most {LENGTH}.")
    for name in OTHERS:
        number = name == "eps"
        if name in given and not (_number(given[name]) if number else isinstance(given[name], str)):
            raise ValueError(f"{name} is {shown(given[name])}, expected a {'number' if number else 'word'}.")
    return trace(**given).to_dict()


def _number(value: Any) -> bool:
    return type(value) in (int, float)
