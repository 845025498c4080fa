"""Tests of the Triton kernels on a GPU: results against float64, and the bitwise guarantees of docs/numerics.md.

pytest tests/ops/triton/test_cuda.py                                        or `make gpu`, which measures too
compute-sanitizer --tool memcheck python tests/support/run_cuda.py                  and racecheck, initcheck, synccheck
"""

import pytest
import torch

import addnorm
from addnorm.ops import philox
from support import cases
from support.accuracy import assert_accurate, forward_and_backward
from support.cases import DTYPES, VARIANTS, Call, bf16, cotangents, make, moved
from support.memory_layouts import make_layouts
from support.oracle import relative, truth

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
from addnorm.ops.triton import gradients, operators  # they import Triton

CUDA = torch.device("cuda")

# The two widths on either side of each change of plan, and the widths of the benchmark.
WIDTHS = [1, 3, 64, 768, 1000, 4096, 8192, 8193, 16384, 16385, 65536, 262144]
TABLE = [
    *((variant, dtypes, (37, 132)) for variant in VARIANTS for dtypes in DTYPES),
    *((variant, "bfloat16", (5, d)) for variant in ("LayerNorm", "RMSNorm", "everything, LayerNorm") for d in WIDTHS),
    *((variant, "float32 stream, bfloat16 branch", (9, d)) for variant in ("LayerNorm", "dropout") for d in WIDTHS),
]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch):
    """Make every operator fail that falls back to the reference."""
    for module in (operators, gradients):
        monkeypatch.setattr(module, "eager", None)


@pytest.mark.parametrize(("variant", "dtypes", "shape"), TABLE, ids=str)
def test_outputs_and_gradients_are_as_accurate_as_torch(variant, dtypes, shape):
    here = make(variant, dtypes, shape)
    assert_accurate(here, *run_on_device(here))  # relative to PyTorch's errors on the CPU, as in the CPU tests


def run_on_device(here):
    """Return the results and gradients of a call on the GPU, and its output gradients, all on the CPU."""
    call, grad_outputs = moved(here), cotangents(here())
    on_device = {name: t.to(CUDA) for name, t in grad_outputs.items()}
    return {name: t.cpu() for name, t in forward_and_backward(call, call, on_device).items()}, grad_outputs


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_z_has_the_bits_of_the_cpu(variant, dtypes):
    call = make(variant, dtypes, (37, 132))
    assert moved(call)()["z"].cpu().equal(call()["z"])


@pytest.mark.parametrize("dtypes", list(DTYPES)[:6])
@pytest.mark.parametrize("variant", [name for name, variant in VARIANTS.items() if variant.norm != "none"])
def test_y_has_the_same_bits_with_grad_and_without_and_alone(variant, dtypes):
    for d in (100, 1024):
        call = moved(make(variant, dtypes, (9, d)))
        y = forward_and_backward(call, call, make_grad_outputs(call))["y"]
        assert call()["y"].equal(y)
        assert call.y_alone().equal(y)


def make_grad_outputs(call):
    return {name: t.to(CUDA) for name, t in cotangents(call()).items()}


@pytest.mark.parametrize("d", [64, 100, 768, 4096, 8193, 20000])  # rows of 100 are not 16-byte aligned
@pytest.mark.parametrize("variant", ["LayerNorm", "RMSNorm", "row_scale and layer_scale"])
def test_row_has_the_same_bits_in_any_batch_and_run(variant, d):
    call = moved(make(variant, "bfloat16", (300, d)))
    grad_outputs = make_grad_outputs(call)
    full, again = (forward_and_backward(call, call, grad_outputs) for _ in range(2))
    assert all(again[name].equal(t) for name, t in full.items())
    for rows in (1, 2, 17):
        part = call.rows(slice(300 - rows, 300))
        actual = forward_and_backward(part, part, {name: t[300 - rows :] for name, t in grad_outputs.items()})
        for name in ("y", "z", "residual", "branch"):
            assert actual[name].equal(full[name][300 - rows :]), (name, rows)


@pytest.mark.parametrize("rows", [1, 1000, 40_000])
def test_sums_over_many_rows_are_as_exact_as_over_few(rows):
    here = make("LayerNorm", "bfloat16 with float32 parameters", (rows, 96))
    ours, grad_outputs = run_on_device(here)
    expected = truth(here, ours["z"], grad_outputs)
    for name in ("weight", "bias"):
        assert relative(ours[name], expected[name]) < 4e-6, name


def test_more_elements_than_32_bits_count():
    free = torch.cuda.mem_get_info()[0]
    rows, d = 2**31 // 4096 + 8, 4096
    if free < 5 * rows * d * 2:
        pytest.skip("the device's memory does not hold five tensors of 2^31 elements")
    x, branch = (torch.randn(rows, d, device=CUDA, dtype=bf16) for _ in range(2))
    y = addnorm.add_layer_norm(x, branch)
    assert y[-8:].equal(addnorm.add_layer_norm(x[-8:], branch[-8:]))
    seed = torch.tensor(7, device=CUDA)
    z = addnorm.add_residual(torch.zeros_like(x), torch.ones_like(x), dropout_p=0.5, seed=seed, out=y)
    expected = philox.keep_mask((8, d), 0.5, torch.tensor(7), (rows - 8) * d // 4)
    assert (z[-8:] != 0).cpu().equal(expected)


@pytest.mark.parametrize("d", [96, 100, 768])
@pytest.mark.parametrize("variant", ["LayerNorm", "everything, RMSNorm"])
def test_memory_layouts_change_no_bit(variant, d):
    call = moved(make(variant, "bfloat16 with float32 parameters", (33, d)))
    grad_outputs = make_grad_outputs(call)
    expected, alone = forward_and_backward(call, call, grad_outputs), call.y_alone()
    for name, t in {**call.tensors, **grad_outputs}.items():
        for place, elsewhere in make_layouts(t).items():
            other = Call(
                call.norm, call.eps, call.tensors | ({name: elsewhere} if name in call.tensors else {}), call.options
            )
            actual = forward_and_backward(
                other, other, grad_outputs | ({name: elsewhere} if name in grad_outputs else {})
            )
            assert all(actual[key].equal(t) for key, t in expected.items()), (name, place)
            assert other.y_alone().equal(alone), (name, place)


def test_cuda_streams_and_graphs_give_the_same_bits():
    call = moved(make("LayerNorm", "bfloat16", (64, 512)))
    expected = call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = call()
    stream.synchronize()
    assert all(actual[name].equal(t) for name, t in expected.items())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for t in captured.values():
        t.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(captured[name].equal(t) for name, t in expected.items())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_tensors_on_another_device_than_the_current_one():
    call = make("LayerNorm", "bfloat16", (5, 64))
    expected = cases.gradients(moved(call, "cuda:0"))
    actual = cases.gradients(moved(call, "cuda:1"))
    assert all(actual[name].device.index == 1 and actual[name].cpu().equal(t.cpu()) for name, t in expected.items())
