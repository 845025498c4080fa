"""Tests of operators of other libraries: as equations, proven in each run, refuted with numbers, or named where none is known."""

import re

import pytest
import torch

import addnorm
from addnorm.stream import register_operator
from addnorm.stream.dataflow import registered_ops
from support import foreign_operators as foreign
from support.foreign_operators import EPS, OPERATORS, make_pair
from support.instrumented_model import assert_same_numbers, record
from support.stream_steps import inspect_steps, repeat

PRE_LN = ["x' = x + f(N(x))"] * 4
KNOWN = [name for name in OPERATORS if not name.startswith("ownlib::")]
VLLM = "_C::fused_add_rms_norm"


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Undo registrations and faults."""
    monkeypatch.setattr(registered_ops, "EQUATIONS", {**registered_ops.EQUATIONS})
    yield
    foreign.faults.clear()


def rms(z, weight, eps):
    return torch.nn.functional.rms_norm(z, z.shape[-1:], weight, eps)


def add_rms_norm(branch, stream, gain, eps):
    total = stream + branch
    return {"branch": rms(total, gain, eps), "stream": total}


def check_pre_ln(found):
    assert found.unknown == ()
    assert found.wiring == "pre_ln"
    assert found.closes
    assert [site.equation for site in found.sites] == PRE_LN
    assert [site.layer for site in found.sites] == [0, 0, 1, 1]
    assert found.streams[0].final_norm is not None
    assert {(norm.kind, norm.eps) for norm in found.streams[0].norms()} == {("rms", EPS)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KNOWN)
def test_inspect_understands_known_operators(name, dtype):
    model, _, ids = make_pair(name, dtype)
    check_pre_ln(addnorm.inspect(model, ids))


def test_inspect_closes_foreign_operators_in_float64():
    model, _, ids = make_pair(VLLM)
    assert addnorm.inspect(model, ids, float64=True).closure < 1e-14


def test_tools_agree_with_the_plain_model():
    model, plain, ids = make_pair(VLLM)
    ours, theirs = addnorm.inspect(model, ids), addnorm.inspect(plain, ids)
    assert [site.id for site in ours.sites] == [site.id for site in theirs.sites]
    shares = [addnorm.decompose(each, ids).mean_shares() for each in (model, plain)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-4)
    recordings = [record(each, ids) for each in (model, plain)]
    assert_same_numbers(*recordings, rtol=1e-3, atol=1e-6)
    assert len(recordings[0].table()) > 50
    for k in range(4):
        with addnorm.scale_write(ours.sites[k], 0.5), addnorm.scale_write(theirs.sites[k], 0.5):
            torch.testing.assert_close(model(ids), plain(ids))
    torch.testing.assert_close(model(ids), plain(ids))


def test_registered_operator_is_understood():
    model, _, ids = make_pair("ownlib::add_rms_norm")
    register_operator("ownlib::add_*", add_rms_norm)
    check_pre_ln(addnorm.inspect(model, ids))


def test_sum_inside_an_operator_is_recorded():
    model, _, ids = make_pair("ownlib::post_norm")
    register_operator("ownlib::post_norm", lambda x, residual, gain, eps: rms(residual + x, gain, eps))
    found = addnorm.inspect(model, ids)
    assert (found.closes, found.unknown) == (True, ())
    assert [site.equation for site in found.sites] == ["x' = N(x + f(N(x)))", *["x' = N(x + f(x))"] * 3]
    recording = record(model, ids)
    sums = [site.sublayer.add.out for site in found.sites]
    assert all(isinstance(value.part, str) for value in sums)  # no outputs of the operator
    recorded = [number for _, number in recording.series("norm_out", "rstd")]
    expected = [(value.tensor.square().mean(-1) + EPS).rsqrt().mean().item() for value in sums]
    assert recorded == pytest.approx(expected)


WRONG = {
    "eps": lambda branch, stream, gain, eps: add_rms_norm(branch, stream, gain, 2 * eps),
    "order": lambda branch, stream, gain, eps: {
        "stream": rms(stream + branch, gain, eps), "branch": stream + branch,
    },
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_equation_is_refuted_with_numbers(wrong):
    model, _, ids = make_pair("ownlib::add_rms_norm")
    register_operator("ownlib::add_rms_norm", WRONG[wrong])
    found = addnorm.inspect(model, ids)
    assert not found.closes
    reason = next(part.reason for part in found.unknown if "registered" in part.reason)
    error, tolerance = map(float, re.search(r"relative error (\S+), tolerance (\S+?)(?:;|$)", reason).groups())
    assert error > 2 * tolerance


@pytest.mark.parametrize("fault", [{"eps": 2.0}, {"sign": -1}, {"swap": True}])
def test_wrong_operator_is_found(fault):
    model, _, ids = make_pair(VLLM)
    foreign.faults.update(fault)
    found = addnorm.inspect(model, ids)
    assert not found.closes
    (part,) = [part for part in found.unknown if "registered" in part.reason]
    assert f"the equation registered for {VLLM} is not what" in part.reason
    assert "there are 4" in part.reason


BROKEN = {
    "raises KeyError: 'no such key'": lambda stream: {}["no such key"],
    "raises ValueError: add_ writes in place": lambda branch, stream: {"stream": stream.add_(branch)},
    "raises ValueError: 'gain' is no argument that the operator writes": lambda gain: {"gain": gain},
    "raises ValueError: 'stream' has shape ()": lambda stream: {"stream": stream.sum()},
}


@pytest.mark.parametrize("reason", BROKEN)
def test_broken_equation_is_reported(reason):
    model, _, ids = make_pair("ownlib::add_rms_norm")
    register_operator("ownlib::add_rms_norm", BROKEN[reason])
    assert reason.replace("add_ ", "") in addnorm.inspect(model, ids).unknown[0].reason.replace("add ", "")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ownlib::add_rms_norm", 'lambda branch, stream, gain, eps: {"branch": ..., "stream": ...}'),
        ("ownlib::rms_norm", "lambda x, gain, eps: ..."),
        ("ownlib::add", "lambda x, y: ..."),
    ],
)
def test_unregistered_operator_is_named_with_its_line(name, line):
    model, _, ids = make_pair(name)
    found = addnorm.inspect(model, ids)
    assert not found.closes
    assert found.wiring in ("unknown", "none")
    assert any(f'addnorm.stream.register_operator("{name}", {line})' in part.reason for part in found.unknown)
    assert any("foreign_operators.py" in part.source for part in found.unknown)


def test_operators_inside_sublayers_are_not_named():
    def step(m, k, x):
        return x + m.gates[k](torch.ops.ownlib.rms_norm(m.gates[k](m.norms[k](x)), m.gammas[k], EPS))

    found = inspect_steps(repeat(step, count=3))
    assert (found.unknown, found.closes) == ((), True)


def test_fuse_leaves_operators_of_other_libraries():
    model, _, ids = make_pair(VLLM)
    before = model(ids)
    fusion = addnorm.fuse(model, ids, benchmark=False)
    assert not fusion.fused
    assert "the model is unchanged" in str(fusion)
    assert torch.equal(model(ids), before)


def test_register_operator_checks_its_arguments():
    for name in ("rms_norm", "aten::mul", "addnorm::norm", None):
        with pytest.raises(ValueError, match="name is"):
            register_operator(name, rms)
    with pytest.raises(TypeError, match="equation is str"):
        register_operator("ownlib::rms_norm", "x")
