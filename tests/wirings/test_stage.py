"""Stages and heads as data: what they refuse, in one sentence, and what they derive."""

import math
import re

import pytest
from torch import nn

from addnorm import Learned, ResidualStack, Row, Wiring, wirings
from addnorm.wirings import Computed, Head, Stage, append_zero, coefficients, unit

HYPER = Computed(coefficients.HyperConnection)
READ = Computed(coefficients.SigmoidRead)
SOURCES = Computed(coefficients.DynamicSources)
KEEP = {"collapse": (1, 0), "inject": (1, 1)}
HEAD = Head(2, (1, 0))


def stack(rule, head=HEAD, embedding=(1.0, 1.0)):
    """Build a stack of two layers with one sublayer each."""
    wiring = Wiring("mine", rule if callable(rule) else lambda place: rule, embedding=embedding, head=head)
    return ResidualStack([nn.Identity(), nn.Identity()], 4, wiring, sublayers_per_layer=1)


def built(wiring):
    return ResidualStack([nn.Identity(), nn.Identity()], 4, wiring)


ONE = {"collapse": (1,), "mix": ((1,),), "inject": (1,)}
REFUSED = {
    "no_streams": (lambda: Stage(0, (), inject=(1,)), "n is 0, expected"),
    "no_inject": (lambda: Stage(2, (1, 0)), "inject is None, expected its entries, or a module that computes it"),
    "no_collapse": (lambda: Stage(2, inject=(1, 0)), "collapse is None, expected its entries, or a module"),
    "short_collapse": (lambda: Stage(2, (1,), inject=(1, 0)), "collapse has the row (1,), expected 2 entries"),
    "short_inject": (lambda: Stage(2, (1, 0), append_zero(2), (1, 0)), "inject has the row (1, 0), expected 3 entries"),
    "text_entry": (lambda: Stage(2, (1, "0"), inject=(1, 0)), "an entry of collapse is '0', expected"),
    "infinite_among_floats": (lambda: Stage(2, (1.0, -math.inf), inject=(1, 0)), "an entry of collapse is -inf, expected"),
    "mix_is_a_number": (lambda: Stage(2, (1, 0), 1.0, (1, 0)), "mix is 1.0, expected a tuple"),
    "collapse_is_computed": (lambda: Stage(2, (1, 0), coefficients=HYPER), "collapse is ((1.0, 0.0),), expected None:"),
    "module_leaves_inject_out": (
        lambda: Stage(2, coefficients=Computed(coefficients.GatedRead, {"injects": False})), "inject is None, expected",
    ),
    "delayed_constants": (lambda: Stage(2, **KEEP, delayed=True), "delayed is True with None"),
    "delayed_that_appends": (lambda: Stage(2, inject=unit(3, 2), coefficients=SOURCES, delayed=True), "delayed is True with"),
    "norm_out_of_computed": (lambda: Stage(2, coefficients=HYPER, norm_out=True), "norm_out is (True, True) with"),
    "norm_flags": (lambda: Stage(2, **KEEP, norm_streams=(True,)), "norm_streams is (True,), expected True, False, or"),
    "norm_in_of_ones": (lambda: Stage(2, **KEEP, norm_in=1), "norm_in is 1, expected"),
    "shared_factor": (lambda: Stage(2, (Learned(1.0, shared=True), 0), inject=(1, 0)), "shared=False"),
    "one_name_two_values": (
        lambda: Stage(2, (Learned(1.0, name="c"), Learned(0.5, name="c")), inject=(1, 0)).learned, "c is Learned(init=1.0",
    ),
    "no_module": (lambda: Computed(nn.Linear), "kind is <class 'torch.nn.modules.linear.Linear'>, expected a subclass"),
    "head_without_read": (lambda: Head(2), "collapse is None, expected its entries"),
    "head_with_both": (lambda: Head(2, (1, 0), READ), "collapse is ((1.0, 0.0),), expected None"),
    "head_delayed_with_both": (lambda: Head(2, (1, 0), delayed=True), "delayed is True beside"),
    "other_number_of_streams": (lambda: stack(Stage(3, (1, 0, 0), inject=(1, 1, 1))), "n = 3 streams at sublayers[0], expected 2"),
    "other_number_at_head": (lambda: stack(Stage(2, **KEEP), Head(3, (1, 0, 0))), "n = 3 streams at the head, expected 2"),
    "rows_among_stages": (lambda: stack(lambda p: Stage(2, **KEEP) if p.layer else Row()), "the row Row() for sublayers[0]"),
    "head_reads_what_nobody_computes": (lambda: stack(Stage(2, **KEEP), Head(2, delayed=True)), "delayed = True at the head"),
    "stage_reads_what_nobody_computes": (
        lambda: stack(lambda p: Stage(2, coefficients=HYPER, delayed=p.layer == 1)), "delayed = True at sublayers[1]",
    ),
    "tensor_and_tuple": (
        lambda: stack(Stage(2, coefficients=HYPER), Head(2, coefficients=Computed(coefficients.SourceAttention))),
        "take the streams as one tensor and others that take a tuple",
    ),
    "constants_among_tensors": (
        lambda: stack(lambda p: Stage(2, **KEEP) if p.layer else Stage(2, coefficients=HYPER)), "constant matrices beside modules",
    ),
    "too_few_inputs": (
        lambda: ResidualStack([nn.Linear(4, 4)] * 2, 4, wirings.muddformer(reads=3)),
        "sublayer is Linear with 1 positional arguments, expected 3 inputs",
    ),
    "negative_eps": (lambda: built(wirings.mhc(eps=-1.0)), "eps is -1.0, expected a number that is not negative"),
    "zero_magnitude": (lambda: wirings.independent_hc(magnitude=0.0), "magnitude is 0.0, expected a positive number"),
    "zero_alpha": (lambda: wirings.ngpt(0.0), "alpha is 0.0, expected a positive number"),  # it would never train
    "head_of_single_pass": (lambda: wirings.mhc(head="mean", single_pass=True), "head is 'mean' with single_pass=True, expected"),
    "growth_of_profile": (lambda: wirings.admin(growth="linear"), "growth is 'linear' with profiled=True, expected"),
    "zero_temperature": (lambda: built(wirings.gated_mix(temperature=0.0)), "temperature is 0.0, expected a positive number"),
    "reads_nothing": (lambda: Stage(2, (0, 0), inject=(1, 1)), "collapse is (0.0, 0.0), expected an entry that is not 0"),
    "writes_nothing": (lambda: Stage(2, (1, 0), inject=(0, -0.0)), "inject is (0.0, -0.0), expected an entry that is not 0"),
    "head_reads_nothing": (lambda: Head(2, (0, 0)), "collapse is (0.0, 0.0), expected an entry that is not 0: the output"),
    "empty_embedding": (lambda: stack(Stage(2, **KEEP), embedding=()), "an entry of embedding is None, expected"),
}  # fmt: skip


def _named(name):
    return lambda: built(Wiring("w", Stage(1, (1,), ((Learned(1.0, name=name),),), (1,), norm_in=True)))


TAKEN = (
    "a",
    "norm",
    "place",
    "reads",
    "stage",
    "norm_in",
    "norm_outs",
    "norm_streams",
    "training",
    "forward",
    "sublayer",
    "coefficients",
)
REFUSED |= {f"named_{name}": (_named(name), f"name is {name!r} in Learned(") for name in TAKEN}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_data_is_refused_in_one_sentence(name):
    make, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as caught:
        make()
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert ". " not in text


def test_delayed_stages_may_begin_a_stack():
    stack(Stage(2, coefficients=HYPER, delayed=True), Head(2, delayed=True))


def test_options_of_a_module_say_what_it_computes():
    read = Computed(coefficients.GatedRead, {"injects": False, "rank": 2})
    assert read.computes == ("collapse",)
    assert Stage(2, inject=(1, 2), coefficients=read).n_out == 2
    assert SOURCES.appends
    assert not Computed(coefficients.DynamicSources, {"residual": False}).appends


def test_reads_are_the_rows_of_collapse():
    assert Stage(2, ((1, 0), (0, 1), (0.5, 0.5)), inject=(1, 0)).reads == 3
    assert Stage(2, (1, 0), inject=(1, 0)).collapse == ((1.0, 0.0),)
    assert Stage(2, (1, 0), append_zero(2), (0, 0, 1)).n_out == 3
