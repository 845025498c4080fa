"""Parameters that are no plain tensors, or whose memory is freed after their use: quantized, computed, offloaded."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import addnorm
from support.equality import assert_same
from support.random_models.graphs import Graph
from support.stacks import torch_encoder
from support.stream_steps import noise

WIDTH = 16
X = noise(2, 6, WIDTH, seed=1)


class Wrapper(torch.Tensor):
    """Weight in inner tensors; every operator runs on what `unwrap` returns."""

    @staticmethod
    def __new__(cls, *inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner[0].shape, dtype=inner[-1].dtype)

    def __init__(self, *inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(*args[0].inner)
        args, kwargs = pytree.tree_map_only(cls, cls.unwrap, (args, kwargs or {}))
        return func(*args, **kwargs)


class Quantized(Wrapper):
    """Weight in int8 with a scale for each row."""

    def __init__(self, data, scale):
        super().__init__(data, scale)
        self.data_int8, self.scale = data, scale

    @classmethod
    def from_float(cls, weight):
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def unwrap(self):
        return self.data_int8.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self):
        return ["data_int8", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(*inner.values())


class Closed(Wrapper):
    """Weight that hides its inner tensor and its operators."""

    def unwrap(self):
        return self.inner[0]

    @classmethod
    def __torch_dispatch__(cls, *args):
        with torch.utils._python_dispatch._disable_current_modes():
            return super().__torch_dispatch__(*args)


def lora(linear):
    return Graph(
        lambda m, x: m.base(x) + m.up(m.down(x)),
        base=linear.requires_grad_(False),
        weight=linear.weight,  # which the fast path of torch's layer looks up, as the bias
        bias=linear.bias,
        down=nn.Linear(WIDTH, 2, bias=False),
        up=nn.Linear(2, linear.out_features, bias=False),
    )


def build():
    return torch_encoder(True, norm=nn.LayerNorm(WIDTH), dropout=0.0).train()


def linears(model):
    return [linear for layer in model.layers for linear in (layer.linear1, layer.linear2)]


def quantize(model):
    for linear in linears(model):
        linear.weight = nn.Parameter(Quantized.from_float(linear.weight.data), requires_grad=False)


def parametrize(model):
    for linear in linears(model):
        shifted = Graph(lambda m, weight: weight + 0.1 * m.shift, shift=nn.Parameter(torch.randn(1)))
        nn.utils.parametrize.register_parametrization(linear, "weight", shifted)


def add_lora(model):
    for layer in model.layers:
        layer.linear1 = lora(layer.linear1)


def offload(model, free=lambda p: p.data.untyped_storage().resize_(0)):
    """Give each module its parameters for the time of its call, as sharded optimizers do."""
    for module in model.modules():
        own = [(p, p.data.clone()) for p in module.parameters(recurse=False)]

        def fetch(module, args, own=own):
            for p, data in own:
                p.data = data.clone()

        def release(module, args, output, own=own):
            for p, _ in own:
                free(p)

        module.register_forward_pre_hook(fetch)
        module.register_forward_hook(release)


def empty(model):
    """As `offload`, but leave parameters without elements."""
    offload(model, free=lambda p: setattr(p, "data", p.data.new_empty(0)))


@pytest.mark.parametrize("change", [quantize, parametrize, add_lora, offload, empty])
def test_inspect_record_and_edit(change):
    model = build()
    expected = addnorm.inspect(model, X)
    change(model)
    found = addnorm.inspect(model, X)
    assert (found.wiring, found.closes, found.unknown) == ("pre_ln", True, ())
    assert [site.kind for site in found.sites] == [site.kind for site in expected.sites]
    with addnorm.record(model) as rec, torch.no_grad():
        after = model(X)
    assert len(rec.series("out", "rms")) == 5
    assert "note" not in rec.metadata
    assert addnorm.decompose(model, X).closure < 1e-5
    with addnorm.ablate(found.sites[1]), torch.no_grad():
        assert not torch.equal(model(X), after)
    with torch.no_grad():
        torch.testing.assert_close(model(X), after)


@pytest.mark.parametrize("change", [parametrize, add_lora])
def test_record_keeps_gradients(change):
    grads = []
    for recorded in (False, True):
        model = build()
        change(model)
        with addnorm.record(model) if recorded else nullcontext() as rec:
            model(X).square().mean().backward()
        assert not recorded or rec.series("params", "grad_l2")
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_same(*grads)


def test_norm_weights_in_wrappers_close():
    model = build().eval()
    for layer in model.layers:
        norm = layer.norm1
        norm.weight = nn.Parameter(Quantized.from_float(norm.weight.data[:, None].expand(-1, 1))[:, 0].detach())
    assert addnorm.inspect(model, X).closes


def test_hidden_operators_are_mixing():
    model = build().eval()
    for linear in linears(model):
        linear.weight = nn.Parameter(Closed(linear.weight.data), requires_grad=False)
    with torch.no_grad():
        model(X)
    found = addnorm.inspect(model, X)
    assert found.closes
    assert len(found.sites) == 4


def test_fuse_refuses_quantized_weights():
    model = build().eval()
    quantize(model)
    with pytest.raises(ValueError, match=r"model has layers.0.linear1.weight, a Quantized, expected plain tensors"):
        addnorm.fuse(model, X)
