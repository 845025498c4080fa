"""Tests of errors of `inspect`, and of its state after an error in the model."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import addnorm
from addnorm import inspect
from addnorm.stream.find.reasons import BY_FEATURE, OTHER_AXIS
from support.handwritten_models import IDS, D, check_tiny, tiny
from support.stream_steps import inspect_steps, list_reasons, make_steps, noise, normalize, repeat

ERRORS = {
    "a function": (lambda: (torch.relu, noise(2, 7, D)), TypeError, "model is builtin_function_or_method, expected a torch.nn.Module"),
    "the meta device": (lambda: (tiny().to("meta"), IDS), ValueError, "embed.weight on the meta device"),
    "lazy modules": (lambda: (nn.LazyLinear(D), noise(2, 7, D)), ValueError, "weight, which is not initialized yet"),
    "nested tensors": (
        lambda: (nn.ReLU(), torch.nested.nested_tensor([noise(3, D), noise(5, D)], layout=torch.jagged)), ValueError, "a padded one",
    ),
    "the model's own error": (lambda: (tiny(), noise(3)), RuntimeError, "Expected tensor for argument #1 'indices'"),
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
        inspect(model, noise(3))
    check_tiny(inspect(model, IDS))


@pytest.mark.parametrize("norm", [F.instance_norm, lambda x: F.layer_norm(x, (5,))], ids=["instance", "layer"])
def test_inspect_refuses_norms_along_the_tokens(norm):
    run = repeat(lambda m, k, x: x + m.mlps[k](norm(x.mT).mT))
    inspection = inspect_steps(run)
    assert (inspection.wiring, inspection.closes) == ("unknown", False)
    assert inspection.streams[0].width == D
    assert {*list_reasons(inspection)} == {OTHER_AXIS}


MASKS = {"(B, 1, T)": (2, 1, 5), "(B, d, 1)": (2, 16, 1), "(1, 1, T)": (1, 1, 5), "(1, d, 1)": (1, 16, 1)}


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("at", ["stream", "write", "post_ln"])
def test_inspect_tells_masks_of_tokens_from_those_of_features(shape, at):
    """The stream is `(B, d, T)`, as in models of speech."""

    def step(m, k, x, mask):
        y = m.mlps[k]((x if at == "post_ln" else m.norms[k](x.mT).mT).mT * mask.mT).mT
        x = x + (y * mask if at == "write" else y)
        x = m.norms[k](x.mT).mT if at == "post_ln" else x
        return x if at == "write" else x * mask

    mask = (noise(*MASKS[shape], seed=1) > -0.5).float()
    model, x = make_steps(repeat(step)), noise(2, 16, 5)
    inspection = inspect(model, x, mask)
    if "d" in shape:
        assert not inspection.closes
        assert BY_FEATURE in list_reasons(inspection)
        return
    assert (inspection.wiring, inspection.closes) == ("post_ln" if at == "post_ln" else "pre_ln", True)
    parts = addnorm.decompose(model, x, mask)
    assert parts.closure < 1e-6


def add_pairs(x, y):
    """Return x + y, each pair of features as one complex number."""
    pairs = [torch.view_as_complex(value.unflatten(-1, (-1, 2)).contiguous()) for value in (x, y)]
    return torch.view_as_real(pairs[0] + pairs[1]).flatten(-2)


def add_in_bags(x, y):
    rows, n = torch.cat([x, y]).flatten(0, 1), x[..., 0].numel()
    return F.embedding_bag(torch.arange(2 * n).view(2, n).T, rows, mode="sum").view(x.shape)


HIDDEN_ADDS = {  # of x and y in operators that no table has as an add
    "complex": lambda x, y: torch.view_as_real(torch.complex(x, y)).sum(-1),
    "complex pairs": add_pairs,
    "fft": lambda x, y: torch.fft.irfft(torch.fft.rfft(x) + torch.fft.rfft(y), n=D),
    "cumsum": lambda x, y: torch.stack([x, y]).cumsum(0)[-1],
    "product with ones": lambda x, y: (torch.stack([x, y], -1) @ torch.ones(2, 1)).squeeze(-1),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, torch.ones(D)),
    "embedding_bag": add_in_bags,
    "index_put": lambda x, y: x.index_put((torch.arange(2)[:, None], torch.arange(5)), y, accumulate=True),
    "quantized": lambda x, y: torch.fake_quantize_per_tensor_affine(x, 0.01, 0, -128, 127) + y,
    "numpy": lambda x, y: torch.from_numpy(x.detach().numpy() + y.detach().numpy()),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN_ADDS)
def test_inspect_claims_no_missing_add_of_unknown_operators(name):
    run = repeat(lambda m, k, x: HIDDEN_ADDS[name](x, m.branch(k, x)), end=normalize)
    inspection = inspect_steps(run)
    assert not inspection.closes
    assert not any("no operator adds" in unknown.reason for unknown in inspection.unknown)
    assert any("understood" in unknown.reason for unknown in inspection.unknown)


@pytest.mark.parametrize("combine", [torch.mul, lambda x, y: y], ids=["product", "output"])
def test_inspect_says_that_no_operator_adds(combine):
    inspection = inspect_steps(repeat(lambda m, k, x: combine(x, m.branch(k, x))))
    assert ["no operator adds" in unknown.reason for unknown in inspection.unknown] == [True]
