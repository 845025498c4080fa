"""Tests that wrong values of every argument are refused with an error that names the argument."""

import inspect
import math

import pytest
import torch

from addnorm.ops.streams.kinds import GATE_KINDS
from support.cases import FUNCTIONS, make
from support.stream_calls import make_call

# Values that are wrong for an option in any call; wrong tensors are below.
VALUES = {
    "eps": (-1.0, math.nan, "1e-5", [], torch.ones(2)),
    "dropout_p": (-0.1, 1.5, math.nan, "0.5", True),
    "residual_scale": ("2", True, [1.0]),
    "layer_scale": ("2", True, {}),
    "row_scale": (0.5, "2", [1.0]),
    "branch_bias": (0.5, [1.0]),
    "seed": (7, 1.5, "seed", torch.tensor(1.0), torch.tensor([1])),
    "offset": (-1, 1.5, 2**63, "0"),
    "residual_dtype": (torch.int32, torch.complex64, "float32"),
    "out_dtype": (torch.bool, torch.float8_e5m2),
    "weight_offset": ("1", [1.0]),
    "casting": ("gemma", 3),
    "normalized_shape": ((), (0, 7, 0, 3), 10**6),
}
DTYPES = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


def list_wrong(t):
    """Return values in the place of a tensor, all of them wrong."""
    return [
        *map(t.to, DTYPES),
        t.to("meta"),
        t.to_sparse(),
        t.new_ones((2, *t.shape, 3)),
        t.tolist(),
        "tensor",
        object(),
    ]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("variant", ["everything, LayerNorm", "everything, RMSNorm", "everything, the add alone"])
def test_wrong_values_are_refused_by_name(variant, grad):
    call = make(variant, "float32", (4, 8))
    function = FUNCTIONS[call.norm]
    tensors = {name: t.requires_grad_(grad) for name, t in call.tensors.items()}
    for name in inspect.signature(function).parameters:
        of_tensor = list_wrong(tensors[name].detach()) if name in tensors else []
        # The error may name an argument that is compared with this one.
        blamed = "|".join([name, *tensors]) if name in ("residual", "branch") else name
        for value in (*VALUES.get(name, ()), *of_tensor):
            with pytest.raises((TypeError, ValueError), match=blamed):
                function(**tensors | call.options | {name: value})


@pytest.mark.parametrize("kind", GATE_KINDS)
def test_wrong_tensors_of_streams_are_refused_by_name(kind):
    call = make_call(3, 8, (2,), kind)
    for name, t in call.tensors.items():
        for value in list_wrong(t):
            with pytest.raises((TypeError, ValueError), match=None if name == "streams" else name):
                call(call.tensors | {name: value})
