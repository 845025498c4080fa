"""Tests of docs/add_norm.md, and of the tables for and against it in claims.md: numbers of the results and of the code."""

import re

import pytest
import torch

import addnorm
from addnorm.trace import PRESETS
from support.loading import ROOT, load

PAGE = ROOT / "docs/add_norm.md"


@pytest.fixture
def script(monkeypatch):
    """Return the script, with copies of the results that tests may change."""
    monkeypatch.syspath_prepend(ROOT / "docs/_build")
    module = load("docs/_build/arguments.py")
    documents = {name: module.page.document(name) for name in ("claims", "stack", "fuse")}
    monkeypatch.setattr(module.page, "document", documents.__getitem__)
    return module


def claim_of(script, claim):
    """Return the entry of a claim, which tests may change."""
    (entry,) = (entry for entry in script.page.document("claims")["claims"] if entry["claim"] == claim)
    return entry


def test_other_results_change_the_page(script):
    entry = claim_of(script, "Norm keeps the scale of the stream stable.")
    entry["measured"]["pre_ln"]["64"], entry["verdict"] = 1234.0, "refuted"
    (line,) = [line for line in script.pros().splitlines() if line.startswith("| It steadies the scale")]
    assert "pre-LN 1.2e3; without norms" in line
    assert line.endswith("| [refuted](#by-depth-untrained) |")  # a refuted advantage stays, and says so


def test_page_counts_the_advantages_that_hold_in_part(script):
    assert script.pros().count("[in part](") == 3
    assert "three of the five arguments for it hold only in part" in PAGE.read_text()


def test_missing_claim_is_an_error(script):
    claim_of(script, script.COSTS)["claim"] = "another"
    with pytest.raises(SystemExit, match=r"claims\.json has no claim 'Add & Norm adds extra"):
        script.cons()


def test_five_pros_and_cons_have_numbers_and_links(script):
    assert len(script.PROS) == len(script.CONS) == 5
    tables = "\n".join(script.SECTIONS[f"claims:{name}"]() for name in ("pros", "cons")).splitlines()
    rows = [row for row in tables if row.startswith("| ") and not row.startswith(("| for", "| against", "| :--"))]
    assert len(rows) == 10
    for row in rows:
        assert re.search(r"\d", row.split("|")[2]), row
        assert re.search(r"\]\([^)]+\)", row), row


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.366e-11, "2.4e-11"), (3.69e14, "3.7e14"), (8.7024, "8.7"), (0.0, "0"), (2.747e-5, "2.7e-5"), (1234.0, "1.2e3")],
)
def test_numbers_are_short(script, value, text):
    assert script.n(value) == text


def test_links_lead_to_headings():
    links = re.findall(r"\]\(([\w.]*)#([\w-]+)\)", PAGE.read_text())
    assert len(links) > 15
    for target, anchor in links:
        text = (PAGE.parent / (target or PAGE.name)).read_text()
        headings = re.findall(r"^#+ (.*)$", text, re.M)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{target}#{anchor}"


def test_shape_rule_is_the_sentence_of_the_library():
    sentence = re.search(r"^> (branch has .*)$", PAGE.read_text(), re.M)[1]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        addnorm.add_layer_norm(torch.zeros(2, 4), torch.zeros(2, 5))


def test_second_example_has_the_numbers_of_the_trace():
    t, page = PRESETS["lesson-001"].trace(), PAGE.read_text()
    for name, places in (("z", 2), ("centred", 2), ("squares", 4), ("normalized", 4)):
        assert f"[{', '.join(f'{value:.{places}f}' for value in t[name].value)}]" in page, name
    assert f"= {t['mean'].value:.2f} |" in page
    assert f"= {t['variance'].value:.4f} |" in page
    assert f"| {t['root'].value:.4f} |" in page
    rounded = [f"{value / 1.04:.4f}" for value in t["centred"].value]
    assert f"dividing by 1.04 gives [{', '.join(rounded)}]" in page


def test_symbols_name_parameters_of_the_code():
    names = {"residual", "branch", "weight", "bias", "eps"}
    assert names <= {*addnorm.add_layer_norm.__code__.co_varnames}
    assert names <= {*re.findall(r"\| .* \| `(\w+)` \|", PAGE.read_text())}
