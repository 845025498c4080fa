"""Tests of `Recording`: numbers by step and site, names, spikes, and its display."""

import base64
import math
import re
import sys

import pytest

from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import HOOK_NAMES, ROLES, STATISTICS, Balance, RecordedSite
from support.recordings import INF, NAN, WRITES, filled, series_of, sites, values
from support.refusals import assert_raises, assert_refused


def test_table_is_sorted_by_step_depth_and_statistic():
    rec = filled(
        (0, 2, "write", "rms", 1.0), (0, 2, "in", "max", 2.0), (0, 1, "grad", "l2", 3.0), (4, 0, "out", "rms", 4.0)
    )
    assert [tuple(entry) for entry in rec.table()] == [
        (0, "0.attn", 0, "grad", "l2", 3.0),
        (0, "0.mlp", 0, "in", "max", 2.0),
        (0, "0.mlp", 0, "write", "rms", 1.0),
        (4, "x_0", None, "out", "rms", 4.0),
    ]
    assert rec.steps == (0, 4)


def test_add_replaces_and_inserts_by_step():
    rec = filled((3, 1, "out", "rms", 1.0), (3, 1, "out", "rms", 2.0))
    assert [entry.value for entry in rec.table()] == [2.0]
    rec.add(2, 1, "out", "rms", 1.0)  # from a backward after the next forward
    assert [(entry.step, entry.value) for entry in rec.table()] == [(2, 1.0), (3, 2.0)]
    assert rec.steps == (2, 3)


def test_number_takes_16_bytes():
    rec = filled(*((step, 1, "out", "rms", 1.0) for step in range(10_000)))
    (_, _, _, series), *others = rec.iter_series()
    assert not others
    assert sum(sys.getsizeof(values) for values in series) < 16 * 10_000 * 1.2


REJECTED = {
    "site is 9, expected a number from 0 to 5": (0, 9, "out", "rms", 1.0),
    "out rsm is not recorded, expected 'out rms'": (0, 1, "out", "rsm", 1.0),
    "norm_in sigma is not recorded": (0, 1, "norm_in", "sigma", 1.0),  # derived from rstd
}


@pytest.mark.parametrize("sentence", REJECTED)
def test_add_rejects_unknown_sites_and_statistics(sentence):
    assert_refused(sentence, lambda: filled(REJECTED[sentence]))


def test_failed_add_changes_nothing():
    rec = Recording(sites())
    for step, value in ((0, "text"), (0.5, 1.0), (0, None)):
        with pytest.raises((TypeError, ValueError)):
            rec.add(step, 1, "out", "rms", value)
    assert (rec.table(), rec.series("out", "rms"), rec.spikes()) == ([], [], [])
    rec.add(3, 1, "out", "rms", 1.0)
    assert rec.over_time(1, "out", "rms") == [(3, 1.0)]


def test_site_ids_must_be_unique():
    with pytest.raises(ValueError, match=r"2 sites have the id 'a'.*'a#2' for the second use"):
        Recording([RecordedSite("a", "a", "other", 0), RecordedSite("a", "a", "other", 1)])


def test_sites_may_be_appended():
    rec = Recording()
    rec.sites = sites()[:2]
    rec.add(0, 1, "out", "rms", 1.0)
    rec.sites = [*rec.sites, RecordedSite("new", "new", "other", 5)]
    rec.add(0, 2, "out", "rms", 2.0)
    assert [site.id for site, _ in rec.series("out", "rms")] == ["0.attn", "new"]


def test_to_pandas():
    pandas = pytest.importorskip("pandas")
    frame = filled(*WRITES, (5, 0, "out", "rms", NAN)).to_pandas()
    assert {name: str(kind) for name, kind in frame.dtypes.items() if name in ("step", "layer", "value")} == {
        "step": "int64", "layer": "Int64", "value": "float64",
    }  # fmt: skip
    assert frame.query("role == 'write' and step == 5").value.tolist() == [51.0, 52.0, 53.0, 54.0]
    assert frame.query("site == 'x_0'").layer.isna().all()
    assert len(Recording().to_pandas()) == 0
    assert isinstance(frame, pandas.DataFrame)


def test_error_of_a_balance():
    assert Balance(("x_0", "f"), (3.0, -1.0), 2.0).error == 0.0
    assert Balance(("x_0", "f"), (3.0, -1.5), 2.0).error == 0.25
    assert math.isnan(Balance(("x_0",), (NAN,), 2.0).error)
    assert math.isnan(Balance(reason="it does not add up").error)


# Names


def test_statistics_are_complete_and_unique():
    assert len({(statistic.role, statistic.name) for statistic in STATISTICS}) == len(STATISTICS)
    assert {statistic.role for statistic in STATISTICS} == set(ROLES)
    assert all(statistic.meaning and statistic.formula for statistic in STATISTICS)
    assert all(set(hook.roles) <= set(ROLES) for hook in HOOK_NAMES.values())


@pytest.mark.parametrize(
    ("name", "role", "kind"),
    [
        ("resid_pre", "in", "attention"),
        ("attn_out", "write", "attention"),
        ("resid_mid", "out", "attention"),
        ("mlp_out", "write", "feed-forward"),
        ("resid_post", "out", "feed-forward"),
    ],
)
def test_transformer_lens_names_select_role_and_kind(name, role, kind):
    rec = filled(*((0, site, role, "rms", float(site)) for site in range(6)))
    series = rec.series(name, "rms")
    assert {site.kind for site, _ in series} == {kind}
    assert [site.layer for site, _ in series] == [0, 1]
    assert rec.series(f"1_{name}", "rms") == series[1:]
    assert rec.over_time(series[0][0], name, "rms") == [(0, series[0][1])]


def test_scale_is_the_denominator_of_a_site_norm():
    rec = filled((0, 1, "norm_in", "rstd", 0.5), (0, 2, "norm_out", "rstd", 0.25), (0, 5, "norm_final", "rstd", 0.0))
    rec.add(0, 1, "norm_in", "rstd_min", 0.1)
    assert values(rec, "scale", "scale") == [2.0, 4.0, INF]
    assert values(rec, "norm_in", "sigma") == [2.0]
    assert values(rec, "norm_in", "sigma_max") == [10.0]
    assert values(rec, "0_scale", "rstd") == [0.5, 0.25]


def test_series_is_by_depth_at_one_step():
    rec = filled(*WRITES, (9, 1, "in", "rms", 1.0))
    assert values(rec, "write", "rms") == [51.0, 52.0, 53.0, 54.0]  # the last step with a value
    assert values(rec, "write", "rms", step=0) == [1.0, 2.0, 3.0, 4.0]
    assert rec.series("write", "rms", step=9) == []
    assert rec.series("grad", "rms") == []
    assert rec.last_step(("write", "rms"), ("in", "rms")) == 9
    assert rec.last_step(("grad", "rms")) is None


def test_series_of_one_stream():
    rec = Recording([*sites(1, "encoder"), *sites(1, "decoder")])
    for site in range(8):
        rec.add(0, site, "out", "rms", float(site))
    assert values(rec, "out", "rms", stream="decoder") == [4.0, 5.0, 6.0, 7.0]
    assert rec.streams == ("encoder", "decoder")


def test_over_time_accepts_id_index_or_site():
    rec = filled(*WRITES)
    expected = [(0, 1.0), (5, 51.0)]
    for site in ("0.attn", 1, -5, rec.sites[1]):
        assert rec.over_time(site, "write", "rms") == expected
    assert rec.over_time("0.attn", "grad", "rms") == []


UNKNOWN = {
    "name is 'atn_out', expected 'attn_out'.": lambda rec: rec.series("atn_out", "rms"),
    "name is '3_wirte', expected 'write'.": lambda rec: rec.series("3_wirte", "rms"),
    "expected one of in, read, raw, write": lambda rec: rec.series("zzz", "rms"),
    "write has no statistic 'cosin', expected 'cosine'.": lambda rec: rec.series("write", "cosin"),
    "expected one of l2, rms, max, ratio, cosine, unchanged, share.": lambda rec: rec.series("write", "zzz"),
    "step is 3, expected a recorded one: 0, 5.": lambda rec: rec.series("write", "rms", step=3),
    "stream is 'sream', expected 'stream'.": lambda rec: rec.series("write", "rms", stream="sream"),
    "site is '0.atn', expected '0.attn'.": lambda rec: rec.over_time("0.atn", "write", "rms"),
    "site is 6, expected a number from 0 to 5": lambda rec: rec.over_time(6, "write", "rms"),
    "0.attn has no 'mlp_out', which is for feed-forward": lambda rec: rec.over_time("0.attn", "mlp_out", "rms"),
    "is for attention of layer 1: use 'write'": lambda rec: rec.over_time("0.attn", "1_attn_out", "rms"),
    "expected none: there is nothing yet": lambda rec: Recording().series("in", "rms", stream="x"),
}


@pytest.mark.parametrize("sentence", UNKNOWN)
def test_unknown_names_raise_one_sentence(sentence):
    text = assert_raises(sentence, lambda: UNKNOWN[sentence](filled(*WRITES)))
    assert text.startswith("ValueError: ")
    assert "\n" not in text


# Spikes


def reference_spikes(values, window, sd, min_count):
    """Return the spikes by the definition, value by value."""
    before, spikes = [], []
    for step, value in enumerate(values):
        last = before[-window:]
        if not math.isfinite(value):
            spikes.append(step)
            continue
        mean = sum(last) / max(len(last), 1)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in last) / max(len(last), 1))
        if len(last) >= min_count and value > mean + sd * max(deviation, 1e-6 * abs(mean)):
            spikes.append(step)
        before.append(value)
    return spikes


@pytest.mark.parametrize(("window", "min_count"), [(128, 32), (8, 8), (5, 2)])
def test_spikes_equal_the_definition(window, min_count):
    noise = [1.0 + 0.1 * math.sin(12.9898 * k * k) for k in range(5000)]
    for at, value in ((40, 5.0), (41, 5.0), (700, NAN), (701, 3.0), (4095, 4.0), (4097, 4.0), (4999, INF)):
        noise[at] = value
    steps = [spike.step for spike in series_of(noise).spikes(window, min_count=min_count)]
    assert steps == reference_spikes(noise, window, 6.0, min_count)
    assert {40, 700, 701, 4095, 4999} <= set(steps)


def test_spike_has_mean_and_sd_of_earlier_values():
    (spike,) = series_of([1.0, 3.0] * 32 + [50.0]).spikes()
    assert spike[:5] == (64, "0.attn", 0, "grad", "l2")
    assert (spike.value, spike.mean, spike.sd) == (50.0, 2.0, 1.0)
    assert str(spike) == "step 64, 0.attn: grad l2 is 50, after 2 ± 1"
    (nan,) = series_of([NAN]).spikes()
    assert str(nan) == "step 0, 0.attn: grad l2 is nan"


def test_spikes_need_enough_values_and_more_than_round_off():
    assert series_of([1.0] * 100 + [1.0 + 1e-7]).spikes() == []
    assert series_of([1.0, 1.1] * 10 + [100.0]).spikes() == []
    assert series_of([0.0] * 40 + [1.0]).spikes()[0].step == 40
    with pytest.raises(ValueError, match="min_count is 200 and window 128"):
        series_of([1.0]).spikes(min_count=200)


# Terminals and notebooks


def test_repr_is_one_line():
    assert repr(Recording()) == "<Recording: 0 sublayers, no steps>"
    assert repr(filled(*WRITES)) == "<Recording of Toy: 4 sublayers, 2 steps from 0 to 5>"
    assert repr(series_of([1.0])) == "<Recording of Toy: 4 sublayers, step 0, with gradients>"
    two = Recording([*sites(1, "encoder"), *sites(1, "decoder")])
    assert repr(two) == "<Recording: 4 sublayers in 2 streams, no steps>"


def test_html_is_static_and_escaped():
    rec = Recording(
        [RecordedSite("<script>alert(1)</script>", "p", "attention", 0)], {"model": "<img src=x onerror=y>"}
    )
    rec.add(0, 0, "out", "rms", 1.0)
    page = rec._repr_html_()
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;" in page
    assert page.count("data:image/svg+xml") == 1
    assert "<img" not in Recording()._repr_html_()


def test_html_marks_values_that_are_not_finite():
    values = [1.0, NAN, 3.0, 400.0]
    page = filled(*((0, site, "out", "rms", value) for site, value in enumerate(values)))._repr_html_()
    drawing = base64.b64decode(re.search(r"svg\+xml;base64,([^\"]+)", page)[1]).decode()
    assert "NaN or infinite" in drawing
    assert [text for text in ("1", "10", "100") if f">{text}</text>" not in drawing] == [], "a logarithmic axis"
    assert drawing.count('class="lost"') == 2, "the mark, and its line of the legend"
