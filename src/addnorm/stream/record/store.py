"""Files of recordings: JSON, with everything in one document, or Parquet, a tidy table that other tools read.

Writing is atomic. Reading runs no code: every value is checked, and a file that is no recording raises one sentence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

from addnorm._util import jsonio
from addnorm._util.files import atomic_path, check_writable
from addnorm._util.optional import require
from addnorm.stream.record.measurements import Measurements
from addnorm.stream.record.schema import Balance, Measurement, RecordedSite

SCHEMA = "addnorm.recording"
VERSION = 1
REMEDY = "save the recording again with Recording.save"
JSON_TYPES = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}
SERIES = ("site", "role", "statistic")

R = TypeVar("R", bound=Measurements)
T = TypeVar("T")


class StoredMeasurements(Measurements):
    """Measurements that can be saved to a file and loaded from it."""

    def to_dict(self) -> dict[str, Any]:
        """Return the whole recording as JSON types. NaN and infinity are "NaN", "Infinity", "-Infinity"."""
        series = [
            {**dict(zip(SERIES, key, strict=True)), "steps": values.steps.tolist(), "values": values.values.tolist()}
            for *key, values in self.iter_series()
        ]
        document: dict[str, Any] = jsonio.to_jsonable({**_head(self), "series": series})
        return document

    def save(self, path: str | Path) -> Path:
        """Write a file atomically and return its path.

        Args:
            path: ends in .json, or in .parquet for a tidy table that other tools read (needs `addnorm[data]`).
        """
        path = Path(path)
        is_parquet = _is_parquet(path)
        with atomic_path(path) as temporary:
            if is_parquet:
                _write_parquet(self, temporary)
            else:
                temporary.write_text(jsonio.dumps(self.to_dict()), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ValueError: the file is no recording.
        """
        reader = _Reader(Path(path))
        document = _read_parquet(reader) if _is_parquet(reader.path) else _read_json(reader)
        return reader.recording(document, cls)


def check_path(path: Path) -> None:
    """Check that `save` can write to a path. Call it before work that takes long."""
    if _is_parquet(path):
        require("pyarrow", "write Parquet")
    check_writable(path)


def _head(recording: Measurements) -> dict[str, Any]:
    """Return everything except the series, for `to_jsonable`."""
    maps = recording.memory_maps.items()
    return {
        "schema": SCHEMA,
        "schema_version": VERSION,
        "metadata": recording.metadata,
        "sites": recording.sites,
        "memory_maps": {stream: {"sources": sources, "shares": shares} for stream, (sources, shares) in maps},
        "balances": recording.balances,
    }


def _read_json(reader: _Reader) -> Any:
    try:
        return json.loads(reader.path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reader.fail(f"no JSON ({error})", "the JSON of a recording")


def _write_parquet(recording: Measurements, path: Path) -> None:
    arrow, parquet = require("pyarrow", "write Parquet"), require("pyarrow.parquet", "write Parquet")
    names = Measurement._fields
    text = arrow.dictionary(arrow.int32(), arrow.string())
    types = {"step": arrow.int64(), "layer": arrow.int64(), "value": arrow.float64()}
    columns = [*zip(*recording.table(), strict=True)] or [()] * len(names)
    arrays = [arrow.array(column, types.get(name, text)) for name, column in zip(names, columns, strict=True)]
    head = {SCHEMA: jsonio.dumps_line(_head(recording))}
    parquet.write_table(arrow.table(arrays, names=names).replace_schema_metadata(head), path)


def _read_parquet(reader: _Reader) -> Any:
    """Return the document of a Parquet file, its rows grouped into series: an object for each row would be slow."""
    arrow, parquet = require("pyarrow", "read Parquet"), require("pyarrow.parquet", "read Parquet")
    data = reader.path.read_bytes()
    try:
        table = parquet.ParquetFile(arrow.BufferReader(data)).read()
        head = json.loads((table.schema.metadata or {}).get(SCHEMA.encode(), b"null"))
    except (arrow.ArrowException, OSError, ValueError) as error:
        reader.fail(f"no Parquet ({str(error).splitlines()[0]})", "the Parquet file of a recording")
    if head is None:
        reader.fail(f"a Parquet file without the metadata {SCHEMA!r}", "one that Recording.save wrote")
    names = ("step", *SERIES, "value")
    for name in names:
        if name not in table.column_names:
            reader.fail(f"a table without the column {name!r}", f"the columns {', '.join(names)}")
    try:
        grouped = table.group_by([*SERIES], use_threads=False).aggregate([("step", "list"), ("value", "list")])
    except arrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        reader.fail(f"a table that cannot be read ({reason})", "the types that Recording.save writes")
    places = {site["id"]: place for place, site in enumerate(reader.value(head, "sites", list))}
    rows = grouped.rename_columns([*SERIES, "steps", "values"]).to_pylist()
    return {**head, "series": [row | {"site": places.get(row["site"], -1)} for row in rows]}


@dataclass
class _Reader:
    """Reader of a document of unknown origin."""

    path: Path

    def fail(self, content: str, expected: str, remedy: str = REMEDY) -> NoReturn:
        raise ValueError(f"{self.path} is {content}, expected {expected}: {remedy}.") from None

    def value(self, document: Any, key: str, kind: type[T]) -> T:
        """Return the value of a key, or fail if it has another type."""
        value = document.get(key) if isinstance(document, dict) else None
        if type(value) is not kind:
            content = "missing" if value is None else f"{str(value)[:40]!r}"
            self.fail(f"a recording whose {key!r} is {content}", JSON_TYPES[kind])
        return value

    def floats(self, values: list[Any]) -> list[float]:
        """Convert values to floats: numbers, or the words "NaN", "Infinity", "-Infinity". Fail for others."""
        try:
            return [*map(jsonio.float_of, values)]
        except ValueError:
            self.fail("a recording with values that are no numbers", f"numbers, or {', '.join(jsonio.WORDS)}")

    def recording(self, document: Any, recording_type: type[R]) -> R:
        """Return the recording that a parsed file holds, as a `recording_type`; raise for a wrong schema, version or content."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            schema = document.get("schema") if isinstance(document, dict) else None
            self.fail(f"a document with the schema {schema!r}", f"{SCHEMA!r}")
        version = self.value(document, "schema_version", int)
        if version > VERSION:
            self.fail(f"a recording of version {version}", f"at most {VERSION}", "install a newer addnorm")
        if version < 1:
            self.fail(f"a recording of version {version}", "1 or more")
        sites = [self._site(site) for site in self.value(document, "sites", list)]
        metadata = self.value(document, "metadata", dict)
        try:
            recording = recording_type(sites, metadata)
        except ValueError as error:
            self.fail(f"a recording with wrong sites ({error})", "sites each with its own id")
        for stream, memory_map in self.value(document, "memory_maps", dict).items():
            sources, shares = self.value(memory_map, "sources", list), self.value(memory_map, "shares", list)
            if not all(isinstance(row, list) and len(row) == len(sources) for row in shares):
                content = f"a recording whose memory map of {stream!r} has rows of another length"
                self.fail(content, f"{len(sources)} shares in each")
            recording.memory_maps[stream] = [*map(str, sources)], [self.floats(row) for row in shares]
        if "balances" in document:  # optional: a tool that makes recordings may have none
            for stream, balance in self.value(document, "balances", dict).items():
                recording.balances[stream] = self._balance(stream, balance)
        for row in self.value(document, "series", list):
            self._add_series(recording, row)
        return recording

    def _site(self, site: Any) -> RecordedSite:
        names = [field.name for field in fields(RecordedSite) if field.name != "layer"]
        texts = {name: self.value(site, name, str) for name in names}
        layer = site.get("layer")
        return RecordedSite(**texts, layer=None if layer is None else self.value(site, "layer", int))

    def _balance(self, stream: str, balance: Any) -> Balance:
        sources, amounts = (self.value(balance, key, list) for key in ("sources", "amounts"))
        if len(sources) != len(amounts):
            content = f"a recording whose balance of {stream!r} has {len(amounts)} amounts"
            self.fail(content, f"{len(sources)}, one for each source")
        norm, closure = self.floats([balance.get("stream_norm"), balance.get("closure")])
        tokens, reason = self.value(balance, "tokens", int), self.value(balance, "reason", str)
        total = self.value({"total_tokens": 0} | balance, "total_tokens", int)  # not in older files
        return Balance(tuple(map(str, sources)), tuple(self.floats(amounts)), norm, tokens, closure, reason, total)

    def _add_series(self, recording: Measurements, row: Any) -> None:
        site = self.value(row, "site", int)
        role, statistic = (self.value(row, key, str) for key in ("role", "statistic"))
        steps, values = self.value(row, "steps", list), self.floats(self.value(row, "values", list))
        if len(steps) != len(values) or not all(type(step) is int for step in steps):
            self.fail(f"{len(values)} values at {len(steps)} steps", "a whole number, its step, for each value")
        try:
            for step, value in zip(steps, values, strict=True):
                recording.add(step, site, role, statistic, value)
        except (ValueError, OverflowError) as error:
            self.fail(f"a recording with a wrong number ({error})", "numbers of its own sites, by step")


def _is_parquet(path: Path) -> bool:
    """Return whether the file's suffix is .parquet, not .json; an error for other suffixes."""
    if path.suffix not in (".json", ".parquet"):
        raise ValueError(
            f"path is {str(path)!r}, expected one that ends in .json or .parquet: the suffix selects the format."
        )
    return path.suffix == ".parquet"
