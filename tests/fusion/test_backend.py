"""Tests of `torch.compile(model, backend="addnorm")`: rewritten graphs run eagerly or go to Inductor."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import addnorm
from addnorm.fusion.backend import backend
from addnorm.fusion.benchmark import saved_bytes
from addnorm.stream.dataflow.snapshot import StateSnapshot
from support.fused_model import QUIET, X, count_calls, fuse
from support.fused_model import PreNormModel as Model
from support.graph_capture import capture_graphs, relative_difference, run_call

pytestmark = QUIET


def check_equal(model, call, x, limit=1e-5):
    """Check that a model and another callable have the same outputs and gradients."""
    expected, result = ([*y, *grads.values()] for y, grads in (run_call(model, one, (x,)) for one in (model, call)))
    assert len(expected) == 1 + len([*model.parameters()])
    assert all(relative_difference(one, other) < limit for one, other in zip(expected, result, strict=True))


def test_compile_by_name_keeps_outputs_and_gradients():
    model = Model(p=0.3)
    check_equal(model, torch.compile(model, backend="addnorm"), X)


def test_inductor_compiles_the_rewritten_graph():
    model = Model(layers=1)
    compiled = torch.compile(model, backend="addnorm", options={"inductor": True, "epilogue_fusion": False})
    with torch.no_grad():
        assert relative_difference(model(X), compiled(X)) < 1e-6
    assert count_calls(compiled, X) == 2


@pytest.mark.parametrize(
    ("options", "what"),
    [({"options": {"epilogue_fusion": False}}, "epilogue_fusion"), ({"mode": "max-autotune"}, "mode")],
)
def test_backend_refuses_inductor_options_without_inductor(options, what):
    graph = torch.fx.symbolic_trace(nn.Identity())
    with pytest.raises(ValueError, match=f'backend "addnorm" has no {what}; Inductor has'):
        backend(graph, [X], **options)


def test_checkpoint_recomputes_the_same():
    model = Model(p=0.3, run=lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    capture = capture_graphs(model)
    check_equal(model, capture.compiled, X.clone().requires_grad_())
    assert [b.reason for b in capture.boundaries] == [None] * 2  # the boundaries inside the layers
    x = X.clone().requires_grad_()
    before, after = (
        saved_bytes(lambda call=call: call(x), StateSnapshot(model, (x,))) for call in (model, capture.compiled)
    )
    assert after <= before  # intermediate results inside the layers are not kept


def test_selective_checkpoint_keeps_its_policy():
    context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    model = Model(run=lambda layer, x: checkpoint(layer, x, use_reentrant=False, context_fn=context))
    check_equal(model, capture_graphs(model).compiled, X.clone().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_autocast_is_as_in_eager(dtype):
    model = Model()
    capture = capture_graphs(model)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        expected, result = model(X), capture.compiled(X)
    assert relative_difference(expected, result) < 2 * torch.finfo(dtype).eps
    with torch.autocast("cpu", dtype):
        check_equal(model, capture.compiled, X, 8 * torch.finfo(dtype).eps)


def test_generate_with_cache_gives_the_same_tokens():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    ids = torch.randint(5, 99, (2, 7))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids, **options)
    fuse(model, ids)
    assert expected.equal(model.generate(ids, **options))
    addnorm.unfuse(model)
