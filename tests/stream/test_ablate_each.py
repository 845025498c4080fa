"""Tests of `ablate_each`: loss and divergence of the model without each sublayer, without side effects."""

from __future__ import annotations

import io
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import addnorm
from addnorm.stream.find.inspection import Inspection
from addnorm.stream.outputs import find_loss
from support.scaled_model import D, Model, make_stream, run_scaled


@pytest.fixture
def x() -> Tensor:
    return make_stream()


class TestAblateEach:
    @pytest.fixture
    def inspected(self, x: Tensor) -> tuple[Inspection, Model]:
        model = Model().eval()
        return addnorm.inspect(model, x), model

    def test_losses_equal_those_without_the_write(self, inspected: Any, x: Tensor) -> None:
        inspection, model = inspected
        each = addnorm.ablate_each(inspection, x, loss=lambda y: y.square().mean())
        whole = float(model(x).detach().square().mean())
        for k, ablation in enumerate(each):
            loss = float(run_scaled(model, k, 0.0, x).detach().square().mean())
            assert ablation.loss == pytest.approx(loss, rel=1e-5)
            assert ablation.loss_change == pytest.approx(loss - whole, abs=1e-6)

    def test_kl_of_the_softmaxes(self, inspected: Any, x: Tensor) -> None:
        inspection, model = inspected
        each = addnorm.ablate_each(inspection, x)
        with torch.no_grad():
            p = F.log_softmax(model(x).double(), -1)
            for k, ablation in enumerate(each):
                q = F.log_softmax(run_scaled(model, k, 0.0, x).double(), -1)
                expected = F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()
                assert ablation.kl == pytest.approx(float(expected), rel=1e-5)
                assert ablation.loss is None

    def test_zero_write_changes_nothing(self, x: Tensor) -> None:
        model = Model()
        with torch.no_grad():
            model.f[2][0].weight.zero_()
            model.f[2][0].bias.zero_()
        each = addnorm.ablate_each(addnorm.inspect(model, x), x, loss=lambda y: y.mean())
        assert (each[2].loss_change, each[2].output_change) == (0.0, 0.0)
        assert each[2].kl == pytest.approx(0.0, abs=1e-12)

    def test_runs_use_the_same_dropout(self, x: Tensor) -> None:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 32, dropout=0.5, batch_first=True), 2).train()
        inspection = addnorm.inspect(model, x)
        once, again = (addnorm.ablate_each(inspection, x, sites=inspection.sites[:1]) for _ in range(2))
        torch.manual_seed(5)
        change = addnorm.ablate_each(inspection, x, sites=inspection.sites[:1])[0].output_change
        torch.manual_seed(5)
        assert addnorm.ablate_each(inspection, x, sites=inspection.sites[:1])[0].output_change == change
        assert len(once) == len(again) == 1

    def test_output_that_is_a_number_is_the_loss(self, x: Tensor) -> None:
        class Loss(Model):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x).square().mean()

        model = Loss().eval()
        inspection = addnorm.inspect(model, x)
        for ablation in addnorm.ablate_each(inspection, x):
            with torch.no_grad():
                whole = float(model(x))
                with addnorm.ablate(ablation.site):
                    assert ablation.loss_change == pytest.approx(float(model(x)) - whole, abs=1e-6)

    @pytest.mark.filterwarnings("ignore:a call of Growing changed the place of a count")
    def test_output_of_another_shape_is_refused(self, x: Tensor) -> None:
        class Growing(Model):
            calls = itertools.count(1)  # an iterator is not restored

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(torch.cat([x] * next(self.calls), 1))

        model = Growing().eval()
        with pytest.raises(RuntimeError, match=r"returns another output when it is called again .*shape"):
            addnorm.ablate_each(addnorm.inspect(model, x), x)

    @pytest.mark.filterwarnings("ignore:a call of Rounded changed the place of a count")
    def test_round_off_of_bfloat16_is_no_other_output(self, x: Tensor) -> None:
        class Rounded(Model):
            calls = itertools.count()  # an iterator is not restored

            def forward(self, x: Tensor) -> Tensor:
                factor = 1 + 2.0**-7 * (next(self.calls) % 2)  # as a sum in another order, rounded to 8 bits
                return super().forward(x) * factor

        model = Rounded().eval().bfloat16()
        assert len(addnorm.ablate_each(addnorm.inspect(model, x.bfloat16()), x.bfloat16())) == 4

    @pytest.mark.parametrize(
        "first", [torch.tensor(3), torch.tensor(3.0), torch.ones(2)], ids=["count", "loss", "losses"]
    )
    def test_only_a_number_is_the_loss(self, first: Tensor) -> None:
        number = first if first.is_floating_point() and not first.dim() else None
        assert find_loss((first, torch.ones(2, 3))) is number
        assert find_loss({"loss": first, "logits": torch.ones(2, 3)}) is number

    @pytest.mark.parametrize("form", ["dict", "tuple"])
    def test_loss_of_the_output(self, x: Tensor, form: str) -> None:
        class Lossy(Model):
            def forward(self, x: Tensor) -> Any:  # type: ignore[override]
                y = super().forward(x)
                y = y.masked_fill(torch.arange(D) == 3, -float("inf"))  # a class of probability 0
                loss = y[..., :3].square().mean()
                return {"loss": loss, "logits_": y} if form == "dict" else (loss, y)

        model = Lossy().eval()
        for ablation in addnorm.ablate_each(addnorm.inspect(model, x), x):
            assert ablation.loss_change is not None
            assert abs(ablation.loss_change) > 0.0
            assert 0.0 < ablation.kl < float("inf")
            assert 0.0 < ablation.output_change < float("inf")

    def test_caches_buffers_and_random_state_are_restored(self, x: Tensor) -> None:
        class Stateful(Model):
            def __init__(self) -> None:
                super().__init__()
                self.batch = nn.BatchNorm1d(D)

            def forward(self, x: Tensor, seen: Any = None) -> Tensor:  # type: ignore[override]
                if seen is not None:
                    seen.parts.append(x)
                return super().forward(F.dropout(self.batch(x.transpose(1, 2)).transpose(1, 2), 0.1))

        model, seen = Stateful().train(), SimpleNamespace(parts=[x * torch.ones(1, requires_grad=True)])
        inspection = addnorm.inspect(model, x)
        random_state, mean = torch.get_rng_state(), model.batch.running_mean.clone()  # type: ignore[union-attr]
        addnorm.ablate_each(inspection, x, seen)
        assert len(seen.parts) == 1
        assert torch.equal(torch.get_rng_state(), random_state)
        assert torch.equal(model.batch.running_mean, mean)  # type: ignore[arg-type]

    def test_prints_as_a_table_and_is_json(self, inspected: Any, x: Tensor) -> None:
        import json

        inspection, _ = inspected
        each = addnorm.ablate_each(inspection, x, loss=lambda y: y.square().mean())
        console = Console(file=io.StringIO(), width=100)
        console.print(each)
        text = console.file.getvalue()  # type: ignore[attr-defined] # a StringIO
        assert "loss change" in text
        assert "f.3" in text
        assert json.loads(json.dumps(each.to_dict(), allow_nan=False))[3]["site"] == "f.3"

    def test_output_of_one_number_has_no_divergence(self, inspected: Any, x: Tensor) -> None:
        class Loss(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model = model

            def forward(self, x: Tensor) -> Any:
                return self.model(x).abs().mean()

        model = Loss(inspected[1]).eval()
        each = addnorm.ablate_each(addnorm.inspect(model, x), x)
        assert [ablation.kl for ablation in each] == [None] * len(each)
        assert "KL" not in str(each)
        assert "loss change" in str(each)

    def test_refuses_a_model_in_place_of_its_inspection(self, x: Tensor) -> None:
        with pytest.raises(TypeError, match=r"inspection is Model, expected the result of addnorm\.inspect"):
            addnorm.ablate_each(Model(), x)  # type: ignore[arg-type] # wrong on purpose

    @pytest.mark.parametrize(
        ("loss", "says"),
        [
            (3, "loss is int, expected a function"),
            (lambda y: y, "loss returned a tensor of shape .*, expected a number"),
            (lambda y: None, "loss returned NoneType, expected a number"),
        ],
    )
    def test_refuses_a_loss_without_a_number(self, inspected: Any, x: Tensor, loss: Any, says: str) -> None:
        inspection, _ = inspected
        with pytest.raises(TypeError, match=says):
            addnorm.ablate_each(inspection, x, loss=loss)

    def test_progress_bar(self, inspected: Any, x: Tensor) -> None:
        inspection, _ = inspected
        console = Console(file=io.StringIO(), force_terminal=True, width=80)
        addnorm.ablate_each(inspection, x, progress=console)
        assert "ablate Model" in console.file.getvalue()  # type: ignore[attr-defined] # a StringIO
