"""Tests of docs/api.md: it lists every public name once, as docs/_build/api.py reads it from the package."""

import importlib
import re
from types import ModuleType

import pytest

import addnorm
import addnorm.trace
from support.loading import ROOT, load

PAGE = ROOT / "docs/api.md"


@pytest.fixture
def script():
    return load("docs/_build/api.py")


def headings() -> list[str]:
    return re.findall(r"^### `([\w.]+)`$", PAGE.read_text(), re.M)


def test_public_modules_are_imported_at_first_use(monkeypatch):
    rooms = {path.split(".")[1] for path in headings() if path.count(".") == 2} - {"nn", "wirings"}
    assert {"lab", "report", "trace", "distributed", "onnx"} <= rooms
    for room in rooms:
        monkeypatch.delattr(addnorm, room, raising=False)  # as in a fresh process
        assert getattr(addnorm, room).__name__ == f"addnorm.{room}"


def test_every_public_name_has_one_heading():
    paths = headings()
    assert len(paths) == len({*paths})
    for path in paths:
        room, _, short = path.rpartition(".")
        assert short in importlib.import_module(room).__all__
    page = PAGE.read_text()
    for name in addnorm.__all__:
        assert f"addnorm.{name}" in paths
    for name in addnorm.nn.__all__:
        assert f"addnorm.nn.{name}" in paths or f"Also `addnorm.nn.{name}`." in page
    for room in (addnorm.trace, addnorm.stream):
        assert {f"{room.__name__}.{name}" for name in room.__all__} <= {*paths}
    assert "addnorm.stream.inspect" not in page


def test_index_links_lead_to_headings():
    page = PAGE.read_text()
    anchors: dict[str, int] = {}
    for heading in re.findall(r"^##+ (.*)$", page, re.M):
        plain = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        anchors[plain] = anchors.get(plain, -1) + 1
    expected = {f"{plain}-{k}" if k else plain for plain, last in anchors.items() for k in range(last + 1)}
    assert {*re.findall(r"\(#([^)]*)\)", page)} == expected
    assert "[`addnorm.trace.Trace`](#addnormtracetrace), " in page
    assert "[`addnorm.trace.trace`](#addnormtracetrace-1)" in page


def test_entry_has_signature_first_line_and_source(script):
    page = PAGE.read_text()
    assert "addnorm.nn.Encoder(num_layers, d_model, nhead, dim_feedforward=None, wiring='pre_ln', *,\n" in page
    assert "addnorm.unfuse(model) -> nn.Module" in page
    assert "with addnorm.scale_write(site, s):" in page
    for name in set(addnorm.__all__) - {"wirings"}:
        value = getattr(addnorm, name)
        assert value.__doc__.strip().splitlines()[0] in page
        call = script.signature(f"addnorm.{name}", value)
        assert f"\n```text\n{call}\n```\n" in page
        assert all(len(line) <= 100 for line in call.splitlines())


def test_class_lists_its_methods_without_fields():
    entry = PAGE.read_text().split("### `addnorm.ResidualStack`")[1].split("###")[0]
    assert "- `.without(i)`: Return this stack without the write of sublayer i" in entry
    assert "extra_repr" not in entry
    wiring = PAGE.read_text().split("### `addnorm.Wiring`")[1].split("###")[0]
    assert "- `.draw()`: " in wiring
    assert "- `.init(" not in wiring


def publish(monkeypatch, value: object) -> None:
    monkeypatch.setattr(addnorm, "novelty", value, raising=False)
    monkeypatch.setattr(addnorm, "__all__", [*addnorm.__all__, "novelty"])


def test_new_name_needs_a_section_and_a_docstring(script, monkeypatch):
    def novelty():
        pass

    publish(monkeypatch, novelty)
    novelty.__module__ = "addnorm.elsewhere"
    with pytest.raises(SystemExit, match=r"addnorm\.novelty is defined in addnorm\.elsewhere.* add a line to MODULES"):
        script.each()
    novelty.__module__ = "addnorm.functional"
    with pytest.raises(SystemExit, match=r"addnorm\.novelty is public and has no docstring"):
        script.each()


def test_new_module_needs_one_line(script, monkeypatch):
    line = script.Module("addnorm.lab.result_store", "The store", "For the researcher.", alone=True)
    monkeypatch.setattr(script, "MODULES", (*script.MODULES, line))
    page = script.each()
    assert "## The store\n\nFor the researcher.\n" in page
    assert (
        "### `addnorm.lab.result_store.read_progress`\n\n```text\naddnorm.lab.result_store.read_progress(path) -> tuple[int, float] | None\n```\n"
        in page
    )


def test_default_with_an_address_is_refused(script):
    def novelty(at=object()):  # noqa: B008  # such a default is what is refused
        """It has one."""

    with pytest.raises(SystemExit, match="another in every run"):
        script.signature("addnorm.novelty", novelty)


def test_module_and_constant_have_no_signature(script):
    assert isinstance(addnorm.wirings, ModuleType)
    assert "### `addnorm.wirings`\n\nResidual wirings as data" in PAGE.read_text()
    with pytest.raises(SystemExit, match="say in CONSTANTS"):
        script.first_line(script.Name("addnorm.trace.NOVELTY", "", (1, 2)))
