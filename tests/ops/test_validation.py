"""Tests that every wrong call raises one sentence: the argument, its value, the expected value, the remedy."""

import math
import re
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import addnorm
from support.cases import FUNCTIONS, make
from support.equality import assert_same
from support.inplace_calls import IN_PLACE
from support.refusals import assert_raises, assert_refused

good = torch.randn(2, 3, 8)
half = torch.randn(2, 3, 8, dtype=torch.float16)
row = torch.ones(8)

# The message of each wrong call, and what it changes of add_layer_norm(good, good, row, row).
REFUSED = {
    "TypeError: residual is a list, expected a tensor: torch.as_tensor(...) makes one.": {"residual": [1.0, 2.0]},
    "TypeError: branch is None, expected a tensor of residual's shape: for the norm alone use addnorm.layer_norm or ":
        {"branch": None},
    "TypeError: residual has dtype int64, expected float32, bfloat16, float16 or float64: convert it with "
        "residual.float().": {"residual": good.long()},
    "TypeError: branch has dtype complex64, expected float32, bfloat16, float16 or float64: convert it with "
        "branch.float() (its ": {"branch": good.cfloat()},
    "TypeError: branch has layout torch.sparse_coo, expected an ordinary strided tensor: branch.to_dense().":
        {"branch": good.to_sparse()},
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
    "ValueError: branch is on meta, expected cpu, the device of residual: move it with branch.to('cpu').":
        {"branch": good.to("meta")},
    "ValueError: weight is on meta, expected cpu, the device of residual": {"weight": row.to("meta")},
    "ValueError: layer_scale is on meta, expected cpu, the": {"layer_scale": row.to("meta")},
    "ValueError: seed is on meta, expected cpu, the device of":
        {"dropout_p": 0.5, "seed": torch.tensor(1, device="meta")},
    "ValueError: residual_scale has shape (2, 3), expected a number, a 0-d tensor or shape (8,), one element "
        "for each feature: to ": {"residual_scale": torch.ones(2, 3)},
    "TypeError: layer_scale has dtype int32, expected": {"layer_scale": row.int()},
    "TypeError: residual_scale is a str, expected a number or a tensor of shape () or (8,).": {"residual_scale": "2"},
    "ValueError: row_scale has shape (2, 3, 8), expected (2, 3) or a shape that broadcasts to it, one element "
        "for each row of ": {"row_scale": torch.ones(2, 3, 8)},
    "TypeError: row_scale is a float, expected a tensor: torch.as_tensor": {"row_scale": 0.5},
    "ValueError: dropout_p is 1.5, expected a probability: a number from 0 to 1.": {"dropout_p": 1.5},
    "TypeError: seed is a int, expected a 0-d int64 tensor: torch.tensor(1234).": {"dropout_p": 0.5, "seed": 1234},
    "ValueError: weight_offset is 1.0 but there is no weight to add it to: pass weight.":
        {"weight": None, "weight_offset": 1.0},
    "TypeError: weight_offset is a str, expected a number: 1.0 for Gemma's": {"weight_offset": "1"},
    "TypeError: residual_dtype is torch.int32, expected float32, bfloat16, float16 or float64 (or None).":
        {"residual_dtype": torch.int32},
    "ValueError: normalized_shape is empty, expected at least one dimension: pass (d,) or None.":
        {"normalized_shape": ()},
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
    "ValueError: normalized_shape is (3, 7), expected the last dimensions of x": {
        "x": good,
        "normalized_shape": (3, 7),
    },
}


@pytest.mark.parametrize("function", [addnorm.layer_norm, addnorm.rms_norm])
@pytest.mark.parametrize("sentence", REFUSED_ALONE)
def test_norm_alone_names_its_own_argument(function, sentence):
    assert_raises(sentence, lambda: function(**REFUSED_ALONE[sentence]))


@pytest.mark.parametrize("casting", ["gemma", ["llama"]])
def test_unknown_casting_lists_the_choices(casting):
    sentence = f"ValueError: casting is {casting!r}, expected one of 'float32', 'llama', 't5'."
    assert_refused(sentence, lambda: addnorm.add_rms_norm(good, good, row, casting=casting))


@pytest.mark.parametrize("function", FUNCTIONS.values())
def test_unknown_option_raises(function):
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        function(good, good, prenorm=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"weight_offset": torch.ones(2)}, "weight_offset is a float32 tensor of shape (2,), expected a number"),
        ({"eps": 10**400}, "eps is 1000"),
        ({"eps": True}, "eps is True, expected a number"),
        ({"eps": torch.tensor(1e-5, requires_grad=True)}, "eps is tensor("),
        *[
            ({"offset": n, "dropout_p": 0.1}, f"offset is {n}, expected a whole number")
            for n in (-1, 1.5, 2**62, 2**63)
        ],
        *[({"dropout_p": p}, f"dropout_p is {p}, expected a probability") for p in (None, True)],
        ({"dropout_p": torch.tensor([0.1, 0.2, 0.3])}, "dropout_p is tensor("),
        ({"dropout_p": 1.5, "training": False}, "dropout_p is 1.5, expected a probability"),
        ({"normalized_shape": 8.0}, "normalized_shape is 8.0, expected a whole number or a sequence of them"),
        ({"normalized_shape": (8.0,)}, "normalized_shape is (8.0,), expected a whole number or a sequence of them"),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [addnorm.add_layer_norm, addnorm.add_rms_norm, addnorm.add_layer_norm_])
def test_non_numbers_are_named_on_every_path(function, options, sentence):
    x = torch.randn(4, 8)
    assert_raises(f": {sentence}", lambda: function(x, x.clone(), torch.ones(8), **options))


def odd_forms(t):
    """Return a tensor in the forms that no kernel reads, by the sentence about each."""
    fake = "(is a FakeTensor and .* is not|is not, expected all or none)"
    forms = {fake: FakeTensorMode().from_tensor(t), "has layout torch.sparse_coo": t.to_sparse()}
    if t.dim() > 0:
        forms |= {"has layout torch._mkldnn": t.to_mkldnn(), "is a nested tensor": torch.nested.nested_tensor(list(t))}
    return forms


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("variant", ["LayerNorm", "everything, RMSNorm", "everything, the add alone"])
@pytest.mark.parametrize("written", [(), ("out",), ("residual", "branch")], ids=str)
def test_tensors_of_odd_forms_are_refused_by_name(variant, written):
    call = make(variant, "float32", (4, 8))
    written = written[:1] if call.norm == "none" else written
    tensors = call.tensors | ({"out": torch.zeros(4, 8)} if written == ("out",) else {})
    before = {name: t.clone() for name, t in tensors.items()}
    function = (IN_PLACE if "residual" in written else FUNCTIONS)[call.norm]
    for name, t in tensors.items():
        forms = odd_forms(t) | ({"is a negative view": torch._neg_view(t.clone())} if name in written else {})
        for words, odd in forms.items():
            with pytest.raises(TypeError, match=f"(^| ){name} {words}.*expected"):
                function(**{**tensors, name: odd}, **call.options)
    assert_same(tensors, before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_seed_is_refused_by_name():
    """torch refuses to tell the shape of a nested tensor."""
    t = torch.randn(4, 8)
    sentence = "TypeError: seed is a nested tensor, expected a 0-d int64 tensor: torch.tensor(1234)."
    seed = torch.nested.nested_tensor([t[:2], t[2:]])
    assert_refused(sentence, lambda: addnorm.add_residual(t, t.clone(), dropout_p=0.5, seed=seed))


x, ones, f32 = torch.randn(3, 4), torch.ones(4), torch.float32
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
    *[(FORWARD, {name: n}, f"{name} is {n}, expected 0 to 2") for n in BROKEN for name in ("norm", "casting")],
    *[(OUT, {name: n}, f"{name} is {n}, expected 0 to 2") for n in BROKEN for name in ("norm", "casting")],
    *[(PLAIN, {"norm": n}, f"norm is {n}, expected 0 to 2") for n in BROKEN],
    *[(BACKWARD, {"norm": n}, f"norm is {n}, expected 0 to 2") for n in BROKEN],
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
