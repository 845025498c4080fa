"""Several fused models in one process: none takes from another."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fusing import QUIET, Model, X, calls, fused

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
