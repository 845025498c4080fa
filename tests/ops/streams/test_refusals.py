"""Tests of wrong arguments of the operators of n streams: an error that names the argument, also in calls of torch.ops."""

import re

import pytest
import torch

import addnorm
from addnorm.ops.streams.kinds import GATE_KINDS
from addnorm.ops.streams.schema import INPUTS
from support.refusals import assert_raises
from support.stream_calls import BY_TOKEN, f32, f64, make_call, make_cotangents, run

NUMBERS = {
    "gate_eps": (-1.0, float("nan"), "1"),
    "project_eps": (-1.0, float("nan"), "1"),
    "iterations": (0, -1, 10001, 2**40, "20"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_wrong_numbers_of_gates_are_refused(name):
    for value in NUMBERS[name]:
        gates = addnorm.StreamGates("manifold", torch.randn(8, 32), torch.ones(3), torch.ones(8))._replace(
            **{name: value}
        )
        assert_raises(
            f"ValueError: {name} is {value!r}, expected",
            lambda gates=gates: addnorm.add_norm_streams(torch.randn(3, 2, 16), gates=gates),
        )


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_refuse_what_eager_calls_refuse(transform):
    x, branch, ones = torch.randn(3, 2, 16), torch.randn(16), torch.ones(2)

    def call(x):
        return addnorm.add_norm_streams(x, branch, inject=ones).streams.sum()

    messages = []
    for function, argument in ((call, x), (transform(call), x[None] if transform is torch.func.vmap else x)):
        with pytest.raises(ValueError, match="branch has shape") as raised:
            function(argument)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_iterations_of_other_gates_are_ignored():
    gates = addnorm.StreamGates("gates", torch.randn(2, 32), torch.ones(1), torch.ones(2))
    x = torch.randn(3, 2, 16)
    steps = [addnorm.add_norm_streams(x, gates=gates._replace(iterations=number)) for number in (20, -1, 2**40)]
    assert all(step.read.equal(steps[0].read) for step in steps)


STEP = make_call(2, 8, (3,), "given", mode="write")
STREAMS = {
    **dict.fromkeys(INPUTS), **STEP.tensors, "eps": 1e-5, "norm": 0, "kind": 0, "iterations": 2, "gate_eps": 0.0,
    "project_eps": 0.0, "magnitude": 2.0,
}  # fmt: skip
OUTPUTS = torch.ops.addnorm.add_norm_streams(**STREAMS)
BACK = STREAMS | dict(zip(("logits", "stats", "computed_collapse"), (OUTPUTS[5], OUTPUTS[6], OUTPUTS[2]), strict=True)) | {
    **dict.fromkeys(("dcollapse", "dmix", "dinject")), "dnew": OUTPUTS[0], "dread": OUTPUTS[1], "grad_mask": 3,
}  # fmt: skip
WRONG = [
    *[({name: n}, f"{name} is {n}, expected 0 to") for name in ("norm", "kind") for n in (-1, 5, 2**32, 2**63 - 1)],
    ({"streams": torch.empty(3, 0, 8)}, "streams has shape (3, 0, 8), expected (*, n, d_model) with n >= 1"),
    *[({"grad_mask": mask}, f"grad_mask is {mask}, expected a bit for each of") for mask in (-1, 32, 1024, 2**63 - 1)],
    *[({name: torch.ones(2)}, f"{name} has shape (2,), expected (3, ") for name in ("dnew", "dread", "stats")],
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_operators_refuse_numbers_out_of_range(wrong, sentence):
    calls = [(torch.ops.addnorm.add_norm_streams_backward, BACK)]
    if wrong.keys() <= STREAMS.keys():
        calls.append((torch.ops.addnorm.add_norm_streams, STREAMS))
    for operator, arguments in calls:
        with pytest.raises((RuntimeError, ValueError), match=re.escape(sentence)) as caught:
            operator(**{**arguments, **wrong})
        assert "\n" not in str(caught.value)


GATES = addnorm.StreamGates("manifold", torch.randn(24, 32), torch.ones(3), torch.ones(24))
# The message of each wrong call, and what it changes of a call that reads with a given c.
BAD = {
    "ValueError: mix has shape (3, 4, 5), expected (3, 4, 4) or (4, 4)": {"mix": torch.randn(3, 4, 5)},
    "ValueError: inject is None and branch is not, expected both": {"inject": None},
    "ValueError: eps is -1.0, expected a number that is not negative": {"eps": -1.0},
    "ValueError: norm is 'batch', expected one of 'layer', 'rms', 'none'": {"norm": "batch"},
    "TypeError: out_dtype is torch.int32, expected float32, bfloat16, float16 or float64": {"out_dtype": torch.int32},
    "TypeError: gates is of type tuple, expected addnorm.StreamGates": {"gates": (1, 2)},
    "ValueError: project of the gates has shape (24, 32), expected (24, 36) for streams (3, 4, 9)":
        {"streams": torch.randn(3, 4, 9), "branch": torch.randn(3, 9), "collapse": None, "gates": GATES},
}  # fmt: skip


@pytest.mark.parametrize("sentence", BAD)
def test_wrong_arguments_raise_one_sentence(sentence):
    arguments = {"streams": torch.randn(3, 4, 8), "branch": torch.randn(3, 8), "mix": torch.randn(3, 4, 4)}
    arguments |= {"inject": torch.randn(3, 4), "collapse": torch.randn(4)} | BAD[sentence]
    assert_raises(sentence, lambda: addnorm.add_norm_streams(**arguments))


@pytest.mark.parametrize("kind", GATE_KINDS)
@pytest.mark.parametrize(("n", "dtype"), [(17, f32), (2, f64)], ids=str)
def test_reference_differentiates_streams_without_tokens(kind, n, dtype):
    """Streams of shape (n, d_model), which the kernels do not compute in these sizes and dtypes."""
    call = make_call(n, 9, (1,), kind, dtype=dtype)
    cotangents = make_cotangents(call)
    expected = run(call, call.leaves(), cotangents)
    call = call.__class__({name: t[0] if name in BY_TOKEN else t for name, t in call.tensors.items()}, kind)
    actual = run(call, call.leaves(), {name: t[0] for name, t in cotangents.items()})
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name].view(value.shape), rtol=1e-5, atol=1e-5)
