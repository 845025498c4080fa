"""Tests of the operators' schemas: opcheck, and fake kernels that agree with the real ones."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from addnorm.ops.schema import SCHEMAS
from support.cases import DTYPES, VARIANTS, bf16, cotangents, f32, f64, make
from support.pairwise import pairwise, product, rotate

ops = torch.ops.addnorm
LISTED = ("residual", "branch", "weight", "bias")


def forward_arguments(variant: str, dtypes: str, shape: tuple[int, ...]) -> tuple[tuple, dict]:
    """Return the arguments of add_norm_forward for a variant."""
    call = make(variant, dtypes, shape)
    norm = {"layer": 0, "rms": 1, "none": 2}[call.norm]
    options = {name: t for name, t in call.tensors.items() if name not in LISTED}
    for name, factor in (("residual_scale", "residual_factor"), ("layer_scale", "branch_factor")):
        if name in call.options:
            options[factor] = float(call.options.pop(name))
    if "row_scale" in options:
        options["row_scale"] = options["row_scale"].expand(shape[:-1])
    return (*(call.tensors.get(name) for name in LISTED), call.eps, norm), options | call.options


def backward_arguments(variant: str, dtypes: str, shape: tuple[int, ...]) -> tuple[tuple, dict]:
    """Return the arguments of add_norm_backward for a variant, with every possible gradient requested."""
    (residual, branch, weight, bias, eps, norm), options = forward_arguments(variant, dtypes, shape)
    y, z, stats = ops.add_norm_forward_reference(residual, branch, weight, bias, eps, norm, **options)
    grad_outputs = cotangents({"y": y, "z": z})
    grad_mask = sum(
        1 << bit
        for bit, t in enumerate(
            (
                residual,
                branch,
                weight,
                bias,
                *map(options.get, ("residual_scale", "row_scale", "layer_scale", "branch_bias")),
            )
        )
        if t is not None
    )
    for name in ("residual_dtype", "out_dtype"):
        options.pop(name, None)
    dtypes = {
        "dresidual_dtype": residual.dtype, "branch_dtype": branch.dtype, "bias_dtype": f32 if bias is None else bias.dtype
    }  # fmt: skip
    arguments = (grad_outputs["y"] if norm < 2 else None, grad_outputs["z"], z, stats, weight, norm)
    return arguments, options | {"residual": residual, "branch": branch, "grad_mask": grad_mask} | dtypes


def out_arguments(variant: str, dtypes: str, shape: tuple[int, ...]) -> tuple[tuple, dict]:
    """Return the arguments of add_norm_out for a variant, with new buffers for y (if there is a norm) and z."""
    arguments, options = forward_arguments(variant, dtypes, shape)
    y, z, _ = ops.add_norm_forward(*arguments, **options)
    for name in ("residual_dtype", "out_dtype"):
        options.pop(name, None)
    return (*arguments, torch.empty_like(y) if arguments[-1] < 2 else None, torch.empty_like(z)), options


OPCHECKED_BASIC = [("LayerNorm", "float32"), ("RMSNorm", "float32 stream, bfloat16 branch")]
OPCHECKED_OPTIONS = ["LayerNorm", "everything, RMSNorm"]
SUFFIXES = ["", "_reference"]


def samples() -> dict[str, tuple[str, tuple, dict]]:
    """Return operators with arguments, by name."""
    cases = {}
    always = [(variant, dtypes, (5, 17)) for variant, dtypes in OPCHECKED_BASIC]
    axes = (
        ["LayerNorm", "RMSNorm", "LayerNorm without either"],
        ["float32", "bfloat16", "float32 stream, bfloat16 branch", "float64"],
        [(5, 17), (2, 3, 8), (17,), (0, 8)],
    )
    for variant, dtypes, shape in dict.fromkeys([*always, *pairwise(*axes)]):
        call = make(variant, dtypes, shape)
        inputs = (*(call.tensors.get(name) for name in LISTED), call.eps, call.norm == "rms")
        label, norm = f"{variant}, {dtypes}, {shape}", int(inputs[-1])
        for name in ("add_norm", "add_norm_stream"):
            cases[f"{name}: {label}"] = (name, inputs, {})
        cases[f"add_norm of nothing: {label}"] = ("add_norm", (inputs[0], None, *inputs[2:]), {})
        cases[f"add_norm_forward of nothing: {label}"] = ("add_norm_forward", (inputs[0], None, *inputs[2:5], norm), {})
        y, z, stats = ops.add_norm_forward_reference(*inputs[:5], norm)
        dy, dz = cotangents({"y": y, "z": z}).values()
        present = 3 | 4 * (inputs[2] is not None) | 8 * (inputs[3] is not None)
        for grad_mask in {1, 2, 3, present, 4 & present, 8 & present} - {0}:
            arguments = (dy, dz, z, stats, inputs[2], norm, *DTYPES[dtypes], grad_mask)
            cases[f"add_norm_backward of {grad_mask}: {label}"] = ("add_norm_backward", arguments, {})
    for i, variant in enumerate(VARIANTS):
        opchecked = variant in OPCHECKED_OPTIONS
        for dtypes in dict.fromkeys(["float32"] * opchecked + [("float32", "bfloat16", "float64")[i % 3]]):
            label = f"{variant}, {dtypes}"
            cases[f"add_norm_forward: {label}"] = ("add_norm_forward", *forward_arguments(variant, dtypes, (3, 2, 9)))
            cases[f"add_norm_out: {label}"] = ("add_norm_out", *out_arguments(variant, dtypes, (3, 2, 9)))
            cases[f"add_norm_backward: {label}"] = (
                "add_norm_backward",
                *backward_arguments(variant, dtypes, (3, 2, 9)),
            )
    return cases


SAMPLES = samples()


def layout(outputs) -> list[tuple]:
    outputs = () if outputs is None else [outputs] if isinstance(outputs, torch.Tensor) else outputs
    return [(tuple(t.shape), t.dtype, t.stride(), t.storage_offset()) for t in outputs]


@pytest.mark.parametrize(("sample", "suffix"), rotate(list(SAMPLES), SUFFIXES, 1))
def test_fake_kernels_return_the_real_metadata(sample, suffix):
    name, arguments, options = SAMPLES[sample]
    operator = getattr(ops, name + suffix)
    real = operator(*arguments, **options)
    with FakeTensorMode() as mode:

        def fake(t):
            return mode.from_tensor(t) if isinstance(t, torch.Tensor) else t

        faked = operator(*tree_map(fake, arguments), **tree_map(fake, options))
    meta = operator(
        *tree_map(lambda t: t.to("meta") if isinstance(t, torch.Tensor) else t, arguments),
        **tree_map(lambda t: t.to("meta") if isinstance(t, torch.Tensor) else t, options),
    )
    assert layout(faked) == layout(real)
    assert layout(meta) == layout(real)


STRIDED = {
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced": lambda t: torch.cat([t, t], -1)[:, : t.shape[1]],
    "expanded": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize(("how", "dtype", "suffix"), product(list(STRIDED), [f32, bf16, f64], SUFFIXES))
def test_outputs_of_strided_inputs_are_contiguous(how, dtype, suffix):
    residual, branch = STRIDED[how](torch.randn(6, 8).to(dtype)), torch.randn(6, 8).to(dtype)
    for operator in (getattr(ops, "add_norm_stream" + suffix), getattr(ops, "add_norm_forward" + suffix)):
        for pair in ((residual, branch), (branch, residual), (residual, residual)):
            kind = "forward" in str(operator) and 1
            real = operator(*pair, None, None, 1e-5, kind)
            with FakeTensorMode() as mode:
                faked = operator(*map(mode.from_tensor, pair), None, None, 1e-5, kind)
            assert layout(faked) == layout(real)
            assert all(t.is_contiguous() for t in real)


OPCHECKED = [
    *(
        f"{name}: {variant}, {dtypes}, (5, 17)"
        for name in ("add_norm", "add_norm_stream", "add_norm_backward of 3")
        for variant, dtypes in OPCHECKED_BASIC
    ),
    *(
        f"{name}: {variant}, float32"
        for name in ("add_norm_forward", "add_norm_backward", "add_norm_out")
        for variant in OPCHECKED_OPTIONS
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sample", "suffix"), rotate(OPCHECKED, SUFFIXES, 1))
def test_operators_pass_opcheck(sample, suffix):
    name, arguments, options = SAMPLES[sample]
    torch.library.opcheck(getattr(ops, name + suffix).default, arguments, options)


def test_every_operator_has_a_reference_and_a_fake_kernel():
    for name in SCHEMAS:
        operator, reference = getattr(ops, name).default, getattr(ops, f"{name}_reference").default
        assert str(operator._schema).replace(name, "", 1) == str(reference._schema).replace(f"{name}_reference", "", 1)
        for overload in (operator, reference):
            assert torch.Tag.pt2_compliant_tag in overload.tags
            assert overload._schema.is_mutable == (name == "add_norm_out")
            assert torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeExplicitAutograd")
            assert torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "Meta")


WRITTEN = [name for name in SAMPLES if name.startswith("add_norm_out")]


@pytest.mark.parametrize(("sample", "suffix"), rotate(WRITTEN, SUFFIXES, 1))
def test_add_norm_out_writes_what_add_norm_forward_returns(sample, suffix):
    _, (*arguments, y, z), options = SAMPLES[sample]
    out_dtype = None if y is None else y.dtype
    expected = ops.add_norm_forward(*arguments, **options, residual_dtype=z.dtype, out_dtype=out_dtype)
    for target in (y, z):
        if target is not None:
            target.fill_(float("nan"))
    assert getattr(ops, "add_norm_out" + suffix)(*arguments, y, z, **options) is None
    assert z.equal(expected[1])
    assert y is None or y.equal(expected[0])


@pytest.mark.parametrize("suffix", ["", "_reference"])
def test_add_norm_out_without_z_rounds_to_residuals_dtype(suffix):
    arguments, options = forward_arguments("LayerNorm", "bfloat16 stream, float32 branch", (5, 17))
    y = torch.empty(5, 17)
    getattr(ops, "add_norm_out" + suffix)(*arguments, y, None, **options)
    assert y.equal(ops.add_norm_forward(*arguments, **options)[0])
    assert not y.equal(ops.add_norm_forward(*arguments, **options, residual_dtype=f32)[0])


@pytest.mark.parametrize("suffix", ["", "_reference"])
def test_add_norm_out_checks_memory_itself(suffix):
    """A compiled graph calls it directly."""
    buffer = torch.randn(96)
    x, half_over, apart = buffer[:32].view(4, 8), buffer[16:48].view(4, 8), buffer[64:].view(4, 8)
    operator = getattr(ops, "add_norm_out" + suffix)
    before = buffer.clone()
    for arguments in (
        (x, apart, None, None, 1e-5, 0, half_over, None),
        (x, apart, None, None, 1e-5, 0, apart, half_over),
        (x, apart, None, None, 1e-5, 0, x, x),
        (x, apart, x[1], None, 1e-5, 1, x, None),
        (apart, x, None, x[1], 1e-5, 1, x, None),
        (x, None, None, None, 1e-5, 1, half_over, None),
        (apart, apart, None, None, 1e-5, 0, buffer[:8].expand(4, 8), None),
        (apart, apart, None, None, 1e-5, 0, x[:3], None),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            operator(*arguments)
    for name in ("residual_scale", "layer_scale", "branch_bias"):
        with pytest.raises((ValueError, RuntimeError)):
            operator(apart, apart, None, None, 1e-5, 0, x, None, **{name: x[2]})
    with pytest.raises((ValueError, RuntimeError)):
        operator(apart, apart, None, None, 1e-5, 0, x, None, row_scale=x[:, 1])
    assert buffer.equal(before)
