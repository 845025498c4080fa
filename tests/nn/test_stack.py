"""Tests of ResidualStack: fused calls, keyword arguments of sublayers, places and wirings, errors."""

import copy
import gc
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import addnorm
from addnorm import ResidualStack, Row, Wiring, wirings
from addnorm.nn.state import StreamState
from support.operator_calls import Recorder
from support.refusals import assert_refused, make_test
from support.stacks import D, Masked, Mlp, stack_of

# Fused calls

COUNTS = {  # for 6 sublayers: adds alone, norms alone, both in one call
    "post_ln": (0, 0, 6),
    "pre_ln": (0, 1, 6),
    "sandwich": (0, 1 + 6, 6),
    "peri_ln": (0, 1 + 1 + 6, 6),
    "reordered": (5, 6, 1),
    "deepnorm": (0, 0, 6),
    "layer_scale": (0, 1, 6),
    "layernorm_scaling": (0, 1, 6),
    "no_norm": (6, 0, 0),
    "no_residual": (0, 0, 6),
    "mix_ln": (0, 1, 6),  # one norm follows another where post-LN layers end
    "parallel": (3, 1, 3),  # one add of each layer alone, the other with the next layer's norm
    "resi_dual": (6, 1, 6),  # the second stream's adds, its norm; the sum of both is no call
    "b2t": (0, 0, 6),  # the layer's input is added again, by no call
}


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", COUNTS)
def test_add_and_next_norm_are_one_call(name, grad, x):
    stack = stack_of(6, name)
    with torch.set_grad_enabled(grad), Recorder() as recorder:
        stack(x)
    counts = Counter(
        (one.arguments["branch"] is not None, one.arguments.get("norm", 0) != 2) for one in recorder.calls
    )  # whether a call adds, and whether it normalizes
    assert (counts[True, False], counts[False, True], counts[True, True]) == COUNTS[name]


# Keyword arguments


def test_keyword_reaches_sublayers_that_name_it(x):
    masked, plain, received = Masked(), Mlp(), {}

    def anything(x, **keywords):
        received.update(keywords)
        return x

    stack = ResidualStack([masked, plain, anything], D)
    mask = torch.ones(3)
    stack(x, mask=mask, scale=0.5, whatever=1)
    assert masked.received == (mask, 0.5)
    assert received == {"mask": mask, "scale": 0.5, "whatever": 1}


@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile about itself
def test_keyword_passes_nested_stacks_and_compiled_modules(x):
    mask = torch.ones(3)
    plain = stack_of(2)
    inner = ResidualStack([Masked(), Mlp()], D)
    assert inner.accepted_kwargs == {"mask", "scale"}
    outer = ResidualStack(
        [plain, inner, Mlp(), torch.compile(Mlp(), backend="eager"), addnorm.SublayerConnection(Masked(), D)], D
    )
    outer(x, mask=mask)
    assert inner.connections[0].sublayer.received[0] is mask
    assert outer.connections[4].sublayer.sublayer.received[0] is mask


def test_replaced_sublayer_receives_its_own_keywords(x):
    stack, mask = stack_of(2), torch.ones(3)
    stack.connections[0].sublayer = Masked()
    stack(x, mask=mask)
    assert stack.connections[0].sublayer.received[0] is mask
    stack.connections[0].sublayer = Mlp()
    assert_refused(
        "TypeError: no sublayer takes the keyword argument 'mask', expected none", lambda: stack(x, mask=mask)
    )


# Places and wirings


def test_last_layer_may_be_shorter():
    stack = stack_of(5, wirings.layernorm_scaling())
    assert [here.c for here in stack.connections] == pytest.approx([1, 1, 2**-0.5, 2**-0.5, 3**-0.5])
    assert stack.num_layers == 3
    decoder = stack_of(6, wirings.layernorm_scaling(), sublayers_per_layer=3)
    assert [here.c for here in decoder.connections] == pytest.approx([1, 1, 1, 2**-0.5, 2**-0.5, 2**-0.5])


@pytest.mark.parametrize(
    ("wiring", "options", "equation"),
    [("post_ln", {"final_norm": True}, "post_ln(): x' = N(x + f(x)),   y = N(x_L)"),
     ("pre_ln", {"final_norm": False}, "pre_ln(): x' = x + f(N(x))"),
     ("deepnorm", {}, "deepnorm(): x' = N(1.414 x + f(x))"),
     ("keel", {}, "keel():\n  layer 1, sublayer 1:  x' = x + f(N(x))")],
)  # fmt: skip
def test_repr_has_the_equation_at_its_depth(wiring, options, equation):
    assert f"  {equation}\n" in repr(stack_of(4, wiring, **options))
    assert "SublayerConnection(\n" in repr(stack_of(4, wiring))


def test_shared_factor_stays_one_parameter():
    def one(stack):
        return all(layer[0].b is here.b for layer in map(list, stack._layers()) for here in layer)

    stack = stack_of(4, "rezero")
    assert one(stack)
    assert one(copy.deepcopy(stack))
    model = nn.Sequential(stack_of(4, "rezero", device="meta"))  # the sublayers are on the CPU
    assert one(model.to_empty(device="cpu")[0])
    assert sum(name.endswith(".b") for name, _ in stack.named_parameters()) == 2


def test_call_leaves_no_state_behind(x):
    stack = stack_of(4)
    stack(x)
    gc.collect()
    assert not any(type(o) is StreamState for o in gc.get_objects())


# Errors


def nothing(x):
    return None


def narrow(x):
    return x[..., :1]


REFUSED = {
    "shares is 'state' with a = 2.0 and norm_out = False, expected a = 1": lambda: Row(a=2.0, shares="state"),
    "shares is 'read' with norm_in = False and c = 3.0, expected no norm_in": lambda: Row(c=3.0, shares="read"),
    "has the row Row(shares='read') first in a layer, expected shares = ''": lambda: stack_of(2, Row(shares="read")),
    "has the row Row(norm_out=True) before one that shares its read, expected a = 1": lambda: stack_of(
        2, Wiring("odd", lambda at: Row(shares="read") if at.sublayer else Row(norm_out=True))
    ),
    "b is Learned(init=0.5, shared=True), Learned(init=1.5, shared=True) in the rows of one layer": lambda: stack_of(
        2, Wiring("odd", lambda at: Row(b=addnorm.Learned(0.5 + at.sublayer, shared=True)))
    ),
    "b is 1.0, Learned(init=0.5, shared=True) in the rows of one layer": lambda: stack_of(
        2, Wiring("odd", lambda at: Row(b=addnorm.Learned(0.5, shared=True) if at.sublayer else 1.0))
    ),
    "d_model is 0, expected a whole number from 1": lambda: ResidualStack([Mlp()], 0),
    "d_model is 16.5, expected a whole number": lambda: addnorm.SublayerConnection(Mlp(), 16.5, "no_norm"),
    "eps is -1, expected a number that is not negative": lambda: stack_of(2, eps=-1),
    "final_norm is 'no', expected True or False, or None": lambda: stack_of(2, final_norm="no"),
    "checkpoint is 'no', expected True, False, or a whole number": lambda: stack_of(2, checkpoint="no"),
    "residual_dtype is torch.int64, expected float32, bfloat16, float16 or float64 (or None)": lambda: stack_of(
        2, residual_dtype=torch.int64
    ),
    "i is True, expected the number of a sublayer": lambda: stack_of(2).without(True),
    "sublayers is empty": lambda: ResidualStack([], D),
    "sublayer is 3, expected a module": lambda: ResidualStack([3], D),
    "sublayers_per_layer is 4 for 6 sublayers": lambda: stack_of(6, sublayers_per_layer=4),
    "sublayers_per_layer is 0": lambda: stack_of(6, sublayers_per_layer=0),
    "norm is 'batch', expected one of 'layer', 'rms'": lambda: stack_of(2, norm="batch"),
    "bias is True with norm 'rms'": lambda: stack_of(2, norm="rms", bias=True),
    "dropout is 1.5, expected a probability": lambda: stack_of(2, dropout=1.5),
    "stochastic_depth is True, expected a probability": lambda: stack_of(2, stochastic_depth=True),
    "i is 2, expected the number of a sublayer, 0 to 1": lambda: stack_of(2).without(2),
    "TypeError: no sublayer takes the keyword argument 'maks', expected 'mask', 'scale'": lambda: ResidualStack(
        [Masked(), Mlp()], D
    )(torch.randn(3, D), maks=None),
    "x is list, expected a tensor": lambda: stack_of(2)([1.0]),
    "x has dtype torch.int64, expected a real floating-point dtype: convert it with x.float()": lambda: stack_of(
        2, "reversible"
    )(torch.zeros(3, D, dtype=torch.int64)),
    "x has shape (3, 8), expected (*, 16), features last": lambda: stack_of(2)(torch.randn(3, 8)),
    "x has shape (), expected (*, 16)": lambda: stack_of(2, "post_ln")(torch.tensor(1.0)),
    "sublayers is Mlp, expected a list of sublayers: pass [Mlp(...)]": lambda: ResidualStack(Mlp(), D),
    "sublayers is Linear, expected a list of sublayers: pass [Linear(...)]": lambda: ResidualStack(nn.Linear, D),
    "sublayers is function, expected a list of sublayers: pass [attention,": lambda: ResidualStack(lambda x: x, D),
    "sublayer is <class 'support.stacks.Mlp'>, expected a module": lambda: ResidualStack([Mlp], D),
    "wiring is 'ngpt', expected one of rows: the sublayers of ngpt have stages": lambda: addnorm.SublayerConnection(
        Mlp(), D, "ngpt"
    ),
}
for _wiring in ("pre_ln", "sandwich", "post_ln", "no_norm", "resi_dual", "b2t", "parallel", "mix_ln"):
    for _sublayer, _text in (
        (nn.Linear(D, 7), "ValueError: sublayers[1] (Linear) returned shape (3, 7), expected (3, 16), the shape of"),
        (narrow, "ValueError: sublayers[1] (narrow) returned shape (3, 1)"),  # it is not broadcast
        (nothing, "TypeError: sublayers[1] (nothing) returned NoneType"),
        (nn.LSTM(D, D), "TypeError: sublayers[1] (LSTM) returned a tuple of 2, expected one tensor: wrap the sublayer"),
    ):
        REFUSED[_text, _wiring] = lambda wiring=_wiring, sublayer=_sublayer: ResidualStack(
            [Mlp(), sublayer], D, wiring
        )(torch.randn(3, D))
for _wiring in ("sandwich", "attention_residuals", "gated_residual"):  # the operation does not see this branch as it is
    for _to, _text in ((torch.int64, "dtype torch.int64, expected a real"), ("meta", "a tensor on meta, expected cpu")):
        REFUSED[f"sublayers[0] (<lambda>) returned {_text}", _wiring] = lambda wiring=_wiring, to=_to: ResidualStack(
            [lambda x: x.to(to)], D, wiring
        )(torch.randn(3, D))


def call_with_norm(name):
    stack = ResidualStack([Mlp()], D, Wiring("all", Row(True, True, True), final_norm=True, embedding_norm=True))
    norm = nn.Identity()
    norm.forward = nothing
    setattr(stack if hasattr(stack, name) else stack.connections[0], name, norm)
    return stack(torch.randn(3, D))


for _name in ("norm_embedding", "norm_in", "norm_branch", "norm_out", "norm_final"):
    REFUSED["TypeError: the norm Identity returned NoneType, expected a tensor of shape (3, 16)", _name] = partial(
        call_with_norm, _name
    )


test_wrong_options_raise = make_test(REFUSED)
