"""Tests of benchmarks/bench_memory.py: counts against formulas and against another count, on small stacks."""

import pytest
import torch

from addnorm.bench.harness import Case
from addnorm.fusion.benchmark import saved_bytes
from support.loading import load

D, LAYERS, SITES = 64, 3, 6
BYTES = {"float32": 4, "bfloat16": 2}


@pytest.fixture(scope="module")
def script():
    return load("benchmarks/bench_memory.py")


def rows_of(script, wiring, dtype="float32", batch=1):
    case = Case(wiring=wiring, dtype=dtype, threads=1)
    rows = script.measure(case, batch=batch, layers=LAYERS, d_model=D)["rows"]
    return {row["checkpoint"]: row for row in rows}


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize(("wiring", "norms"), [("pre_ln", SITES + 1), ("post_ln", SITES)])
def test_one_stream_saves_z_and_8_bytes_a_token(script, wiring, norms, dtype):
    row = rows_of(script, wiring, dtype)[0]
    assert row["z_bytes"] == SITES * script.TOKENS * D * BYTES[dtype]
    assert row["statistics_bytes"] == norms * script.TOKENS * 8
    assert row["streams_bytes"] == row["coefficients_bytes"] == row["checkpoint_bytes"] == 0
    # Nothing else keeps the last y, and y is kept with its norm's bias, a parameter, which does not count.
    assert row["gain_bytes"] == (SITES - 1) * script.TOKENS * D * BYTES[dtype]
    assert script.share(row) == row["gain_bytes"] / (row["state_bytes"] + row["saved_bytes"])


@pytest.mark.parametrize("wiring", ["hyper_connections", "mhc"])
def test_several_streams_save_no_z(script, wiring):
    row = rows_of(script, wiring)[0]
    tensor = script.TOKENS * D * 4
    # The first streams are views of the input, which does not count.
    assert row["streams_bytes"] == (SITES - 1) * script.STREAMS * tensor
    assert row["branch_bytes"] == SITES * tensor
    assert row["z_bytes"] == row["gain_bytes"] == 0
    assert row["coefficients_bytes"] > 0


@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln", "hyper_connections", "mhc"])
def test_count_equals_that_of_a_whole_forward(script, wiring):
    stack = script.make_stack(wiring, torch.float32, LAYERS, D)
    x = torch.randn(1, script.TOKENS, D)
    assert rows_of(script, wiring)[0]["saved_bytes"] == saved_bytes(lambda: stack(x), stack, x)


@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln"])
def test_linear_layers_save_y(script, wiring):
    stack = script.make_stack(wiring, torch.float32, LAYERS, D)
    reads, saved = [], {}

    def keep(module, inputs):
        reads.append(inputs[0])

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t
        return t

    for connection in stack.connections:
        connection.sublayer.register_forward_pre_hook(keep)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = stack(torch.randn(1, script.TOKENS, D))
    assert len(reads) == SITES
    assert all(read.untyped_storage().data_ptr() in saved for read in reads)
    del y


@pytest.mark.parametrize("wiring", ["pre_ln", "mhc"])
def test_activations_are_proportional_to_tokens(script, wiring):
    one, three = (rows_of(script, wiring, batch=batch)[0] for batch in (1, 3))
    assert three["saved_bytes"] == 3 * one["saved_bytes"]
    assert (
        three["state_bytes"]
        == one["state_bytes"]
        == 4
        * script.Tally(
            stack := script.make_stack(wiring, torch.float32, LAYERS, D), torch.randn(1, script.TOKENS, D)
        ).parameters
    )
    assert one["state_bytes"] == 4 * sum(p.nbytes for p in stack.parameters())


def test_checkpoints_hold_states_and_one_group(script):
    rows, tensor = rows_of(script, "pre_ln"), script.TOKENS * D * 4
    # A state is the stream and the pending write; the input of the first layer does not count.
    assert rows[1]["checkpoint_bytes"] == (LAYERS - 1) * 2 * tensor
    assert rows[1]["z_bytes"] == 2 * tensor
    assert rows[1]["peak_bytes"] < rows[0]["peak_bytes"]
    assert rows[3]["saved_bytes"] < rows[0]["saved_bytes"], "without what the final norm saves"


def test_summary_and_section_follow_from_the_rows(script):
    row = {
        **Case(wiring="pre_ln", dtype="float32", threads=1).row(variant="no checkpoint", checkpoint=0),
        **{f"{kind}_bytes": 0 for kind in (*script.KINDS, "checkpoint")},
        "z_bytes": 2e6, "gain_bytes": 2e6, "saved_bytes": 10e6, "state_bytes": 30e6, "peak_bytes": 40e6,
    }  # fmt: skip
    (one,) = script.summarize({"rows": [row]})
    assert (one["value"], one["met"]) == (0.05, None)
    document = {
        "rows": [row], "protocol": script.BENCHMARK.protocol, "versions": {"torch": "2", "addnorm": "1"},
        "commit": "0123456789abc", "date": "2026-01-01T00:00:00",
    }  # fmt: skip
    text = script.section(document)
    assert "| `pre_ln` | float32 | none | 40.0 | 10.0 | 0 | 2.00 | 0 | 0 | 0 | 0 | 5.0 % |" in text
    assert "16 x 128 tokens; torch 2, addnorm 1, commit 0123456789; 2026-01-01." in text
