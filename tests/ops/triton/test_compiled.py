"""The Triton kernels compiled for sm_90 (H100, H200) without a GPU: registers, accesses, what is compiled anew and what is not.

That they are as fast as this promises only a GPU can tell (benchmarks/bench_gpu.py).
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from support import SUPPORT

# Kernels whose rows stay in registers: without any option, and where the dropout's random bits are made beside them.
KEPT = [
    *(("LayerNorm", "bfloat16", d) for d in (64, 768, 4096, 8192, 16384)),
    ("RMSNorm", "bfloat16", 4096),
    ("RMSNorm", "float16", 16384),
    ("LayerNorm", "float32", 1024),
    ("LayerNorm", "float32", 8192),
    ("LayerNorm", "float32 stream, bfloat16 branch", 4096),
    ("dropout", "bfloat16", 4096),
    ("everything, LayerNorm", "bfloat16", 1024),
]
SPILLED = {("LayerNorm", "bfloat16", 8192): 8, ("LayerNorm", "bfloat16", 16384): 32, ("LayerNorm", "float32", 8192): 56}
OUTPUTS = [
    ("LayerNorm", "bfloat16", 1024),
    ("LayerNorm", "float32 stream, bfloat16 branch", 1024),
    ("RMSNorm", "bfloat16 stream, float32 branch", 768),
    ("residual_dtype bfloat16", "float32", 256),
    ("LayerNorm", "bfloat16", 20000),
    ("everything, RMSNorm", "bfloat16", 256),
    ("everything, LayerNorm", "float32", 256),
    ("out_dtype float32", "float64", 256),
    ("residual_scale (d,)", "float32", 256),
    ("branch_bias under layer_scale", "bfloat16", 256),
    ("row_scale and layer_scale", "bfloat16", 256),
]
# Where what is fetched ahead, dropout's words and rows of another dtype want the most shared memory together.
CROWDED = [
    ("everything, the add alone", "float32", 4096),
    ("everything, the add alone", "float64", 2048),
    ("everything, the add alone", "float32 stream, bfloat16 branch", 4096),
    ("everything, LayerNorm", "bfloat16", 4096),
    ("LayerNorm", "bfloat16 stream, float32 branch", 8192),
    ("LayerNorm", "float64", 16384),
]
LONG = [("LayerNorm", "bfloat16", 20000), ("RMSNorm", "float32", 20001)]
# Rows of 16 bytes and of others, parameters in another dtype, options, rows read twice and in parts.
SOMEWHERE = [
    ("LayerNorm", "bfloat16", 100),
    ("LayerNorm", "bfloat16", 768),
    ("LayerNorm", "bfloat16 stream, float32 branch", 768),
    ("RMSNorm", "float32", 130),
    ("everything, LayerNorm", "bfloat16", 256),
    ("LayerNorm", "bfloat16", 16384),
    ("LayerNorm", "bfloat16", 20000),
]
SIZES = [4, 1, 2, 7, 16, 33, 160]


@pytest.fixture(scope="module")
def found():
    """Everything that this file asks for, by function and arguments: one process, since it takes a while to start."""
    asked = [
        *(["of", case] for case in KEPT + CROWDED + LONG),
        *(["outputs", case] for case in OUTPUTS),
        ["batches", ("everything, LayerNorm", "bfloat16", 128, SIZES)],
        ["batches", ("RMSNorm", "float32", 20000, SIZES[:4])],
        ["kept", (256,)],
        *(["in_given_memory", (d,)] for d in (256, 20000)),
        *(["somewhere", case] for case in SOMEWHERE),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    done = subprocess.run(
        [sys.executable, SUPPORT / "run_compiled.py"], input=json.dumps(asked), capture_output=True, text=True,
        env=environment | {"PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    keys = [(name, json.dumps(arguments)) for name, arguments in asked]
    return dict(zip(keys, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_a_row_stays_in_registers(found, case):
    for kernel in found["of", json.dumps(case)]:
        # A thread's part of a row is 64 bytes and more: what is left over beside sums that fill the registers is none.
        assert kernel["stack"] <= SPILLED.get(case, 0), kernel
        assert kernel["dynamic"] <= 96 * 1024, kernel


@pytest.mark.parametrize("case", [case for case in KEPT if "everything" not in case[0]], ids=str)
def test_rows_are_read_and_written_sixteen_bytes_at_a_time(found, case):
    for kernel in found["of", json.dumps(case)]:
        narrow = [access for access in kernel["accesses"] if access not in ("v4.b32", "b64")]
        # Narrower are the two statistics of a row, and the gradients of parameters.
        assert len(narrow) <= 4, kernel
        assert len(narrow) < len(kernel["accesses"]), kernel


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_no_product_and_sum_are_fused_into_one_rounding(found, case):
    """The compiler would fuse them differently in every combination of options, and y would differ in the last bit."""
    for kernel in found["of", json.dumps(case)]:
        assert kernel["fused"] == 0, kernel


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_nothing_is_float64_where_no_tensor_is(found, case):
    """A number that came as a double would widen all it touches."""
    assert [kernel["kernel"] for kernel in found["of", json.dumps(case)] if kernel["float64"]] == []


@pytest.mark.parametrize("case", OUTPUTS, ids=str)
def test_y_is_summed_in_the_same_order_whatever_is_returned_beside_it(found, case):
    """Else y alone would have other bits than y with the stream, and inference others than training."""
    orders = found["outputs", json.dumps(case)]
    assert all(order == orders["y"] for order in orders.values())
    assert orders["y"]


@pytest.mark.parametrize("case", KEPT + LONG, ids=str)
def test_every_quotient_and_root_is_correctly_rounded(found, case):
    """What is not may be another number on another GPU, and x / 1 need not be x: a constant row would not be exact."""
    for kernel in found["of", json.dumps(case)]:
        assert not kernel["approximate"], kernel


@pytest.mark.parametrize("case", KEPT + CROWDED, ids=str)
def test_a_program_finds_its_shared_memory_on_smaller_gpus_too(found, case):
    """Those of compute capability 8.6, 8.9 and 12 have 99 KB for one program, an H100 227."""
    for kernel in found["of", json.dumps(case)]:
        assert kernel["dynamic"] <= 99 * 1024, kernel


@pytest.mark.parametrize("d", [256, 20000])
def test_memory_that_is_given_gets_the_bits_of_fresh_memory_wherever_it_begins(found, d):
    fresh, *given = found["in_given_memory", json.dumps((d,))]
    assert given == [fresh, fresh]
    assert fresh


@pytest.mark.parametrize("case", SOMEWHERE, ids=str)
def test_sums_have_the_same_order_wherever_inputs_and_gradients_lie(found, case):
    """Else a row would have other bits in a batch in which it begins elsewhere, and a view others than its copy."""
    ways = found["somewhere", json.dumps(case)]
    assert {"forward_kernel", "backward_kernel"} <= set(ways)
    for kernel, orders in ways.items():
        assert len(orders) == 1, kernel


def test_another_batch_size_compiles_nothing_anew(found):
    for key, kernels in found.items():
        if key[0] == "batches":
            assert kernels == kernels[:1] * len(kernels), key


def test_strides_and_alignment_find_the_kernel_that_is_compiled_for_their_like(found):
    """Contiguous, aligned or not; two strides of rows that are read where they are; one of rows that are copied."""
    assert found["kept", json.dumps((256,))] == [1, 1, 2, 2, 2]
