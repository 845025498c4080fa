"""Tests of `addnorm.lab.run`: runs, their keys, and protocols."""

from dataclasses import replace

import pytest

from addnorm import Row, Wiring, wirings
from addnorm.lab import FULL, ILLUSTRATION, Protocol, Text
from addnorm.lab.run import as_lab_wiring, wiring_label
from addnorm.wirings.init import gpt2
from support.lab_runs import SIZE, TEXT, quick, small
from support.refusals import make_test

OTHER = {"num_layers": 3, "d_model": 32, "nhead": 4, "tokens": 9, "batch": 5, "steps": 11, "lr": 2e-3, "warm_up": 1, "seed": 1,
         "norm": "rms", "every": 4, "wiring": "post_ln"}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_run_key_depends_on_every_setting(name):
    run = small()
    assert set(OTHER) == set(run.settings())
    assert replace(run, **{name: OTHER[name]}).key(TEXT) != run.key(TEXT)


def test_run_key_depends_on_text_not_its_name():
    assert small().key(Text("x", TEXT.text)) == small().key(TEXT) != small().key(Text(TEXT.name, TEXT.text + "!"))


def test_run_key_depends_on_rows_not_the_wirings_name():
    mine = Wiring("mine", lambda at: Row(norm_in=True), final_norm=True)
    assert small(mine).key(TEXT) == small("pre_ln").key(TEXT)
    assert small(wirings.mix_ln(k=0)).key(TEXT) == small("pre_ln").key(TEXT)
    others = [replace(mine, final_norm=False), replace(mine, embedding_norm=True), replace(mine, init=gpt2),
              replace(mine, rule=Row(norm_in=True, b=0.5)), replace(mine, profile=wirings.admin().profile),
              wirings.mix_ln(k=2), wirings.mix_ln(k=3)]  # fmt: skip
    assert len({small(config, num_layers=4).key(TEXT) for config in (mine, *others)}) == 8


def test_run_key_is_stable():
    assert small().key(Text("fixed", "abc" * 100)) == "336c3973f47c162f"
    assert str(small(num_layers=1)).startswith("pre_ln, 1 layer, lr")


def test_wiring_label_shows_changed_options():
    assert wiring_label(as_lab_wiring("pre_ln")) == "pre_ln"
    assert wiring_label(as_lab_wiring(wirings.mix_ln(k=3))) == "mix_ln(k=3)"
    for name in ("mine", "W", "pre_ln"):  # the last is not addnorm's pre_ln
        assert wiring_label(Wiring(name, Row(norm_in=True, b=0.5))) == name


REFUSED = {
    "lr is nan, expected a positive number": lambda: small(lr=float("nan")),
    "steps is 0, expected a whole number from 1": lambda: small(steps=0),
    "seed is -1": lambda: small(seed=-1),
    "seed is 2147483648, expected at most": lambda: small(seed=2**31),
    "norm is 'batch'": lambda: small(norm="batch"),
    "seeds is empty": lambda: Protocol(seeds=()),
}


test_run_refuses_wrong_settings = make_test(REFUSED)


def test_largest_seed_has_batches():
    run = small(seed=2**31 - 1)
    assert TEXT.batch(run.seed, 10**9, 2, 8)[0].shape == (2, 8)


def test_protocol_combines_settings_seed_by_seed():
    protocol = quick(num_layers=(2, 3), rates=(1e-3, 1e-2), warm_ups=(0, 5), seeds=(0, 1))
    runs = protocol.runs([as_lab_wiring("post_ln"), as_lab_wiring("pre_ln")])
    assert len({run.key(TEXT) for run in runs}) == len(runs) == 32
    assert [run.seed for run in runs] == [0] * 16 + [1] * 16
    assert {run.batch for run in runs} == {SIZE["batch"]}


def test_protocol_accepts_single_numbers():
    assert Protocol(rates=1e-3, seeds=(0, 0, 1)).seeds == (0, 1)
    assert Protocol(num_layers=3).num_layers == (3,)


def test_protocol_tells_illustration_from_evidence():
    assert ILLUSTRATION.is_illustration
    assert not FULL.is_illustration
    assert Protocol(rates=(1e-3, 1e-2), seeds=(0, 1)).is_illustration
    assert Protocol(rates=1e-3, seeds=range(5)).is_illustration
