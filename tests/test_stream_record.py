"""`record` against the same numbers computed in the open, and under everything that makes a forward run otherwise."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import addnorm
from addnorm.stream.record.recording import STATISTICS, Recording

D, TOKENS, BATCH = 16, 6, 3


class Block(nn.Module):
    """Two sublayers in the open: `seen` has what the recorder must find."""

    def __init__(self, post: bool, d: int = D) -> None:
        super().__init__()
        self.post = post
        self.mix, self.up, self.down = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        for norm in (self.norm1, self.norm2):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.1)

    def attention(self, x: Tensor) -> Tensor:
        return self.mix(torch.softmax(x @ x.transpose(-1, -2) / 4, -1) @ x)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor, seen: list[dict[str, Tensor]] | None = None) -> Tensor:
        for f, norm in ((self.attention, self.norm1), (self.mlp, self.norm2)):
            before = x
            read = before if self.post else norm(before)
            raw = f(read)
            x = norm(before + raw) if self.post else before + raw
            if seen is not None:
                for tensor in (before, x):
                    if tensor.requires_grad:
                        tensor.retain_grad()
                seen.append({"in": before, "read": read, "raw": raw, "write": raw, "out": x, "z": before + raw})
        return x


class Model(nn.Module):
    def __init__(self, post: bool = False, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, D)
        self.blocks = nn.ModuleList(Block(post) for _ in range(layers))
        self.last = nn.Identity() if post else nn.LayerNorm(D)
        self.checkpointed: bool | None = None

    def forward(self, ids: Tensor, seen: list[dict[str, Tensor]] | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if self.checkpointed is not None and self.training:
                x = checkpoint(block, x, seen, use_reentrant=self.checkpointed)
            else:
                x = block(x, seen)
        return self.last(x)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(20, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def loss_of(y: Tensor) -> Tensor:
    """A loss whose gradient at every token is another."""
    return (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)).sum()


def step(model: nn.Module, ids: Tensor, **options: Any) -> Recording:
    model.zero_grad()
    with addnorm.record(model, **options) as rec:
        loss_of(model(ids)).backward()
    return rec


def column(rec: Recording, role: str, statistic: str) -> list[float]:
    return [value for site, value in rec.series(role, statistic) if site.layer is not None]


def lengths(t: Tensor) -> Tensor:
    return t.detach().double().reshape(-1, t.shape[-1]).norm(dim=-1)


REFERENCE: dict[str, Callable[[Tensor], float]] = {
    "l2": lambda t: float(lengths(t).mean()),
    "rms": lambda t: float(t.detach().double().square().mean().sqrt()),
    "max": lambda t: float(t.detach().abs().max()),
}


@pytest.mark.parametrize("post", [False, True], ids=["pre-LN", "post-LN"])
class TestTheNumbers:
    """What is recorded is what the formulas of `STATISTICS` give on the tensors themselves."""

    @pytest.fixture
    def both(self, post: bool, ids: Tensor) -> tuple[Recording, list[dict[str, Tensor]], Model]:
        model = Model(post)
        rec = step(model, ids)
        seen: list[dict[str, Tensor]] = []
        model.zero_grad()
        loss_of(model(ids, seen)).backward()
        return rec, seen, model

    @pytest.mark.parametrize("role", ["in", "read", "raw", "write", "out"])
    @pytest.mark.parametrize("statistic", REFERENCE)
    def test_sizes(self, both: Any, role: str, statistic: str) -> None:
        rec, seen, _ = both
        assert column(rec, role, statistic) == pytest.approx([REFERENCE[statistic](s[role]) for s in seen], rel=1e-5)

    def test_the_write_and_the_stream(self, both: Any) -> None:
        rec, seen, _ = both
        ratios = [float((lengths(s["write"]) / lengths(s["in"])).mean()) for s in seen]
        cosines = [
            float(F.cosine_similarity(s["write"].detach().double(), s["in"].detach().double(), dim=-1).mean())
            for s in seen
        ]
        assert column(rec, "write", "ratio") == pytest.approx(ratios, rel=1e-5)
        assert column(rec, "write", "cosine") == pytest.approx(cosines, abs=1e-6)

    def test_how_alike_the_tokens_are(self, both: Any) -> None:
        rec, seen, _ = both
        expected = []
        for s in seen:
            unit = F.normalize(s["out"].detach().double(), dim=-1)
            cosines = unit @ unit.transpose(1, 2)
            off = ~torch.eye(TOKENS, dtype=torch.bool)
            expected.append(float(cosines[:, off].mean()))
        assert column(rec, "out", "similarity") == pytest.approx(expected, abs=1e-6)

    def test_the_norms_denominators(self, both: Any, post: bool) -> None:
        rec, seen, _ = both
        role, of = ("norm_out", "z") if post else ("norm_in", "in")
        rstds = [(s[of].detach().double().var(-1, correction=0) + 1e-5).rsqrt() for s in seen]
        assert column(rec, role, "rstd") == pytest.approx([float(r.mean()) for r in rstds], rel=1e-5)
        assert column(rec, role, "rstd_max") == pytest.approx([float(r.max()) for r in rstds], rel=1e-5)
        assert column(rec, "scale", "sigma_max") == pytest.approx([float(1 / r.min()) for r in rstds], rel=1e-5)

    @pytest.mark.parametrize("statistic", REFERENCE)
    def test_the_gradient_at_the_stream(self, both: Any, statistic: str) -> None:
        rec, seen, _ = both
        gradients = [s["out"].grad for s in seen]
        assert column(rec, "grad", statistic) == pytest.approx([REFERENCE[statistic](g) for g in gradients], rel=1e-4)

    def test_the_gradient_of_a_sublayers_parameters(self, both: Any) -> None:
        rec, _, model = both
        expected = []
        for block in model.blocks:
            for modules in ([block.mix], [block.up, block.down]):
                grads = [p.grad.double().square().sum() for m in modules for p in m.parameters()]
                expected.append(float(torch.stack(grads).sum().sqrt()))
        assert column(rec, "params", "grad_l2") == pytest.approx(expected, rel=1e-5)

    def test_a_memory_map_whose_rows_sum_to_one(self, both: Any, post: bool) -> None:
        rec, _, _ = both
        sources, shares = rec.maps["stream"]
        assert len(shares) == 5
        assert sources[0] == "x_0"
        assert all(sum(row) == pytest.approx(1.0) for row in shares)
        assert ("norm biases" in sources) == post

    def test_the_map_is_the_decompositions(self, both: Any, ids: Tensor) -> None:
        rec, _, model = both
        sources, shares = addnorm.decompose(model, ids).memory_map()
        found = dict(zip(rec.maps["stream"][0], rec.maps["stream"][1][-1], strict=True))
        assert found == pytest.approx(dict(zip(sources, shares[-1], strict=True)), rel=1e-4)

    def test_a_balance_whose_amounts_add_up_to_the_streams_length(self, both: Any, ids: Tensor) -> None:
        rec, seen, model = both
        sheet = rec.balances["stream"]
        assert sheet.refused == ""
        assert sheet.error < 1e-6 > sheet.closure
        assert sheet.tokens == BATCH * TOKENS
        assert sheet.length == pytest.approx(float(lengths(seen[-1]["out"]).mean()), rel=1e-5)
        parts = addnorm.decompose(model, ids)
        x = parts.state()
        by_hand = {name: float(((c * x).sum(-1) / x.norm(dim=-1)).mean()) for name, c in parts.components().items()}
        assert dict(zip(sheet.sources, sheet.amounts, strict=True)) == pytest.approx(by_hand, rel=1e-4, abs=1e-6)

    def test_what_the_inspection_knows_of_it(self, both: Any, post: bool) -> None:
        rec, _, _ = both
        (name, known), *others = rec.facts["streams"].items()
        assert (name, others, rec.facts["unknown"]) == ("stream", [], [])
        assert known["wiring"] == ("post_ln" if post else "pre_ln")
        assert known["norms"] == "LayerNorm 1e-5"
        assert (known["closure"] is None) == post
        assert [*known["sites"]] == [site.id for site in rec.sites if site.kind not in ("start", "final")]
        assert all(site["closes"] and site["closure"] < 1e-5 for site in known["sites"].values())


class Odd(nn.Module):
    """Two sublayers, and between them something that a sum of components does not pass."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.between = nn.Linear(D, D), nn.Linear(D, D), between
        self.scale = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.one(x))
        x = self.between(self, x)
        return x + torch.tanh(self.two(x))


@pytest.mark.parametrize(
    ("between", "says"),
    [
        (lambda model, x: x * model.scale, "multiplie"),
        (
            lambda model, x: x * (torch.arange(TOKENS) < 4)[None, :, None],
            "the stream is multiplied or masked between add 1 and",
        ),
        (lambda model, x: torch.cat([x, x[:, :1]], 1), "tokens join or leave the stream before add 2"),
    ],
    ids=["scaled", "masked", "longer"],
)
def test_where_no_balance_can_be_drawn_up_it_says_why(between: Any, says: str) -> None:
    model = Odd(between)
    with addnorm.record(model) as rec:
        model(torch.randn(BATCH, TOKENS, D)).square().mean().backward()
    (sheet,) = rec.balances.values()
    assert says in sheet.refused
    assert (rec.maps, sheet.sources, sheet.amounts) == ({}, (), ())


class Low(nn.Module):
    """A bfloat16 stream to which a write is added that is too small for most of its elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.f, self.last = nn.LayerNorm(256), nn.Linear(256, 256), nn.LayerNorm(256)
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        self.writes = self.f(self.norm(x)) * 0.01
        self.out = x + self.writes
        return self.last(self.out)


def test_elements_that_an_add_leaves_as_they_were() -> None:
    model, x = Low(), torch.randn(2, 50, 256).bfloat16()
    with addnorm.record(model) as rec:
        model(x)
    ((_, found),) = rec.series("write", "unchanged")
    assert found == pytest.approx(float((model.out == x).double().mean()), abs=1e-7)
    assert found > 0.2


def test_massive_activations() -> None:
    model, x = Low().float(), torch.randn(2, 50, 256)
    x[0, 0, 7] = 5000.0
    with addnorm.record(model) as rec:
        model(x)
    found = {name: {site.id: value for site, value in rec.series("out", name)}["x_0"] for name in ("massive", "top")}
    assert found["massive"] == 1.0
    assert found["top"] == pytest.approx(5000 / float(x.abs().median()), rel=0.05)


class TestWhatRunsOtherwise:
    @pytest.mark.parametrize("post", [False, True], ids=["pre-LN", "post-LN"])
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoints(self, post: bool, reentrant: bool, ids: Tensor) -> None:
        """Each number is there once, and is that of the forward without."""
        model = Model(post).train()
        plain = step(model, ids)
        model.checkpointed = reentrant
        found = step(model, ids)
        assert found.steps == (0,)
        assert [e[:5] for e in found.table()] == [e[:5] for e in plain.table()]
        assert [e.value for e in found.table()] == pytest.approx([e.value for e in plain.table()], rel=1e-4, abs=1e-6)
        assert "note" not in found.facts

    def test_a_frozen_part_under_a_reentrant_checkpoint_gets_no_gradient(self, ids: Tensor) -> None:
        """As without the recorder: of its inputs none requires one."""
        model = Model().train()
        model.embed.requires_grad_(False)
        model.checkpointed = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about just this
            loss_of(model(ids)).backward()
            expected = [p.grad is None for p in model.parameters()]
            step(model, ids)
        assert [p.grad is None for p in model.parameters()] == expected

    def test_gradient_accumulation_by_forward(self, ids: Tensor) -> None:
        """Each forward is a step, with the gradients of its own backward."""
        model = Model()
        alone = [step(model, part) for part in ids.split(1)]
        model.zero_grad()
        with addnorm.record(model) as rec:
            for part in ids.split(1):
                loss_of(model(part)).backward()
        for k, one in enumerate(alone):
            for role, name in (("params", "grad_l2"), ("grad", "l2"), ("write", "ratio")):
                mine = [v for _, v in rec.series(role, name, step=k)]
                assert mine == pytest.approx([v for _, v in one.series(role, name)], rel=1e-4)

    def test_gradient_accumulation_as_one_step(self, ids: Tensor) -> None:
        model = Model()
        model.zero_grad()
        with addnorm.record(model, accumulate=3) as rec:
            for part in ids.split(1):
                loss_of(model(part)).backward()
        assert rec.steps == (0,)
        expected = [
            float(torch.stack([p.grad.norm() for p in modules.parameters()]).norm())
            for block in model.blocks for modules in (block.mix, nn.ModuleList([block.up, block.down]))
        ]  # fmt: skip
        assert column(rec, "params", "grad_l2") == pytest.approx(expected, rel=1e-4)

    def test_one_backward_of_two_forwards(self, ids: Tensor) -> None:
        model = Model()
        first, second = ids[:1], ids[1:2]
        one = step(model, first)
        with addnorm.record(model) as rec:
            (loss_of(model(first)) + loss_of(model(second))).backward()
        assert [v for _, v in rec.series("grad", "l2", step=0)] == pytest.approx(
            [v for _, v in one.series("grad", "l2")], rel=1e-4
        )

    def test_autocast(self, ids: Tensor) -> None:
        model = Model(post=True)
        with torch.autocast("cpu", torch.bfloat16):
            rec = step(model, ids)
        plain = step(model, ids)
        assert "note" not in rec.facts
        assert column(rec, "write", "rms") == pytest.approx(column(plain, "write", "rms"), rel=0.03)
        assert rec.maps

    def test_dropout_is_that_of_the_run(self) -> None:
        """The inspection before the first forward draws nothing: the output is what it is without a recorder."""
        torch.manual_seed(0)
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 32, dropout=0.3, batch_first=True), 2).train()
        x = torch.randn(2, 5, D)
        torch.manual_seed(3)
        expected = model(x)
        torch.manual_seed(3)
        with addnorm.record(model) as rec:
            found = model(x)
        assert torch.equal(found, expected)
        assert len(rec.series("write", "rms")) == 4

    def test_evaluation_without_gradients(self, ids: Tensor) -> None:
        model = Model().eval()
        with torch.no_grad(), addnorm.record(model) as rec:
            model(ids)
        assert column(rec, "write", "rms") == pytest.approx(column(step(model, ids), "write", "rms"))
        assert rec.series("grad", "l2") == []

    def test_training_and_evaluation_in_one_recording(self, ids: Tensor) -> None:
        model = Model()
        with addnorm.record(model) as rec:
            loss_of(model.train()(ids)).backward()
            with torch.no_grad():
                model.eval()(ids)
        assert rec.steps == (0, 1)
        assert rec.series("grad", "l2", step=1) == []

    def test_in_place_adds(self, ids: Tensor) -> None:
        class InPlace(Model):
            def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
                x = self.embed(ids)
                for block in self.blocks:
                    x += block.attention(block.norm1(x))
                    x += block.mlp(block.norm2(x))
                return self.last(x)

        with torch.no_grad():
            model = InPlace().eval()
            with addnorm.record(model) as rec:
                model(ids)
            plain = Model().eval()
            with addnorm.record(plain) as expected:
                plain(ids)
        for role, name in (("in", "rms"), ("write", "ratio"), ("write", "cosine"), ("out", "similarity")):
            assert column(rec, role, name) == pytest.approx(column(expected, role, name), rel=1e-4)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it imports its compiler
    def test_a_compiled_model_runs_eagerly_and_says_so(self, ids: Tensor) -> None:
        model = Model()
        compiled = torch.compile(model)
        with pytest.warns(UserWarning, match="compiled, and recorded eagerly"), addnorm.record(compiled) as rec:
            compiled(ids)
        assert rec.facts["note"] == "the model is compiled, and recorded eagerly"
        assert column(rec, "write", "rms") == pytest.approx(column(step(model, ids), "write", "rms"))

    @pytest.mark.parametrize("wiring", ["pre_ln", "sandwich", "rezero", "layer_scale", "parallel", "layernorm_scaling"])
    @pytest.mark.parametrize("gradients", [True, False])
    def test_stacks_of_this_library(self, wiring: str, gradients: bool) -> None:
        """Whose operators are others with gradients and without, and which write into the memory of branches."""
        torch.manual_seed(0)
        model = addnorm.ResidualStack([nn.Sequential(nn.Linear(D, D), nn.GELU()) for _ in range(4)], D, wiring)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        x = torch.randn(40, 40, D)  # more than 64 KB
        with torch.set_grad_enabled(gradients), addnorm.record(model) as rec:
            y = model(x)
            if gradients:
                loss_of(y).backward()
        assert "note" not in rec.facts
        writes = [REFERENCE["rms"](w) for w in model.unroll(x).writes]
        assert column(rec, "write", "rms") == pytest.approx(writes, rel=1e-5)

    @pytest.mark.parametrize("wiring", ["post_ln", "deepnorm", "mix_ln", "admin", "b2t"])
    @pytest.mark.parametrize("gradients", [True, False])
    def test_stacks_with_norms_on_the_stream(self, wiring: str, gradients: bool) -> None:
        torch.manual_seed(0)
        model = addnorm.nn.Encoder(2, D, n_heads=2, wiring=wiring)
        x = torch.randn(40, 40, D)
        with torch.set_grad_enabled(gradients), addnorm.record(model) as rec:
            model(x)
        assert "note" not in rec.facts
        assert len(column(rec, "write", "rms")) >= 4


class TestWhatIsAsked:
    def test_every_so_many(self, ids: Tensor) -> None:
        model = Model()
        with addnorm.record(model, every=3) as rec:
            for _ in range(7):
                loss_of(model(ids)).backward()
        assert rec.steps == (0, 3, 6)
        assert [s for s, _ in rec.over_time(rec.sites[1].id, "params", "grad_l2")] == [0, 3, 6]

    def test_layers(self, ids: Tensor) -> None:
        rec = step(Model(layers=3), ids, layers=[1])
        assert {site.layer for site in rec.sites} == {None, 1}
        assert column(rec, "write", "rms") == pytest.approx(column(step(Model(layers=3), ids), "write", "rms")[2:4])

    def test_layers_that_are_not(self, ids: Tensor) -> None:
        with pytest.raises(ValueError, match=r"layers is \[5\], expected numbers from 0 to 1"):
            step(Model(), ids, layers=[5])

    def test_tokens_that_count(self, ids: Tensor) -> None:
        """Padding changes nothing of what is recorded of the others; here each token is its own sequence."""
        mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
        mask[:, 4:] = False
        model = Model()
        rec = step(model, ids, tokens=mask)
        seen: list[dict[str, Tensor]] = []
        model(ids, seen)
        expected = [REFERENCE["rms"](s["write"][mask]) for s in seen]
        assert column(rec, "write", "rms") == pytest.approx(expected, rel=1e-5)
        alike = []
        for s in seen:
            unit = F.normalize(s["out"][:, :4].detach().double(), dim=-1)
            alike.append(float((unit @ unit.transpose(1, 2))[:, ~torch.eye(4, dtype=torch.bool)].mean()))
        assert column(rec, "out", "similarity") == pytest.approx(alike, abs=1e-6)

    def test_a_mask_of_another_shape(self, ids: Tensor) -> None:
        with pytest.raises(ValueError, match=r"tokens has shape \(2, 2\), expected \(3, 6\)"):
            step(Model(), ids, tokens=torch.ones(2, 2))

    def test_without_gradients(self, ids: Tensor) -> None:
        rec = step(Model(), ids, grads=False)
        assert {e.role for e in rec.table()}.isdisjoint({"grad", "params"})

    def test_a_model_without_a_stream(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        with pytest.raises(ValueError, match="no residual stream to record"), addnorm.record(model):
            model(torch.randn(2, 4))

    @pytest.mark.parametrize(("options", "message"), [({"every": 0}, "every"), ({"accumulate": 0}, "accumulate")])
    def test_impossible_options(self, options: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message), addnorm.record(Model(), **options):
            pass

    def test_not_a_model(self) -> None:
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"), addnorm.record(torch.relu):  # type: ignore[arg-type]
            pass

    def test_all_that_is_recorded_is_in_the_table_of_statistics(self, ids: Tensor) -> None:
        known = {(s.role, s.name) for s in STATISTICS if not s.derived_from}
        assert {(e.role, e.statistic) for e in step(Model(), ids).table()} <= known


class TestNothingIsLeft:
    @pytest.fixture
    def hooks(self) -> Iterator[Callable[[nn.Module], int]]:
        def count(model: nn.Module) -> int:
            modules = nn.modules.module
            mine = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
            params = sum(len(p._backward_hooks or ()) for p in model.parameters())
            return mine + params + len(modules._global_forward_hooks) + len(modules._global_forward_pre_hooks)

        return count

    def test_no_hook(self, ids: Tensor, hooks: Callable[[nn.Module], int]) -> None:
        model = Model()
        step(model, ids)
        assert hooks(model) == 0

    def test_no_hook_after_an_error_in_the_model(self, ids: Tensor, hooks: Callable[[nn.Module], int]) -> None:
        model = Model()
        with addnorm.record(model):
            model(ids)
            with pytest.raises(IndexError):
                model(ids + 100)
        assert hooks(model) == 0
        assert torch.backends.mha.get_fastpath_enabled()
        step(model, ids)

    def test_the_model_computes_the_same(self, ids: Tensor) -> None:
        model = Model()
        expected = model(ids)
        with addnorm.record(model):
            found = model(ids)
        assert torch.equal(found, expected)

    def test_gradients_are_the_same(self, ids: Tensor) -> None:
        model = Model(post=True)
        loss_of(model(ids)).backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        step(model, ids)
        assert all(
            torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True) if p.grad is not None
        )

    def test_memory_does_not_grow_with_the_steps(self, ids: Tensor) -> None:
        model = Model()

        def tensors() -> int:
            gc.collect()
            return sum(type(o) is Tensor for o in gc.get_objects())

        with addnorm.record(model):
            counts = []
            for _ in range(4):
                model.zero_grad(set_to_none=False)
                loss_of(model(ids)).backward()
                counts.append(tensors())
        assert counts[3] <= counts[2] <= counts[1]  # less is what other tests left

    def test_two_recorders_of_one_model(self, ids: Tensor) -> None:
        model = Model()
        with addnorm.record(model) as one, addnorm.record(model, grads=False) as two:
            loss_of(model(ids)).backward()
        assert column(one, "write", "rms") == pytest.approx(column(two, "write", "rms"))


def test_a_cache_that_is_given_is_used_once() -> None:
    """The inspection before the first forward does not append to it."""
    torch.manual_seed(0)
    decoder = addnorm.nn.Decoder(2, D, n_heads=2).eval()
    memory = torch.randn(2, 4, D)
    x = torch.randn(2, 5, D)
    cache, plain = addnorm.nn.KeyValueCache(), addnorm.nn.KeyValueCache()
    with torch.no_grad():
        expected = decoder(x, memory=memory, cache=plain)
        with addnorm.record(decoder):
            found = decoder(x, memory=memory, cache=cache)
    assert torch.equal(found, expected)
    assert cache.length == plain.length


def test_a_model_that_runs_otherwise_is_inspected_again(ids: Tensor) -> None:
    class Switch(Model):
        skip = False

        def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
            x = self.embed(ids)
            for block in self.blocks[1:] if self.skip else self.blocks:
                x = block(x)
            return self.last(x)

    model = Switch()
    with addnorm.record(model) as rec:
        model(ids)
        model.skip = True
        model(ids)
    assert "ran otherwise" in rec.facts["note"]
    assert [s.id for s, _ in rec.series("write", "rms", step=1)] == [s.id for s in rec.sites if s.layer == 1]


class TestWhichStepAGradientIsOf:
    def first(self, rec: Recording, step: int) -> list[float]:
        return [value for _, value in rec.series("params", "grad_l2", step=step)]

    def test_a_backward_that_is_not_recorded_changes_nothing(self, ids: Tensor) -> None:
        model = Model()
        with addnorm.record(model, every=2) as rec:
            loss_of(model(ids)).backward()
            before = self.first(rec, 0)
            (loss_of(model(ids)) * 10).backward()
        assert self.first(rec, 0) == before

    def test_backwards_after_both_forwards(self, ids: Tensor) -> None:
        model = Model()
        with addnorm.record(model) as rec:
            one, ten = loss_of(model(ids)), loss_of(model(ids)) * 10
            one.backward()
            ten.backward()
        assert self.first(rec, 1) == pytest.approx([10 * value for value in self.first(rec, 0)], rel=1e-4)

    def test_an_evaluation_before_the_backward(self, ids: Tensor) -> None:
        model = Model()
        with addnorm.record(model) as rec:
            loss = loss_of(model(ids))
            with torch.no_grad():
                model(ids)
            loss.backward()
        assert len(self.first(rec, 0)) == 4
        assert self.first(rec, 1) == []

    def test_an_input_that_requires_a_gradient_enters_twice(self) -> None:
        model = Model()
        model.embed = nn.Identity()  # type: ignore[assignment]
        x = torch.randn(2, 5, D, requires_grad=True)
        with addnorm.record(model) as rec:
            loss_of(model(x)).backward()
            before = rec.series("grad", "l2", step=0)
            (loss_of(model(x)) * 10).backward()
        assert rec.series("grad", "l2", step=0) == before

    def test_after_a_backward_that_failed(self, ids: Tensor) -> None:
        model = Model()

        def fail(grad: Tensor) -> None:
            raise RuntimeError("stop")

        with addnorm.record(model, every=2) as rec:
            handle = model.embed.weight.register_hook(fail)
            with pytest.raises(RuntimeError, match="stop"):
                loss_of(model(ids)).backward()
            handle.remove()
            before = self.first(rec, 0)
            (loss_of(model(ids)) * 10).backward()
        assert self.first(rec, 0) == before

    def test_a_module_that_is_replaced(self, ids: Tensor) -> None:
        model = Model()
        with addnorm.record(model) as rec:
            loss_of(model(ids)).backward()
            model.blocks[0] = Block(False)
            model.zero_grad()
            loss_of(model(ids)).backward()
        expected = float(torch.stack([p.grad.norm() for p in model.blocks[0].mix.parameters()]).norm())
        assert self.first(rec, 1)[0] == pytest.approx(expected, rel=1e-4)
        assert "note" not in rec.facts


class Gated(nn.Module):
    """What scales a write is computed, after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.f, self.last = nn.LayerNorm(D), nn.Linear(D, D), nn.LayerNorm(D)
        self.g = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            f = self.f(self.norm(x))
            self.write = f * torch.sigmoid(self.g)
            x = torch.addcmul(x, f, torch.sigmoid(self.g))
        return self.last(x)


def test_a_scale_that_is_computed() -> None:
    model = Gated()
    with addnorm.record(model) as rec:
        for _ in range(2):
            model(torch.randn(2, 5, D))
            model.g.data.add_(1.0)
    assert column(rec, "write", "rms")[-1] == pytest.approx(REFERENCE["rms"](model.write), rel=1e-5)
    assert all(sum(row) == pytest.approx(1.0) for row in rec.maps["stream"][1])


def test_a_batch_of_nothing(ids: Tensor) -> None:
    model = Model()
    with addnorm.record(model) as rec:
        for part in (ids, ids[:0], ids):
            loss_of(model(part)).backward()
    assert column(rec, "write", "rms") == pytest.approx(column(step(model, ids), "write", "rms"))


class TestTokens:
    def test_padding_is_no_massive_activation(self, ids: Tensor) -> None:
        model = Model()
        model.embed = nn.Identity()  # type: ignore[assignment]
        x = torch.randn(2, 5, D)
        x[:, -1] = 1e6
        mask = torch.ones(2, 5)
        mask[:, -1] = 0
        rec = step(model, x, tokens=mask)
        assert max(value for _, value in rec.series("out", "massive")) == 0.0
        alone = step(model, x[:, :-1])
        assert rec.series("out", "top")[0][1] == pytest.approx(alone.series("out", "top")[0][1])

    def test_tokens_first(self) -> None:
        """The mask tells which dimension is the batch."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(D, 2, 32, dropout=0.0)
        other = nn.TransformerEncoderLayer(D, 2, 32, dropout=0.0, batch_first=True)
        models = [nn.TransformerEncoder(one, 2, enable_nested_tensor=False) for one in (layer, other)]
        models[1].load_state_dict(models[0].state_dict())
        x, mask = torch.randn(3, 5, D), torch.ones(3, 5)
        turned, plain = step(models[0], x.transpose(0, 1), tokens=mask), step(models[1], x, tokens=mask)
        assert column(turned, "out", "similarity") == pytest.approx(column(plain, "out", "similarity"), rel=1e-4)

    def test_of_one_stream(self) -> None:
        torch.manual_seed(0)
        model = nn.Transformer(D, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        source, target, mask = torch.randn(2, 6, D), torch.randn(2, 4, D), torch.ones(2, 6)
        mask[1, 4:] = 0

        with addnorm.record(model, tokens={"encoder.layers.0": mask}) as rec:
            model(source, target)
        with addnorm.record(model) as second:
            model(source, target)
        start = [v for site, v in rec.series("out", "rms") if site.id == "encoder.layers.0/x_0"]
        assert start == pytest.approx([REFERENCE["rms"](source[mask.bool()])])
        of_decoder = [
            [v for site, v in one.series("out", "rms") if site.stream == "decoder.layers.0"] for one in (rec, second)
        ]
        assert of_decoder[0] == of_decoder[1]
        assert len(of_decoder[0]) == 4
        with (
            pytest.raises(ValueError, match=r"tokens has the stream 'encoder', expected some of 'encoder\.layers\.0'"),
            addnorm.record(model, tokens={"encoder": mask}),
        ):
            model(source, target)


def test_inside_torch_func_it_is_said(ids: Tensor) -> None:
    model = Model()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with addnorm.record(model) as rec:
        torch.func.grad(lambda p: loss_of(torch.func.functional_call(model, p, (ids,))))(parameters)
        model(ids)
    assert rec.steps == (1,)
    assert rec.facts["note"] == "forward 0 ran inside torch.func: it is not recorded"


def test_an_interrupted_forward_leaves_nothing(ids: Tensor) -> None:
    model = Model()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with addnorm.record(model) as rec:
        model(ids)
        handle = model.blocks[1].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(ids)
        handle.remove()
        model(ids)
    assert rec.steps[-1] == 2
    assert not _get_current_dispatch_mode_stack()
    assert not nn.modules.module._global_forward_hooks


def test_features_in_the_middle() -> None:
    """Where another dimension is as wide."""

    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.f = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for f in self.f:
                self.write = torch.tanh(f(x))
                x = x + self.write
            return x

    model = Convolved()
    with addnorm.record(model) as rec:
        model(torch.randn(2, 8, 8, 8))
    expected = float(model.write.detach().double().norm(dim=1).mean())
    assert column(rec, "write", "l2")[-1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_map_is_of_the_weights_of_its_forward_whatever_an_optimizer_does_before_it_is_asked_for(norm_first):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 5, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with addnorm.record(model) as rec:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            before = copy.deepcopy(model)
            optimizer.step()
    with addnorm.record(before) as expected:
        before(x).square().mean().backward()
        assert expected.maps["stream"][1]
    assert rec.balances["stream"].refused == ""
    assert rec.maps["stream"][0] == expected.maps["stream"][0]
    for found, exact in zip(rec.maps["stream"][1], expected.maps["stream"][1], strict=True):
        assert found == pytest.approx(exact, abs=1e-6)
