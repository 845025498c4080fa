"""Tests of the C++ kernels: every instruction set, any number of threads, independent rows, and no read of unwritten memory."""

import os
import subprocess
import sys

import pytest
import torch

import addnorm
from addnorm.ops import cpu
from support import SUPPORT
from support.capabilities import CAPABILITIES, NAMES
from support.cases import DTYPES, VARIANTS, bf16, cotangents, f32, gradients, leaves, make
from support.pairwise import rotate, with_values


def run_table(extent, **variables):
    """Run support/run_table.py in a process with these environment variables, and return its output; it must succeed."""
    command = [sys.executable, "-W", "error", str(SUPPORT / "run_table.py"), extent]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    process = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr[-300:]
    return process.stdout


EXTENTS = [pytest.param("cover"), pytest.param("full", marks=pytest.mark.slow)]


@pytest.mark.skipif(cpu.ISA is None, reason=f"the C++ kernels: {cpu.DETAIL}")
@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_instruction_set_is_accurate(capability, extent):
    """ADDNORM_POISON fills the library's allocations with NaN, so that an element that was not written differs from float64."""
    output = run_table(extent, ATEN_CPU_CAPABILITY=capability, ADDNORM_POISON="1")
    names = list(NAMES.values())
    ran = names.index(output.splitlines()[0].removeprefix("C++ kernels for "))
    wish = names.index(CAPABILITIES[capability])
    assert ran <= wish if "ATEN_CPU_CAPABILITY" in os.environ else ran == min(wish, names.index(cpu.ISA))


@pytest.mark.parametrize("extent", EXTENTS)
def test_operation_works_without_the_cpp_library(extent):
    assert run_table(extent, ADDNORM_CPP="0").startswith("switched off by ADDNORM_CPP=0")


def test_backends_names_what_is_there():
    reference, kernels, gpu = addnorm.backends()
    assert reference == ("reference", True, "eager torch, every device, every option")
    assert kernels.name == "cpu"
    assert kernels.available == (cpu.ISA is not None)
    assert kernels.detail
    assert gpu.name == "triton"
    assert gpu.available <= torch.cuda.is_available()
    assert gpu.detail


def test_broken_library_gives_one_warning_and_a_reason(tmp_path, monkeypatch):
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(cpu, "LIBRARY", broken)
    monkeypatch.delenv("ADDNORM_CPP", raising=False)
    with pytest.warns(RuntimeWarning, match="runs without its CPU kernels.*reinstall"):
        isa, reason = cpu.load()
    assert isa is None
    assert "does not load with torch" in reason
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "absent.so")
    assert cpu.load() == (
        None,
        "not built (the package was installed with ADDNORM_CPP=0): reinstall it without that variable",
    )


@pytest.mark.parametrize(
    ("variant", "dtypes", "shape"),
    [
        *((variant, dtypes, (300, 257)) for variant in ("LayerNorm", "RMSNorm") for dtypes in DTYPES),
        *((variant, dtypes, (1, 40001)) for variant in ("LayerNorm", "RMSNorm") for dtypes in DTYPES),
        *(
            (variant, dtypes, (2000, 24))
            for variant in ("everything, LayerNorm", "row_scale and layer_scale", "residual_scale 0-d")
            for dtypes in ("float32", "bfloat16 with float32 parameters", "float64")
        ),
    ],
    ids=str,
)
def test_one_thread_and_two_give_the_same_bits(variant, dtypes, shape, threads):
    call = make(variant, dtypes, shape)
    results = []
    for count in (1, 2):
        threads(count)
        results.append(call() | gradients(call, cotangents(call())))
    assert [name for name, tensor in results[0].items() if not tensor.equal(results[1][name])] == []


# Dropout's mask counts elements: it depends on a row's place in the batch (`offset`).
UNMASKED = [name for name in VARIANTS if "dropout" not in name and "everything" not in name]


@pytest.mark.parametrize(
    ("variant", "dtypes", "shape"),
    [row for shape in [(71, 83), (4, 5)] for row in with_values(rotate(UNMASKED, list(DTYPES), 3), shape)],
    ids=str,
)
def test_row_bits_do_not_depend_on_the_batch(variant, dtypes, shape):
    call = make(variant, dtypes, shape)
    outputs = call()
    grad_outputs = cotangents(outputs)
    full = outputs | {
        name: grad for name, grad in gradients(call, grad_outputs).items() if name in ("residual", "branch")
    }
    for rows in (slice(0, 1), slice(1, 4), slice(2, 71), slice(66, 67), slice(60, 70)):
        part = call.rows(rows)
        actual = part() | gradients(part, {name: g[rows] for name, g in grad_outputs.items()})
        assert [name for name, value in full.items() if not actual[name].equal(value[rows])] == [], rows


@pytest.mark.parametrize("dtypes", ["float32", "float16", "float64"])
@pytest.mark.parametrize("variant", ["LayerNorm", "RMSNorm"])
def test_long_row_bits_do_not_depend_on_the_batch(variant, dtypes, threads):
    """The row is long enough for torch to sum it with two threads."""
    threads(2)
    call = make(variant, dtypes, (3, 40001))
    grad_outputs = cotangents(call())
    full, alone = (
        gradients(call, grad_outputs),
        gradients(call.rows(slice(1, 2)), {name: g[1:2] for name, g in grad_outputs.items()}),
    )
    assert call.rows(slice(1, 2))()["y"].equal(call()["y"][1:2])
    assert alone["residual"].equal(full["residual"][1:2])


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_expanded_inputs_act_like_their_copies(dtype):
    row, column = torch.randn(1, 33).to(dtype), torch.randn(20, 1).to(dtype)
    call = make("LayerNorm", "float32" if dtype == f32 else "bfloat16", (20, 33))
    call.tensors |= {"residual": row.expand(20, 33), "branch": column.expand(20, 33), "weight": row[0, :1].expand(33)}
    expected = make("LayerNorm", "float32", (20, 33))
    expected.tensors = {name: t.clone(memory_format=torch.contiguous_format) for name, t in call.tensors.items()}
    assert call()["y"].equal(expected()["y"])
    tensors = leaves(expected)
    y = expected(tensors)["y"]
    assert y.grad_fn is not None
    row.requires_grad_()
    call.tensors["residual"] = row.expand(20, 33)
    dy = cotangents({"y": y})["y"]
    call()["y"].backward(dy)
    y.backward(dy)
    torch.testing.assert_close(row.grad, tensors["residual"].grad.sum(0, keepdim=True), rtol=1e-5, atol=1e-5)
