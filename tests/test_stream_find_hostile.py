"""`inspect` on models that are made to break it: nothing is claimed that is not so, and what is not understood is told."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from addnorm import inspect
from families import shake
from traps_parts import Attention, D, Mlp, Tiny, post, pre

IDS = torch.randint(0, 99, (2, 7), generator=torch.Generator().manual_seed(0))
AFAF = ["attention", "feed-forward"] * 2


def x(*shape):
    return torch.randn(shape or (2, 7, D), generator=torch.Generator().manual_seed(0))


def tiny(step=pre, **options):
    return shake(Tiny(step, **{"final_norm": True} | options))


def stacked(*layers):
    return shake(nn.Sequential(*layers))


def kinds(found):
    return [site.kind for site in found.sites if site.role != "skip"]


class Block(nn.Module):
    """Pre-LN."""

    def __init__(self, norm=lambda: nn.LayerNorm(D), attention=Attention, mlp=Mlp):
        super().__init__()
        self.n1, self.n2, self.a, self.m = norm(), norm(), attention(), mlp()

    def forward(self, x):
        x = x + self.a(self.n1(x))
        return x + self.m(self.n2(x))


class Residual(nn.Module):
    """x + f(x), with whatever is inside of f."""

    def __init__(self, *parts):
        super().__init__()
        self.f = nn.Sequential(*parts)

    def forward(self, x):
        return x + self.f(x)


class Looped(nn.Module):
    """Four sublayers, and a function that says how they are run."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.parts = nn.ModuleList(Mlp() for _ in range(4))
        self.pairs = [*zip(self.norms, self.parts, strict=True)]

    def forward(self, *args):
        return self.run(self, *args)


def looped(run):
    return shake(Looped(run))


# --- where and how a model runs ------------------------------------------------------------------------------------------


def judge_tiny(found, wiring="pre_ln", limit=1e-5):
    assert found.wiring == wiring
    assert kinds(found) == AFAF
    assert found.unknown == ()
    assert found.closes
    assert found.closure <= limit


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


def test_one_feature():
    found = inspect(
        stacked(*(Residual(nn.LayerNorm(1), nn.Linear(1, 4), nn.GELU(), nn.Linear(4, 1)) for _ in range(2))), x(2, 5, 1)
    )
    assert (found.wiring, found.streams[0].width) == ("pre_ln", 1)


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


def test_two_hundred_layers():
    model = stacked(*(Block() for _ in range(100)))
    found = inspect(model, x(1, 3, D))
    assert (found.wiring, len(found.sites), found.streams[0].n_layers) == ("pre_ln", 200, 100)


# --- numbers -------------------------------------------------------------------------------------------------------------


class Scaled(Tiny):
    def __init__(self, factor, **options):
        super().__init__(pre, final_norm=True, **options)
        self.factor = factor

    def embedded(self, ids):
        return super().embedded(ids) * self.factor


def test_constant_tokens():
    judge_tiny(inspect(tiny(), torch.zeros_like(IDS)))


def test_values_of_ten_thousand_in_float16():
    judge_tiny(inspect(shake(Scaled(1e4)).half(), IDS), limit=0.01)


def test_a_nan_in_one_feature_leaves_the_rest_proven():
    factor = torch.ones(2, 7, D)
    factor[0, 0, 0] = math.nan
    judge_tiny(inspect(shake(Scaled(factor)), IDS))


@pytest.mark.parametrize(("model", "ids", "why"), [
    (lambda: Scaled(math.nan), IDS, "no number of the stream is finite"),
    (lambda: Scaled(1.0), IDS[:0], "hold no token"),
    (lambda: Scaled(1e30), IDS, "no number of the stream is finite"),
], ids=["nan", "no batch", "overflow"])  # fmt: skip
def test_where_nothing_is_proven_nothing_closes(model, ids, why):
    found = inspect(shake(model()), ids)
    assert not found.closes
    assert why in found.unknown[0].reason


def test_sublayers_that_return_zeros():
    model = tiny()
    for part in model.parts:
        last = getattr(part.f, "out", None) or part.f.down
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    judge_tiny(inspect(model, IDS))


@pytest.mark.parametrize(("step", "gamma", "wiring"), [
    (lambda s, x: x + s.scale * s.f(x), 0.0, "skipinit"),
    (lambda s, x: x + s.gamma * s.f(s.norm(x)), 1e-6, "layer_scale"),
    (lambda s, x: x + s.gamma * s.f(s.norm(x)), math.nan, "layer_scale"),
])  # fmt: skip
def test_factors_at_their_start(step, gamma, wiring):
    model = tiny(step, final_norm=wiring == "layer_scale")
    for part in model.parts:
        nn.init.constant_(part.scale, gamma)
        nn.init.constant_(part.gamma, gamma)
    assert inspect(model, IDS).wiring == wiring


def test_what_is_multiplied_by_zero_is_told():
    found = inspect(tiny(lambda s, x: x + 0.0 * s.f(s.norm(x))), IDS)
    assert found.wiring == "unknown"
    assert "multiplied by 0" in found.unknown[0].reason


# --- graphs --------------------------------------------------------------------------------------------------------------


class Dit(nn.Module):
    """adaLN: shift, scale and gate of each sublayer come from a condition."""

    def __init__(self):
        super().__init__()
        self.norm, self.a, self.m = nn.LayerNorm(D, elementwise_affine=False), Attention(), Mlp()
        self.condition = nn.Linear(D, 6 * D)

    def forward(self, given):
        x, c = given
        s1, g1, a1, s2, g2, a2 = self.condition(F.silu(c))[:, None].chunk(6, -1)
        x = x + a1 * self.a(self.norm(x) * (1 + g1) + s1)
        return x + a2 * self.m(self.norm(x) * (1 + g2) + s2), c


class Experts(nn.Module):
    def __init__(self, n=64):
        super().__init__()
        self.router, self.experts = nn.Linear(D, n), nn.ModuleList(Mlp() for _ in range(n))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            here = (chosen == k).any(-1)
            if here.any():
                out[here] += expert(x[here]) * (weights * (chosen == k)).sum(-1)[here][:, None]
        return out


class LoRa(nn.Module):
    """W x + B A x is no residual add."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.a = linear, nn.Linear(linear.in_features, 4, bias=False)
        self.b = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.b(self.a(x))


class Recurrent(nn.LSTM):
    def __init__(self):
        super().__init__(D, D, batch_first=True)

    def forward(self, x):
        return super().forward(x)[0]


def with_lora():
    model = Tiny(pre, final_norm=True)
    for part in model.parts:
        for name, linear in [*part.f.named_children()]:
            setattr(part.f, name, LoRa(linear))
    return shake(model)


class Crossing(Block):
    """Latents that read an array, as a Perceiver's."""

    def forward(self, given):
        z, array = given
        z = z + self.a(self.n1(z), array)
        return z + self.m(self.n2(z)), array


class Joint(nn.Module):
    """Two streams with one attention over the tokens of both (MM-DiT)."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.a, self.m1, self.m2 = Attention(), Mlp(), Mlp()

    def forward(self, given):
        x, y = given
        both = self.a(torch.cat([self.norms[0](x), self.norms[1](y)], 1))
        x, y = x + both[:, : x.shape[1]], y + both[:, x.shape[1] :]
        return x + self.m1(self.norms[2](x)), y + self.m2(self.norms[3](y))


PRE_LN = {
    "adaLN": (lambda: stacked(Dit(), Dit()), (x(), x(2, D)), [AFAF]),
    "sixty-four experts": (lambda: stacked(*(Block(mlp=Experts) for _ in range(2)), nn.LayerNorm(D)), x(), [AFAF]),
    "LoRA": (with_lora, IDS, [AFAF]),
    "latents": (lambda: stacked(Crossing(), Crossing()), (x(2, 4, D), x()), [["cross-attention", "feed-forward"] * 2]),
    "joint attention": (lambda: stacked(Joint(), Joint()), (x(), x(2, 5, D)), [AFAF, AFAF]),
    "a sum of a list": (lambda: looped(lambda m, x: [x := sum([x, f(n(x))]) for n, f in m.pairs][-1]), x(), [["feed-forward"] * 4]),
    "from .data": (lambda: looped(lambda m, x: [x := x.data + f(n(x)) for n, f in m.pairs][-1]), x(), [["feed-forward"] * 4]),
    "vmap": (lambda: looped(lambda m, x: [x := torch.vmap(lambda y: y + f(n(y)))(x) for n, f in m.pairs][-1]), x(), [["feed-forward"] * 4]),  # noqa: B023
    "LSTM": (lambda: stacked(*(Block(attention=Recurrent) for _ in range(2))), x(), [["other", "feed-forward"] * 2]),
    "one sublayer": (lambda: stacked(Residual(nn.LayerNorm(D), Mlp())), x(), [["feed-forward"]]),
    "shared norm and sublayer": (lambda: stacked(*[Block()] * 3), x(), [["attention", "feed-forward"] * 3]),
}  # fmt: skip


@pytest.mark.parametrize("name", PRE_LN)
def test_pre_ln_in_other_clothes(name):
    make, given, expected = PRE_LN[name]
    found = inspect(make(), given)
    assert found.unknown == ()
    assert [stream.wiring.name for stream in found.streams if stream.wiring] == ["pre_ln"] * len(expected)
    assert [[site.kind for site in stream.sites] for stream in found.streams] == expected
    assert found.closes


def test_writes_in_place_through_another_view():
    def run(m, x):
        x = x.clone()
        turned = x.transpose(1, 2)
        for n, f in m.pairs:
            turned += f(n(x)).transpose(1, 2)
        return x

    found = inspect(looped(run), x())
    assert (found.wiring, len(found.sites), found.closes, found.unknown) == ("pre_ln", 4, True, ())


@pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated
def test_quantized_sublayers():
    model = torch.ao.quantization.quantize_dynamic(tiny(), {nn.Linear})
    judge_tiny(inspect(model, IDS))


def reversible(m, x):
    a = b = x
    for (n1, f1), (n2, f2) in zip(m.pairs[::2], m.pairs[1::2], strict=True):
        a = a + f1(n1(b))
        b = b + f2(n2(a))
    return a + b


def gated(m, x):
    for n, f in m.pairs:
        g = torch.sigmoid(n(x))
        x = g * x + (1 - g) * f(x)
    return x


def hyper(m, x):
    streams, mix = torch.stack([x] * 3, -2), m.norms[0].weight[:9].reshape(3, 3)
    for n, f in m.pairs:
        streams = mix @ streams + f(n(streams.mean(-2)))[..., None, :]
    return streams.sum(-2)


def dense(m, x):
    states = [x]
    for n, f in m.pairs:
        states.append(f(n(torch.stack(states).sum(0))))
    return torch.stack(states).sum(0)


def resnet(m, x, plain=False):
    for n, f in m.pairs:
        x = F.relu(x + f(x if plain else n(x)))
    return x


NOT_UNDERSTOOD = {
    "reversible": (reversible, "two streams in turn"),
    "gates": (gated, "the gate g is computed from the data"),
    "hyper-connections": (hyper, "a matrix mixes what is carried on"),
    "dense connections": (dense, "a sum of three or more values"),
    "relu after the add": (resnet, "a function, element by element, of where another stream ends"),
    "relu after the add, no norms": (lambda m, x: resnet(m, x, plain=True), "stands alone"),
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_what_is_no_row_is_told(name):
    run, why = NOT_UNDERSTOOD[name]
    found = inspect(looped(run), x())
    assert found.wiring in ("none", "unknown", "pre_ln / unknown") or name == "dense connections"
    assert any(why in unknown.reason for unknown in found.unknown), found.unknown


class Snake(nn.Module):
    """An activation that is an add of x and a function of it."""

    def forward(self, x):
        return x + torch.sin(x).square()


NO_WIRING = {
    "residual convolutions, batch norms": (
        lambda: Residual(nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=1)), (2, 8, 9), 8,
    ),
    "the same in evaluation": (
        lambda: Residual(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)).eval(), (2, 8, 9, 5), 8,
    ),
    "group norms": (lambda: Residual(nn.GroupNorm(1, 8), nn.Conv1d(8, 8, 3, padding=1)), (2, 8, 9), 8),
    "a norm in the middle": (lambda: Residual(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)), (2, 5, D), D),
    "norms of two axes": (lambda: Residual(nn.LayerNorm((5, D)), nn.Linear(D, D)), (2, 5, D), D),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_WIRING)
def test_no_wiring_is_claimed_where_norms_are_others(name):
    make, shape, width = NO_WIRING[name]
    found = inspect(nn.Sequential(*(make() for _ in range(3))), x(*shape))
    assert found.wiring == "unknown"
    assert found.closes
    assert len(found.sites) == 3
    assert found.streams[0].width == width
    assert found.streams[0].axis == shape.index(width) - len(shape)


def test_activations_that_add_are_no_sublayers():
    layers = [
        part
        for _ in range(2)
        for part in (Residual(Snake(), nn.Conv1d(8, 8, 3, padding=1)), Snake(), nn.Conv1d(8, 8, 1))
    ]
    found = inspect(nn.Sequential(*layers), x(2, 8, 9))
    assert all("twice" not in unknown.reason for unknown in found.unknown)
    assert all(not site.path.endswith("1") for site in found.sites)


def test_models_without_a_stream():
    for model, given in ((nn.LSTM(D, D, 2), x()), (nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)), x())):
        found = inspect(model, given)
        assert (found.wiring, found.sites, found.closes) == ("none", (), False)
        assert "no residual add was found" in found.unknown[0].reason


# --- refusals ------------------------------------------------------------------------------------------------------------


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.LazyLinear(D)

    def forward(self, x):
        return x + self.f(x)


class Plain(nn.Module):
    def forward(self, x):
        return x + x.relu()


REFUSED = {
    "a function": (lambda: (torch.relu, x()), TypeError, "model is builtin_function_or_method, expected a torch.nn.Module"),
    "the meta device": (lambda: (tiny().to("meta"), IDS), ValueError, "embed.weight on the meta device"),
    "lazy modules": (lambda: (Lazy(), x()), ValueError, "f.weight, which is not made yet"),
    "nested tensors": (
        lambda: (Plain(), torch.nested.nested_tensor([x(3, D), x(5, D)], layout=torch.jagged)), ValueError, "a padded one",
    ),
    "the model's own error": (lambda: (tiny(), x(3)), RuntimeError, "Expected tensor for argument #1 'indices'"),
    "a wrong number of inputs": (lambda: (tiny(), IDS, IDS), TypeError, "positional arguments"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        inspect(*make())


def test_after_an_error_in_the_model_all_is_as_before():
    model = tiny()
    with pytest.raises(RuntimeError):
        inspect(model, x(3))
    assert torch.backends.mha.get_fastpath_enabled()
    judge_tiny(inspect(model, IDS))


def test_post_ln_in_torch_s_modules_and_nested_tensors_of_its_own():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 32, batch_first=True), 2).eval()
    mask = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    judge_tiny(inspect(encoder, x(2, 5, D), src_key_padding_mask=mask), "post_ln")
    judge_tiny(inspect(shake(Tiny(post)), IDS), "post_ln")
