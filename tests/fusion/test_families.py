"""Tests of fusing families of transformers and MiniLM: wherever `inspect` understands them, with the proof and equal losses."""

import copy

import pytest
import torch

import addnorm
from addnorm.fusion.rng_replay import replay_rng
from addnorm.fusion.runs import named_tensors
from addnorm.stream.dataflow.arithmetic import strip_views
from addnorm.stream.find.inspect import to_float64
from support.families import families

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
FAMILIES = families()
# Adds that may stay unfused: embeddings that broadcast over the batch, and the second of two norms that read one sum.
UNFUSED = ("its add broadcasts", "its sum is already fused with the norm in ")


def cast(inputs, dtype):
    """Return inputs with the floating-point tensors in a dtype."""
    return {
        name: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for name, t in inputs.items()
    }


def count_sums(inspection):
    """Return the number of the streams' states that a norm reads."""
    return sum(
        len({strip_views(norm.x) for norm in stream.norms()} & {add.out for add in stream.chain.adds})
        for stream in inspection.streams
    )


def build(name, dtype):
    model, args, kwargs = FAMILIES[name].build()
    args = tuple(cast(dict(enumerate(args)), dtype).values())
    return model.to(dtype), args, cast(kwargs, dtype)


# By default few families whose norms differ, each in one dtype; `make test-all` runs all in both dtypes. test_pattern.py has
# every spelling of the add and of the norm, and the tests of `addnorm fuse` have llama and BERT.
LOW = {"gemma2"}
HIGH = {"torch Encoder post_ln"}
CASES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}", marks=() if name in chosen else pytest.mark.slow)
    for name in FAMILIES
    for chosen, dtype in ((HIGH, torch.float32), (LOW, torch.bfloat16))
]


def outputs_of(model, args, kwargs):
    with torch.no_grad():
        return named_tensors(model(*args, **kwargs))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_family_is_fused_and_proven(name, dtype):
    model, args, kwargs = build(name, dtype)
    expected = count_sums(addnorm.inspect(model, *args, **kwargs))
    before = outputs_of(model, args, kwargs)
    fusion = addnorm.fuse(model, *args, **kwargs)
    assert len(fusion.fused) >= expected > 0
    assert all(boundary.reason.startswith(UNFUSED) for boundary in fusion.unfused)
    assert fusion.proof.holds
    assert fusion.proof.oracle == "float64"
    assert fusion.proof.gradients
    after = outputs_of(addnorm.unfuse(model), args, kwargs)
    assert all(after[name].equal(tensor) for name, tensor in before.items())


def train(call, model, args, kwargs, steps=3):
    """Return the losses of a few training steps, with dropout, on random targets."""
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learned, 2e-2)
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = [t for t in named_tensors(call(*args, **kwargs)).values() if t.requires_grad]
        generator = torch.Generator().manual_seed(5)
        loss = sum((t - torch.randn(t.shape, generator=generator).to(t)).square().mean() for t in outputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses, dtype=torch.float64)


TRAINED = {("bert", torch.float32)}


@pytest.mark.parametrize(("name", "dtype"), [
    pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}", marks=() if (name, dtype) in TRAINED else pytest.mark.slow)
    for name in FAMILIES
    for dtype in (torch.float32, torch.bfloat16)
])  # fmt: skip
def test_family_trains_with_the_same_losses(name, dtype):
    model, args, kwargs = build(name, dtype)
    state = copy.deepcopy(model.train().state_dict())
    exact, exact_args, exact_kwargs = to_float64(model, args, kwargs)
    with replay_rng(dtype):
        truth = train(exact, exact, exact_args, exact_kwargs)
    eager = train(model, model, args, kwargs)
    model.load_state_dict(state)
    fusion = addnorm.fuse(model, *args, **kwargs)
    assert fusion.fused
    assert fusion.proof.mode == "training"
    fused = train(model, model, args, kwargs)
    assert any(
        not value.equal(state[name]) for name, value in model.state_dict().items()
    )  # losses may round to one value
    # Eager's error grows with the steps; the largest one counts.
    limit = 2 * (eager - truth).abs().max() + 2 * torch.finfo(dtype).eps * eager.abs().max()
    assert (fused - eager).abs().max() <= limit
    addnorm.unfuse(model)
