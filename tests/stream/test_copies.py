"""Tests of `copy.deepcopy` and `pickle` of results."""

import copy
import pickle

import pytest

import addnorm
from support.instrumented_model import record
from support.scaled_model import Model
from support.stream_steps import X

RESULTS = {
    "inspection": addnorm.inspect,
    "site": lambda model, x: addnorm.inspect(model, x).sites[0],
    "verification": lambda model, x: addnorm.verify(model, x, wiring="pre_ln"),
    "reference": lambda model, x: addnorm.verify(model, x, like=model),
    "decomposition": addnorm.decompose,
    "ablations": lambda model, x: addnorm.ablate_each(addnorm.inspect(model, x), x),
    "program": lambda model, x: addnorm.inspect(addnorm.nn.Encoder(1, 16, nhead=2, wiring="mhc").eval(), x),
}


@pytest.mark.parametrize("name", RESULTS)
def test_result_with_a_run_is_not_copied(name):
    result = RESULTS[name](Model(), X)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"the run of a model cannot be copied or pickled: keep its to_dict\(\)"):
            make(result)


def test_recording_is_pickled():
    recording = record(Model(), X)
    again = pickle.loads(pickle.dumps(recording))
    assert str(again) == str(recording)
    assert again.to_dict() == recording.to_dict()
