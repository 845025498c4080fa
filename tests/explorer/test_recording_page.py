"""Tests of the recording view in Chromium: its marks and rows equal the file, and failed proofs are reported."""

import math

import pytest

import addnorm
from addnorm.explorer.recording import Recordings
from addnorm.stream.shares import BIASES
from support.browser import drawn
from support.explorer_recordings import STEPS
from support.recordings import values

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
POST, PRE, SCALED, TWO = range(4)


@pytest.fixture(scope="module")
def files(recordings):
    """Return the recordings read from their files, by number."""
    return [addnorm.stream.Recording.load(path) for path in recordings]


def assert_drawn(explorer, rec, step, stream="stream"):
    """Check that the marks of a stream equal the recording, to the last digit."""
    marks, count = explorer.charts()[0], 0
    sites = [site.id for site in rec.sites if site.stream == stream]
    for chart, lines in CHARTS.items():
        for name, series in lines.items():
            values = {site.id: value for site, value in rec.series(*series.split("."), step=step, stream=stream)}
            expected = drawn([values.get(site) for site in sites])
            assert marks.get(f"recording-{chart}", {}).get(name, []) == expected, (chart, name)
            count += len(expected) > 0
    assert count >= 6


def badges(page):
    return page.evaluate("""() => Object.fromEntries([...document.querySelectorAll('.recording-badge')].map((badge) => [
      badge.querySelector('.name').innerText.split(':')[0], [badge.dataset.state, badge.querySelector('.text').innerText]]))""")


def test_recording_marks_and_badges_equal_file(explorer, files, recordings):
    served = Recordings(recordings)
    for number, stream in ((number, stream) for number, rec in enumerate(files) for stream in rec.streams):
        rec = files[number]
        page = explorer.recording(f"&rec={number}&rstream={stream}")
        assert_drawn(explorer, rec, rec.steps[-1], stream)
        response = served.compute(served.parse({"recording": number, "stream": stream}))
        assert badges(page) == {badge["name"]: [badge["state"], badge["text"]] for badge in response["badges"]}
        assert page.locator(".recording-sheet").is_visible() == (number != SCALED)
        cells = explorer.charts()[0].get("recording-map", {}).values()
        _, shares = rec.memory_maps.get(stream, ([], []))
        columns = zip(*([*row, *[None] * (len(shares) - len(row))] for row in cells), strict=True)
        assert [sorted(filter(None, column)) for column in columns] == [sorted(filter(None, row)) for row in shares]
    explorer.recording(f"&rec={SCALED}")
    assert "multiplied or masked between add 1 and add 2" in explorer.read(".recording-summary")


def test_recording_step_slider_and_comparison(explorer, files):
    page = explorer.recording("&rwith=first")
    slider = page.get_by_role("slider", name="Step", exact=True)
    assert slider.get_attribute("aria-valuetext") == f"step {STEPS - 1}"
    for step in (2, 1):
        explorer.after(slider.press, "ArrowLeft", view="recording")
        assert_drawn(explorer, files[POST], step)
        assert f"rstep={step}" in explorer.fragment()
        assert slider.get_attribute("aria-valuetext") == f"step {step}"
    first = values(files[POST], "out", "rms", step=0)
    assert explorer.marks("recording-stream", "stream, step 0") == first
    page.locator("h2").first.click()
    explorer.pass_time(1100)  # steps within a second are one step for the Back button
    explorer.after(page.keyboard.press, "]", view="recording")
    assert_drawn(explorer, files[POST], 2)
    explorer.after(page.go_back, view="recording")
    assert_drawn(explorer, files[POST], 1)


def test_recording_statistic_over_steps(explorer, files):
    page = explorer.recording("&rdepth=3")
    rec = files[POST]
    explorer.after(page.get_by_label("Statistic").select_option, "write.ratio", view="recording")
    expected = [value for _, value in rec.over_time(rec.sites[3], "write", "ratio")]
    assert len(expected) == STEPS
    assert explorer.charts()[0]["recording-time"] == {"write / stream, attention 2": expected}
    cursor = page.get_by_role("slider", name="Over the steps: data cursor")
    explorer.after(cursor.press, "Home", view="recording")
    assert "rstep=0" in explorer.fragment()
    assert_drawn(explorer, rec, 0)


# The balance sheet.


def sheet(page):
    """Return the rows of the balance sheet: source, deposited, left at the end with every digit, share."""
    return page.eval_on_selector_all(
        ".recording-sheet tbody tr",
        """rows => rows.map((row) => {
          const [deposited, left, share] = row.querySelectorAll('td');
          const number = (element) => parseFloat(element.innerText.replace('−', '-'));
          return [row.querySelector('th span').innerText, number(deposited), Number(left.dataset.value), number(share.querySelector('span'))];
        })""",
    )


@pytest.mark.parametrize(("which", "place"), [(POST, 0), (PRE, 0), (TWO, 0), (TWO, 1)])
def test_balance_table_adds_up(explorer, files, which, place):
    rec = files[which]
    stream = rec.streams[place]
    page = explorer.recording(f"&rec={which}&rstream={stream}" if place else f"&rec={which}")
    balance, (sources, shares) = rec.balances[stream], rec.memory_maps[stream]
    amounts = dict(zip(balance.sources, balance.amounts, strict=True))
    in_order = sorted(balance.sources, key=lambda source: source == BIASES)  # these come last
    rows = dict(zip(in_order, sheet(page), strict=True))
    assert [row[0] for row in rows.values()][:2] == ["x_0", "attention 1"]
    assert {source: row[2] for source, row in rows.items()} == amounts
    last = rec.steps[-1], stream
    written = {"x_0": rec.series("out", "l2", *last)[0][1]}
    written |= {site.id: value for site, value in rec.series("write", "l2", *last)}
    assert {source: rows[source][1] for source in written} == pytest.approx(written, rel=5e-4)
    percent = {source: 100 * share for source, share in zip(sources, shares[-1], strict=True)}
    assert {source: row[3] for source, row in rows.items()} == pytest.approx(percent, rel=6e-3, abs=1e-9)
    foot = page.eval_on_selector_all(
        ".recording-sheet tfoot tr", "rows => rows.map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    assert [row[0] for row in foot] == ["sum", "norm of the stream", "error"]
    assert float(foot[0][2]) == pytest.approx(math.fsum(balance.amounts), rel=5e-6)
    assert float(foot[1][2]) == pytest.approx(balance.stream_norm, rel=5e-6)
    assert float(foot[0][3].removesuffix("%")) == pytest.approx(100, abs=0.06)
    assert float(foot[2][2]) <= 1e-5 * balance.stream_norm


def test_balance_table_sorts_by_keyboard(explorer):
    page = explorer.recording(f"&rec={PRE}")
    by_depth = sheet(page)
    head = page.get_by_role("columnheader", name="left at the end")
    for key, order, sign in (("Enter", "descending", -1), ("Space", "ascending", 1)):
        head.get_by_role("button").press(key)
        assert head.get_attribute("aria-sort") == order
        assert sheet(page) == sorted(by_depth, key=lambda row, sign=sign: sign * row[2])
    page.wait_for_function(
        "() => document.getElementById('live').textContent === 'Sorted by left at the end, smallest first.'"
    )
    page.get_by_role("columnheader", name="source").get_by_role("button").press("Enter")
    assert sheet(page) == by_depth
    assert page.locator("[aria-sort]").count() == 1


# Wrong addresses, and code.


@pytest.mark.parametrize("more", ["&rstep=99", "&rstream=encoder"])
def test_recording_reports_missing_step_and_stream(explorer, more):
    page = explorer.open(f"#v=1&view=recording{more}", "#panel-recording .wrong:not([hidden])")
    wrong = page.locator("#panel-recording .wrong")
    assert wrong.inner_text().endswith(" The last step of the first stream is shown.")
    assert page.locator(".recording-results").is_visible()
    assert len(explorer.console) == 1, "the browser reports the response's status itself"
    explorer.console.clear()
    explorer.after(page.get_by_role("combobox", name="Recording").select_option, "1", view="recording")
    assert not wrong.is_visible()


@pytest.mark.parametrize(("number", "more", "step"), [(POST, "&rstep=1", 1), (PRE, "", 0), (SCALED, "", 0)])
def test_recording_code_prints_page_numbers(explorer, files, number, more, step):
    explorer.recording(f"&rec={number}{more}")
    output, _ = explorer.run_code()
    rec = files[number]
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
