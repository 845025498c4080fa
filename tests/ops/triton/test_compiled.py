"""Tests of the Triton kernels compiled for sm_90 (H100, H200) without a GPU: registers, accesses, recompilation.

The resulting speed can only be measured on a GPU (benchmarks/bench_gpu.py).
"""

import json
import os

import pytest

pytest.importorskip("triton")
from support import SUPPORT
from support.processes import run_python

# Kernels whose rows stay in registers: without options, and with dropout, whose random bits are computed beside them.
KEPT = [
    *(("LayerNorm", "bfloat16", d) for d in (64, 768, 4096, 8192, 16384, 32768)),
    ("RMSNorm", "bfloat16", 4096),
    ("RMSNorm", "float16", 16384),
    ("LayerNorm", "float32", 1024),
    ("LayerNorm", "float32", 8192),
    ("LayerNorm", "float32 stream, bfloat16 branch", 4096),
    ("dropout", "bfloat16", 4096),
    ("everything, LayerNorm", "bfloat16", 1024),
]
# Bytes of a thread's stack. Twice as many elements a thread, and so twice as many programs, were faster on an H100 all the same.
SPILLED = {
    ("LayerNorm", "bfloat16", 8192): 8, ("LayerNorm", "bfloat16", 16384): 32, ("LayerNorm", "float32", 1024): 8,
    ("LayerNorm", "float32", 8192): 56, ("LayerNorm", "float32 stream, bfloat16 branch", 4096): 72,
}  # fmt: skip
TWICE = 16384  # elements of a row that the backward reads twice, in steps of 4 elements a thread
OUTPUTS = [
    ("LayerNorm", "bfloat16", 1024),
    ("LayerNorm", "float32 stream, bfloat16 branch", 1024),
    ("RMSNorm", "bfloat16 stream, float32 branch", 768),
    ("residual_dtype bfloat16", "float32", 256),
    ("LayerNorm", "bfloat16", 40000),
    ("everything, RMSNorm", "bfloat16", 256),
    ("everything, LayerNorm", "float32", 256),
    ("out_dtype float32", "float64", 256),
    ("residual_scale (d,)", "float32", 256),
    ("branch_bias under layer_scale", "bfloat16", 256),
    ("row_scale and layer_scale", "bfloat16", 256),
]
# Cases in which prefetched data, dropout's words and rows of another dtype together need the most shared memory.
CROWDED = [
    ("everything, the add alone", "float32", 4096),
    ("everything, the add alone", "float64", 2048),
    ("everything, the add alone", "float32 stream, bfloat16 branch", 4096),
    ("everything, LayerNorm", "bfloat16", 4096),
    ("LayerNorm", "bfloat16 stream, float32 branch", 8192),
    ("LayerNorm", "float64", 16384),
]
LONG = [("LayerNorm", "bfloat16", 40000), ("RMSNorm", "float32", 40001)]
# Rows with and without 16-byte steps, parameters in another dtype, options, rows that are read twice or in parts.
SOMEWHERE = [
    ("LayerNorm", "bfloat16", 100),
    ("LayerNorm", "bfloat16", 768),
    ("LayerNorm", "bfloat16 stream, float32 branch", 768),
    ("RMSNorm", "float32", 130),
    ("everything, LayerNorm", "bfloat16", 256),
    ("LayerNorm", "bfloat16", 16384),
    ("LayerNorm", "bfloat16", 40000),
]
SIZES = (4, 1, 2, 7, 16, 33, 160)
BATCHES = [
    ("LayerNorm", "bfloat16", 768, (4, 1, 16, 33)),  # whose first kernels KEPT[1] has compiled
    ("RMSNorm", "float32", 64, (4, 1, 16, 33)),
    ("RMSNorm", "float32", 40000, SIZES[:3]),
    ("everything, LayerNorm", "bfloat16", 128, SIZES),
]
BUFFERS = [(256,), (40000,)]
# Streams: kind, dtype, n, d_model, compute capability, numbers of tokens.
STREAMS = [
    ("hyper", "bfloat16", 2, 100, 90, (1, 20)),
    *((kind, "bfloat16", 4, 1024, 90, (1, 20, 600)) for kind in ("given", "manifold", "hyper")),
    ("manifold", "bfloat16", 4, 1024, 100, (20,)),
    ("hyper", "float32", 2, 100, 100, (20,)),
    ("manifold", "float32", 8, 1000, 80, (20,)),
    ("hyper", "float32", 8, 1000, 120, (20,)),
    ("independent", "float16", 6, 768, 80, (20,)),
    ("gates", "float32", 1, 4096, 120, (20,)),
]
# Compiled by default; the other cases are slow. A few seconds each, unless Triton's cache has them.
DEFAULT = [KEPT[1], KEPT[10], OUTPUTS[1], LONG[0], SOMEWHERE[0], BATCHES[0], BUFFERS[0], STREAMS[0]]


def each(*lists):
    """Run a test with each case of these lists: those that are not in DEFAULT are slow."""
    rows = [case for some in lists for case in some]
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=() if case in DEFAULT else pytest.mark.slow, id=str(case)) for case in rows]
    )


@pytest.fixture(scope="module")
def results(request):
    """Compile the cases of the selected tests in one process; return the results by function and arguments."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    selected = [item.callspec.params.get("case") for item in items]
    functions = {
        "of": KEPT + CROWDED + LONG, "outputs": OUTPUTS, "batches": BATCHES, "in_given_memory": BUFFERS, "somewhere": SOMEWHERE,
        "of_streams": STREAMS,
    }  # fmt: skip
    requests = [(name, case) for name, rows in functions.items() for case in rows if case in selected]
    requests.append(("kept", (256,)))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = run_python(SUPPORT / "run_compiled.py", input=json.dumps(requests), env=environment)
    return dict(zip(requests, json.loads(process.stdout), strict=True))


@each(KEPT)
def test_row_stays_in_registers(results, case):
    """A thread's part of a row is 64 bytes or more. Fewer spilled bytes, beside sums that fill the registers, are no row."""
    for kernel in results["of", case]:
        assert kernel["stack"] <= SPILLED.get(case, 0), kernel
        assert kernel["dynamic"] <= 96 * 1024, kernel
        # One double-precision number would widen everything that it is combined with.
        assert not kernel["float64"], kernel
        # The compiler would fuse products and sums differently in every combination of options, and y would differ in a bit.
        assert kernel["fused"] == 0, kernel


@each([case for case in KEPT if "everything" not in case[0] and case[2] != TWICE])
def test_rows_are_accessed_sixteen_bytes_at_a_time(results, case):
    for kernel in results["of", case]:
        narrow = [access for access in kernel["accesses"] if access not in ("v4.b32", "b64")]
        # Only the two statistics of a row and the gradients of parameters are narrower.
        assert len(narrow) <= 4, kernel
        assert len(narrow) < len(kernel["accesses"]), kernel


@each(OUTPUTS)
def test_order_of_sums_ignores_the_requested_outputs(results, case):
    """Otherwise y alone would have other bits than y with the stream, and inference other bits than training."""
    orders = results["outputs", case]
    assert all(order == orders["y"] for order in orders.values())
    assert orders["y"]


@each(KEPT, LONG)
def test_every_quotient_and_root_is_correctly_rounded(results, case):
    """An approximation may differ on another GPU, and x / 1 need not be x: a constant row would not be exact."""
    for kernel in results["of", case]:
        assert not kernel["approximate"], kernel


@each(CROWDED)
def test_shared_memory_fits_smaller_gpus(results, case):
    """GPUs of compute capability 8.6, 8.9 and 12 have 99 KB for one program, an H100 227 KB."""
    for kernel in results["of", case]:
        assert kernel["dynamic"] <= 99 * 1024, kernel


@each(BUFFERS)
def test_out_has_the_bits_of_new_memory_at_any_alignment(results, case):
    fresh, *buffers = results["in_given_memory", case]
    assert buffers == [fresh, fresh]
    assert fresh


@each(SOMEWHERE)
def test_order_of_sums_ignores_alignment(results, case):
    """Otherwise a row's bits would depend on its offset in the batch, and a view would differ from its copy."""
    kernels = results["somewhere", case]
    assert {"forward_kernel", "backward_kernel"} <= set(kernels)
    for kernel, orders in kernels.items():
        assert len(orders) == 1, kernel


@each(BATCHES)
def test_another_batch_size_compiles_no_new_kernel(results, case):
    kernels = results["batches", case]
    assert kernels == kernels[:1] * len(kernels)


@each(STREAMS)
def test_kernels_of_streams_fit_every_gpu(results, case):
    """One kernel each, whatever the number of tokens: the forward writes the streams, the backward computes them again."""
    kernels = results["of_streams", case]
    names = [kernel["kernel"] for kernel in kernels]
    expected = ["write_kernel", "read_kernel", "read_backward_kernel", "write_backward_kernel"]
    if case[0] != "given":
        expected += ["write_kernel", "gates_backward_kernel", "project_backward_kernel"]
    assert sorted(names) == sorted(expected)
    for kernel in kernels:
        assert kernel["dynamic"] <= 99 * 1024, kernel
        assert kernel["float64"] == 0, kernel
        assert not kernel["approximate"], kernel
        assert kernel["stack"] <= 256, kernel


def test_strides_and_alignment_reuse_the_compiled_kernel(results):
    """Contiguous, aligned or not; two strides of rows that are read in place; one of rows that are copied."""
    assert results["kept", (256,)] == [1, 1, 2, 2, 2]
