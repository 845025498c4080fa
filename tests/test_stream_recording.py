"""A recording: what goes in comes out, under every name, and through every file."""

import json
import math
import sys

import pytest
from rich.console import Console

import addnorm.stream.record.recording as recording_module
from addnorm.stream.record import store
from addnorm.stream.record.balance import Balance
from addnorm.stream.record.recording import STATISTICS, RecordedSite, Recording
from addnorm.stream.record.vocabulary import ALIASES, ROLES

NAN, INF = math.nan, math.inf


def sites(layers=2, stream="stream"):
    """x_0, attention and feed-forward of each layer, the final norm."""
    under = "" if stream == "stream" else f"{stream}."
    kinds = {"attn": "attention", "mlp": "feed-forward"}
    return [
        RecordedSite(f"{under}x_0", "", "start", None, stream),
        *(
            RecordedSite(f"{under}{k}.{name}", f"{under}{k}.{name}", kind, k, stream)
            for k in range(layers)
            for name, kind in kinds.items()
        ),
        RecordedSite(f"{under}final", f"{under}norm", "final", None, stream),
    ]


def filled(*numbers, **options):
    """A recording of two layers with these (step, site, role, statistic, value)."""
    rec = Recording(sites(**options), {"model": "Toy", "torch": "2.13"})
    for number in numbers:
        rec.add(*number)
    return rec


WRITES = [(step, site, "write", "rms", 10.0 * step + site) for step in (0, 5) for site in (1, 2, 3, 4)]


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
    (_, _, _, series), *others = rec.each_series()
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


# Names.


def test_every_statistic_has_a_role_a_meaning_and_a_formula_and_stands_once():
    assert len({(one.role, one.name) for one in STATISTICS}) == len(STATISTICS)
    assert {one.role for one in STATISTICS} == set(ROLES)
    assert all(one.meaning and one.formula for one in STATISTICS)
    assert all(set(alias.roles) <= set(ROLES) for alias in ALIASES.values())


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
        (lambda rec: rec.over_time("0.attn", "1_attn_out", "rms"), "is for attention of layer 1: ask for 'write'"),
        (lambda rec: Recording().series("in", "rms", stream="x"), "expected none: there is nothing yet"),
    ],
)
def test_what_there_is_not_is_said_in_one_sentence_with_what_there_is(ask, says):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (what it says is compared as text, below)
        ask(filled(*WRITES))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


# Spikes.


def series_of(values):
    return filled(*((step, 1, "grad", "l2", value) for step, value in enumerate(values)))


def by_hand(values, window, sd, least):
    """The rule, value by value."""
    before, found = [], []
    for step, value in enumerate(values):
        last = before[-window:]
        if not math.isfinite(value):
            found.append(step)
            continue
        mean = sum(last) / max(len(last), 1)
        deviation = math.sqrt(sum((one - mean) ** 2 for one in last) / max(len(last), 1))
        if len(last) >= least and value > mean + sd * max(deviation, 1e-6 * abs(mean)):
            found.append(step)
        before.append(value)
    return found


@pytest.mark.parametrize(("window", "least"), [(128, 32), (8, 8), (5, 2)])
def test_spikes_follow_the_rule(window, least):
    noise = [1.0 + 0.1 * math.sin(12.9898 * k * k) for k in range(5000)]
    for at, value in ((40, 5.0), (41, 5.0), (700, NAN), (701, 3.0), (4095, 4.0), (4097, 4.0), (4999, INF)):
        noise[at] = value
    found = [spike.step for spike in series_of(noise).spikes(window, least=least)]
    assert found == by_hand(noise, window, 6.0, least)
    assert {40, 700, 701, 4095, 4999} <= set(found)


def test_a_spike_tells_what_came_before_it():
    (spike,) = series_of([1.0, 3.0] * 32 + [50.0]).spikes()
    assert spike[:5] == (64, "0.attn", 0, "grad", "l2")
    assert (spike.value, spike.mean, spike.sd) == (50.0, 2.0, 1.0)
    assert str(spike) == "step 64, 0.attn: grad l2 is 50, after 2 ± 1"
    (nan,) = series_of([NAN]).spikes()
    assert str(nan) == "step 0, 0.attn: grad l2 is nan"


def test_rounding_and_few_values_are_no_spikes():
    assert series_of([1.0] * 100 + [1.0 + 1e-7]).spikes() == []
    assert series_of([1.0, 1.1] * 10 + [100.0]).spikes() == []
    assert series_of([0.0] * 40 + [1.0]).spikes()[0].step == 40
    with pytest.raises(ValueError, match="least is 200 and window 128"):
        series_of([1.0]).spikes(least=200)


# Files.


def rich_recording():
    rec = filled(*WRITES, (5, 1, "out", "rms", NAN), (5, 2, "out", "rms", INF), (5, 3, "out", "rms", -INF))
    rec.add(7, 1, "norm_in", "rstd", 0.1)  # no binary fraction
    rec.facts |= {"dtype": "bfloat16", "notes": ["é <b>", None, 1.5, True], "limits": {"eps": 1e-5}}
    rec.maps = {"stream": (["x_0", "0.attn"], [[1.0, 0.0], [0.1, 0.9]])}
    rec.balances["stream"] = Balance(("x_0", "0.attn"), (0.25, 0.1), 0.35, 7, 1e-8)
    rec.balances["other"] = Balance(refused="tokens join or leave the stream before add 2")
    return rec


@pytest.mark.parametrize("suffix", [".json", ".addnorm.json", ".parquet"])
def test_a_file_keeps_every_bit(tmp_path, suffix):
    rec, path = rich_recording(), tmp_path / f"run{suffix}"
    assert rec.save(str(path)) == path
    again = Recording.load(path)
    assert again.to_dict() == rec.to_dict()
    assert (again.sites, again.facts, again.maps, again.steps) == (rec.sites, rec.facts, rec.maps, rec.steps)
    assert str(again.balances) == str(rec.balances)
    assert str(again.table()) == str(rec.table())  # as text: NaN is not NaN
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_a_file_of_a_version_without_balances_is_one_too(tmp_path):
    document = rich_recording().to_dict()
    del document["balances"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    old = Recording.load(tmp_path / "old.json")
    assert (old.balances, old.maps) == ({}, rich_recording().maps)


def test_a_balance_is_wrong_by_what_the_amounts_lack():
    assert Balance(("x_0", "f"), (3.0, -1.0), 2.0).error == 0.0
    assert Balance(("x_0", "f"), (3.0, -1.5), 2.0).error == 0.25
    assert math.isnan(Balance(("x_0",), (NAN,), 2.0).error)
    assert math.isnan(Balance(refused="it does not add up").error)


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_an_empty_recording_is_one_too(tmp_path, suffix):
    Recording().save(tmp_path / f"run{suffix}")
    assert Recording.load(tmp_path / f"run{suffix}").to_dict() == Recording().to_dict()


def test_json_is_strictly_valid():
    def refuse(name):
        raise AssertionError(name)

    document = json.loads(json.dumps(rich_recording().to_dict(), allow_nan=False), parse_constant=refuse)
    assert (document["schema"], document["schema_version"]) == ("addnorm.recording", 1)
    values = {row["site"]: row["values"] for row in document["series"] if row["role"] == "out"}
    assert values == {1: ["NaN"], 2: ["Infinity"], 3: ["-Infinity"]}


def test_facts_that_json_lacks_are_written_as_text(tmp_path):
    torch = pytest.importorskip("torch")
    rec = Recording(facts={"dtype": torch.bfloat16, "shape": torch.Size([2, 3]), "loss": NAN})
    rec.save(tmp_path / "run.json")
    assert Recording.load(tmp_path / "run.json").facts == {"dtype": "torch.bfloat16", "shape": [2, 3], "loss": "NaN"}


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, suffix, monkeypatch):
    path = tmp_path / f"run{suffix}"
    rich_recording().save(path)
    before = path.read_bytes()
    monkeypatch.setattr(store, "_head", lambda recording: {"schema": {1, 2}})
    with pytest.raises(TypeError):
        Recording().save(path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_parquet_is_a_tidy_table_for_others(tmp_path):
    pandas = pytest.importorskip("pandas")
    rec = rich_recording()
    rec.save(tmp_path / "run.parquet")
    frame = pandas.read_parquet(tmp_path / "run.parquet")
    assert [*frame.columns] == ["step", "site", "layer", "role", "statistic", "value"]
    assert len(frame) == len(rec.table())


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


def change(**changes):
    return lambda document: {**document, **changes}


SITE = {"id": "a", "path": "a", "kind": "other", "layer": 0, "stream": "stream", "equation": ""}
ROW = {"site": 0, "role": "out", "statistic": "rms", "steps": [0], "values": [1.0]}
HOSTILE = {
    "another schema": (change(schema="torch.profiler"), "schema 'torch.profiler', expected 'addnorm.recording'"),
    "a list": (lambda document: [document], "schema None"),
    "newer": (change(schema_version=2), "version 2, expected at most 1: install a newer addnorm"),
    "version 0": (change(schema_version=0), "version 0, expected 1 or more"),
    "version as text": (change(schema_version="1"), "'schema_version' is '1', expected a whole number"),
    "no sites": (lambda d: {k: v for k, v in d.items() if k != "sites"}, "'sites' is missing, expected a list"),
    "a site that is none": (change(sites=[1]), "'id' is missing, expected a text"),
    "a layer that is none": (change(sites=[{**SITE, "layer": "0"}]), "'layer' is '0', expected a whole number"),
    "one id twice": (change(sites=[SITE, SITE]), "wrong sites (2 sites have the id 'a'"),
    "facts": (change(facts=[]), "'facts' is '[]', expected an object"),
    "maps": (
        change(maps={"s": {"sources": ["a"], "shares": [[0.5, 0.5]]}}),
        "rows of another length, expected 1 shares",
    ),
    "balances": (change(balances=[]), "'balances' is '[]', expected an object"),
    "a balance that is none": (change(balances={"s": 1}), "'sources' is missing, expected a list"),
    "amounts": (
        change(balances={"s": {"sources": ["a"], "amounts": [0.5, 0.5]}}),
        "balance of 's' has 2 amounts, expected 1, one for each source",
    ),
    "a length that is none": (
        change(balances={"s": {"sources": [], "amounts": [], "length": "long", "closure": 0.0}}),
        "values that are no numbers",
    ),
    "shares": (change(maps={"s": {"sources": ["a"], "shares": [[None]]}}), "values that are no numbers"),
    "lengths": (change(series=[{**ROW, "steps": [0, 1]}]), "1 values at 2 steps"),
    "steps": (change(series=[{**ROW, "steps": [0.5]}]), "expected a whole number, its step, for each value"),
    "huge step": (change(series=[{**ROW, "steps": [2**70]}]), "a wrong number"),
    "site out of range": (change(series=[{**ROW, "site": 99}]), "site is 99"),
    "unknown statistic": (change(series=[{**ROW, "statistic": "zzz"}]), "out zzz is not recorded"),
    "values as text": (change(series=[{**ROW, "values": ["1.0"]}]), "no numbers, expected numbers, or NaN, Infinity"),
    "series": (change(series={}), "'series' is '{}', expected a list"),
}


@pytest.mark.parametrize(("spoil", "says"), HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_is_no_recording_is_refused_in_one_sentence(tmp_path, spoil, says):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(spoil(rich_recording().to_dict())))
    with pytest.raises(ValueError, match=r".") as raised:
        Recording.load(path)
    message = str(raised.value)
    assert message.startswith(f"{path} is ")
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["run.json", "run.parquet"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"PAR1" * 5, b"[" * 100_000])
def test_broken_files_are_refused(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"run\.\w+ is no (JSON|Parquet)"):
        Recording.load(path)


def test_parquet_of_others_is_refused(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table, path = arrow.table({"a": [1]}), tmp_path / "other.parquet"
    parquet.write_table(table, path)
    with pytest.raises(ValueError, match="without the metadata 'addnorm"):
        Recording.load(path)
    parquet.write_table(
        table.replace_schema_metadata({"addnorm.recording": json.dumps(store._head(Recording()))}), path
    )
    with pytest.raises(ValueError, match="a table without the column 'step'"):
        Recording.load(path)


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ({"step": [None]}, "a wrong number"),
        ({"step": [0.5]}, "a wrong number"),
        ({"site": ["b"]}, "a wrong number (site is -1"),
        ({"value": ["one"]}, "a wrong number"),
        ({"value": [None]}, "a wrong number"),
        ({"role": [["out"]]}, "a table that cannot be read"),
        ({"step": [[0]]}, "a table that cannot be read"),
    ],
)
def test_parquet_of_other_types_is_refused_in_one_sentence(tmp_path, column, says):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"step": [0], "site": ["a"], "role": ["out"], "statistic": ["rms"], "value": [1.0]} | column
    head = json.dumps(store._head(Recording([RecordedSite("a", "a", "other", 0)])))
    path = tmp_path / "odd.parquet"
    parquet.write_table(arrow.table(columns).replace_schema_metadata({"addnorm.recording": head}), path)
    with pytest.raises(ValueError, match=r".") as raised:
        Recording.load(path)
    assert str(raised.value).startswith(f"{path} is ")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_other_suffixes_and_files_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"run.pkl', expected one that ends in .json or .parquet"):
        Recording().save(tmp_path / "run.pkl")
    with pytest.raises(FileNotFoundError):
        Recording.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError):
        Recording.load(tmp_path / "none.parquet")


@pytest.mark.parametrize(
    ("module", "use", "says"),
    [
        ("pandas", lambda rec, folder: rec.to_pandas(), r"needed to make a DataFrame: pip install 'addnorm\[data\]'"),
        (
            "pyarrow",
            lambda rec, folder: rec.save(folder / "a.parquet"),
            r"write Parquet: pip install 'addnorm\[data\]'",
        ),
        ("matplotlib.pyplot", lambda rec, folder: rec.plot.stream(), r"draw: pip install 'addnorm\[plot\]'"),
    ],
)
def test_a_package_that_is_not_there_is_missed_with_its_extra(tmp_path, monkeypatch, module, use, says):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=says):
        use(filled((0, 1, "out", "rms", 1.0)), tmp_path)
    assert [*tmp_path.iterdir()] == []


# How it shows itself.


def test_repr_is_one_line():
    assert repr(Recording()) == "<Recording: 0 sublayers, no steps>"
    assert repr(filled(*WRITES)) == "<Recording of Toy: 4 sublayers, 2 steps 0 ... 5>"
    assert repr(series_of([1.0])) == "<Recording of Toy: 4 sublayers, 1 step 0, with gradients>"
    two = Recording([*sites(1, "encoder"), *sites(1, "decoder")])
    assert repr(two) == "<Recording: 4 sublayers in 2 streams, no steps>"


def test_the_terminal_has_a_row_for_each_site_and_a_column_for_what_was_recorded():
    rec = filled((0, 1, "out", "rms", 1.2345), (0, 1, "write", "ratio", NAN))
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123 (closed with the console)
    with console.file:
        console.print(rec)
    text = console.export_text()
    assert "Recording of Toy: 4 sublayers" in text
    for word in ("0.attn", "1.mlp", "feed-forward", "stream rms", "1.23", "write / stream", "nan"):
        assert word in text
    assert "similarity  " not in text.split("stream rms:")[0]


def test_html_is_static_and_escaped():
    rec = Recording(
        [RecordedSite("<script>alert(1)</script>", "p", "attention", 0)], {"model": "<img src=x onerror=y>"}
    )
    rec.add(0, 0, "out", "rms", 1.0)
    page = rec._repr_html_()
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<svg") == 1
    assert "<svg" not in Recording()._repr_html_()


def test_html_draws_what_is_not_finite_as_a_cross_and_says_so():
    values = [1.0, NAN, 3.0, 400.0]
    page = filled(*((0, site, "out", "rms", value) for site, value in enumerate(values)))._repr_html_()
    assert "log scale: 1 to 400, 1 not finite" in page
    assert page.count("<circle") == 3
    assert page.count("#B00020") == 1


def test_the_vocabulary_is_at_hand_where_the_recording_is():
    assert recording_module.STATISTICS is STATISTICS
    assert recording_module.ROLES is ROLES
