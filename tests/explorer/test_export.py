"""Tests of the exported page: its numbers are the server's, its folder is whole or as it was, and it works from the disk."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from addnorm._util.files import UnwritableError
from addnorm._util.jsonio import to_jsonable
from addnorm.explorer import export as module
from addnorm.explorer import stack, streams
from addnorm.explorer.export import Grid, export
from addnorm.explorer.page import STATIC
from addnorm.explorer.recording import Recordings
from support.browser import READY, ExplorerPage, drawn
from support.report_pages import Document

GRIDS = {
    "stack": Grid(
        stack,
        {
            "placement": ("post", "pre", "deepnorm"), "sublayers": (4, 24), "gain": (0.5, 1.0), "seed": (0, 1),
            "residual": (False, True), "final": ("own", "on", "off"),
        },
        ("sublayers", "gain"),
    ),
    "streams": Grid(
        streams,
        {
            "wiring": ("pre_ln", "reversible", "hyper_connections", "attention_residuals"), "sublayers": (4, 12), "n": (2, 4),
            "perturbation": (0.0, 0.25),
        },
        ("sublayers",),
    ),
}  # fmt: skip
record_example = cache(module._record_example)


def make_export(folder, recordings=None, **options):
    """Write an export with the small grids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_record_example", record_example)
        patch.setattr(module, "GRIDS", options.pop("grids", GRIDS))
        return export(folder, recordings, **options)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, recordings):
    """Return the folder of an export of the test's recordings."""
    folder = tmp_path_factory.mktemp("export") / "page"
    make_export(folder, Recordings(recordings))
    return folder


def read(folder, name):
    """Return the content of a data file."""
    text = (folder / "data" / f"{name}.js").read_text()
    start = f'addnormExport("{name}", '
    assert text.startswith(start)
    return json.loads(text.removeprefix(start).removesuffix(");\n"))


def rounded(document):
    """Return a document after a round trip through JSON, with numbers of four digits."""
    return json.loads(json.dumps(document), parse_float=lambda text: float(f"{float(text):.4g}"))


def respond(view, params):
    """Return the server's response to a request."""
    return to_jsonable(view.compute(view.parse(params)))


# Numbers.


@pytest.mark.parametrize("view", [*GRIDS])
def test_files_have_the_numbers_of_the_server(exported, view):
    grid = GRIDS[view]
    for file in grid.each_file():
        content = read(exported, "-".join([view, *(f"{value:g}" for value in file.values())]))
        settings = [{**setting, **file} for setting in grid.each_setting()]
        assert len(settings) == len(content["places"])
        for setting, place in [*zip(settings, content["places"], strict=True)][::3]:
            answer = content["shared"] | content["answers"][place]
            if "map" in answer:
                answer["map"] = [[None] * k + row for k, row in enumerate(answer["map"])]
            assert rounded(answer) == rounded(respond(grid.view, setting))


def test_published_grids_are_valid_settings_with_the_defaults():
    for view, grid in module.GRIDS.items():
        for name, field in grid.view.FIELDS.items():
            values = grid.values_of(name)
            assert field.default in values, (view, name)
            assert [field.check(name, value) for value in values] == [*values], (view, name)


def test_description_names_the_values_and_hides_paths(exported, recordings):
    meta = read(exported, "meta")
    assert meta["stack"]["fields"]["sublayers"]["values"] == [4, 24]
    assert meta["stack"]["fields"]["d_model"]["values"] == [stack.FIELDS["d_model"].default]
    assert meta["export"]["install"] == "pip install 'addnorm[web]'"
    assert [recording["path"] for recording in meta["recordings"]] == [Path(path).name for path in recordings]
    folder = str(Path(next(iter(recordings))).parent)
    assert not [path for path in exported.rglob("*.js") if folder in path.read_text()]


# The folder.


def test_export_is_a_page_with_all_its_files(exported):
    page = Document((exported / "index.html").read_text())
    addresses = {one["href"] for one in page.all("link")} | {one["src"] for one in page.all("script")}
    addresses = {address for address in addresses if not address.startswith("data:")}
    assert all((exported / address).is_file() for address in addresses)
    styles = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.css")}
    assert {f"static/{path}" for path in styles} | {"static/explorer.js"} == addresses
    (policy,) = (one["content"] for one in page.all("meta") if "http-equiv" in one)
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "connect-src" not in policy  # the page loads nothing but scripts and styles
    manifest = json.loads((exported / "export.json").read_text())["files"]
    files = {path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file()}
    assert {*manifest, "export.json"} == files
    assert not re.search(r"https?://(?!www\.w3\.org)", (exported / "static" / "explorer.js").read_text())


SMALL = {"stack": Grid(stack, {"sublayers": (2,), "seed": (0, 1)}, ("seed",))}


def test_export_replaces_an_older_one_and_reports_its_size(tmp_path):
    folder, calls = tmp_path / "new" / "page", []
    folder.mkdir(parents=True)
    size = make_export(folder, grids=SMALL, on_file=lambda: calls.append(1))
    assert calls == [1, 1]
    assert size == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    (folder / "index.html").write_text("of 2025")
    make_export(folder, grids=SMALL)
    assert "of 2025" not in (folder / "index.html").read_text()
    assert [*folder.parent.iterdir()] == [folder]
    meta = read(folder, "meta")
    assert [(one["name"], len(one["steps"])) for one in meta["recordings"]] == [("example.json", 12)]


@pytest.mark.parametrize("has_older", [False, True])
def test_interrupted_export_leaves_the_folder_as_it_was(tmp_path, has_older):
    folder = tmp_path / "page"
    if has_older:
        make_export(folder, grids=SMALL)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def interrupt():
        assert any(path.name.endswith(".tmp") for path in tmp_path.iterdir())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_export(folder, grids=SMALL, on_file=interrupt)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [*tmp_path.iterdir()] == [folder] * has_older


def test_export_does_not_replace_a_folder_that_changed_meanwhile(tmp_path):
    folder = tmp_path / "page"

    def fill():
        folder.mkdir(exist_ok=True)
        (folder / "mine.txt").write_text("mine")

    with pytest.raises(UnwritableError, match="which has other files"):
        make_export(folder, grids=SMALL, on_file=fill)
    assert [path.name for path in tmp_path.rglob("*")] == ["page", "mine.txt"]


# The page, opened from the disk.


@pytest.fixture
def disk_page(exported, context):
    """Yield the exported page."""
    page = ExplorerPage(context.new_page(), exported.as_uri(), file="index.html")
    yield page
    page.page.close()
    page.assert_clean()


def test_page_shows_the_exported_numbers(disk_page):
    page = disk_page.show("#v=1&S=4&gain=0.5&pins=place:pre,S:4,gain:0.5")
    for keys, params in (("1", {"placement": "post"}), ("2", {"placement": "pre"}), ("5", {"placement": "deepnorm"})):
        if keys != "1":
            disk_page.after(page.keyboard.press, keys)
        expected = respond(stack, {"sublayers": 4, "gain": 0.5} | params)
        assert rounded(json.loads(disk_page.download("JSON"))["measured"]) == rounded(expected)
    assert page.locator("#panel-stack input[type=range]:visible").count() == 3
    assert disk_page.read("#panel-stack .exported code") == "pip install 'addnorm[web]'\naddnorm explore"
    page = disk_page.show("#v=1&view=streams&swiring=hyper_connections&sS=4&sn=2", "streams")
    expected = respond(streams, {"wiring": "hyper_connections", "sublayers": 4, "n": 2})
    assert rounded(json.loads(disk_page.download("JSON"))["measured"]) == rounded(expected)


def test_sliders_move_over_the_values(disk_page):
    page = disk_page.show("#v=1&S=4")
    slider = page.get_by_label("Sublayers", exact=True).first
    disk_page.after(slider.press, "ArrowRight")
    assert page.locator("#panel-stack output").first.inner_text() == "24"
    disk_page.after(disk_page.click, "Another seed")
    assert disk_page.fragment() == "#v=1&seed=1"


def test_other_settings_of_an_address_become_the_nearest(disk_page):
    page = disk_page.show("#v=1&S=14&d=128&gain=9")
    assert page.locator("#notices p span").all_inner_texts() == [
        "S is '14' in the address, expected 4 or 24 in this exported page: 4 was used.",
        "d is '128' in the address, expected 64 in this exported page: 64 was used.",
        "gain is '9' in the address, expected 0.5 or 1 in this exported page: 1 was used.",
    ]
    assert disk_page.marks("stream", "post-LN") == [
        float(f"{value:.4g}") for value in drawn(respond(stack, {"sublayers": 4})["stream"])
    ]


@pytest.mark.parametrize(
    ("more", "query"),
    [
        ("", {"what": "out.rms"}),
        ("&rstep=1&rwhat=write.ratio&rdepth=2", {"step": 1, "what": "write.ratio", "depth": 2}),
        ("&rwhat=write.ratio&rdepth=0", {"what": "write.ratio", "depth": 0}),  # x_0 has no write
        ("&rec=3&rstream=decoder", {"stream": "decoder"}),
    ],
)
def test_recordings_are_those_of_the_server(disk_page, recordings, more, query):
    disk_page.recording(more)
    number = 3 if "rec=3" in more else 0
    expected = respond(Recordings(recordings), {"recording": number, **query})
    found = json.loads(disk_page.download("JSON"))
    found = found.get("recording", found)
    assert found["path"] == Path(expected.pop("path")).name
    assert rounded({name: found[name] for name in expected}) == rounded(expected)


def test_example_is_shown_with_its_name_and_steps(disk_page, tmp_path):
    make_export(tmp_path / "page", grids=SMALL)
    disk_page.address = (tmp_path / "page").as_uri()
    page = disk_page.recording("&rstep=3")
    assert page.locator("#panel-recording h2").first.inner_text() == "A recording: example.json (Encoder)"
    assert page.get_by_role("slider", name="Step", exact=True).get_attribute("aria-valuetext") == "step 3"


def test_missing_steps_and_files_are_reported(disk_page, exported):
    page = disk_page.recording("&rstep=77")
    wrong = page.locator("#panel-recording .wrong")
    assert wrong.inner_text() == (
        "step is 77, which this exported page does not have. The last step of the first stream is shown."
    )
    file = exported / "data" / "stack-24-0.5.js"
    away = file.rename(file.with_suffix(".away"))
    try:
        disk_page.open("#v=1&gain=0.5")
        page.wait_for_selector("#panel-stack .wrong:not([hidden])")
        assert "data/stack-24-0.5.js of this exported page cannot be loaded" in disk_page.read("#panel-stack .wrong")
    finally:
        away.rename(file)
    disk_page.after(page.keyboard.press, "2")
    assert page.locator("#panel-stack .wrong").is_hidden()
    assert len(disk_page.console) == 1  # the browser's own line about the file
    disk_page.console.clear()


def test_race_names_what_it_needs(disk_page):
    page = disk_page.open("#v=1&view=race&L=2", READY["race"])
    assert disk_page.read("#panel-race .exported p") == (
        "A race trains two small models, so it runs on your own machine:"
    )
    assert page.locator("#panel-race button").count() == 0
    assert disk_page.violations() == []
    assert all("style.css" in line for line in disk_page.console if "violates" in line)
    disk_page.console.clear()  # axe requests the styles, which the policy does not allow
    disk_page.click("Help and keys")
    assert "computed beforehand by addnorm" in page.get_by_role("dialog").inner_text()
