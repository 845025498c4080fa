"""Tests of `record` on all ways to run a model: the steps of its numbers and gradients, and nothing of it stays or changes."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.optim.optimizer import _global_optimizer_post_hooks

import addnorm
from support.equality import assert_same
from support.instrumented_model import (
    REFERENCE,
    D,
    Model,
    assert_same_numbers,
    backward,
    column,
    compute_loss,
    parameter_gradients,
    step,
)
from support.stacks import encoder
from support.stream_steps import X


@pytest.fixture
def model():
    return Model()


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(post, reentrant, ids):
    """Record each number once, as without checkpoints."""
    model = Model(post).train()
    plain = step(model, ids)
    model.checkpointed = reentrant
    rec = step(model, ids)
    assert rec.steps == (0,)
    assert_same_numbers(rec, plain, rtol=1e-4, atol=1e-6)
    assert "note" not in rec.metadata


def test_reentrant_checkpoint_of_frozen_inputs(ids):
    """Compute the same gradients as without the recorder: none where no input requires one."""
    model = Model().train()
    model.embed.requires_grad_(False)
    model.checkpointed = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about these inputs
        backward(model, ids)
        expected = [p.grad is None for p in model.parameters()]
        step(model, ids)
    assert [p.grad is None for p in model.parameters()] == expected


@pytest.mark.parametrize(("wiring", "wrapped"), [("pre_ln", False), ("post_ln", True)])
def test_checkpoints_of_this_library(wiring, wrapped):
    """Record a stack whose layers are recomputed, by its option or in wrappers, with the gradients of the plain one."""
    model = encoder(wiring).train()
    other = copy.deepcopy(model)
    if wrapped:
        apply_activation_checkpointing(other, check_fn=lambda module: isinstance(module, addnorm.nn.ResidualLayer))
    else:
        other.stack.checkpoint = True
    assert_same(*([row.value for row in step(each, X).table()] for each in (model, other)))
    assert_same(*([p.grad for p in each.parameters()] for each in (model, other)))


def test_empty_inputs_are_not_recorded():
    """Record a forward with an empty prefix and an empty mask, not one without tokens."""

    class Prefixed(addnorm.nn.Encoder):
        def forward(self, prefix, x, mask):  # other inputs
            return super().forward(torch.cat([prefix, x], 1))

    model = Prefixed(1, D, nhead=2)
    with addnorm.record(model) as rec:
        model(torch.randn(2, 0, D), X, torch.ones(0))
        model(torch.randn(0, 0, D), torch.randn(0, 5, D), torch.ones(5, 5))
    assert rec.steps == (0,)
    assert "Note: forward 1 had an empty input: it is not recorded." in str(rec)


def test_accumulate_is_one_step(model, ids):
    model.zero_grad()
    with addnorm.record(model, accumulate=3) as rec:
        for part in ids.split(1):
            backward(model, part)
    assert rec.steps == (0,)
    assert column(rec, "params", "grad_l2") == pytest.approx(parameter_gradients(model), rel=1e-4)


def test_optimizer_ends_a_step(ids):
    """Steps of 2 and 1 forwards; optimizers of other parameters, and a second optimizer of the model, end none."""
    model, other = Model(), nn.Linear(2, 3)
    first, second = ([*model.parameters()][k::2] for k in (0, 1))
    optimizers = [torch.optim.SGD(parameters, 0.0) for parameters in (first, second)]
    unrelated = torch.optim.SGD(other.parameters(), 0.1)
    parts = ids.split(1)
    model.zero_grad()
    with addnorm.record(model, accumulate=None) as rec:
        for part, ends in zip(parts, (False, True, False), strict=True):
            backward(model, part)
            unrelated.step()
            for optimizer in optimizers if ends else ():
                optimizer.step()
                optimizer.zero_grad()
    assert rec.steps == (0, 1)
    for k, forwards in enumerate((parts[:2], parts[2:])):
        model.zero_grad()
        with addnorm.record(model, accumulate=len(forwards)) as expected:
            for part in forwards:
                backward(model, part)
        for role, name in (("params", "grad_l2"), ("write", "ratio")):
            assert column(rec, role, name, k) == pytest.approx(column(expected, role, name), rel=1e-4)
    assert not _global_optimizer_post_hooks


def test_one_backward_for_two_forwards(ids):
    model, (first, second, _) = Model(), ids.split(1)
    recording = step(model, first)
    with addnorm.record(model) as rec:
        (compute_loss(model(first)) + compute_loss(model(second))).backward()
    assert column(rec, "grad", "l2", 0) == pytest.approx(column(recording, "grad", "l2"), rel=1e-4)


def test_autocast(ids):
    model = Model(post=True)
    with torch.autocast("cpu", torch.bfloat16):
        rec = step(model, ids)
    plain = step(model, ids)
    assert "note" not in rec.metadata
    assert column(rec, "write", "rms") == pytest.approx(column(plain, "write", "rms"), rel=0.03)
    assert rec.memory_maps


def test_evaluations_between_training_steps_are_no_steps(model, ids):
    with addnorm.record(model, every=2) as rec:
        for _ in range(4):
            backward(model.train(), ids)
            with torch.no_grad():
                model.eval()(ids)
                model.train()(ids)
    assert rec.steps == (0, 2)
    assert all(rec.series("grad", "l2", step=step) for step in (0, 2))
    assert "evaluations between training steps are not recorded" in rec.metadata["note"]


def test_training_after_evaluation_is_recorded(model, ids):
    with addnorm.record(model) as rec:
        with torch.no_grad():
            model.eval()(ids)
        backward(model.train(), ids)
    assert rec.steps == (0, 1)
    assert rec.series("grad", "l2", step=0) == []
    assert rec.series("grad", "l2", step=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch raises them when it imports its compiler
def test_compiled_model_runs_eagerly_with_a_warning(model, ids):
    compiled = torch.compile(model)
    with pytest.warns(UserWarning, match="compiled, and recorded eagerly"), addnorm.record(compiled) as rec:
        compiled(ids)
    assert rec.metadata["note"] == "the model is compiled, and recorded eagerly"
    assert column(rec, "write", "rms") == pytest.approx(column(step(model, ids), "write", "rms"))


SUMS = ("pre_ln", "sandwich", "rezero", "layer_scale", "parallel", "layernorm_scaling", "mix_ln")
ON_STREAM = ("post_ln", "deepnorm", "admin", "b2t")  # their norms add biases


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("wiring", SUMS + ON_STREAM)
def test_stacks_of_this_library(wiring, gradients):
    """Record stacks, which run other operators without gradients and write into the memory of branches."""
    model = encoder(wiring).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    x = torch.randn(40, 40, D)  # more than 64 KB
    with torch.set_grad_enabled(gradients), addnorm.record(model) as rec:
        y = model(x)
        if gradients:
            compute_loss(y).backward()
    assert "note" not in rec.metadata
    recorded, writes = column(rec, "write", "rms"), [REFERENCE["rms"](w) for w in model.stack.unroll(x).writes]
    assert len(recorded) >= 4
    assert wiring in ON_STREAM or recorded == pytest.approx(writes, rel=1e-5)


def test_changed_forward_is_inspected_again(model, ids):
    with addnorm.record(model) as rec:
        model(ids)
        model.blocks[0].forward = lambda x: x
        model(ids)
    assert "ran otherwise" in rec.metadata["note"]
    assert [s.id for s, _ in rec.series("write", "rms", step=1)] == [s.id for s in rec.sites if s.layer == 1]


def test_torch_func_forward_is_noted(model, ids):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with addnorm.record(model) as rec:
        torch.func.grad(lambda p: compute_loss(torch.func.functional_call(model, p, (ids,))))(parameters)
        model(ids)
    assert rec.steps == (1,)
    assert rec.metadata["note"] == "forward 0 ran inside torch.func: it is not recorded"


# Gradients, which belong to the step of their forward.


def test_two_backwards_after_two_forwards(model, ids):
    with addnorm.record(model) as rec:
        loss, ten = compute_loss(model(ids)), compute_loss(model(ids)) * 10
        loss.backward()
        ten.backward()
    assert column(rec, "params", "grad_l2", 1) == pytest.approx(
        [10 * value for value in column(rec, "params", "grad_l2", 0)], rel=1e-4
    )


def test_evaluation_before_the_backward(model, ids):
    with addnorm.record(model) as rec:
        loss = compute_loss(model(ids))
        with torch.no_grad():
            model(ids)
        loss.backward()
    assert len(column(rec, "params", "grad_l2", 0)) == 4
    assert rec.steps == (0,)


def test_input_with_gradient_in_two_forwards(model):
    model.embed = nn.Identity()
    x = X.clone().requires_grad_()
    with addnorm.record(model) as rec:
        backward(model, x)
        before = rec.series("grad", "l2", step=0)
        (compute_loss(model(x)) * 10).backward()
    assert rec.series("grad", "l2", step=0) == before


def test_unrecorded_backward_after_a_failed_one_changes_nothing(model, ids):
    def fail(grad):
        raise RuntimeError("stop")

    with addnorm.record(model, every=2) as rec:
        handle = model.embed.weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="stop"):
            backward(model, ids)
        handle.remove()
        before = column(rec, "params", "grad_l2", 0)
        (compute_loss(model(ids)) * 10).backward()
    assert column(rec, "params", "grad_l2", 0) == before


def test_replaced_module_gets_hooks(model, ids):
    with addnorm.record(model) as rec:
        backward(model, ids)
        model.blocks[0] = Model().blocks[1]
        model.zero_grad()
        backward(model, ids)
    assert column(rec, "params", "grad_l2", 1) == pytest.approx(parameter_gradients(model), rel=1e-4)
    assert "note" not in rec.metadata


# Results do not change, and no hook, tensor or token in a cache is left.


def test_hooks_are_removed_after_an_error(model, ids):
    with addnorm.record(model):
        model(ids)
        with pytest.raises(IndexError):
            model(ids + 100)
    own = [module._forward_hooks | module._forward_pre_hooks for module in model.modules()]
    own += [p._backward_hooks or {} for p in model.parameters()]
    assert not any([*own, nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks])
    step(model, ids)


def test_memory_does_not_grow_with_steps(model, ids, frozen_heap):
    def tensors():
        gc.collect()
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    with addnorm.record(model):
        counts = []
        for _ in range(4):
            model.zero_grad(set_to_none=False)
            backward(model, ids)
            counts.append(tensors())
    assert counts[1] == counts[2] == counts[3]


def test_cache_is_appended_once():
    """Leave the cache unchanged in the inspection before the first forward."""
    decoder = addnorm.nn.Decoder(2, D, nhead=2).eval()
    memory = torch.randn(2, 4, D)
    cache, plain = addnorm.nn.KeyValueCache(), addnorm.nn.KeyValueCache()
    with torch.no_grad():
        expected = decoder(X, memory=memory, cache=plain)
        with addnorm.record(decoder):
            y = decoder(X, memory=memory, cache=cache)
    assert torch.equal(y, expected)
    assert cache.length == plain.length


class Decorated(addnorm.nn.Encoder):
    forward = torch.autocast("cpu", torch.bfloat16)(addnorm.nn.Encoder.forward)


@pytest.mark.parametrize("kind", [addnorm.nn.Encoder, Decorated])
@pytest.mark.parametrize("wiring", ["pre_ln", "mhc"])
def test_second_recording_in_an_autocast_block_is_whole(wiring, kind):
    """Autocast keeps the casts of parameters in its block: a later run has no operator that casts them."""
    model = kind(2, 16, nhead=2, wiring=wiring).eval()
    recordings = []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with addnorm.record(model) as rec:
                model(X).float().square().mean().backward()
            recordings.append(rec)
        assert torch.is_autocast_cache_enabled()
    assert_same_numbers(*recordings, rtol=0, atol=0)
    assert rec.series("params", "grad_l2")
