"""Test of the parameters of requests; explorer_requests.py has wrong ones, and test_race.py the sentences of errors."""

from addnorm.explorer.params import Number, read_params

FIELDS = {
    "sublayers": Number(24, 2, 96, step=2),
    "gain": Number(1.0, 0.1, 3.0),
    "seed": Number(0, 0, 2**31 - 1, step=1),
}


def test_numbers_get_their_type():
    result = read_params(FIELDS, {"sublayers": 48.0, "gain": 3, "seed": -0.0})
    assert [(value, type(value)) for value in result.values()] == [(48, int), (3.0, float), (0, int)]
