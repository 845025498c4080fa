"""`inspect` finds the same however a model runs: dtypes, modes of autograd, training, compilers, wrappers; a hook is part of it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from addnorm import inspect
from support.families import shake
from support.tiny_models import IDS, judge_tiny, tiny, x
from support.traps_parts import D, Mlp, Tiny, post, pre


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype):
    limit = {torch.float64: 1e-10}.get(dtype, 8 * torch.finfo(dtype).eps)
    judge_tiny(inspect(tiny().to(dtype), IDS), limit=limit)


def test_a_copy_in_float64_closes_to_1e_10_and_the_model_stays_as_it_is():
    model = tiny()
    judge_tiny(inspect(model, IDS, float64=True), limit=1e-10)
    assert next(model.parameters()).dtype == torch.float32


def test_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        judge_tiny(inspect(tiny(), IDS), limit=0.03)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_autograd(mode):
    model = tiny()
    with mode():
        judge_tiny(inspect(model, IDS))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("step", [
    lambda s, x: x + s.path(s.drop(s.f(s.norm(x)))),
    lambda s, x: x + F.dropout(s.f(s.norm(x)), 0.5, training=True),
    lambda s, x: x + s.f(s.norm(x)) * (torch.rand(2, 1, 1) < 0.8) / 0.8,
    lambda s, x: checkpoint(lambda y: pre(s, y), x, use_reentrant=False),
    lambda s, x: checkpoint(lambda y: pre(s, y), x, use_reentrant=True),
], ids=["modules", "function", "by hand", "checkpoint", "reentrant"])  # fmt: skip
def test_training_with_noise_and_checkpoints(step):
    judge_tiny(inspect(tiny(step).train(), IDS))


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 1)], ids=str)
def test_few_tokens(shape):
    judge_tiny(inspect(tiny(), IDS[: shape[0], : shape[1]]))


def wrapped(model):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = model

        def forward(self, *args):
            return {"out": self.module(*args), "none": None}

    return Wrapper()


def with_parts(make):
    def change(model):
        for part in model.parts:
            part.f = make(part.f)
        return model

    return change


WAYS = {
    "compiled": torch.compile,
    "compiled sublayers": with_parts(torch.compile),
    "scripted sublayers": with_parts(lambda f: torch.jit.script(f) if isinstance(f, Mlp) else f),
    "traced sublayers": with_parts(lambda f: torch.jit.trace(f, x())),
    "traced": lambda model: torch.jit.trace(model, IDS),
    "exported": lambda model: torch.export.export(model, (IDS,)).module(),
    "data parallel": nn.DataParallel,
    "in a wrapper that returns a dict": wrapped,
}


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
@pytest.mark.parametrize("way", WAYS)
def test_wrapped_and_compiled_models(way):
    judge_tiny(inspect(WAYS[way](tiny()), IDS))


def test_hooks_are_part_of_the_model():
    model = tiny()
    model.parts[0].f.register_forward_hook(lambda module, args, output: output * 2)
    found = inspect(model, IDS)
    assert [float(site.row.b) for site in found.sites] == [2.0, 1.0, 1.0, 1.0]


@pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated
def test_quantized_sublayers():
    model = torch.ao.quantization.quantize_dynamic(tiny(), {nn.Linear})
    judge_tiny(inspect(model, IDS))


def test_post_ln_in_torch_s_modules_and_nested_tensors_of_its_own():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 32, batch_first=True), 2).eval()
    mask = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    judge_tiny(inspect(encoder, x(2, 5, D), src_key_padding_mask=mask), "post_ln")
    judge_tiny(inspect(shake(Tiny(post)), IDS), "post_ln")
