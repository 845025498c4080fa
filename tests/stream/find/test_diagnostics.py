"""Tests of errors of `inspect`, and of its state after an error in the model."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import addnorm
from addnorm import inspect
from addnorm.stream.find.reasons import BESIDE, BY_FEATURE, OTHER_AXIS
from support.handwritten_models import IDS, D, make_input, tiny
from support.inspection_checks import check_tiny
from support.stream_steps import make_steps, noise


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.LazyLinear(D)

    def forward(self, x):
        return x + self.f(x)


class Plain(nn.Module):
    def forward(self, x):
        return x + x.relu()


ERRORS = {
    "a function": (lambda: (torch.relu, make_input()), TypeError, "model is builtin_function_or_method, expected a torch.nn.Module"),
    "the meta device": (lambda: (tiny().to("meta"), IDS), ValueError, "embed.weight on the meta device"),
    "lazy modules": (lambda: (Lazy(), make_input()), ValueError, "f.weight, which is not initialized yet"),
    "nested tensors": (
        lambda: (Plain(), torch.nested.nested_tensor([make_input(3, D), make_input(5, D)], layout=torch.jagged)), ValueError, "a padded one",
    ),
    "the model's own error": (lambda: (tiny(), make_input(3)), RuntimeError, "Expected tensor for argument #1 'indices'"),
    "a wrong number of inputs": (lambda: (tiny(), IDS, IDS), TypeError, "positional arguments"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_inspect_raises(case):
    make, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        inspect(*make())


def test_inspect_restores_state_after_error():
    model = tiny()
    with pytest.raises(RuntimeError):
        inspect(model, make_input(3))
    assert torch.backends.mha.get_fastpath_enabled()
    check_tiny(inspect(model, IDS))


@pytest.mark.parametrize("name", ["instance_norm", "layer_norm"])
def test_inspect_refuses_norms_along_the_tokens(name):
    norm = {"instance_norm": F.instance_norm, "layer_norm": lambda x: F.layer_norm(x, (5,))}[name]

    def run(m, x):
        for k in range(4):
            x = x + m.mlps[k](norm(x.transpose(1, 2)).transpose(1, 2))
        return x

    inspection = addnorm.inspect(make_steps(run), noise(2, 5, D))
    assert (inspection.wiring, inspection.closes) == ("unknown", False)
    assert inspection.streams[0].width == D
    assert {unknown.reason for unknown in inspection.unknown} == {OTHER_AXIS}


MASKS = {"(B, 1, T)": (2, 1, 5), "(B, d, 1)": (2, 16, 1), "(1, 1, T)": (1, 1, 5), "(1, d, 1)": (1, 16, 1)}


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("at", ["stream", "write", "post_ln"])
def test_inspect_tells_masks_of_tokens_from_those_of_features(shape, at):
    """The stream is `(B, d, T)`, as in models of speech."""

    def run(m, x, mask):
        for k in range(4):
            y = m.mlps[k]((x if at == "post_ln" else m.norms[k](x.mT).mT).mT * mask.mT).mT
            x = x + (y * mask if at == "write" else y)
            x = m.norms[k](x.mT).mT if at == "post_ln" else x
            x = x if at == "write" else x * mask
        return x

    mask = (noise(*MASKS[shape], seed=1) > -0.5).float()
    model, x = make_steps(run), noise(2, 16, 5)
    inspection = addnorm.inspect(model, x, mask)
    if "d" in shape:
        assert not inspection.closes
        assert BY_FEATURE in {unknown.reason for unknown in inspection.unknown}
        return
    assert (inspection.wiring, inspection.closes) == ("post_ln" if at == "post_ln" else "pre_ln", True)
    parts = addnorm.decompose(model, x, mask)
    assert parts.closure < 1e-6


def test_inspect_refuses_reads_of_the_sum_before_its_norm():
    def run(m, x):
        for k in range(4):
            z = m.norms[k](x)
            x = z + m.mlps[k](z * m.gates[k](x).sigmoid())
        return m.last(x)

    inspection = inspect(make_steps(run), noise(2, 5, 16))
    assert {unknown.reason for unknown in inspection.unknown} == {BESIDE}
    assert [stream.wiring for stream in inspection.streams] == [None]
