"""Fused models in one process: each has recompilations of its own, and none takes from another."""

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from support.fusing import QUIET, Model, X, calls, fused

pytestmark = QUIET


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


def test_several_fused_models_may_run_at_once_and_hooks_are_guarded_until_the_last_is_done():
    from torch._dynamo import config

    given = [Model(layers=1).eval() for _ in range(3)]
    for model in given:
        fused(model, X)
    before = config.skip_nnmodule_hook_guards
    with torch.no_grad():
        wanted = [model(X) for model in given]

    def run(k):
        with torch.no_grad():
            return all(given[k](X).equal(wanted[k]) for _ in range(50))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(run, range(3)))
    assert config.skip_nnmodule_hook_guards == before


@torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2)  # 8 and 256 as a rule
def test_many_models_may_be_fused_in_one_process():
    given = []
    for _ in range(4):  # more than the frontend allows of one function
        model = Model(layers=1).eval()
        assert len(fused(model, X).fused) == 2
        given.append(model)
    assert all(calls(model, X) == 2 for model in given)


def if_torch_has(option):
    """For what only some versions of torch.compile can be told."""
    has = option in inspect.signature(torch.compile).parameters
    return pytest.mark.skipif(not has, reason=f"this torch.compile has no {option}")


@if_torch_has("recompile_limit")
@torch._dynamo.config.patch(recompile_limit=2)  # the proof alone captures twice
def test_a_fused_model_has_room_for_more_modes_dtypes_and_shapes_than_the_process_allows_a_function():
    model = Model(layers=1).eval()
    fused(model, X)
    for change, x in ((model.train, X), (model.eval, X[0]), (model.bfloat16, X.bfloat16())):
        change()
        with torch.no_grad():
            model(x)  # captures it; the next call only runs
        assert calls(model, x) == 2


class Broken(Model):
    """Its graphs break: those after the break are kept by its forward's code, which all models of the class have in common."""

    def forward(self, x):
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.layers[1](x)


@if_torch_has("isolate_recompiles")
@torch._dynamo.config.patch(recompile_limit=2)
def test_fused_models_use_up_no_recompilation_of_another_model_of_their_class():
    model = Broken().eval()
    done = fused(model, X)
    assert (len(done.fused), done.num_graphs) == (4, 2)
    captured = []
    other = torch.compile(Broken().eval(), backend=lambda graph, _: captured.append(graph) or graph)
    with torch.no_grad():
        other(X)
    assert len(captured) == 2
