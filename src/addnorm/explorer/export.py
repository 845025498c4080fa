"""`addnorm explore --export`: the page as a folder of files that needs no server.

    export("site/explorer", Recordings(["minilm.json"]))

The stack and streams views offer the settings of a grid, whose numbers are computed here by the functions that the server calls.
A file of `data/` has the settings that a reader changes most; the other settings name the file (`Grid.files`). All files are
scripts that call `addnormExport(name, content)`, and the modules of the page are one script, since browsers neither fetch files
nor import modules from file://.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import addnorm
from addnorm._util.files import UnwritableError, read_text, unwritable_errors, write_text
from addnorm._util.jsonio import dumps_line
from addnorm._util.norms import KINDS
from addnorm._util.optional import install_command
from addnorm.explorer import stack, streams
from addnorm.explorer.page import CONTENT_SECURITY_POLICY, STATIC, describe
from addnorm.explorer.recording import NAMES, Recordings, spread
from addnorm.lab.init_probe import PLACEMENTS, InitProbe
from addnorm.lab.streams_probe import PROBED

DIGITS = 4  # significant digits of numbers, as many as the charts show
MAX_STEPS = 50  # steps of a recording that an export has at most
MANIFEST = "export.json"  # lists the files of an export, by which an older export is recognized
IMPORT = re.compile(r'^import \{ (.+) \} from "(.+)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?(?:function\*?|class|const) (\w+))", re.MULTILINE)


@dataclass(frozen=True)
class Grid:
    """Settings that an exported view offers.

    Attributes:
        view: module of the view.
        values: {parameter: its values}; a parameter that is left out has its default.
        files: parameters that name a file. The others vary within a file.
    """

    view: Any
    values: Mapping[str, tuple[Any, ...]]
    files: tuple[str, ...]

    def values_of(self, name: str) -> tuple[Any, ...]:
        """Return the values of a parameter."""
        return self.values.get(name, (self.view.FIELDS[name].default,))

    def each_file(self) -> list[dict[str, Any]]:
        """Return the parameters of each file."""
        return self._combine(self.files)

    def each_setting(self) -> list[dict[str, Any]]:
        """Return the other parameters of each setting in a file; the page counts them in the same order."""
        return self._combine([name for name in self.view.FIELDS if name not in self.files])

    def _combine(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return all combinations of the values of some parameters."""
        return [dict(zip(names, values, strict=True)) for values in product(*map(self.values_of, names))]


GRIDS = {
    "stack": Grid(
        stack,
        {
            "placement": tuple(PLACEMENTS), "norm": tuple(KINDS), "sublayers": (6, 12, 24, 48),
            "gain": (0.5, 1.0, 2.0), "seed": (0, 1), "residual": (False, True), "final": ("own", "on", "off"),
        },
        ("norm", "sublayers", "gain", "seed"),
    ),
    "streams": Grid(
        streams,
        {
            "wiring": PROBED, "sublayers": (6, 12, 24), "n": (2, 4),
            "perturbation": (0.0, 0.25, 0.5, 1.0), "seed": (0, 1),
        },
        ("sublayers", "seed"),
    ),
}  # fmt: skip


def count_files() -> int:
    """Return the number of files whose numbers are computed, for a progress bar."""
    return sum(len(grid.each_file()) for grid in GRIDS.values())


def export(
    folder: str | Path, recordings: Recordings | None = None, *, on_file: Callable[[], object] = lambda: None
) -> int:
    """Write the page with precomputed numbers to a folder and return its size in bytes.

    The folder is written under another name and renamed at the end, so it is either complete or unchanged. An older export is
    replaced.

    Args:
        folder: the folder to write. It must not exist, or be empty or an older export.
        recordings: the recordings of the page; None: a small example.
        on_file: called after each file whose numbers are computed, `count_files()` times.

    Raises:
        UnwritableError: the folder is something else, or cannot be written.
    """
    loaded = recordings or _record_example()
    loaded.paths = [Path(path).name for path in loaded.paths]  # an export shows the files' names, not their paths
    with _atomic_folder(Path(folder)) as target:
        shutil.copytree(STATIC, target / "static", ignore=shutil.ignore_patterns("*.js", "index.html"))
        write_text(target / "static" / "explorer.js", bundle(STATIC / "app.js"))
        write_text(target / "index.html", _page(read_text(STATIC / "index.html")))
        (target / "data").mkdir()
        _write_data(target, "meta", _describe(loaded))
        for number in range(len(loaded.paths)):
            for k, stream in enumerate(loaded.loaded[number].streams):
                _write_data(target, f"recording-{number}-{k}", _compute_recording(loaded, number, stream))
        for view, grid in GRIDS.items():
            for file in grid.each_file():
                _write_data(target, "-".join([view, *map(_word, file.values())]), compute_file(grid, file))
                on_file()
        files = _list_files(target)
        write_text(target / MANIFEST, json.dumps({"addnorm": addnorm.__version__, "files": files}))
        return sum((target / file).stat().st_size for file in [*files, MANIFEST])


# The numbers.


def compute_file(grid: Grid, file: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server's responses to all settings of a file.

    Returns:
        `places`: for each setting the index of its answer. Settings that differ only in parameters without effect share one.
        `answers`: the responses of the server, rounded, without what is in `shared`.
        `shared`: the entries that are equal in all answers.
    """
    probes = [_canonical(grid.view.parse({**setting, **file})) for setting in grid.each_setting()]
    distinct = [*dict.fromkeys(probes)]
    answers = [_pack(grid.view.compute(probe)) for probe in distinct]
    shared = {
        name: value
        for name, value in answers[0].items()
        if all(name in other and other[name] == value for other in answers)
    }
    return {
        "places": [*map(distinct.index, probes)], "shared": shared,
        "answers": [{name: value for name, value in answer.items() if name not in shared} for answer in answers],
    }  # fmt: skip


def _canonical(probe: Any) -> Any:
    """Return the canonical form of a probe, which is equal for probes with the same measurements."""
    if isinstance(probe, InitProbe):
        own = replace(probe, final_norm=None)
        return own if own.wiring == probe.wiring else probe
    wiring = probe.make_wiring()
    n = probe.n if "n" in dict(wiring.options) else streams.FIELDS["n"].default
    return replace(probe, n=n, perturbation=probe.perturbation if streams.is_learned(wiring) else 0.0)


def _pack(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response with rounded numbers. In its map each source begins at the depth where it is written."""
    packed = {name: _rounded(value) for name, value in answer.items()}
    if "map" in packed:
        packed["map"] = [[share for share in row if share is not None] for row in packed["map"]]
    return packed


def _rounded(value: Any) -> Any:
    """Return the value as JSON types with numbers of `DIGITS` digits. Whole numbers become integers, to be shorter."""

    def round_text(text: str) -> float:
        number = float(f"{float(text):.{DIGITS}g}")
        return int(number) if number.is_integer() and abs(number) < 10**DIGITS else number

    return json.loads(dumps_line(value), parse_float=round_text)


def _describe(recordings: Recordings) -> dict[str, Any]:
    """Return the description of the page, whose parameters have the values of the grids."""
    meta = describe(recordings)
    for view, grid in GRIDS.items():
        meta[view]["files"] = grid.files
        for name, field in meta[view]["fields"].items():
            field["values"] = grid.values_of(name)
    meta["race"] = {"fields": meta["race"]["fields"]}
    for recording, rec in zip(meta["recordings"], recordings.loaded, strict=True):
        recording["steps"] = spread(rec.steps, MAX_STEPS)
    return meta | {"export": {"install": install_command("starlette")}}


def _compute_recording(recordings: Recordings, number: int, stream: str) -> dict[str, Any]:
    """Return the responses of one stream: `base` for the last step, the `series` of each step, `meanings` of the statistics.

    The balance sheet keeps all digits: the page adds its amounts up.
    """
    steps = spread(recordings.loaded[number].steps, MAX_STEPS)

    def respond(**params: Any) -> dict[str, Any]:
        return recordings.compute(recordings.parse({"recording": number, "stream": stream, **params}))

    answers = [respond(step=step) for step in steps]
    times = {name: respond(what=name)["time"] for name in NAMES}
    base = {name: value for name, value in answers[-1].items() if name not in ("series", "time")}
    return {
        "base": base | {"map": _rounded(base["map"])},
        "steps": steps, "series": [_rounded(answer["series"]) for answer in answers],
        "meanings": {name: time["meaning"] for name, time in times.items() if time},
    }  # fmt: skip


def _record_example() -> Recordings:
    """Record some steps of training of a small encoder."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = addnorm.nn.Encoder(4, 32, nhead=4)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        x, target = torch.randn(2, 8, 16, 32)
        with addnorm.record(model) as rec:
            for _ in range(12):
                optimizer.zero_grad()
                (model(x) - target).square().mean().backward()
                optimizer.step()
    rec.metadata["note"] = "an example: twelve steps of training on random numbers"
    with TemporaryDirectory() as temporary:
        return Recordings([rec.save(Path(temporary) / "example.json")])


# The files.


def bundle(entry: Path) -> str:
    """Return a module of the page and all that it imports as one script, each module as a function."""
    done: dict[Path, str] = {}
    parts: list[str] = []

    def add(path: Path) -> str:
        if path in done:
            return done[path]
        imports = []

        def take(match: re.Match[str]) -> str:
            names = match[1].replace(" as ", ": ")
            imports.append(f"const {{ {names} }} = {add((path.parent / match[2]).resolve())};\n")
            return ""

        text = IMPORT.sub(take, read_text(path))
        names = [name for _, name in EXPORT.findall(text)]
        body = "".join(imports) + EXPORT.sub(r"\1", text)
        done[path] = f"module{len(done)}"
        parts.append(f"const {done[path]} = (() => {{\n{body}\nreturn {{ {', '.join(names)} }};\n}})();\n")
        return done[path]

    add(entry.resolve())
    return '(() => {\n"use strict";\n' + "".join(parts) + "})();\n"


def _page(text: str) -> str:
    """Return the page of an export: relative addresses, the script, and the policy that a server would send."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">'
    for old, new in (
        ('<html lang="en">', '<html lang="en" data-export>'),
        ('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}'),
        ('<script type="module" src="/static/app.js">', '<script defer src="/static/explorer.js">'),
        ("All scripts come from this server.", "All scripts are in its folder."),
    ):
        text = text.replace(old, new)
    return text.replace('"/static/', '"static/')


def _write_data(target: Path, name: str, content: Any) -> None:
    script = f"addnormExport({json.dumps(name)}, {dumps_line(content)});\n"
    write_text(target / "data" / f"{name}.js", script)


def _word(value: Any) -> str:
    """Return the text that JavaScript's String(value) gives, which is part of a file's name."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _list_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def check_target(folder: Path) -> None:
    """Check that an export can be written to the folder: it does not exist, is empty, or is an older export.

    Raises:
        UnwritableError: the folder is something else, or cannot be read.
    """
    remedy = "choose another path"
    sentence = f"folder is '{folder}'"
    if folder.is_symlink():
        raise UnwritableError(f"{sentence}, a symbolic link, expected a folder: {remedy}.")
    with unwritable_errors(folder, "folder"):
        if not folder.exists():
            return
        if not folder.is_dir():
            raise UnwritableError(f"{sentence}, which is no folder, expected a new or an empty one: {remedy}.")
        if folder.resolve() in (Path.cwd(), *Path.cwd().parents):
            raise UnwritableError(f"{sentence}, the folder of this terminal, expected another one: {remedy}.")
        files = _list_files(folder)
        if files and files != _read_manifest(folder):
            raise UnwritableError(
                f"{sentence}, which has other files, expected an empty folder or an export: {remedy}."
            )


def _read_manifest(folder: Path) -> list[str]:
    """Return the files of an older export, its manifest included, or an empty list if the folder is no export."""
    try:
        return sorted([*json.loads(read_text(folder / MANIFEST))["files"], MANIFEST])
    except (ValueError, TypeError, KeyError):
        return []


@contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder that becomes `folder` when the block ends, and is removed if the block fails."""
    check_target(folder)
    with unwritable_errors(folder, "folder"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{folder.name[:100]}."
        with TemporaryDirectory(".tmp", prefix, folder.parent, ignore_cleanup_errors=True) as temporary:
            new, old = (Path(temporary) / name for name in ("new", "old"))
            new.mkdir()
            yield new
            check_target(folder)  # meanwhile it may have become another folder
            try:
                if folder.exists():
                    folder.rename(old)
                new.rename(folder)
            finally:
                if old.exists() and not folder.exists():
                    old.rename(folder)
