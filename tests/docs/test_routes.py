"""Tests of docs/routes.md: the page shows the committed results, and the routes compute what the results say."""

import itertools
import json

import pytest
import torch

from support import route_calls, route_processes, route_results
from support.pairwise import mark_slow, some
from support.route_calls import SAME_BITS, measure, measure_error
from support.route_models import OPERATIONS
from support.route_results import ROUTES, agrees, list_cells, measure_processes, tolerance

# Of torch, while it captures, compiles and exports.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::UserWarning:torch", "ignore::DeprecationWarning", "ignore::FutureWarning:torch", "ignore::torch.jit.TracerWarning"
    ),
    pytest.mark.usefixtures("one_thread"),
]  # fmt: skip
DOCUMENT = json.loads(route_results.PATH.read_text())
ROWS = {(row["route"], row["operation"], row["dtype"]): row for row in DOCUMENT["rows"]}

# Routes without a compiler, on small models; the two dtypes in turn.
CHEAP = ("eager", "export", "jit.trace", "checkpoint", "checkpoint, reentrant", "apply_activation_checkpointing")
CHEAP = [
    (route, name, torch.float64 if i % 2 else torch.float32)
    for i, (name, route) in enumerate(itertools.product(("AddNorm", "pre-LN", "post-LN"), CHEAP))
]
ALONE = [(route, name, dtype) for route, name, dtype in list_cells() if route in route_calls.ROUTES]


@pytest.fixture(scope="module", autouse=True)
def free_models():
    yield
    route_calls.share_model.cache_clear()


def limit(name, dtype):
    return tolerance(DOCUMENT["errors"][name], dtype)


def test_results_have_every_cell():
    assert [*ROWS] == [(route, name, str(dtype)) for route, name, dtype in list_cells()]
    assert {route for route, _, _ in ROWS} == {*ROUTES}
    assert {name for _, name, _ in ROWS} == {*OPERATIONS} == {*DOCUMENT["errors"]}
    assert DOCUMENT["factor"] == route_results.FACTOR


@pytest.mark.parametrize(("route", "name", "dtype"), list_cells())
def test_committed_errors_are_within_the_tolerance(route, name, dtype):
    row = ROWS[route, name, str(dtype)]
    assert agrees(row, row, limit(name, dtype)) == ""
    assert (row["gradients"] is None) == (route in ("AOTInductor", "ONNX"))
    assert row["fused"] is (None if row["gradients"] is None else True)
    assert row["outputs"] == SAME_BITS or row["outputs"] > 0


@pytest.mark.parametrize(("route", "name", "dtype"), mark_slow(ALONE, CHEAP))
def test_route_computes_what_the_results_say(route, name, dtype):
    row, measured = ROWS[route, name, str(dtype)], measure(route, OPERATIONS[name], dtype)
    assert agrees(row, measured, limit(name, dtype), bits=route != "torch.compile") == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("route", route_processes.ROUTES)
def test_processes_compute_what_the_results_say(route, name):
    for dtype, row in measure_processes(route, name).items():
        expected = ROWS[route, name, dtype]
        assert agrees(expected, row, limit(name, getattr(torch, dtype.removeprefix("torch."))), bits=False) == ""


@pytest.mark.parametrize("name", some(OPERATIONS, {*OPERATIONS} - {"MiniLM"}))
def test_tolerances_follow_from_the_error_of_eager_mode(name):
    """Measured anew, the error is that of the results, but for the machine's order of sums."""
    assert 0.5 < measure_error(OPERATIONS[name]) / DOCUMENT["errors"][name] < 2


def test_comparison_detects_wrong_results():
    run = route_calls.run_eager(OPERATIONS["post-LN"], torch.float32)
    name = "body.stack.layers.0.connections.1.norm_out.bias"
    last = run.output.clone()
    last[-1, -1, -1] += 1e-4 * last.abs().max()
    wrong = {
        "outputs": run._replace(output=last),
        "gradients": run._replace(gradients={**run.gradients, name: run.gradients[name] * 1.0001}),
    }
    row = route_calls.compare(run, run)
    assert row == {"outputs": SAME_BITS, "gradients": SAME_BITS, "fused": True}
    for key, other in wrong.items():
        result = route_calls.compare(other, run)
        assert agrees(row, result, 1.0).startswith(f"{key} differ by 1.0e-04, tolerance 0.0e+00")
        assert agrees(row, result, 1e-5, bits=False).startswith(f"{key} differ by 1.0e-04, tolerance 1.0e-05")
        assert agrees(row, result, 1e-3, bits=False) == ""
    with pytest.raises(AssertionError, match="output is NaN"):
        route_calls.compare(run._replace(output=last * torch.nan), run)
