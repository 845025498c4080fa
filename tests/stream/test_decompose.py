"""`decompose`: components that add up to the stream, for every placement of the norm, and a lens that makes its caller choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import addnorm
from addnorm import wirings
from support.families import families

D = 16
SUMS = (
    "pre_ln",
    "sandwich",
    "peri_ln",
    "reordered",
    "layernorm_scaling",
    "no_norm",
    "parallel",
    "depth_mup",
    "layer_scale",
)
ON_STREAM = ("post_ln", "deepnorm", "mix_ln", "admin")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 7, D, generator=torch.Generator().manual_seed(0))


def encoder(wiring: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = addnorm.nn.Encoder(3, D, nhead=2, wiring=wirings.get(wiring), **options).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() < 2:
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return model


@pytest.mark.parametrize("wiring", SUMS + ON_STREAM)
@pytest.mark.parametrize("norm", ["layer", "rms"])
class TestComponents:
    def test_add_up_at_every_depth(self, wiring: str, norm: str, x: Tensor) -> None:
        parts = addnorm.decompose(encoder(wiring, norm=norm), x)
        for depth in range(parts.depth + 1):
            total = torch.stack([*parts.components(depth).values()]).sum(0)
            assert (total - parts.state(depth)).norm() <= 1e-5 * parts.state(depth).norm()

    def test_add_up_to_1e_10_in_float64(self, wiring: str, norm: str, x: Tensor) -> None:
        assert addnorm.decompose(encoder(wiring, norm=norm), x, float64=True).closure <= 1e-10

    def test_shares_sum_to_one_for_every_token(self, wiring: str, norm: str, x: Tensor) -> None:
        shares = addnorm.decompose(encoder(wiring, norm=norm), x).shares()
        total = torch.stack([*shares.values()]).sum(0)
        assert torch.allclose(total, torch.ones(2, 7, dtype=torch.float64))


@pytest.mark.parametrize("wiring", ["pre_ln", "sandwich", "layer_scale"])
def test_in_a_plain_sum_the_components_are_the_writes(wiring: str, x: Tensor) -> None:
    model = encoder(wiring)
    parts = addnorm.decompose(model, x).components()
    x_0, writes, *_ = model.stack.unroll(x)
    assert torch.allclose(parts.pop("x_0").float(), x_0)
    for found, expected in zip(parts.values(), writes, strict=True):
        assert torch.allclose(found.float(), expected, atol=1e-6)


def test_behind_norms_a_component_is_what_the_frozen_norms_make_of_its_write(x: Tensor) -> None:
    """By linear algebra: the last norm's Jacobian with the denominator fixed, times the write before it."""
    model = encoder("post_ln")
    parts = addnorm.decompose(model, x)
    last = parts.stream.sites[-1]
    found = parts.components()[last.id]
    norm, raw = last.norm_out, last.sublayer.raw.tensor.double().reshape(x.shape)
    assert norm is not None
    z = norm.x.tensor.double()
    centre = torch.eye(D, dtype=torch.float64) - 1 / D
    expected = raw @ centre / (z.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * norm.weight.tensor.double()
    assert torch.allclose(found, expected)


def test_the_share_of_what_is_nothing_is_zero(x: Tensor) -> None:
    """A sublayer whose weights are zero has no part in a pre-LN stream."""
    model = encoder("pre_ln")
    site = addnorm.inspect(model, x).sites[2]
    with torch.no_grad():
        for p in model.get_submodule(site.path).parameters():
            p.zero_()
    shares = addnorm.decompose(model, x).shares()
    assert float(shares[site.id].abs().max()) == 0.0


class TestLens:
    def head(self, y: Tensor) -> Tensor:
        return y @ torch.eye(D)[:, :5]

    def test_the_norm_has_no_default(self, x: Tensor) -> None:
        with pytest.raises(TypeError, match="norm"):
            addnorm.decompose(encoder("pre_ln"), x).lens()  # type: ignore[call-arg]

    def test_another_norm_is_refused(self, x: Tensor) -> None:
        with pytest.raises(ValueError, match=r"'recompute' .* or 'frozen'"):
            addnorm.decompose(encoder("pre_ln"), x).lens(norm="cached")  # type: ignore[arg-type]

    @pytest.mark.parametrize("norm", ["recompute", "frozen"])
    def test_at_the_end_it_is_the_models_own_output(self, norm: Any, x: Tensor) -> None:
        model = encoder("pre_ln")
        found = addnorm.decompose(model, x).lens(self.head, norm=norm)
        assert len(found) == 7
        assert torch.allclose(found[-1], self.head(model(x)), atol=1e-5)

    def test_recomputed_each_depth_is_normalized(self, x: Tensor) -> None:
        model = encoder("pre_ln")
        parts = addnorm.decompose(model, x)
        final = parts.stream.final_norm
        assert final is not None
        for state, y in zip([parts.state(k) for k in range(7)], parts.lens(norm="recompute"), strict=True):
            assert torch.allclose(y, final(state).float(), atol=1e-5)

    def test_frozen_contributions_add_up(self, x: Tensor) -> None:
        """The difference of two depths is what the writes between them contribute: linear."""
        parts = addnorm.decompose(encoder("pre_ln"), x, float64=True)
        final, lens = parts.stream.final_norm, parts.lens(norm="frozen")
        assert final is not None
        denominator = final.denominator(parts.state())
        writes = parts.components(2)
        of_two = sum(final.linear(writes[site.id], denominator) for site in parts.stream.sites[:2])
        assert torch.allclose(lens[2] - lens[0], of_two)


class TestRefusals:
    def test_a_model_without_a_stream(self) -> None:
        with pytest.raises(ValueError, match="no residual stream to decompose"):
            addnorm.decompose(nn.Linear(4, 4), torch.randn(2, 4))

    def test_several_streams_and_none_chosen(self) -> None:
        model = nn.Transformer(D, 2, 2, 2, 32, batch_first=True).eval()
        source = torch.randn(2, 5, D)
        with pytest.raises(ValueError, match="stream is None, expected one of 'encoder', 'decoder'"):
            addnorm.decompose(model, source, source)
        assert addnorm.decompose(model, source, source, stream="decoder").closure <= 1e-5

    def test_a_stream_that_is_masked_between(self, x: Tensor) -> None:
        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.f = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
                self.norm = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))

            def forward(self, x: Tensor, mask: Tensor) -> Tensor:
                for f, norm in zip(self.f, self.norm, strict=True):
                    x = (x + f(norm(x))) * mask[..., None]
                return x

        mask = torch.ones(2, 7)
        mask[:, 5:] = 0
        with pytest.raises(ValueError, match="multiplied or masked between add 1 and add 2"):
            addnorm.decompose(Masked(), x, mask)

    def test_a_depth_that_is_not(self, x: Tensor) -> None:
        with pytest.raises(IndexError, match="expected a number from 0"):
            addnorm.decompose(encoder("pre_ln"), x).components(7)

    def test_not_a_model(self) -> None:
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
            addnorm.decompose(lambda x: x, 1)  # type: ignore[arg-type]


def test_features_in_the_middle() -> None:
    """The shares are each position's, whichever dimension has the features."""

    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.f = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for f in self.f:
                x = x + torch.tanh(f(x))
            return x

    model, x = Convolved(), torch.randn(2, 8, 5, 5)
    parts = addnorm.decompose(model, x)
    y = model(x).detach().double()
    assert torch.allclose(parts.shares()["x_0"], (x.double() * y).sum(1) / y.square().sum(1))
    assert torch.allclose(parts.state(), y.movedim(1, -1))


def test_tokens_that_are_flat_at_some_adds() -> None:
    model, args, kwargs = families()["opt post"].build()
    assert addnorm.decompose(model, *args, **kwargs).closure < 1e-5
