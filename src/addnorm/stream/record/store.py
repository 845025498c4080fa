"""A recording as a file: JSON, which has everything in one document, or Parquet, a tidy table that other tools read.

A file is written whole or not at all, never by pickle; what is read is checked, and refused in one sentence.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from addnorm.stream.record.balance import Balance
from addnorm.stream.record.optional import need
from addnorm.stream.record.schema import Entry, RecordedSite

if TYPE_CHECKING:  # recording.py stands on this file
    from addnorm.stream.record.recording import Recording

__all__ = ["SCHEMA", "VERSION", "load", "plain", "save", "to_dict"]

SCHEMA = "addnorm.recording"
VERSION = 1
_AGAIN = "save the recording again with Recording.save"

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_KINDS = {str: "a text", int: "a whole number", float: "a number", list: "a list", dict: "an object"}
T = TypeVar("T")


def to_dict(recording: Recording) -> dict[str, Any]:
    """What `Recording.to_dict` does."""
    series = [
        {
            "site": site,
            "role": role,
            "statistic": statistic,
            "steps": found.steps.tolist(),
            "values": _numbers(found.values),
        }
        for site, role, statistic, found in recording.each_series()
    ]
    return {**_head(recording), "series": series}


def _head(recording: Recording) -> dict[str, Any]:
    """All but the numbers."""
    return {
        "schema": SCHEMA,
        "schema_version": VERSION,
        "facts": plain(recording.facts),
        "sites": [asdict(site) for site in recording.sites],
        "maps": {
            stream: {"sources": list(sources), "shares": [_numbers(row) for row in shares]}
            for stream, (sources, shares) in recording.maps.items()
        },
        "balances": {stream: plain(asdict(sheet)) for stream, sheet in recording.balances.items()},
    }


def _numbers(values: Iterable[float]) -> list[Any]:
    return [value if math.isfinite(value) else _word(value) for value in values]


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def plain(fact: Any) -> Any:
    """A value as JSON types; what is none, a dtype say, as its text."""
    if isinstance(fact, dict):
        return {str(key): plain(value) for key, value in fact.items()}
    if isinstance(fact, list | tuple):
        return [*map(plain, fact)]
    if isinstance(fact, float) and not math.isfinite(fact):
        return _word(fact)
    return fact if fact is None or type(fact) in (bool, int, float, str) else str(fact)


def save(recording: Recording, path: Path) -> Path:
    """What `Recording.save` does."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write = _format(path)[0]
    try:
        write(recording, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load(path: Path, make: type[Recording]) -> Recording:
    """What `Recording.load` does."""
    return _format(path)[1](path, make)


def _write_json(recording: Recording, path: Path) -> None:
    head = json.dumps({**_head(recording), "series": []}, ensure_ascii=False, allow_nan=False, indent=1)
    rows = ",\n".join(json.dumps(row, allow_nan=False) for row in to_dict(recording)["series"])
    path.write_text(head.removesuffix("[]\n}") + f"[\n{rows}\n]}}\n", encoding="utf-8")


def _read_json(path: Path, make: type[Recording]) -> Recording:
    file = _File(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        file.refuse(f"no JSON ({error})", "the JSON of a recording")
    recording = file.head(document, make)
    for row in file.value(document, "series", list):
        site = file.value(row, "site", int)
        role, statistic = (file.value(row, key, str) for key in ("role", "statistic"))
        steps, values = file.value(row, "steps", list), file.floats(file.value(row, "values", list))
        if len(steps) != len(values) or not all(type(step) is int for step in steps):
            file.refuse(f"{len(values)} values at {len(steps)} steps", "a whole number, its step, for each value")
        for step, value in zip(steps, values, strict=True):
            file.add(recording, step, site, role, statistic, value)
    return recording


def _write_parquet(recording: Recording, path: Path) -> None:
    arrow, parquet = need("pyarrow", "write Parquet"), need("pyarrow.parquet", "write Parquet")
    rows = recording.table()
    text = arrow.dictionary(arrow.int32(), arrow.string())
    types = {"step": arrow.int64(), "site": text, "layer": arrow.int64(), "role": text, "statistic": text}
    columns = [*zip(*rows, strict=True)] or [()] * len(Entry._fields)
    names = Entry._fields
    arrays = [
        arrow.array(column, types.get(name, arrow.float64())) for name, column in zip(names, columns, strict=True)
    ]
    head = json.dumps(_head(recording), allow_nan=False)
    parquet.write_table(arrow.table(arrays, names=names).replace_schema_metadata({SCHEMA: head}), path)


def _read_parquet(path: Path, make: type[Recording]) -> Recording:
    arrow, parquet = need("pyarrow", "read Parquet"), need("pyarrow.parquet", "read Parquet")
    file, data = _File(path), path.read_bytes()
    try:
        table = parquet.ParquetFile(arrow.BufferReader(data)).read()
        head = json.loads((table.schema.metadata or {}).get(SCHEMA.encode(), b"null"))
    except (arrow.ArrowException, OSError, ValueError) as error:
        file.refuse(f"no Parquet ({str(error).splitlines()[0]})", "the Parquet file of a recording")
    if head is None:
        file.refuse(f"a Parquet file without the metadata {SCHEMA!r}", "one that Recording.save wrote")
    recording = file.head(head, make)
    places = {site.id: place for place, site in enumerate(recording.sites)}
    names = ("step", "site", "role", "statistic", "value")
    for name in names:
        if name not in table.column_names:
            file.refuse(f"a table without the column {name!r}", f"the columns {', '.join(names)}")
    by = ["site", "role", "statistic"]
    try:  # a series at a time: a Python object for each of a million rows takes its time
        grouped = table.group_by(by, use_threads=False).aggregate([("step", "list"), ("value", "list")])
    except arrow.ArrowException as error:
        file.refuse(
            f"a table that cannot be read ({str(error).splitlines()[0]})", "the types that Recording.save writes"
        )
    columns = (grouped[name].to_pylist() for name in (*by, "step_list", "value_list"))
    for site, role, statistic, steps, values in zip(*columns, strict=True):
        for step, value in zip(steps, values, strict=True):
            file.add(recording, step, places.get(site, -1), role, statistic, value)
    return recording


Write = Callable[["Recording", Path], None]
Read = Callable[[Path, type["Recording"]], "Recording"]
_FORMATS: dict[str, tuple[Write, Read]] = {
    ".json": (_write_json, _read_json),
    ".parquet": (_write_parquet, _read_parquet),
}


def _format(path: Path) -> tuple[Write, Read]:
    if path.suffix not in _FORMATS:
        raise ValueError(
            f"path is {str(path)!r}, expected one that ends in {' or '.join(_FORMATS)}: which says the format."
        )
    return _FORMATS[path.suffix]


class _File:
    """Takes values from a document that anybody may have written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def refuse(self, came: str, wanted: str, remedy: str = _AGAIN) -> NoReturn:
        raise ValueError(f"{self.path} is {came}, expected {wanted}: {remedy}.") from None

    def value(self, document: Any, key: str, kind: type[T]) -> T:
        """What stands under a key, if it is of that kind."""
        value = document.get(key) if isinstance(document, dict) else None
        if type(value) is not kind:
            came = "missing" if value is None else f"{str(value)[:40]!r}"
            self.refuse(f"a recording whose {key!r} is {came}", _KINDS[kind])
        return value

    def floats(self, values: list[Any]) -> list[float]:
        """Numbers, some of which are words."""
        with suppress(KeyError, TypeError, OverflowError):
            return [_WORDS[value] if isinstance(value, str) else float(value) for value in values]
        return self.refuse("a recording with values that are no numbers", f"numbers, or {', '.join(_WORDS)}")

    def head(self, document: Any, make: type[Recording]) -> Recording:
        """The recording without its numbers."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            came = document.get("schema") if isinstance(document, dict) else None
            self.refuse(f"a document with the schema {came!r}", f"{SCHEMA!r}")
        version = self.value(document, "schema_version", int)
        if version > VERSION:
            self.refuse(f"a recording of version {version}", f"at most {VERSION}", "install a newer addnorm")
        if version < 1:
            self.refuse(f"a recording of version {version}", "1 or more")
        try:
            sites = [self._site(site) for site in self.value(document, "sites", list)]
            recording = make(sites, self.value(document, "facts", dict))
        except ValueError as error:
            if str(error).startswith(str(self.path)):
                raise
            self.refuse(f"a recording with wrong sites ({error})", "sites each with its own id")
        for stream, found in self.value(document, "maps", dict).items():
            sources, shares = self.value(found, "sources", list), self.value(found, "shares", list)
            if not all(isinstance(row, list) and len(row) == len(sources) for row in shares):
                self.refuse(
                    f"a recording whose map of {stream!r} has rows of another length", f"{len(sources)} shares in each"
                )
            recording.maps[stream] = [*map(str, sources)], [self.floats(row) for row in shares]
        if "balances" in document:  # older files have none
            for stream, found in self.value(document, "balances", dict).items():
                recording.balances[stream] = self._balance(stream, found)
        return recording

    def _balance(self, stream: str, found: Any) -> Balance:
        sources, amounts = (self.value(found, key, list) for key in ("sources", "amounts"))
        if len(sources) != len(amounts):
            self.refuse(
                f"a recording whose balance of {stream!r} has {len(amounts)} amounts",
                f"{len(sources)}, one for each source",
            )
        length, closure = self.floats([found.get("length"), found.get("closure")])
        tokens, refused = self.value(found, "tokens", int), self.value(found, "refused", str)
        return Balance(tuple(map(str, sources)), tuple(self.floats(amounts)), length, tokens, closure, refused)

    def _site(self, site: Any) -> RecordedSite:
        texts = {
            field.name: self.value(site, field.name, str) for field in fields(RecordedSite) if field.name != "layer"
        }
        layer = site.get("layer")
        return RecordedSite(**texts, layer=None if layer is None else self.value(site, "layer", int))

    def add(self, recording: Recording, step: Any, site: int, role: Any, statistic: Any, value: Any) -> None:
        """A number, if it fits the recording."""
        try:
            recording.add(step, site, role, statistic, value)
        except (ValueError, TypeError, OverflowError) as error:
            self.refuse(f"a recording with a wrong number ({error})", "numbers of its own sites, by step")
