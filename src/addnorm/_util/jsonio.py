"""JSON in which NaN and infinity are the words "NaN", "Infinity" and "-Infinity", since JSON has no such numbers.

The words are those of JavaScript, so that a page reads them back with `Number(word)`.
"""

import json
import math
import re
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_jsonable(value: Any) -> Any:
    """Return the value as JSON types: dict, list, str, int, float, bool and None.

    Tuples become lists, dataclasses become dicts, and NaN and infinity become words. Any other value, such as a dtype,
    becomes its text.

    Example:
        >>> from addnorm._util.jsonio import to_jsonable
        >>> to_jsonable({"loss": float("inf"), 3: (1, torch.float16)})
        {'loss': 'Infinity', '3': [1, 'torch.float16']}
    """
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)  # numpy.float64 is a float too
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, dict):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [*map(to_jsonable, value)]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in fields(value)}
    return str(value)


@dataclass(frozen=True)
class Document:
    """Base of dataclasses with a JSON form: the fields with `repr=True`, and the properties named in `PROPERTIES`."""

    PROPERTIES: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes for JSON, with null for NaN and infinity."""
        names = [field.name for field in fields(self) if field.repr]
        return {name: _to_json(getattr(self, name)) for name in (*names, *self.PROPERTIES)}


def _to_json(value: Any) -> Any:
    if isinstance(value, Document):
        return value.to_dict()
    if isinstance(value, tuple):
        return tuple(map(_to_json, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dumps(document: Any) -> str:
    """Return a document as JSON with one key a line and, in lists of records, one record a line.

    Two documents can be compared line by line, and the text is little longer than without any line breaks.

    Args:
        document: any value that `to_jsonable` accepts.

    Example:
        >>> from addnorm._util.jsonio import dumps
        >>> print(dumps({"machine": {"cores": 2}, "rows": [{"d": 64, "us": 1.5}, {"d": 128, "us": float("nan")}]}), end="")
        {
        "machine": {"cores": 2},
        "rows": [
        {"d": 64, "us": 1.5},
        {"d": 128, "us": "NaN"}
        ]
        }
    """
    return f"{_lines(to_jsonable(document), top=True)}\n"


def dumps_line(value: Any) -> str:
    """Return a value as JSON in one line without spaces, for a response or a line of a log.

    Example:
        >>> from addnorm._util.jsonio import dumps_line
        >>> dumps_line({"loss": [1.0, float("-inf")]})
        '{"loss":[1.0,"-Infinity"]}'
    """
    return json.dumps(to_jsonable(value), allow_nan=False, separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text, with the words for NaN and infinity as numbers.

    Any string that is one of the words becomes a number. If a text may be "NaN", use `json.loads` and `float_of` instead.

    Raises:
        ValueError: the text is not JSON.

    Example:
        >>> from addnorm._util.jsonio import loads
        >>> loads('{"losses": [1.5, "NaN"]}')
        {'losses': [1.5, nan]}
    """
    return _restored(json.loads(text))


def float_of(value: Any) -> float:
    """Return a number of a JSON document as a float. The number may be a word such as "NaN".

    Raises:
        ValueError: the value is not a number.

    Example:
        >>> from addnorm._util.jsonio import float_of
        >>> float_of("-Infinity"), float_of(3)
        (-inf, 3.0)
    """
    if isinstance(value, str) and value in WORDS:
        return WORDS[value]
    if isinstance(value, float) or (type(value) is int and abs(value) < 2**1023):
        return float(value)
    raise ValueError(f"value is {str(value)[:40]!r}, expected a number, or one of {', '.join(map(repr, WORDS))}.")


def _restored(value: Any) -> Any:
    """Replace the words for NaN and infinity by numbers."""
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [*map(_restored, value)]
    return WORDS.get(value, value) if isinstance(value, str) else value


def _lines(value: Any, *, top: bool = False) -> str:
    """Return JSON with line breaks in the outermost object, in objects that hold lists of records, and in those lists."""
    if isinstance(value, dict) and value and (top or any(map(_has_records, value.values()))):
        return "{\n" + ",\n".join(f"{_compact(key)}: {_lines(item)}" for key, item in value.items()) + "\n}"
    if _is_records(value):
        return "[\n" + ",\n".join(map(_compact, value)) + "\n]"
    return _compact(value)


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _has_records(value: Any) -> bool:
    return _is_records(value) or (isinstance(value, dict) and any(map(_has_records, value.values())))


def _compact(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair, as in a file name that is not UTF-8, cannot be encoded.
    return text if text.isascii() else re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
