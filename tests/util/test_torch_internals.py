"""Tests of the undocumented parts of torch: each may be missing, and settings of the process act in one thread or are restored."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

from addnorm._util import torch_internals as internals
from addnorm.ops import autograd
from support import SUPPORT
from support.processes import run_python

NAMES = sorted(set(re.findall(r'"(torch\.[\w.]+)"', Path(internals.__file__).read_text())))
DEFAULT = ("torch._C.parse_schema", "torch._C._any_requires_grad", "torch._subclasses.fake_tensor.FakeTensor")


@pytest.mark.parametrize("names", [DEFAULT, pytest.param(tuple({*NAMES} - {*DEFAULT}), marks=pytest.mark.slow)])
def test_missing_part_of_torch_breaks_no_import(names):
    """Without it the operation computes, by its formulas if need be, and a tool raises an error that names it."""
    rows = map(json.loads, run_python(SUPPORT / "run_without.py", *names).stdout.splitlines())
    for name, row in zip(names, rows, strict=True):
        assert row["worst"] <= 2, name
        assert row["kernels"].startswith("C++ kernels") or f"has no {name}: use an older torch" in row["kernels"]
        assert row["inspect"] == "post_ln" or f"which has no {name}: this needs torch" in row["inspect"]


@pytest.mark.parametrize("any_requires_grad", [internals._any_requires_grad, torch._C._any_requires_grad])
def test_gradient_of_a_list_of_tensors_is_found(any_requires_grad, monkeypatch):
    """The sources of attention residuals are a list, and may be all that has a gradient."""
    monkeypatch.setattr(autograd, "any_requires_grad", any_requires_grad)
    sources, query = [torch.randn(2, 4), torch.randn(2, 4, requires_grad=True)], torch.randn(1, 4)
    read, *_ = torch.ops.addnorm.attend_sources(sources, query, None, 1e-6, False)
    (grad,) = torch.autograd.grad(read.sum(), sources[1])
    assert grad.any()
    assert not any_requires_grad(sources[:1], query, None, 1e-6, flag=False)


def test_hooks_of_a_thread_do_not_concern_other_threads():
    calls, module = [], torch.nn.Linear(2, 2)
    with internals.hook_this_thread(lambda m: calls.append("before"), lambda m: calls.append("after")):
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(internals.has_any_global_hook).result()
            other.submit(module, torch.ones(2)).result()
        assert calls == []
        assert internals.has_any_global_hook()
        module(torch.ones(2))
    assert calls == ["before", "after"]
    assert not internals.has_any_global_hook()


def test_process_settings_are_restored():
    before = dynamo_config.skip_nnmodule_hook_guards, functorch_config.donated_buffer
    with internals.guard_hooks(), internals.keep_donated_buffers(True):
        assert (dynamo_config.skip_nnmodule_hook_guards, functorch_config.donated_buffer) == (False, False)
    assert (dynamo_config.skip_nnmodule_hook_guards, functorch_config.donated_buffer) == before
