"""Tests that every wrong call raises one sentence: the argument, its value, the expected value, the remedy."""

import inspect
import math
import re
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import addnorm
from addnorm.ops.streams.kinds import GATE_KINDS
from support.cases import FUNCTIONS, make
from support.equality import assert_same
from support.inplace_calls import IN_PLACE
from support.refusals import assert_raises, assert_refused
from support.stream_calls import make_call

good = torch.randn(2, 3, 8)
row = torch.ones(8)

# The message of each wrong call, and what it changes of add_layer_norm(good, good, row, row).
REFUSED = {
    "TypeError: branch is None, expected a tensor of residual's shape: for the norm alone use addnorm.layer_norm or ":
        {"branch": None},
    "ValueError: residual is a 0-d tensor, expected shape (*, d): give it a last dimension to normalize over.":
        {"residual": torch.tensor(1.0), "branch": torch.tensor(1.0)},
    "ValueError: branch has shape (), expected (2, 3, 8), the shape of residual: they are added element by element. The sublayer must "
        "return 8 features, not a single number: end it with a projection back to the width of the stream.":
            {"branch": torch.tensor(1.0)},
    "ValueError: branch has shape (2, 3, 7), expected (2, 3, 8), the shape of residual: they are added element by element. The "
        "sublayer must return 8 features, not 7: end it with a projection back to the width of the stream.":
            {"branch": torch.randn(2, 3, 7)},
    "ValueError: branch has shape (1, 3, 8), expected (2, 3, 8), the shape of residual: they are added element by element. Nothing "
        "is broadcast: expand branch, or residual, to the same shape.": {"branch": torch.randn(1, 3, 8)},
    "ValueError: branch has shape (3, 2, 8), expected (2, 3, 8), the shape of residual: they are added element by element. Permute "
        "or reshape branch.": {"branch": torch.randn(3, 2, 8)},
    "ValueError: weight has shape (7,), expected (8,), one element for each feature of residual (2, 3, 8): "
        "build it with the model's ": {"weight": torch.ones(7)},
    "ValueError: weight has shape (3, 8), expected (8,), one element for each feature of residual (2, 3, 8): "
        "for a norm over more ": {"weight": torch.ones(3, 8)},
    "ValueError: row_scale has shape (2, 3, 8), expected (2, 3) or a shape that broadcasts to it, one element "
        "for each row of ": {"row_scale": torch.ones(2, 3, 8)},
    "ValueError: dropout_p is 1.5, expected a probability: a number from 0 to 1.": {"dropout_p": 1.5, "training": False},
    "ValueError: weight_offset is 1.0 but there is no weight to add it to: pass weight.":
        {"weight": None, "weight_offset": 1.0},
    "ValueError: normalized_shape is (3, 7), expected the last dimensions of residual (2, 3, 8): pass None to "
        "normalize over the last ": {"normalized_shape": (3, 7)},
    "ValueError: normalized_shape is (4, 8), expected the last dimensions of residual (2, 3, 8):":
        {"normalized_shape": (4, 8), "weight": None, "bias": None},
    "ValueError: weight has shape (8,), expected normalized_shape (3, 8): reshape it.": {"normalized_shape": (3, 8)},
    "ValueError: branch has shape (2, 3, 7), expected to end in normalized_shape (8,): reshape it.":
        {"normalized_shape": 8, "branch": torch.randn(2, 3, 7)},
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("function", [addnorm.add_layer_norm, addnorm.add_rms_norm])
@pytest.mark.parametrize("sentence", REFUSED)
def test_wrong_argument_raises_its_sentence(sentence, function, grad):
    arguments = {"residual": good, "branch": good, "weight": row.clone().requires_grad_(grad), "bias": row}
    arguments |= REFUSED[sentence]
    for return_residual in (False, True):
        assert_raises(sentence, partial(function, **arguments, return_residual=return_residual))


REFUSED_ALONE = {
    "TypeError: x is a float, expected a tensor: torch.as_tensor(...) makes one.": {"x": 1.0},
    "ValueError: x is a 0-d tensor, expected shape (*, d): give it a last dimension": {"x": torch.tensor(1.0)},
    "ValueError: weight has shape (7,), expected (8,), one element for each": {"x": good, "weight": torch.ones(7)},
}


@pytest.mark.parametrize("function", [addnorm.layer_norm, addnorm.rms_norm])
@pytest.mark.parametrize("sentence", REFUSED_ALONE)
def test_norm_alone_names_its_own_argument(function, sentence):
    assert_raises(sentence, lambda: function(**REFUSED_ALONE[sentence]))


def test_nested_seed_is_refused_by_name():
    """torch refuses to tell the shape of a nested tensor."""
    t = torch.randn(4, 8)
    sentence = "TypeError: seed is a nested tensor, expected a 0-d int64 tensor: torch.tensor(1234)."
    seed = torch.nested.nested_tensor([t[:2], t[2:]])
    assert_refused(sentence, lambda: addnorm.add_residual(t, t.clone(), dropout_p=0.5, seed=seed))


# Wrong values of each argument.

# Values that are wrong for an option in any call; wrong tensors are below.
VALUES = {
    "eps": (-1.0, math.nan, "1e-5", [], torch.ones(2), True, 10**400, torch.tensor(1e-5, requires_grad=True)),
    "dropout_p": (-0.1, 1.5, math.nan, "0.5", True, None, torch.ones(3)),
    "residual_scale": ("2", True, [1.0], torch.ones(1)),
    "layer_scale": ("2", True, {}),
    "row_scale": (0.5, "2", [1.0]),
    "branch_bias": (0.5, [1.0]),
    "seed": (7, 1.5, "seed", torch.tensor(1.0), torch.tensor([1]), torch.tensor(1, device="meta")),
    "offset": (-1, 1.5, 2**62, 2**63, "0"),
    "residual_dtype": (torch.int32, torch.complex64, "float32"),
    "out_dtype": (torch.bool, torch.float8_e5m2),
    "weight_offset": ("1", [1.0], torch.ones(2)),
    "casting": ("gemma", 3, ["llama"]),
    "normalized_shape": ((), (0, 7, 0, 3), 10**6, 8.0, (8.0,)),
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


def list_odd(t, is_written):
    """Return a tensor in the forms that no kernel reads, or writes."""
    odd = [t.to_mkldnn(), torch.nested.nested_tensor(list(t))] if t.dim() > 0 else []
    return [FakeTensorMode().from_tensor(t), *odd, *[torch._neg_view(t.clone())] * is_written]


@pytest.mark.parametrize("way", ["no grad", "grad", "in place", "out"])
@pytest.mark.parametrize(
    "variant", ["LayerNorm", "everything, LayerNorm", "everything, RMSNorm", "everything, the add alone"]
)
def test_wrong_values_are_refused_by_name(variant, way):
    """And nothing is written."""
    call = make(variant, "float32", (4, 8))
    function = (IN_PLACE if way == "in place" else FUNCTIONS)[call.norm]
    written = {"in place": ("residual", "branch")[: 1 if call.norm == "none" else 2], "out": ("out",)}.get(way, ())
    tensors = {name: t.requires_grad_(way == "grad") for name, t in call.tensors.items()}
    tensors |= {"out": torch.zeros(4, 8)} if way == "out" else {}
    before = {name: t.clone() for name, t in tensors.items()}
    for name in inspect.signature(function).parameters:
        values = VALUES.get(name, ()) if call.options or name not in ("seed", "offset") else ()  # of dropout
        of_tensor = list_wrong(tensors[name].detach()) if name in tensors else []
        of_tensor += list_odd(tensors[name], name in written) if name in tensors and way != "grad" else []
        # The error may name an argument that is compared with this one.
        is_compared = name in ("residual", "branch", "residual_dtype", "out_dtype")
        blamed = "|".join([name, *tensors]) if is_compared else name
        for value in (*values, *of_tensor):
            with pytest.raises((TypeError, ValueError), match=rf"(^| )({blamed}) (is|has) .*expected .*\.$"):
                function(**tensors | call.options | {name: value})
    assert_same(tensors, before)


@pytest.mark.parametrize("kind", GATE_KINDS)
def test_wrong_tensors_of_streams_are_refused_by_name(kind):
    call = make_call(3, 8, (2,), kind)
    for name, t in call.tensors.items():
        sizes = t[..., :-1], t[None, None], t.new_ones(()), t.new_empty(0)
        for value in (*list_wrong(t), *sizes):
            with pytest.raises((TypeError, ValueError), match=None if name == "streams" else name):
                call(call.tensors | {name: value})


# The operators.

x, f32 = torch.randn(3, 4), torch.float32
_, z, stats = torch.ops.addnorm.add_norm_forward(x, x, None, None, 1e-5, 0)
INPUTS = {"residual": x, "branch": x, "weight": None, "bias": None, "eps": 1e-5}
PLAIN = ("add_norm_stream", INPUTS | {"norm": 1})
FORWARD = ("add_norm_forward", INPUTS | {"norm": 0})
OUT = ("add_norm_out", INPUTS | {"norm": 0, "y": x.clone(), "z": x.clone()})
BACKWARD = (
    "add_norm_backward",
    {"dy": x, "dz": None, "z": z, "stats": stats, "weight": None, "norm": 0, "dresidual_dtype": f32, "branch_dtype": f32,
     "bias_dtype": f32, "grad_mask": 3},
)  # fmt: skip
SEED, BROKEN = torch.tensor(1), (-1, 3, 2**32 + 1, 2**63 - 1)
# Calls of operators with one wrong argument, and what the sentence says of it.
OPERATORS = [
    *[(PLAIN, {"eps": eps}, f"eps is {eps}, expected") for eps in (-1.0, math.nan)],
    *[(call, {"norm": n}, f"norm is {n}, expected 0 to 2") for call in (PLAIN, FORWARD, OUT, BACKWARD) for n in BROKEN],
    *[(call, {"casting": n}, f"casting is {n}, expected 0 to 2") for call in (FORWARD, OUT) for n in BROKEN],
    *[(FORWARD, {"outputs": n}, f"outputs is {n}, expected 1 to 3") for n in (-1, 0, 4, 2**32 + 1)],
    *[(FORWARD, {"offset": n}, f"offset is {n}, expected") for n in (-1, 2**62, -(2**63))],
    *[(FORWARD, {"dropout_p": p, "seed": SEED}, f"dropout_p is {p}, expected") for p in (-0.1, 1.5, math.nan)],
    *[(FORWARD, {"row_scale": torch.ones(s)}, f"row_scale has shape {s}, expected (3,)") for s in ((1,), (), (3, 4))],
    (FORWARD, {"dropout_p": 0.5}, "seed is None, expected a 0-d int64 tensor"),
    (FORWARD, {"weight_offset": 1.0}, "weight_offset is 1.0 but there is no weight"),
    (FORWARD, {"out_dtype": torch.int64}, "out_dtype is torch.int64, expected"),
    (OUT, {"norm": 2}, "y is a tensor, expected None"),
    (OUT, {"branch": None}, "z is a tensor, expected None"),
    (OUT, {"z": torch._neg_view(x)}, "z is a negative view"),
    *[(BACKWARD, {"grad_mask": n}, f"grad_mask is {n}, expected 0 to 255") for n in (-1, 256, 2**63 - 1)],
    *[(BACKWARD, {"grad_mask": n}, f"grad_mask is {n}, expected no bit") for n in (16, 32, 64, 128)],
    *[(BACKWARD, {name: x[:2]}, f"{name} has shape (2, 4), expected (3, ") for name in ("dy", "dz", "stats", "branch")],
    (BACKWARD, {"dy": None}, "dy and dz are None, expected"),
    (BACKWARD, {"weight": torch.ones(5)}, "weight has shape (5,), expected (4,)"),
    (BACKWARD, {"bias_dtype": torch.int64}, "bias_dtype is torch.int64, expected"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "wrong", "sentence"), OPERATORS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_operators_refuse_numbers_out_of_range(call, wrong, sentence):
    name, arguments = call
    before = x.clone()
    with pytest.raises((RuntimeError, ValueError, TypeError), match=re.escape(sentence)) as caught:
        getattr(torch.ops.addnorm, name)(**{**arguments, **wrong})
    assert "\n" not in str(caught.value)
    assert x.equal(before)
