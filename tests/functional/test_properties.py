"""Property tests of shapes, strides, dtypes, eps and combinations of options, on examples from hypothesis."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.cases import DTYPES, Call, Variant, cotangents, f64, gradients, make
from support.oracle import UNIT, arithmetic, magnitudes, truth, worst


@st.composite
def shapes(draw, min_rank: int = 1) -> tuple[int, ...]:
    """Draw shapes of rank 1 to 4; d is at most 300 and rarely a multiple of a vector; some dimensions are one or zero."""
    d = draw(st.one_of(st.integers(1, 40), st.integers(1, 300), st.sampled_from([15, 16, 17, 63, 64, 65, 128, 255])))
    rows = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7]), min_size=min_rank - 1, max_size=3))
    return (*rows, d)


def _moved(t: Tensor, how: str, dim: int) -> Tensor:
    """Return the same numbers (except for "expanded") with another memory layout."""
    if how == "permuted" and t.dim() > 1:
        order = [*range(t.dim())][dim % t.dim() :] + [*range(t.dim())][: dim % t.dim()]
        return t.permute(order).contiguous().permute([order.index(i) for i in range(t.dim())])
    if how == "every second":
        return torch.stack([t, t + 1], -1)[..., 0]
    if how == "slice":
        dim %= t.dim()
        return torch.cat([t, t, t], dim).narrow(dim, t.shape[dim], t.shape[dim])
    if how == "unaligned":
        return torch.cat([t.new_zeros(1 + dim), t.flatten()])[1 + dim :].view(t.shape)
    if how == "expanded":
        dim %= t.dim()
        return t.narrow(dim, 0, min(1, t.shape[dim])).expand(t.shape)
    return t


LAYOUTS = st.tuples(
    st.sampled_from(["as it is", "permuted", "every second", "slice", "unaligned", "expanded"]), st.integers(0, 3)
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "residual_scale": st.sampled_from([0.0, -1.5, "()", "(d,)"]),
        "layer_scale": st.sampled_from([0.25, "()", "(d,)"]),
        "row_scale": st.sampled_from(["(*)", "(n, 1...)"]),
        "branch_bias": st.just("(d,)"),
        "dropout_p": st.sampled_from([0.0, 0.1, 0.9, 1.0]),
        "offset": st.integers(0, 2**40),
        "weight_offset": st.sampled_from([0.0, 1.0]),
        "residual_dtype": st.sampled_from([None, torch.float32, torch.bfloat16, f64]),
        "out_dtype": st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
    },
)


@st.composite
def calls(draw, dtypes=tuple(DTYPES), options=OPTIONS, min_rank: int = 1) -> Call:
    options = draw(options)
    weight = draw(st.booleans()) or bool(options.get("weight_offset"))
    variant = Variant(draw(st.sampled_from(["layer", "rms"])), weight, draw(st.booleans()), options)
    eps = draw(st.sampled_from([1e-12, 1e-6, 1e-5, 1e-3, 1.0]))
    shape = draw(shapes(min_rank))
    call = make(variant, draw(st.sampled_from(list(dtypes))), shape, eps=eps, seed=draw(st.integers(0, 2**32)))
    scale, mean = draw(st.sampled_from([1e-2, 1.0, 30.0])), draw(st.sampled_from([0.0, 0.0, 1.0, 100.0]))
    for name in ("residual", "branch"):
        call.tensors[name] = (call.tensors[name].to(f64) * scale + mean).to(call.tensors[name].dtype)
    for name in ("residual", "branch", *({"weight", "bias"} & call.tensors.keys())):
        call.tensors[name] = _moved(call.tensors[name], *draw(LAYOUTS))
    return call


@given(calls(), LAYOUTS, st.sampled_from([("y", "z"), ("y",), ("z",)]))
def test_any_call_is_accurate(call, layout, used):
    outputs = call()
    cot = {name: _moved(t, *layout) for name, t in cotangents(outputs).items() if name in used}
    expected, terms = truth(call, outputs["z"], cot), magnitudes(call, outputs["z"], cot)
    # The norm's arithmetic has the stream's dtype; the add has the widest dtype of all.
    unit = arithmetic(call)
    actual = {"y": outputs["y"]} | gradients(call, cot)
    for name, value in actual.items():
        if expected[name] is None or not expected[name].any():
            assert value is None or worst(value) <= 8 * unit * worst(terms.get(name, torch.zeros(1))), name
            continue
        # A rounding to the result's dtype (two for a broadcast row_scale), absolute for subnormals, and a few of
        # the arithmetic.
        smallest = torch.finfo(value.dtype).smallest_normal * UNIT[value.dtype]
        bound = 2.02 * UNIT[value.dtype] * worst(expected[name]) + 16 * unit * worst(terms[name]) + smallest
        assert value.shape == expected[name].shape
        assert worst(value.to(f64) - expected[name]) <= bound, name


@given(calls(options=st.just({})))
def test_input_layout_never_changes_a_bit(call):
    copy = Call(
        call.norm,
        call.eps,
        {name: t.clone(memory_format=torch.contiguous_format) for name, t in call.tensors.items()},
        {},
    )
    actual, expected = call(), copy()
    assert actual["y"].equal(expected["y"])
    assert actual["z"].equal(expected["z"])
    assert call.y_alone().equal(expected["y"])


@given(calls(min_rank=2), st.data())
def test_row_never_depends_on_its_neighbours(call, data):
    call.options.pop("dropout_p", None)  # the mask depends on the element's index, and so on the place
    call.tensors = {
        name: t.flatten(0, -2) if name in ("residual", "branch") else t
        for name, t in call.tensors.items()
        if name != "row_scale"
    }
    rows = call.tensors["residual"].shape[0]
    first = data.draw(st.integers(0, max(rows - 1, 0)))
    last = data.draw(st.integers(first, rows))
    outputs, part = call(), call.rows(slice(first, last))()
    assert part["y"].equal(outputs["y"][first:last])
    assert part["z"].equal(outputs["z"][first:last])
