"""Rows, stages, heads and wirings refuse wrong data in one sentence."""

import inspect
import math

import pytest
from torch import nn

from addnorm import Learned, ResidualStack, Row, Wiring, wirings
from addnorm.wirings import CONSTRUCTORS, Computed, Head, Stage, append_zero, coefficients, unit
from support.refusals import make_test

HYPER = Computed(coefficients.HyperConnection)
READ = Computed(coefficients.SigmoidRead)
SOURCES = Computed(coefficients.DynamicSources)
KEEP = {"collapse": (1, 0), "inject": (1, 1)}
HEAD = Head(2, (1, 0))
POST = Row(norm_out=True)


def stack(rule, head=HEAD, embedding=(1.0, 1.0)):
    """Build a stack of two layers with one sublayer each."""
    wiring = Wiring("mine", rule if callable(rule) else lambda place: rule, embedding=embedding, head=head)
    return ResidualStack([nn.Identity(), nn.Identity()], 4, wiring, sublayers_per_layer=1)


def built(wiring):
    return ResidualStack([nn.Identity(), nn.Identity()], 4, wiring)


def mine(rule=POST, **options):
    return Wiring(**{"name": "mine", "rule": rule, **options})


START = "for a start at zero use Learned(0.0)."
REFUSED = {
    # Rows and learned factors
    "TypeError: norm_in is 1, expected True or False: whether the row has that norm.": lambda: Row(norm_in=1),
    f"ValueError: b is 0, expected another number: the sublayer would never write; {START}": lambda: Row(b=0),
    f"ValueError: c is 0, expected another number: the sublayer would read only zeros; {START}": lambda: Row(c=-0.0),
    "ValueError: init is nan, expected a finite number.": lambda: Learned(math.nan),
    "TypeError: per_feature is 8, expected True or False.": lambda: Learned(1.0, per_feature=8),
    "TypeError: shared is 'layer', expected True or False.": lambda: Learned(1.0, shared="layer"),
    # Wirings
    "TypeError: name is '', expected a text: what the wiring is called.": lambda: mine(name=""),
    "TypeError: rule is 'pre_ln', expected a Row or a Stage, or a function that returns that of": lambda: mine("pre_ln"),
    "TypeError: final_norm is 1, expected True or False, or a function of the number of layers.": lambda: mine(final_norm=1),
    "TypeError: embedding_norm is 'layer', expected True or False.": lambda: mine(embedding_norm="layer"),
    "TypeError: init is 'gpt2', expected a function of a role and a Place, as in addnorm.wirings.init.": lambda: mine(init="gpt2"),
    "ValueError: a key of symbols is 'd', expected 'a', 'b' or 'c', or an entry of a stage,": lambda: mine(symbols={"d": ("δ", "")}),
    "TypeError: the rule of wiring 'mine' gave {'b': 1.0} for Place(layer=0, sublayer=1, num_layers=2, sublayers_per_layer=2), "
    "expected a Row or a Stage.": lambda: mine(lambda at: {"b": 1.0}).row(0, 1, num_layers=2),
    "an entry of embedding is None, expected": lambda: stack(Stage(2, **KEEP), embedding=()),
    # Stages and heads
    "n is 0, expected": lambda: Stage(0, (), inject=(1,)),
    "inject is None, expected its entries, or a module that computes it": lambda: Stage(2, (1, 0)),
    "collapse is None, expected its entries, or a module": lambda: Stage(2, inject=(1, 0)),
    "collapse has the row (1,), expected 2 entries": lambda: Stage(2, (1,), inject=(1, 0)),
    "inject has the row (1, 0), expected 3 entries": lambda: Stage(2, (1, 0), append_zero(2), (1, 0)),
    "an entry of collapse is -inf, expected": lambda: Stage(2, (1.0, -math.inf), inject=(1, 0)),
    "mix is 1.0, expected a tuple": lambda: Stage(2, (1, 0), 1.0, (1, 0)),
    "collapse is ((1.0, 0.0),), expected None: Computed(HyperConnection)": lambda: Stage(2, (1, 0), coefficients=HYPER),
    "inject is None, expected": lambda: Stage(2, coefficients=Computed(coefficients.GatedRead, {"injects": False})),
    "delayed is True with None": lambda: Stage(2, **KEEP, delayed=True),
    "delayed is True with": lambda: Stage(2, inject=unit(3, 2), coefficients=SOURCES, delayed=True),
    "norm_out is (True, True) with": lambda: Stage(2, coefficients=HYPER, norm_out=True),
    "norm_streams is (True,), expected True, False, or": lambda: Stage(2, **KEEP, norm_streams=(True,)),
    "norm_in is 1, expected": lambda: Stage(2, **KEEP, norm_in=1),
    "shared=False": lambda: Stage(2, (Learned(1.0, shared=True), 0), inject=(1, 0)),
    "c is Learned(init=1.0": lambda: Stage(2, (Learned(1.0, name="c"), Learned(0.5, name="c")), inject=(1, 0)).learned,
    "kind is <class 'torch.nn.modules.linear.Linear'>, expected a subclass": lambda: Computed(nn.Linear),
    "collapse is None, expected its entries": lambda: Head(2),
    "collapse is ((1.0, 0.0),), expected None: Computed(SigmoidRead)": lambda: Head(2, (1, 0), READ),
    "delayed is True beside": lambda: Head(2, (1, 0), delayed=True),
    "collapse is (0.0, 0.0), expected an entry that is not 0: the sublayer": lambda: Stage(2, (0, 0), inject=(1, 1)),
    "inject is (0.0, -0.0), expected an entry that is not 0": lambda: Stage(2, (1, 0), inject=(0, -0.0)),
    "collapse is (0.0, 0.0), expected an entry that is not 0: the output": lambda: Head(2, (0, 0)),
    # Stages in a stack
    "n = 3 streams at sublayers[0], expected 2": lambda: stack(Stage(3, (1, 0, 0), inject=(1, 1, 1))),
    "n = 3 streams at the head, expected 2": lambda: stack(Stage(2, **KEEP), Head(3, (1, 0, 0))),
    "the row Row() for sublayers[0]": lambda: stack(lambda p: Stage(2, **KEEP) if p.layer else Row()),
    "delayed = True at the head": lambda: stack(Stage(2, **KEEP), Head(2, delayed=True)),
    "delayed = True at sublayers[1]": lambda: stack(lambda p: Stage(2, coefficients=HYPER, delayed=p.layer == 1)),
    "take the streams as one tensor and others that take a tuple": lambda: stack(
        Stage(2, coefficients=HYPER), Head(2, coefficients=Computed(coefficients.SourceAttention))
    ),
    "constant matrices beside modules": lambda: stack(
        lambda p: Stage(2, **KEEP) if p.layer else Stage(2, coefficients=HYPER)
    ),
    "sublayer is Linear with 1 positional arguments, expected 3 inputs": lambda: ResidualStack(
        [nn.Linear(4, 4)] * 2, 4, wirings.muddformer(reads=3)
    ),
    # Published wirings
    "TypeError: wiring is ['pre_ln'], expected a Wiring or a name, such as addnorm.wirings.pre_ln() or 'pre_ln'.":
        lambda: wirings.as_wiring(["pre_ln"]),
    "num_layers is True, expected a whole number from 1.": lambda: wirings.pre_ln().equation(True),
    "ValueError: wiring is 'layerscale', expected 'layer_scale'.": lambda: wirings.get("layerscale"),
    f"ValueError: wiring is 'zzz', expected one of {', '.join(CONSTRUCTORS)}.": lambda: wirings.get("zzz"),
    "ValueError: rezero has no option 'k', expected none.": lambda: wirings.get("rezero", k=1),
    "ValueError: residual_multiplier needs its option 'multiplier': addnorm.wirings.residual_multiplier(multiplier=...).":
        lambda: wirings.get("residual_multiplier"),
    "other_layers is None, expected the number of decoder layers: the encoder's constants": lambda: wirings.deepnorm("encoder"),
    "other_layers is 6, expected None: a stack that is decoder-only has no": lambda: wirings.deepnorm("decoder-only", 6),
    "multiplier is nan, expected a finite number.": lambda: wirings.residual_multiplier(math.nan),
    "k is True, expected a finite number.": lambda: wirings.completep(True),
    "k is -1, expected a whole number from 0.": lambda: wirings.mix_ln(-1),
    "norms is 3, expected 1 (one for all sublayers of a layer) or 2 (one for each).": lambda: wirings.parallel(3),
    "eps is -1.0, expected a number that is not negative": lambda: built(wirings.mhc(eps=-1.0)),
    "magnitude is 0.0, expected a positive number": lambda: wirings.independent_hc(magnitude=0.0),
    "alpha is 0.0, expected a positive number": lambda: wirings.ngpt(0.0),  # it would never train
    "head is 'mean' with single_pass=True, expected": lambda: wirings.mhc(head="mean", single_pass=True),
    "growth is 'linear' with profiled=True, expected": lambda: wirings.admin(growth="linear"),
    "temperature is 0.0, expected a positive number": lambda: built(wirings.gated_mix(temperature=0.0)),
}  # fmt: skip
for _name in "abc":
    for _value in (math.nan, math.inf, -math.inf, "2", None, True, 1j, 10**400):
        REFUSED[f"{_name} is {_value!r}, expected a finite number, or Learned(...) for a factor that trains."] = (
            lambda name=_name, value=_value: Row(**{name: value})
        )
for _name in ("a", "norm", "reads", "norm_in", "norm_outs", "norm_streams", "coefficients"):
    REFUSED[f"name is {_name!r} in Learned("] = lambda name=_name: built(
        mine(Stage(1, (1,), ((Learned(1.0, name=name),),), (1,), norm_in=True))
    )
for _layer, _sublayer in ((4, 0), (-1, 0), (0, 2), (0, -1)):
    REFUSED[f"ValueError: layer {_layer} of 4, sublayer {_sublayer} of 2: expected each below its number"] = (
        lambda layer=_layer, sublayer=_sublayer: wirings.pre_ln().row(layer, sublayer, num_layers=4)
    )


test_wrong_data_is_refused_in_one_sentence = make_test(REFUSED)


@pytest.mark.parametrize("value", ["maybe", [], -1.5j], ids=repr)
@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, make in CONSTRUCTORS.items() for option in inspect.signature(make).parameters]
)  # fmt: skip
def test_every_option_is_checked(name, option, value):
    with pytest.raises((TypeError, ValueError), match=rf"{option} is .*, expected|expected two numbers"):
        wirings.get(name, **{option: value})
