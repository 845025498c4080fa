"""Files of recordings: JSON, with everything in one document, or Parquet, a tidy table that other tools read.

Writing is atomic. Reading runs no code: every value is checked, and a file that is no recording raises one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from addnorm._util import jsonio
from addnorm._util.files import atomic_path
from addnorm._util.optional import require
from addnorm.stream.record.measurements import Measurements
from addnorm.stream.record.schema import Balance, Measurement, RecordedSite

__all__ = ["SCHEMA", "VERSION", "load", "save", "to_dict"]

SCHEMA = "addnorm.recording"
VERSION = 1
REMEDY = "save the recording again with Recording.save"
KINDS = {str: "a text", int: "a whole number", float: "a number", list: "a list", dict: "an object"}

R = TypeVar("R", bound=Measurements)
T = TypeVar("T")


def to_dict(recording: Measurements) -> dict[str, Any]:
    """Return everything as JSON types, numbers that are not finite as words."""
    document: dict[str, Any] = jsonio.to_jsonable(_document(recording))
    return document


def _document(recording: Measurements) -> dict[str, Any]:
    series = [
        {
            "site": site,
            "role": role,
            "statistic": name,
            "steps": values.steps.tolist(),
            "values": values.values.tolist(),
        }
        for site, role, name, values in recording.iter_series()
    ]
    return {**_head(recording), "series": series}


def _head(recording: Measurements) -> dict[str, Any]:
    """Return everything except the series."""
    return {
        "schema": SCHEMA,
        "schema_version": VERSION,
        "metadata": recording.metadata,
        "sites": [asdict(site) for site in recording.sites],
        "memory_maps": {
            stream: {"sources": sources, "shares": shares}
            for stream, (sources, shares) in recording.memory_maps.items()
        },
        "balances": {stream: asdict(balance) for stream, balance in recording.balances.items()},
    }


def save(recording: Measurements, path: Path) -> Path:
    """Write a recording to a file whose suffix is .json or .parquet, atomically, and return its path."""
    write = _format(path)[0]
    with atomic_path(path) as temporary:
        write(recording, temporary)
    return path


def load(path: Path, recording_type: type[R]) -> R:
    """Read a file that `save` wrote.

    Raises:
        ValueError: the file is no recording.
        FileNotFoundError: there is no file.
    """
    recording: R = _format(path)[1](_File(path), recording_type)
    return recording


def _write_json(recording: Measurements, path: Path) -> None:
    path.write_text(jsonio.dumps(_document(recording)), encoding="utf-8")


def _read_json(file: _File, recording_type: type[R]) -> R:
    try:
        document = json.loads(file.path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        file.fail(f"no JSON ({error})", "the JSON of a recording")
    recording = file.recording(document, recording_type)
    for row in file.value(document, "series", list):
        site = file.value(row, "site", int)
        role, statistic = (file.value(row, key, str) for key in ("role", "statistic"))
        steps, values = file.value(row, "steps", list), file.floats(file.value(row, "values", list))
        if len(steps) != len(values) or not all(type(step) is int for step in steps):
            file.fail(f"{len(values)} values at {len(steps)} steps", "a whole number, its step, for each value")
        for step, value in zip(steps, values, strict=True):
            file.add(recording, step, site, role, statistic, value)
    return recording


def _write_parquet(recording: Measurements, path: Path) -> None:
    arrow, parquet = require("pyarrow", "write Parquet"), require("pyarrow.parquet", "write Parquet")
    names = Measurement._fields
    text = arrow.dictionary(arrow.int32(), arrow.string())
    types = {"step": arrow.int64(), "site": text, "layer": arrow.int64(), "role": text, "statistic": text}
    columns = [*zip(*recording.table(), strict=True)] or [()] * len(names)
    arrays = [
        arrow.array(column, types.get(name, arrow.float64())) for name, column in zip(names, columns, strict=True)
    ]
    head = {SCHEMA: jsonio.dumps_line(_head(recording))}
    parquet.write_table(arrow.table(arrays, names=names).replace_schema_metadata(head), path)


def _read_parquet(file: _File, recording_type: type[R]) -> R:
    arrow, parquet = require("pyarrow", "read Parquet"), require("pyarrow.parquet", "read Parquet")
    data = file.path.read_bytes()
    try:
        table = parquet.ParquetFile(arrow.BufferReader(data)).read()
        head = json.loads((table.schema.metadata or {}).get(SCHEMA.encode(), b"null"))
    except (arrow.ArrowException, OSError, ValueError) as error:
        file.fail(f"no Parquet ({str(error).splitlines()[0]})", "the Parquet file of a recording")
    if head is None:
        file.fail(f"a Parquet file without the metadata {SCHEMA!r}", "one that Recording.save wrote")
    recording = file.recording(head, recording_type)
    places = {site.id: place for place, site in enumerate(recording.sites)}
    names = ("step", "site", "role", "statistic", "value")
    for name in names:
        if name not in table.column_names:
            file.fail(f"a table without the column {name!r}", f"the columns {', '.join(names)}")
    keys = ["site", "role", "statistic"]
    try:  # grouped by series: Python objects for each of a million rows would be slow
        grouped = table.group_by(keys, use_threads=False).aggregate([("step", "list"), ("value", "list")])
    except arrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        file.fail(f"a table that cannot be read ({reason})", "the types that Recording.save writes")
    columns = (grouped[name].to_pylist() for name in (*keys, "step_list", "value_list"))
    for site, role, statistic, steps, values in zip(*columns, strict=True):
        for step, value in zip(steps, values, strict=True):
            file.add(recording, step, places.get(site, -1), role, statistic, value)
    return recording


class _File:
    """Reader of values from a document of unknown origin."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, content: str, expected: str, remedy: str = REMEDY) -> NoReturn:
        raise ValueError(f"{self.path} is {content}, expected {expected}: {remedy}.") from None

    def value(self, document: Any, key: str, kind: type[T]) -> T:
        """Return the value of a key, or fail if it has another type."""
        value = document.get(key) if isinstance(document, dict) else None
        if type(value) is not kind:
            content = "missing" if value is None else f"{str(value)[:40]!r}"
            self.fail(f"a recording whose {key!r} is {content}", KINDS[kind])
        return value

    def floats(self, values: list[Any]) -> list[float]:
        """Return numbers, some of which are words."""
        try:
            return [*map(jsonio.float_of, values)]
        except ValueError:
            self.fail("a recording with values that are no numbers", f"numbers, or {', '.join(jsonio.WORDS)}")

    def recording(self, document: Any, recording_type: type[R]) -> R:
        """Return the recording without its series."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            schema = document.get("schema") if isinstance(document, dict) else None
            self.fail(f"a document with the schema {schema!r}", f"{SCHEMA!r}")
        version = self.value(document, "schema_version", int)
        if version > VERSION:
            self.fail(f"a recording of version {version}", f"at most {VERSION}", "install a newer addnorm")
        if version < 1:
            self.fail(f"a recording of version {version}", "1 or more")
        try:
            sites = [self._site(site) for site in self.value(document, "sites", list)]
            recording = recording_type(sites, self.value(document, "metadata", dict))
        except ValueError as error:
            if str(error).startswith(str(self.path)):
                raise
            self.fail(f"a recording with wrong sites ({error})", "sites each with its own id")
        for stream, memory_map in self.value(document, "memory_maps", dict).items():
            sources, shares = self.value(memory_map, "sources", list), self.value(memory_map, "shares", list)
            if not all(isinstance(row, list) and len(row) == len(sources) for row in shares):
                self.fail(
                    f"a recording whose memory map of {stream!r} has rows of another length",
                    f"{len(sources)} shares in each",
                )
            recording.memory_maps[stream] = [*map(str, sources)], [self.floats(row) for row in shares]
        if "balances" in document:  # optional: a tool that makes recordings may have none
            for stream, balance in self.value(document, "balances", dict).items():
                recording.balances[stream] = self._balance(stream, balance)
        return recording

    def _balance(self, stream: str, balance: Any) -> Balance:
        sources, amounts = (self.value(balance, key, list) for key in ("sources", "amounts"))
        if len(sources) != len(amounts):
            self.fail(
                f"a recording whose balance of {stream!r} has {len(amounts)} amounts",
                f"{len(sources)}, one for each source",
            )
        norm, closure = self.floats([balance.get("stream_norm"), balance.get("closure")])
        tokens, reason = self.value(balance, "tokens", int), self.value(balance, "reason", str)
        total = self.value({"total_tokens": 0} | balance, "total_tokens", int)  # not in older files
        return Balance(tuple(map(str, sources)), tuple(self.floats(amounts)), norm, tokens, closure, reason, total)

    def _site(self, site: Any) -> RecordedSite:
        texts = {
            field.name: self.value(site, field.name, str) for field in fields(RecordedSite) if field.name != "layer"
        }
        layer = site.get("layer")
        return RecordedSite(**texts, layer=None if layer is None else self.value(site, "layer", int))

    def add(self, recording: Measurements, step: Any, site: int, role: Any, statistic: Any, value: Any) -> None:
        """Add a number, or fail if it does not fit the recording."""
        try:
            recording.add(step, site, role, statistic, value)
        except (ValueError, TypeError, OverflowError) as error:
            self.fail(f"a recording with a wrong number ({error})", "numbers of its own sites, by step")


Write = Callable[[Measurements, Path], None]
Read = Callable[[_File, type[Any]], Any]
_FORMATS: dict[str, tuple[Write, Read]] = {
    ".json": (_write_json, _read_json),
    ".parquet": (_write_parquet, _read_parquet),
}


def _format(path: Path) -> tuple[Write, Read]:
    """Return the writer and the reader for the file's suffix."""
    if path.suffix not in _FORMATS:
        raise ValueError(
            f"path is {str(path)!r}, expected one that ends in {' or '.join(_FORMATS)}: the suffix selects the format."
        )
    return _FORMATS[path.suffix]
