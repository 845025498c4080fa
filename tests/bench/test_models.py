"""Tests of the benchmarks of stacks, streams, fusing and the lab, on small models: equal variants, rows, targets."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from addnorm.bench.harness import Case
from addnorm.fusion import benchmark
from addnorm.lab import Text
from addnorm.stream.models.load import LoadedModel
from support.loading import load

TEXT = Text("counting", "one two three four five six seven eight nine ten eleven twelve " * 40)


@pytest.fixture(scope="module")
def scripts():
    """Return the benchmarks as modules."""
    return SimpleNamespace(
        **{
            name: load(f"benchmarks/bench_{name}.py")
            for name in ("stack", "loop", "stream", "streams", "stream_layers", "fuse", "lab")
        }
    )


def small_bert(name, *, texts, tokens, dtype):
    """Return a BERT of one layer with random weights in place of MiniLM."""
    from transformers import BertConfig, BertModel  # not at the top: every process collects every file

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(vocab_size=50, **sizes)).eval().to(getattr(torch, dtype or "float32"))
    ids = torch.randint(0, 50, (len(texts), tokens))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return LoadedModel(name, model, (), inputs, tuple(texts), "random")


def assert_separate_weights(*modules):
    """Check that no two modules share a parameter: the second would find it in the cache."""
    storages = [{parameter.data_ptr() for parameter in module.parameters()} for module in modules]
    assert all(not storage & other for storage, other in itertools.combinations(storages, 2))
    assert len({sum(parameter.numel() for parameter in module.parameters()) for module in modules}) == 1


def assert_rows(rows, variants):
    assert [row["variant"] for row in rows] == variants
    assert all(0 < row["q1_us"] <= row["median_us"] <= row["q3_us"] for row in rows)


def rows_of(case, **times):
    return [case.row(variant=name, median_us=time) for name, time in times.items()]


def values(summary):
    return {row["name"]: (row["value"], row["met"]) for row in summary}


# Stacks.


def stack_case(wiring="pre_ln", job="inference"):
    return Case(wiring=wiring, job=job, batch=2, tokens=3, d=64, threads=1)


@pytest.mark.parametrize(("wiring", "job"), [("pre_ln", "inference"), ("post_ln", "training")])
def test_stack_variants_are_equal_and_have_rows(scripts, wiring, job):
    rows = scripts.stack.measure(stack_case(wiring, job), rounds=1)["rows"]  # raises if outputs differ
    assert_rows(rows, ["addnorm", "plain", "torch"])
    assert all(("saved_bytes" in row) == (job == "training") for row in rows)
    modules = scripts.stack.variants(stack_case(wiring, job))[0]
    assert_separate_weights(modules["addnorm"], modules["torch"])
    ours, plain = ({*map(id, modules[name].parameters())} for name in ("addnorm", "plain"))
    assert ours == plain  # copies would lie elsewhere in memory
    assert {type(module) for module in modules["plain"].modules() if isinstance(module, nn.LayerNorm)} == {nn.LayerNorm}


def test_stack_with_different_outputs_is_an_error(scripts, monkeypatch):
    variants = scripts.stack.variants

    def spoil(case):
        modules, x, dy = variants(case)
        nn.init.constant_(modules["plain"].final.bias, 1.0)
        return modules, x, dy

    monkeypatch.setattr(scripts.stack, "variants", spoil)
    with pytest.raises(AssertionError):
        scripts.stack.measure(stack_case(), rounds=1)


def test_speed_of_a_stack_is_the_inverse_of_the_peers_ratio(scripts):
    rows = {
        "addnorm": {"median_us": 10.0},
        "plain": {"median_us": 20.0, "paired_ratio": 0.5, "paired_low": 0.4, "paired_high": 0.8},
    }
    assert scripts.stack.speed(rows["plain"]) == (2.0, 1.25, 2.5)
    assert scripts.stack.times_as_fast(rows, "plain") == "**2.00** (1.25 to 2.50) (10.0 / 20.0)"


def test_stack_summary_follows_from_the_rows(scripts):
    cases = (stack_case(), stack_case(job="training"), stack_case("post_ln", "training"))
    saved = {"addnorm": 50, "plain": 100, "torch": 200}
    rows = [row for case in cases for row in rows_of(case, addnorm=10.0, plain=9.0, torch=20.0)]
    for row in rows:
        middle = 10.0 / row["median_us"]
        row |= {"paired_ratio": middle, "paired_low": 0.8 * middle, "paired_high": 1.25 * middle}
    summary = scripts.stack.summarize({"rows": [{**row, "saved_bytes": saved[row["variant"]]} for row in rows]})
    assert [(row["cells"], row["cells_met"]) for row in summary if row["met"] is False] == [(1, 0), (2, 0)]
    assert (
        values(summary).items()
        >= {
            "forward + backward: lowest, against plain PyTorch": (pytest.approx(0.9), False),
            "inference: lowest, against torch.nn.TransformerEncoder": (2.0, True),
            "saved bytes: highest share of plain PyTorch's": (0.5, None),
            "forward + backward: mean, against torch.nn.TransformerEncoder": (pytest.approx(2.0), None),
        }.items()
    )


# Streams.


def test_stream_has_rows_calls_and_targets(scripts, monkeypatch):
    monkeypatch.setattr(scripts.stream.minilm, "load", small_bert)
    monkeypatch.setattr(scripts.stream, "CALLS", 1)
    case = Case(batch=1, tokens=8, threads=1)
    result = scripts.stream.measure(case, rounds=1)
    assert_rows(result["rows"], ["plain", "recorded", "without gradients"])
    assert [row["call"] for row in result["calls"]] == ["inspect", "decompose"]
    assert all(
        0 < row["median_s"] <= row["most_s"] and row["closure"] <= scripts.stream.CLOSURE for row in result["calls"]
    )
    calls = [{**result["calls"][0], "most_s": 2.0, "closure": 1e-7}]
    summary = scripts.stream.summarize({"rows": rows_of(case, plain=10.0, recorded=25.0), "calls": calls})
    assert values(summary) == {
        "recording, 1 x 8 tokens: times the plain step": (2.5, False),
        "inspect, 1 x 8 tokens: seconds, the slowest of 1": (2.0, True),
        "inspect, 1 x 8 tokens: closure": (1e-7, True),
    }


# Fusing.

INFERENCE = Case(job="inference", batch=1, tokens=8, dtype="float32", threads=1)
TRAINING = Case(job="training", batch=1, tokens=8, dtype="bfloat16", threads=1)


@pytest.fixture
def fuse(scripts, monkeypatch):
    monkeypatch.setattr(scripts.fuse.minilm, "load", small_bert)
    monkeypatch.setattr(scripts.fuse, "SECONDS", 0.0)
    monkeypatch.setattr(benchmark, "SHARE_SECONDS", 0.0)
    return scripts.fuse


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "mode"), [(INFERENCE, "evaluation"), (TRAINING, "training")], ids=["inference", "training"]
)
def test_fuse_has_rows_and_the_proof(fuse, monkeypatch, case, mode):
    models = []
    plain = fuse.MAKE["plain"]
    monkeypatch.setitem(fuse.MAKE, "plain", lambda model, kwargs: models.append(model) or plain(model, kwargs))
    result = fuse.measure(case, rounds=1)
    assert_rows(result["rows"], ["plain", "fused", "frontend"])
    assert 0 < result["rows"][0]["share"] < 1
    assert all((row.get("saved_bytes", 0) > 0) == (mode == "training") for row in result["rows"])
    assert models[0].training == (mode == "training")
    assert result["failures"] == []
    (row,) = result["fusions"]
    assert (row["variant"], row["mode"]) == ("fused", mode)
    assert (row["fused"], row["left"]) == (3, [])  # two of the layer, and that of the embedding
    assert row["seconds"] > 0
    for part in ("outputs", "gradients"):
        assert row[part]["holds"]
        assert row[part]["times_error"] == row[part]["max_abs"] / row[part]["eager_error"]


def test_fuse_measures_inductor_in_chosen_cases_and_reports_failures(fuse, monkeypatch):
    models = []

    def fail(model, kwargs):
        models.append(model)
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(fuse, "MAKE", {"plain": fuse.MAKE["plain"], "fused": fail, "inductor": fail})
    monkeypatch.setattr(fuse, "INDUCTOR", (("inference", 1, 8, "float32"),))
    result = fuse.measure(INFERENCE, rounds=1)
    assert [row["variant"] for row in result["rows"]] == ["plain"]
    assert [row["variant"] for row in result["failures"]] == ["fused", "inductor"]
    assert result["failures"][0]["error"] == "RuntimeError: no compiler here"
    assert_separate_weights(*models)
    assert [row["variant"] for row in fuse.measure(INFERENCE, rounds=1, inductor=False)["failures"]] == ["fused"]
    monkeypatch.setattr(fuse, "MAKE", {"plain": fail})
    with pytest.raises(RuntimeError, match="no compiler here"):
        fuse.measure(INFERENCE, rounds=1)


def test_text_that_is_too_short_is_refused(fuse, monkeypatch):
    monkeypatch.setattr(
        fuse.minilm, "load", lambda *args, tokens, **options: small_bert(*args, tokens=tokens - 1, **options)
    )
    with pytest.raises(ValueError, match=r"the text gave \(1, 7\), expected \(1, 8\): use longer passages"):
        fuse.minilm.load_model(INFERENCE)


# The lab.


@pytest.fixture
def lab(scripts, monkeypatch, threads):
    threads(1)
    monkeypatch.setattr(scripts.lab, "EVERY", 2)
    return scripts.lab


def lab_case(wiring):
    return Case(wiring=wiring, num_layers=2, d=16, batch=2, tokens=8, threads=1)


@pytest.mark.parametrize("wiring", ["post_ln", "pre_ln"])
def test_lab_has_equal_losses_and_rows_of_windows(lab, monkeypatch, wiring):
    """Check the windows: the first step is separate, and the last step of each later window is recorded."""
    trainings = {}

    class Training(lab.Training):
        def __init__(self, run, text):
            super().__init__(run, text)
            trainings[run.every, run.steps] = self

    monkeypatch.setattr(lab, "Training", Training)
    result = lab.measure(lab_case(wiring), rounds=1, text=TEXT, windows=2)
    (losses,) = result["losses"]
    assert len({*losses["losses"]}) == lab.CHECKED
    assert losses["off"] <= lab.CLOSE
    assert_rows(result["rows"], ["plain", "addnorm", "recorded"])
    assert all(row["rounds"] == 2 and row["first_us"] > 0 < row["last_us"] for row in result["rows"])
    assert trainings[2, 5].recorded["steps"] == [0, 2, 4]
    assert trainings[0, 5].recorded["steps"] == []
    ours = trainings[0, 5].model
    plain = lab.Plain(ours, 4)
    assert {type(module) for module in plain.modules() if isinstance(module, nn.LayerNorm)} == {nn.LayerNorm}
    assert_separate_weights(plain, ours)


def test_loop_that_trains_another_model_is_an_error(lab, monkeypatch):
    prepare = lab.prepare

    def spoil(case, variant, text, steps):
        train = prepare(case, variant, text, steps)
        return (lambda observe: train(lambda step, loss: observe(step, loss * 1.001))) if variant == "plain" else train

    monkeypatch.setattr(lab, "prepare", spoil)
    with pytest.raises(ValueError, match=r"the losses of pre_ln, 2 layers, d = 16 differ by .* expected round-off"):
        lab.check_losses(lab_case("pre_ln"), TEXT)


# Boundaries of several streams.


@pytest.mark.parametrize(("job", "dtype"), [("forward", "bfloat16"), ("forward_backward", "float32")])
def test_boundaries_are_equal_and_have_rows(scripts, job, dtype, monkeypatch):
    monkeypatch.setattr(scripts.streams, "COPY_BYTES", 4096)
    case = Case(job=job, threads=1, rows=3, d=16, dtype=dtype)
    results = scripts.streams.measure(case, rounds=1, compiled=False)  # raises if the results differ
    assert_rows(results["rows"], ["addnorm", "transformers"])
    assert results["copies"][0]["gigabytes_per_second"] > 0


def test_boundaries_with_different_results_are_an_error(scripts, monkeypatch):
    monkeypatch.setattr(
        scripts.streams.Fused, "forward", lambda self, streams, output, *rest: (output * 1.1, streams, *rest)
    )
    with pytest.raises(ValueError, match="results differ by"):
        scripts.streams.measure(Case(job="forward", threads=1, rows=3, d=16, dtype="float32"), rounds=1, compiled=False)


def test_summary_of_boundaries_names_each_target(scripts):
    def cell(job, rows, *times):
        case = Case(job=job, threads=2, rows=rows, d=512, dtype="float32")
        return rows_of(case, addnorm=times[0], transformers=times[1], compile=times[2])

    rows = [
        *cell("forward", 1, 10.0, 25.0, 9.0),
        *cell("forward", 32, 10.0, 80.0, 20.0),
        *cell("forward", 512, 10.0, 20.0, 20.0),
    ]
    assert values(scripts.streams.summarize({"rows": rows})) == {
        "forward: mean, 32 rows and more": (pytest.approx(4.0), True),
        "forward: lowest at one row": (2.5, False),
        "forward: lowest against torch.compile": (0.9, False),
        "forward + backward: mean, 32 rows and more": (None, None),
        "forward + backward: lowest at one row": (None, None),
        "forward + backward: lowest against torch.compile": (None, None),
    }


def test_least_time_of_a_boundary_is_that_of_its_bytes(scripts):
    row = {"job": "forward", "rows": 1, "d": 4096, "dtype": "bfloat16"}
    assert scripts.streams.least_us(row, 81.92) == pytest.approx(1.0)  # 81,920 bytes
    assert scripts.streams.least_us({**row, "job": "forward_backward"}, 204.8) == pytest.approx(1.0)  # and 122,880


@pytest.mark.parametrize("model", ["DeepSeek V4", "GLM-5.3"])
def test_fused_layers_are_equal_and_have_rows(scripts, model, monkeypatch):
    small = {
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "n_routed_experts": 4,
    }
    monkeypatch.setattr(scripts.stream_layers, "COMMON", scripts.stream_layers.COMMON | small | {"hidden_size": 32})
    monkeypatch.setattr(scripts.stream_layers, "HIDDEN", 32)
    case = Case(model=model, threads=1, tokens=5, dtype="float32")
    results = scripts.stream_layers.measure(case, rounds=1)  # raises if the outputs differ
    assert_rows(results["rows"], ["addnorm", "transformers", "addnorm, boundaries", "transformers, boundaries"])
    document = {**results, "summary": scripts.stream_layers.summarize(results)}
    whole, edges = (one["value"] for one in document["summary"])
    assert (whole, edges) == tuple(results["rows"][k]["paired_ratio"] for k in (0, 2))
    assert f"| {model} | 5 | float32 | **" in scripts.stream_layers.table(document)


@pytest.fixture
def today_as_before(scripts, monkeypatch):
    """Let the loop be compared with itself: a checkout may lack the old commit, as one without history does."""
    monkeypatch.setattr(scripts.loop, "before", lambda: scripts.loop.addnorm.nn)


@pytest.mark.parametrize("wiring", ["pre_ln", "layer_scale"])
@pytest.mark.parametrize("job", ["inference", "training"])
@pytest.mark.parametrize("sublayers", ["alone", "attention and feed-forward"])
def test_loops_that_agree_have_rows(scripts, today_as_before, wiring, job, sublayers):
    case = Case(wiring=wiring, job=job, sublayers=sublayers, tokens=3, d=64, threads=1)
    rows = scripts.loop.measure(case, rounds=1)["rows"]
    assert_rows(rows, ["addnorm", "before"])
    assert rows[0]["paired_low"] <= rows[0]["paired_ratio"] <= rows[0]["paired_high"]


def test_loop_with_other_bits_is_refused(scripts, today_as_before, monkeypatch):
    variants = scripts.loop.variants

    def changed(case):
        modules, x, dy = variants(case)
        with torch.no_grad():
            modules["before"].norm_final.weight[5] *= 1.001
        return modules, x, dy

    monkeypatch.setattr(scripts.loop, "variants", changed)
    case = Case(wiring="pre_ln", job="inference", sublayers="alone", tokens=3, d=64, threads=1)
    with pytest.raises(ValueError, match="pre_ln gives other bits than at f6a1493"):
        scripts.loop.measure(case, rounds=1)


def test_targets_of_the_loop_take_the_lowest_bound(scripts):
    case = {"wiring": "pre_ln", "job": "training", "sublayers": "alone", "tokens": 1, "d": 64, "threads": 1}
    paired = [(0.96, 1.0, 1.1), (0.98, 1.21, 1.3)]
    rows = [
        {**case, "d": 64 + i, "variant": "addnorm", "paired_low": low, "paired_ratio": ratio, "paired_high": high}
        for i, (low, ratio, high) in enumerate(paired)
    ]
    bound, mean = scripts.loop.summarize({"rows": rows})
    assert (bound["value"], bound["met"], bound["cells"], bound["cells_met"]) == (0.96, False, 2, 1)
    assert mean["value"] == pytest.approx(1.1)
    assert mean["met"] is None


def test_old_loop_is_read_from_git_or_refused(scripts, monkeypatch):
    monkeypatch.setattr(scripts.loop, "BEFORE", "0" * 40)
    scripts.loop.before.cache_clear()
    with pytest.raises(RuntimeError, match="git cannot read the commit 0000000"):
        scripts.loop.before()
