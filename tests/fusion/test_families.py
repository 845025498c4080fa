"""Every family of transformers of families.py is fused at every boundary that `inspect` understands, and differs by no more than
twice what eager is off from float64: outputs and the gradient of every parameter, in float32 and in bfloat16.
"""

import copy

import pytest
import torch

import addnorm
from addnorm.fusion.rng_replay import replay_rng
from addnorm.fusion.runs import named_tensors
from addnorm.stream.find.inspect import to_float64
from addnorm.stream.find.operators import strip_views
from support.families import families

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
FAMILIES = families()
# What may be left: embeddings that broadcast over the batch, and the second of two norms that read one sum.
LEFT = ("its add broadcasts", "its sum is already fused with the norm in ")


def cast(given, dtype):
    """The floating-point tensors of the inputs in a dtype."""
    return {
        name: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for name, t in given.items()
    }


def sums(found):
    """The states of the streams that a norm reads."""
    return sum(
        len({strip_views(norm.x) for norm in one.norms()} & {add.out for add in one.chain.adds})
        for one in found.streams
    )


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()  # what a family left is not kept for the next


def build(name, dtype):
    model, args, kwargs = FAMILIES[name].build()
    args = tuple(cast(dict(enumerate(args)), dtype).values())
    return model.to(dtype), args, cast(kwargs, dtype)


# By default those whose graphs or norms differ, each in one dtype; `make test-all` runs all of them in both. (Of two streams there
# are T5, from RMSNorms, and torch's Transformer, from LayerNorms: Whisper takes longest, and has nothing that these have not.)
LOW = {"bert", "llama", "gemma2", "t5", "gpt_neox parallel"}
HIGH = {
    "gpt2", "vit", "opt pre", "torch Encoder post_ln",
    "torch Encoder pre_ln with final norm", "torch Transformer post_ln", "wav2vec2 post",
}  # fmt: skip
CASES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}", marks=() if name in chosen else pytest.mark.slow)
    for name in FAMILIES
    for chosen, dtype in ((HIGH, torch.float32), (LOW, torch.bfloat16))
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_family_is_fused_wherever_it_is_understood_and_proven(name, dtype):
    model, args, kwargs = build(name, dtype)
    expected = sums(addnorm.inspect(model, *args, **kwargs))
    done = addnorm.fuse(model, *args, **kwargs)
    assert len(done.fused) >= expected > 0
    assert all(one.reason.startswith(LEFT) for one in done.unfused)
    assert done.proof.holds
    assert done.proof.oracle == "float64"
    assert done.proof.gradients
    addnorm.unfuse(model)


def losses(call, model, args, kwargs, steps=5):
    """Of a few steps of gradient descent in training mode, dropout and all, towards random outputs."""
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learned, 2e-2)
    torch.manual_seed(3)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = [t for t in named_tensors(call(*args, **kwargs)).values() if t.requires_grad]
        generator = torch.Generator().manual_seed(5)
        loss = sum((t - torch.randn(t.shape, generator=generator).to(t)).square().mean() for t in outputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        found.append(float(loss.detach()))
    return torch.tensor(found, dtype=torch.float64)


TRAINED = {("bert", torch.float32), ("llama", torch.bfloat16)}


@pytest.mark.parametrize(("name", "dtype"), [
    pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}", marks=() if (name, dtype) in TRAINED else pytest.mark.slow)
    for name in FAMILIES
    for dtype in (torch.float32, torch.bfloat16)
])  # fmt: skip
def test_five_steps_of_training_have_the_same_losses(name, dtype):
    model, args, kwargs = build(name, dtype)
    state = copy.deepcopy(model.train().state_dict())
    exact, exact_args, exact_kwargs = to_float64(model, args, kwargs)
    with replay_rng(dtype):
        truth = losses(exact, exact, exact_args, exact_kwargs)
    eager = losses(model, model, args, kwargs)
    model.load_state_dict(state)
    done = addnorm.fuse(model, *args, **kwargs)
    assert done.fused
    assert done.proof.mode == "training"
    fused = losses(model, model, args, kwargs)
    assert len({*eager.tolist()}) > 1  # it learns something
    # What eager is off after any of the steps: it drifts as they go on.
    limit = 2 * (eager - truth).abs().max() + 2 * torch.finfo(dtype).eps * eager.abs().max()
    assert (fused - eager).abs().max() <= limit
    addnorm.unfuse(model)
