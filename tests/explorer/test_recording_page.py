"""Tests of the recording view in Chromium: its marks and rows equal the file, and failed proofs are reported."""

import csv
import json
import math

import pytest

import addnorm
from addnorm.stream.shares import BIASES
from support.explorer_recordings import STEPS

CHARTS = {
    "stream": {"stream": "out.rms"},
    "gradients": {"of the stream": "grad.l2", "of the sublayer's parameters": "params.grad_l2"},
    "ratio": {"write / stream": "write.ratio"},
    "cosine": {"cosine": "write.cosine"},
    "similarity": {"similarity": "out.similarity"},
    "sigma": {
        "norm before the sublayer": "norm_in.sigma", "norm after the add": "norm_out.sigma", "final norm": "norm_final.sigma",
    },
    "largest": {"largest element of the stream": "out.max"},
}  # fmt: skip
POST, PRE, SCALED = 0, 1, 2


@pytest.fixture(scope="module")
def files(recordings):
    """Return the recordings read from their files, by number."""
    return [addnorm.stream.Recording.load(path) for path in recordings]


def by_depth(rec, name, step):
    """Return a series by depth, with None for missing values, as long as the list of its marks."""
    series = {site.id: value for site, value in rec.series(*name.split("."), step=step)}
    values = [series.get(site.id) for site in rec.sites]
    while values and values[-1] is None:
        values.pop()
    return values


def assert_drawn(explorer, rec, step):
    """Check that each chart's marks equal the recording, to the last digit."""
    marks, _ = explorer.charts()
    drawn = 0
    for chart, lines in CHARTS.items():
        for name, series in lines.items():
            expected = by_depth(rec, series, step)
            assert marks.get(f"recording-{chart}", {}).get(name, []) == expected, (chart, name)
            drawn += len(expected) > 0
    assert drawn >= 6


def test_recording_marks_equal_file(explorer, files):
    for number, rec in enumerate(files):
        explorer.recording(f"&rec={number}")
        assert_drawn(explorer, rec, rec.steps[-1])


def test_recording_step_slider_and_comparison(explorer, files):
    page = explorer.recording("&rwith=first")
    rec = files[POST]
    slider = page.get_by_role("slider", name="Step", exact=True)
    assert slider.get_attribute("aria-valuetext") == f"step {STEPS - 1}"
    for step in (2, 1):
        explorer.after(lambda: slider.press("ArrowLeft"), "recording")
        assert_drawn(explorer, rec, step)
        assert f"rstep={step}" in explorer.fragment()
        assert slider.get_attribute("aria-valuetext") == f"step {step}"
    assert explorer.marks("recording-stream", "stream, step 0") == by_depth(rec, "out.rms", 0)
    page.locator("h2").first.click()
    explorer.pass_time(1100)  # steps within a second are one step for the Back button
    explorer.after(lambda: page.keyboard.press("]"), "recording")
    assert_drawn(explorer, rec, 2)
    explorer.after(page.go_back, "recording")
    assert_drawn(explorer, rec, 1)


def test_recording_statistic_over_steps(explorer, files):
    page = explorer.recording("&rdepth=3")
    rec = files[POST]
    site = rec.sites[3]
    explorer.after(lambda: page.get_by_label("Statistic").select_option("write.ratio"), "recording")
    expected = [value for _, value in rec.over_time(site, "write", "ratio")]
    assert len(expected) == STEPS
    assert explorer.marks("recording-time", "write / stream, feed-forward 2") != expected
    assert explorer.marks("recording-time", "write / stream, attention 2") == expected
    cursor = page.get_by_role("slider", name="Over the steps: data cursor")
    cursor.focus()
    explorer.after(lambda: page.keyboard.press("Home"), "recording")
    assert "rstep=0" in explorer.fragment()
    assert_drawn(explorer, rec, 0)


def test_recording_cursors_are_linked(explorer):
    page = explorer.recording()
    page.get_by_role("slider", name="Residual stream: data cursor").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    places = page.eval_on_selector_all(
        ".charts .cursor[role=slider]", "all => all.map(one => one.getAttribute('aria-valuetext').split(':')[0])"
    )
    assert {place for place in places if place != "no place selected"} == {"attention 3"}
    assert "attention 3" in page.get_by_role("slider", name="Sources of the stream").get_attribute("aria-valuetext")
    assert "rdepth=5" in explorer.fragment()


def test_recording_map_equals_file(explorer, files):
    page = explorer.recording(f"&rec={PRE}")
    _, shares = files[PRE].memory_maps["stream"]
    cells = page.eval_on_selector_all(
        "#chart-recording-map .cell", "all => all.map(c => [Number(c.dataset.index), Number(c.dataset.value)])"
    )
    assert len(cells) > 20
    for depth, column in enumerate(shares):
        assert sorted(value for at, value in cells if at == depth) == sorted(share for share in column if share)


# The balance sheet.


def number(text):
    return float(text.replace("−", "-").replace("%", "").strip())


def sheet(page):
    """Return the rows of the balance sheet: source, deposited, left at the end with every digit, share."""
    return page.eval_on_selector_all(
        ".recording-sheet tbody tr",
        """rows => rows.map((row) => {
          const [deposited, left, share] = row.querySelectorAll('td');
          const text = (element) => element.innerText;
          return [text(row.querySelector('th span')), text(deposited), Number(left.dataset.value), text(share.querySelector('span') )];
        })""",
    )


@pytest.mark.parametrize("which", [POST, PRE])
def test_balance_table_adds_up(explorer, files, which):
    page = explorer.recording(f"&rec={which}")
    rec = files[which]
    balance = rec.balances["stream"]
    rows = sheet(page)
    pairs = sorted(
        zip(balance.sources, balance.amounts, strict=True), key=lambda pair: pair[0] == BIASES
    )  # these come last
    assert [row[2] for row in rows] == [amount for _, amount in pairs]
    assert [row[0] for row in rows[:3]] == ["x_0", "attention 1", "feed-forward 1"]
    written = {site.id: value for site, value in rec.series("write", "l2", rec.steps[-1])}
    sources, shares = rec.memory_maps["stream"]
    share = dict(zip(sources, shares[-1], strict=True))
    for (source, _), row in zip(pairs, rows, strict=True):
        if source in written:
            assert number(row[1]) == pytest.approx(written[source], rel=5e-4)
        assert number(row[3]) == pytest.approx(100 * share[source], rel=6e-3, abs=1e-9)
    foot = page.eval_on_selector_all(
        ".recording-sheet tfoot tr", "rows => rows.map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    assert [row[0] for row in foot] == ["sum", "norm of the stream", "error"]
    assert number(foot[0][2]) == pytest.approx(math.fsum(balance.amounts), rel=5e-6)
    assert number(foot[1][2]) == pytest.approx(balance.stream_norm, rel=5e-6)
    assert number(foot[0][3]) == pytest.approx(100, abs=0.06)
    assert number(foot[2][2]) <= 1e-5 * balance.stream_norm


def test_balance_table_sorts_by_keyboard(explorer):
    page = explorer.recording(f"&rec={PRE}")
    depth = sheet(page)
    head = page.get_by_role("columnheader", name="left at the end")
    head.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert sheet(page) == sorted(depth, key=lambda row: -row[2])
    page.wait_for_function(
        "() => document.getElementById('live').textContent === 'Sorted by left at the end, largest first.'"
    )
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "ascending"
    assert sheet(page) == sorted(depth, key=lambda row: row[2])
    page.get_by_role("columnheader", name="source").get_by_role("button").press("Enter")
    assert sheet(page) == depth
    assert page.locator("[aria-sort]").count() == 1


# Proofs.


def badges(page):
    return page.evaluate("""() => Object.fromEntries([...document.querySelectorAll('.recording-badge')].map((badge) => [
      badge.querySelector('.name').innerText.split(':')[0], [badge.dataset.state, badge.querySelector('.text').innerText]]))""")


def test_recording_badges(explorer):
    post, pre, scaled = (badges(explorer.recording(f"&rec={number}")) for number in (POST, PRE, SCALED))
    assert post["wiring"] == ["proved", "post-LN"]
    assert pre["wiring"] == ["proved", "pre-LN"]
    assert pre["equations"][1].startswith("6 sublayers closed, relative error at most ")
    assert pre["x_L = x_0 + all writes"][0] == "proved"
    assert post["x_L = x_0 + all writes"] == ["none", "not a plain sum"]
    assert scaled["wiring"] == ["open", "not a known wiring"]
    assert scaled["balance"] == ["open", "does not add up"]
    page = explorer.page
    assert not page.locator(".recording-sheet").is_visible()
    assert not page.locator("#chart-recording-map").is_visible()
    assert "multiplied or masked between add 1 and add 2" in page.locator(".recording-summary").inner_text()


# Downloads.


@pytest.mark.parametrize("more", ["&rstep=99", "&rstream=encoder"])
def test_recording_reports_missing_step_and_stream(explorer, more):
    page = explorer.open(f"#v=1&view=recording{more}", "#panel-recording .wrong:not([hidden])")
    assert page.locator("#panel-recording .wrong").inner_text().endswith(" The last step of the first stream is shown.")
    assert page.locator(".recording-results").is_visible()
    assert len(explorer.console) == 1, "the browser reports the response's status itself"
    explorer.console.clear()
    explorer.after(lambda: page.get_by_role("combobox", name="Recording").select_option("1"), "recording")
    assert not page.locator("#panel-recording .wrong").is_visible()


@pytest.mark.parametrize(("number", "more"), [(POST, "&rstep=1"), (PRE, ""), (SCALED, "")])
def test_recording_code_prints_page_numbers(explorer, files, number, more):
    explorer.recording(f"&rec={number}{more}")
    output, _ = explorer.run_code()
    rec = files[number]
    step = 1 if more else rec.steps[-1]
    names = [name for lines in CHARTS.values() for name in lines.values()]
    numbers = [number for name in names for number in rec.series(*name.split("."), step=step)]
    assert len(numbers) >= 12
    for site, value in numbers:
        assert f"{site.id:40} {value:.5g}" in output
    if number == SCALED:
        assert "no balance:" in output
        return
    assert f"norm of the stream {rec.balances['stream'].stream_norm:.6g}" in output
    for amount, share in zip(rec.balances["stream"].amounts, rec.memory_maps["stream"][1][-1], strict=True):
        assert f"{amount:10.5g} {share:8.2%}" in output


def test_recording_downloads_have_all_digits(explorer, files):
    explorer.recording(f"&rec={PRE}&rdepth=1")
    rec = files[PRE]
    head, *rows = csv.reader(explorer.download("CSV", "#chart-recording-gradients").splitlines())
    assert head == ["depth in sublayers", "of the stream", "of the sublayer's parameters"]
    for at, name in enumerate(CHARTS["gradients"].values(), start=1):
        values = {site.id: value for site, value in rec.series(*name.split("."), step=rec.steps[-1])}
        assert [float(row[at]) if row[at] else None for row in rows] == [values.get(site.id) for site in rec.sites]
    document = json.loads(explorer.download("JSON"))["recording"]
    assert document["balance"]["rows"][0]["amount"] == rec.balances["stream"].amounts[0]
