"""What `inspect` refuses, in a sentence; after an error in the model all is as before."""

import pytest
import torch
from torch import nn

from addnorm import inspect
from support.tiny_models import IDS, judge_tiny, tiny, x
from support.traps_parts import D


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
    "lazy modules": (lambda: (Lazy(), x()), ValueError, "f.weight, which is not initialized yet"),
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
