"""A recording: what goes in comes out, under every name."""

import math
import sys

import pytest

from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import HOOK_NAMES, ROLES, STATISTICS, Balance, RecordedSite
from support.recordings import INF, NAN, WRITES, filled, sites


def test_the_table_is_tidy_by_step_depth_and_the_order_of_the_statistics():
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


def test_a_second_number_of_a_step_replaces_the_first_and_a_late_one_finds_its_place():
    rec = filled((3, 1, "out", "rms", 1.0), (3, 1, "out", "rms", 2.0))
    assert [entry.value for entry in rec.table()] == [2.0]
    rec.add(2, 1, "out", "rms", 1.0)  # of a backward that came after the next forward
    assert [(entry.step, entry.value) for entry in rec.table()] == [(2, 1.0), (3, 2.0)]
    assert rec.steps == (2, 3)


def test_a_number_takes_16_bytes():
    rec = filled(*((step, 1, "out", "rms", 1.0) for step in range(10_000)))
    (_, _, _, series), *others = rec.iter_series()
    assert not others
    assert sum(sys.getsizeof(values) for values in series) < 16 * 10_000 * 1.2


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ((0, 9, "out", "rms", 1.0), "site is 9, expected a number from 0 to 5"),
        ((0, 1, "out", "rsm", 1.0), "out rsm is not recorded, expected 'out rms'"),
        ((0, 1, "norm_in", "sigma", 1.0), "norm_in sigma is not recorded"),  # it follows from rstd
    ],
)
def test_what_is_no_number_of_a_recording_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        filled(call)


def test_a_refused_number_leaves_nothing_behind():
    rec = Recording(sites())
    for step, value in ((0, "text"), (0.5, 1.0), (0, None)):
        with pytest.raises((TypeError, ValueError)):
            rec.add(step, 1, "out", "rms", value)
    assert (rec.table(), rec.series("out", "rms"), rec.spikes()) == ([], [], [])
    rec.add(3, 1, "out", "rms", 1.0)
    assert rec.over_time(1, "out", "rms") == [(3, 1.0)]


def test_two_sites_of_one_id_are_refused():
    with pytest.raises(ValueError, match=r"2 sites have the id 'a'.*'a#2' for the second use"):
        Recording([RecordedSite("a", "a", "other", 0), RecordedSite("a", "a", "other", 1)])


def test_sites_may_come_while_recording():
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


def test_a_balance_is_wrong_by_what_the_amounts_lack():
    assert Balance(("x_0", "f"), (3.0, -1.0), 2.0).error == 0.0
    assert Balance(("x_0", "f"), (3.0, -1.5), 2.0).error == 0.25
    assert math.isnan(Balance(("x_0",), (NAN,), 2.0).error)
    assert math.isnan(Balance(reason="it does not add up").error)


# Names.


def test_every_statistic_has_a_role_a_meaning_and_a_formula_and_stands_once():
    assert len({(one.role, one.name) for one in STATISTICS}) == len(STATISTICS)
    assert {one.role for one in STATISTICS} == set(ROLES)
    assert all(one.meaning and one.formula for one in STATISTICS)
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
def test_transformer_lens_names_choose_role_and_kind_of_site(name, role, kind):
    rec = filled(*((0, site, role, "rms", float(site)) for site in range(6)))
    found = rec.series(name, "rms")
    assert {site.kind for site, _ in found} == {kind}
    assert [site.layer for site, _ in found] == [0, 1]
    assert rec.series(f"1_{name}", "rms") == found[1:]
    assert rec.over_time(found[0][0], name, "rms") == [(0, found[0][1])]


def test_scale_is_the_denominator_of_the_norm_that_a_site_has():
    rec = filled((0, 1, "norm_in", "rstd", 0.5), (0, 2, "norm_out", "rstd", 0.25), (0, 5, "norm_final", "rstd", 0.0))
    rec.add(0, 1, "norm_in", "rstd_min", 0.1)
    assert [value for _, value in rec.series("scale", "scale")] == [2.0, 4.0, INF]
    assert [value for _, value in rec.series("norm_in", "sigma")] == [2.0]
    assert [value for _, value in rec.series("norm_in", "sigma_max")] == [10.0]
    assert [value for _, value in rec.series("0_scale", "rstd")] == [0.5, 0.25]


def test_series_is_by_depth_at_the_last_step_or_the_one_asked_for():
    rec = filled(*WRITES, (9, 1, "in", "rms", 1.0))
    assert [value for _, value in rec.series("write", "rms")] == [51.0, 52.0, 53.0, 54.0]  # the last that has it
    assert [value for _, value in rec.series("write", "rms", step=0)] == [1.0, 2.0, 3.0, 4.0]
    assert rec.series("write", "rms", step=9) == []
    assert rec.series("grad", "rms") == []
    assert rec.last_step(("write", "rms"), ("in", "rms")) == 9
    assert rec.last_step(("grad", "rms")) is None


def test_a_stream_can_be_chosen():
    rec = Recording([*sites(1, "encoder"), *sites(1, "decoder")])
    for site in range(8):
        rec.add(0, site, "out", "rms", float(site))
    assert [value for _, value in rec.series("out", "rms", stream="decoder")] == [4.0, 5.0, 6.0, 7.0]
    assert rec.streams == ("encoder", "decoder")


def test_over_time_takes_a_site_by_id_place_or_itself():
    rec = filled(*WRITES)
    expected = [(0, 1.0), (5, 51.0)]
    for site in ("0.attn", 1, -5, rec.sites[1]):
        assert rec.over_time(site, "write", "rms") == expected
    assert rec.over_time("0.attn", "grad", "rms") == []


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda rec: rec.series("atn_out", "rms"), "name is 'atn_out', expected 'attn_out'."),
        (lambda rec: rec.series("3_wirte", "rms"), "name is '3_wirte', expected 'write'."),
        (lambda rec: rec.series("zzz", "rms"), "expected one of in, read, raw, write"),
        (lambda rec: rec.series("write", "cosin"), "write has no statistic 'cosin', expected 'cosine'."),
        (lambda rec: rec.series("write", "zzz"), "expected one of l2, rms, max, ratio, cosine, unchanged."),
        (lambda rec: rec.series("write", "rms", step=3), "step is 3, expected a recorded one: 0, 5."),
        (lambda rec: rec.series("write", "rms", stream="sream"), "stream is 'sream', expected 'stream'."),
        (lambda rec: rec.over_time("0.atn", "write", "rms"), "site is '0.atn', expected '0.attn'."),
        (lambda rec: rec.over_time(6, "write", "rms"), "site is 6, expected a number from 0 to 5"),
        (lambda rec: rec.over_time("0.attn", "mlp_out", "rms"), "0.attn has no 'mlp_out', which is for feed-forward"),
        (lambda rec: rec.over_time("0.attn", "1_attn_out", "rms"), "is for attention of layer 1: use 'write'"),
        (lambda rec: Recording().series("in", "rms", stream="x"), "expected none: there is nothing yet"),
    ],
)
def test_what_there_is_not_is_said_in_one_sentence_with_what_there_is(ask, says):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (what it says is compared as text, below)
        ask(filled(*WRITES))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
