"""Tests of `inspect` with every way to run a model: dtypes, autograd modes, training, compilers, wrappers, and odd numbers.

Odd numbers are zeros, NaN and overflow. Without finite values nothing closes.
"""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from addnorm import inspect
from support.handwritten_models import IDS, D, check_tiny, pre, tiny
from support.random_models.graphs import Graph
from support.stacks import Mlp
from support.stream_steps import noise


def test_inspect_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        check_tiny(inspect(tiny(), IDS), closure=0.03)


MASKS = {
    "rand": lambda: torch.rand(2, 1, 1) < 0.8,
    "floor of rand": lambda: torch.floor(torch.rand(2, 1, 1) + 0.8),
    "rand of p": lambda: torch.rand(2, 1, 1) < torch.full((2, 1, 1), 0.8),
    "bernoulli": lambda: torch.bernoulli(torch.full((2, 1, 1), 0.8)),
    "bernoulli of a product": lambda: torch.bernoulli(torch.ones(2, 1, 1) * 0.8),
    "bernoulli_": lambda: torch.empty(2, 1, 1).bernoulli_(torch.tensor(0.8)),
    "bernoulli_ of one half": lambda: torch.ones(2, 1, 1).bernoulli_() / 0.5 * 0.8,
}
NOISE = {
    "module": lambda s, x: x + s.drop(s.branch(x)),
    "operator": lambda s, x: x + torch.native_dropout(s.branch(x), 0.5, True)[0],
    "all dropped": lambda s, x: x + torch.native_dropout(s.branch(x), 1.0, True)[0],
    "checkpoint": lambda s, x: checkpoint(lambda y: pre(s, y), x, use_reentrant=False),
    "reentrant": lambda s, x: checkpoint(lambda y: pre(s, y), x, use_reentrant=True),
}


@pytest.mark.parametrize("name", [*NOISE, *MASKS])
def test_inspect_noise_and_checkpoints_in_training(name):
    torch.manual_seed(5)
    step = NOISE.get(name) or (lambda s, x: x + s.branch(x) * MASKS[name]() / 0.8)
    inspection = inspect(tiny(step).train(), IDS)
    check_tiny(inspection)
    assert not inspection.streams[0].remarks  # noise belongs to training


DRAWS = (
    r"[34] of its 4 sublayers draw random numbers in evaluation mode, \S+ first, "
    r".*and two runs differ: if it is dropout, let it follow self.training$"
)
RESIDUAL, WRITE = (f"the {part} of its 4 sublayers is detached, parts[.]" for part in ("residual of 3", "write of 4"))
REMARKS = {
    "dropout of the write": (lambda s, x: x + F.dropout(s.branch(x), 0.1), DRAWS),
    "mask of a write": (lambda s, x: x + s.branch(x) * MASKS["bernoulli"]() / 0.8, DRAWS),
    "dropout of the stream": (lambda s, x: F.dropout(x + s.branch(x), 0.1), DRAWS),
    "dropout of the read": (lambda s, x: x + s.f(F.dropout(s.norm(x), 0.1)), DRAWS),
    "detached residual": (lambda s, x: x.detach() + s.branch(x), RESIDUAL),
    "detached write": (lambda s, x: x + s.branch(x).data, WRITE),
}  # fmt: skip


@pytest.mark.parametrize("name", REMARKS)
def test_inspect_remarks_on_steps_in_evaluation(name):
    torch.manual_seed(5)
    step, words = REMARKS[name]
    (remark,) = inspect(tiny(step).eval(), IDS).streams[0].remarks
    assert re.match(words, remark), remark


def test_inspect_remarks_on_modules_left_in_training_mode():
    model = tiny(lambda s, x: x + s.drop(s.branch(x))).eval()
    assert not inspect(model, IDS).streams[0].remarks
    drop = next(path for path, module in model.named_modules() if isinstance(module, nn.Dropout))
    model.get_submodule(drop).train()
    (remark,) = inspect(model, IDS).streams[0].remarks
    assert remark.endswith(f"and two runs differ: call model.eval(), since {drop} is in training mode")


def test_inspect_sees_outputs_of_operators_that_also_write():
    step = lambda s, x: x + F.rrelu(s.branch(x))  # noqa: E731  # rrelu writes its noise in place
    assert inspect(tiny(step).eval(), IDS).wiring == "pre_ln"


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 1)], ids=str)
def test_inspect_few_tokens(shape):
    check_tiny(inspect(tiny(), IDS[: shape[0], : shape[1]]))


def wrapped(model):
    return Graph(lambda m, *args: {"out": m.module(*args), "none": None}, module=model)


def with_parts(make):
    def change(model):
        for part in model.parts:
            part.f = make(part.f)
        return model

    return change


WRAPPERS = {
    "compiled": torch.compile,
    "compiled sublayers": with_parts(torch.compile),
    "scripted sublayers": with_parts(lambda f: torch.jit.script(f) if isinstance(f, Mlp) else f),
    "traced sublayers": with_parts(lambda f: torch.jit.trace(f, noise(2, 7, D))),
    "traced": lambda model: torch.jit.trace(model, IDS),
    "exported": lambda model: torch.export.export(model, (IDS,)).module(),
    "data parallel": nn.DataParallel,
    "quantized": lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),
    "in a wrapper that returns a dict": wrapped,
}


@pytest.mark.filterwarnings("ignore")  # torch.jit and torch.ao are deprecated
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_inspect_wrapped_and_compiled_models(wrapper):
    check_tiny(inspect(WRAPPERS[wrapper](tiny()), IDS))


# Zeros, NaN and overflow.


def scaled(factor):
    """Return the tiny model with another scale of its embeddings."""
    model = tiny()
    for embedding in (model.embed, model.positions):
        embedding.weight.data.mul_(factor)
    return model


def test_inspect_constant_tokens():
    check_tiny(inspect(tiny(), torch.zeros_like(IDS)))


def test_inspect_large_values_in_float16():
    check_tiny(inspect(scaled(1e4).half(), IDS), closure=0.01)


def test_inspect_proves_rows_with_one_nan():
    model = tiny()
    model.embed.weight.data[IDS[0, 0], 0] = math.nan  # of the first sample
    inspection = inspect(model, IDS)
    check_tiny(inspection)
    (remark,) = inspection.streams[0].remarks
    odd, total = re.findall(r"[\d,]+", remark)[:2]
    assert "are NaN or infinite; the others prove its equations" in remark
    assert int(odd) in range(D, 2 * 7 * D)
    assert int(total) == 2 * 7 * D


@pytest.mark.parametrize(("model", "ids", "reason"), [
    (lambda: scaled(math.nan), IDS, "no number of the stream is finite"),
    (tiny, IDS[:0], "hold no token"),
    (lambda: scaled(1e30), IDS, "no number of the stream is finite"),
], ids=["nan", "no batch", "overflow"])  # fmt: skip
def test_inspect_proves_nothing_without_finite_values(model, ids, reason):
    inspection = inspect(model(), ids)
    assert not inspection.closes
    assert reason in inspection.unknown[0].reason


def test_inspect_sublayers_that_return_zeros():
    model = tiny()
    for part in model.parts:
        last = getattr(part.f, "out", None) or part.f.down
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    check_tiny(inspect(model, IDS))


@pytest.mark.parametrize(("step", "gamma", "wiring"), [
    (lambda s, x: x + s.scale * s.f(x), 0.0, "skipinit"),
    (lambda s, x: x + s.gamma * s.branch(x), 1e-6, "layer_scale"),
    (lambda s, x: x + s.gamma * s.branch(x), math.nan, "unknown"),  # no equation closes
])  # fmt: skip
def test_inspect_learned_factors_before_training(step, gamma, wiring):
    model = tiny(step, final_norm=wiring != "skipinit")
    for part in model.parts:
        nn.init.constant_(part.scale, gamma)
        nn.init.constant_(part.gamma, gamma)
    assert inspect(model, IDS).wiring == wiring


def test_inspect_explains_zero_factor():
    inspection = inspect(tiny(lambda s, x: x + 0.0 * s.branch(x)), IDS)
    assert inspection.wiring == "unknown"
    assert "multiplied by 0" in inspection.unknown[0].reason
