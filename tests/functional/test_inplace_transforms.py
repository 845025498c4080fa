"""Tests of the in-place forms and out= under autocast, function transforms and torch.compile."""

import contextlib
import functools
import re

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vmap
from torch.utils._pytree import tree_map_only

import addnorm
from support.cases import FUNCTIONS, OWN_DTYPES, bf16, f32, f64, make
from support.equality import assert_same
from support.inplace_calls import IN_PLACE, in_place, into, nan
from support.pairwise import rotate, some

# torch.compile builds its own C++ with deprecated parts of setuptools and distutils, which warn.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
x, b = torch.randn(4, 8), torch.randn(4, 8)
plain_and_scaled = pytest.mark.parametrize("options", [{}, {"layer_scale": 0.5}], ids=str)


@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0}], ids=str)
def test_under_autocast_y_has_the_dtype_of_its_memory(options):
    call = make("LayerNorm", "float32 stream, bfloat16 branch", (5, 33))
    call.options |= options
    expected = call()
    with torch.autocast("cpu", dtype=bf16):
        assert call()["y"].dtype == f32  # the dtype of F.layer_norm of the stream
        assert_same(in_place(call), expected)
        out = nan(expected["y"])
        assert into(call, out).equal(expected["y"])


@pytest.mark.parametrize("variant", ["LayerNorm", "row_scale and layer_scale", "the add alone"])
def test_inside_vmap_every_sample_is_written(variant):
    call = make(variant, "float64", (6, 5, 8))
    expected = call()
    tensors = {name: t.clone() for name, t in call.tensors.items()}
    batched = {name: 0 if t.dim() > 1 else None for name, t in tensors.items()}
    vmap(lambda arguments: IN_PLACE[call.norm](**arguments), in_dims=(batched,))(tensors)
    torch.testing.assert_close(tensors["residual"], expected["z"])
    if "y" in expected:
        torch.testing.assert_close(tensors["branch"], expected["y"])


@plain_and_scaled
def test_forward_mode_writes_the_tangents(options):
    t, s, dt, ds = (torch.randn(4, 8, dtype=f64) for _ in range(4))
    both = functools.partial(addnorm.add_layer_norm, **options, return_residual=True)

    def in_place(t, s):
        t, s = t.clone(), s.clone()
        return addnorm.add_layer_norm_(t, s, **options), t

    values, tangents = jvp(both, (t, s), (dt, ds))
    torch.testing.assert_close(jvp(in_place, (t, s), (dt, ds)), (values, tangents))


@plain_and_scaled
def test_func_grad_of_in_place_raises(options):
    with pytest.raises(RuntimeError, match=r"^residual requires a gradient, expected none"):
        grad(lambda t: addnorm.add_layer_norm_(t.clone(), b.clone(), **options).sum())(x)


def stack(t, s, w):
    """Run steps of a pre-LN stack in place, with operators in between that Inductor may fuse or reuse."""
    y = addnorm.add_layer_norm_(t, s, w)
    other = torch.empty_like(y)
    addnorm.add_rms_norm(t, y * 2.0, w, return_residual=True, out=(other, t))
    addnorm.add_rms_norm_(t, other, w, layer_scale=0.5, dropout_p=0.3, seed=torch.tensor(5))
    addnorm.layer_norm(other, out=other)
    addnorm.add_residual_(t, other)
    return y, other + 0.0


@pytest.mark.parametrize(
    ("backend", "dtypes"),
    rotate(["aot_eager", "inductor"], ["float32", "float32 stream, bfloat16 branch"], 1),
)
def test_compiled_graph_writes_the_same_memory(backend, dtypes):
    call = make("RMSNorm", dtypes, (6, 40))
    with torch.no_grad():
        expected_inputs, inputs = ([t.clone() for t in call.tensors.values()] for _ in range(2))
        expected = stack(*expected_inputs)
        versions = [t._version for t in inputs]
        actual = torch.compile(stack, fullgraph=True, backend=backend)(*inputs)
    assert_same((*actual, *inputs), (*expected, *expected_inputs))
    assert actual[0] is inputs[1]
    assert [t._version > version for t, version in zip(inputs, versions, strict=True)] == [True, True, False]


@pytest.mark.parametrize("backend", some(["aot_eager", "inductor"], ["aot_eager"]))
def test_compiled_overlap_raises_or_is_computed_aside(backend):
    tensor = torch.randn(4, 8)
    # An overlap that the kernels detect has the reference's message, passed on through libtorch.
    with pytest.raises((ValueError, RuntimeError), match=r"shares memory with y, expected .*: pass z\.clone\(\)\.$"):
        torch.compile(addnorm.add_layer_norm_, fullgraph=True, backend=backend)(tensor, tensor)
    rows = torch.randn(5, 8)
    before, expected = rows.clone(), addnorm.layer_norm(rows[1:])
    raised = False
    try:
        torch.compile(lambda t, out: addnorm.layer_norm(t, out=out), fullgraph=True, backend=backend)(
            rows[1:], rows[:4]
        )
    except (ValueError, RuntimeError):
        raised = True
    assert rows.equal(before) if raised else rows[:4].equal(expected)


def test_compiled_in_place_raises_the_sentence():
    for function, sentence in (
        (lambda t: addnorm.add_layer_norm_(t, b), "residual requires a gradient, expected none"),
        (lambda t: addnorm.add_residual_(x, t), "branch requires a gradient, expected none"),
        (lambda t: addnorm.add_residual_(x, b, layer_scale=t[0]), "layer_scale requires a gradient, expected none"),
        (
            lambda t: addnorm.add_layer_norm(t.detach(), b, out=torch.empty(3, 8)),
            "y has shape (3, 8), expected (4, 8)",  # the operator's name of the argument
        ),
    ):
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=re.escape(sentence)):
            torch.compile(function, fullgraph=True, backend="aot_eager")(x.clone().requires_grad_())


@pytest.mark.parametrize("fake", [False, True], ids=["meta", "fake"])
@pytest.mark.parametrize("variant", OWN_DTYPES)
def test_in_place_accepts_meta_and_fake_tensors(variant, fake):
    call = make(variant, "float32 stream, bfloat16 branch", (3, 8))
    arguments = call.tensors | call.options | ({} if call.norm == "none" else {"eps": call.eps})
    with FakeTensorMode() if fake else contextlib.nullcontext() as mode:
        arguments = tree_map_only(Tensor, mode.from_tensor if fake else lambda t: t.to("meta"), arguments)
        returned = IN_PLACE[call.norm](**arguments)
        assert returned is arguments["residual" if call.norm == "none" else "branch"]
        out = torch.empty(8, 3, device=returned.device)
        with pytest.raises(ValueError, match=r"^out has shape \(8, 3\), expected \(3, 8\)"):
            FUNCTIONS[call.norm](**arguments, out=out)
