"""Tests of the schemas of the operators of n streams: opcheck, and decomposed graphs without them."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import addnorm
from addnorm.ops.options import NORMS
from addnorm.ops.streams.kinds import KINDS
from addnorm.ops.streams.schema import GRADIENTS, INPUTS
from support.stream_calls import bf16, f32, f64, make_call, make_cotangents

ops = torch.ops.addnorm
CALLS = [("given", "shared", f32, ""), ("manifold", "write", bf16, ""), ("gates", "identity", f64, "_reference")]
SLOW = [("independent", "features", f32, ""), ("hyper", "given", f32, ""), ("manifold", "read", f32, ""),
        ("given", "shared", f32, "_reference"), ("manifold", "write", bf16, "_reference"), ("hyper", "read", f32, "_reference")]  # fmt: skip
CASES = [*CALLS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def make_arguments(call):
    """Return the arguments of the operator."""
    numbers = {
        "eps": 1e-5, "norm": NORMS[call.norm], "kind": KINDS[call.kind], "iterations": 2, "gate_eps": 1e-6, "project_eps": 1e-6,
        "magnitude": 2.0,
    }  # fmt: skip
    return [numbers.get(name, call.tensors.get(name)) for name in INPUTS]


@pytest.mark.parametrize(("kind", "mode", "dtype", "suffix"), CASES, ids=str)
def test_forward_passes_opcheck(kind, mode, dtype, suffix):
    arguments = make_arguments(make_call(3, 8, (2, 3), kind, dtype=dtype, mode=mode))
    forward = getattr(ops, f"add_norm_streams{suffix}").default
    if not suffix:  # the reference has no gradient of its own
        arguments = [t.requires_grad_() if isinstance(t, torch.Tensor) else t for t in arguments]
    torch.library.opcheck(forward, tuple(arguments))


@pytest.mark.parametrize(("kind", "mode", "dtype", "suffix"), CASES, ids=str)
def test_backward_passes_opcheck(kind, mode, dtype, suffix):
    call = make_call(3, 8, (2, 3), kind, dtype=dtype, mode=mode)
    arguments = make_arguments(call)
    new, read, *computed, logits, stats = ops.add_norm_streams(*arguments)
    grads = [torch.randn_like(t) if t.numel() else None for t in (new, read, *computed)]
    for mask in (sum(1 << bit for bit, name in enumerate(GRADIENTS) if name in call.tensors), 1):
        backward = getattr(ops, f"add_norm_streams_backward{suffix}").default
        torch.library.opcheck(backward, (*arguments, logits, stats, computed[0], *grads, mask))


@pytest.mark.parametrize("kind", KINDS)
def test_joint_graph_decomposes_to_torch_operators(kind):
    call = make_call(3, 8, (4,), kind)
    cotangents = make_cotangents(call)

    def differentiated(*tensors):
        leaves = dict(zip(call.tensors, tensors, strict=True))
        outputs = call(leaves)
        return torch.autograd.grad(list(outputs.values()), tensors, [cotangents[name] for name in outputs])

    inputs = list(call.leaves().values())
    opaque = make_fx(differentiated)(*inputs)
    graph = make_fx(opaque, decomposition_table=addnorm.decompositions(core_aten=False))(*inputs)
    names = [{str(node.target) for node in g.graph.nodes if "addnorm" in str(node.target)} for g in (opaque, graph)]
    assert names == [{"addnorm.add_norm_streams.default", "addnorm.add_norm_streams_backward.default"}, set()]
    torch.testing.assert_close(graph(*inputs), differentiated(*inputs), rtol=1e-4, atol=1e-4)
