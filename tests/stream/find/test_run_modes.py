"""Tests of `inspect` with every way to run a model: dtypes, autograd modes, training, compilers, wrappers, hooks."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from addnorm import inspect
from support.handwritten_models import IDS, D, make_input, pre, tiny
from support.inspection_checks import check_tiny
from support.random_models.graphs import Graph
from support.stacks import Mlp


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
    "function": lambda s, x: x + F.dropout(s.branch(x), 0.5, training=True),
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
    "mask of a read": (lambda s, x: x + s.f(s.norm(x) * (torch.rand(2, 1, D) < 0.9)), DRAWS),
    "detached residual": (lambda s, x: x.detach() + s.branch(x), RESIDUAL),
    "detached write": (lambda s, x: x + s.branch(x).data, WRITE),
    "detached stream": (lambda s, x: (x + s.branch(x)).detach(), RESIDUAL),
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
    "traced sublayers": with_parts(lambda f: torch.jit.trace(f, make_input())),
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
