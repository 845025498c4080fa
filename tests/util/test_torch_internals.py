"""Tests of each undocumented part of torch that the package uses: a newer torch that changes one fails here first."""

import inspect
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
from torch._dynamo import config as dynamo_config
from torch._dynamo.testing import CompileCounter
from torch._functorch import config as functorch_config
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from addnorm._util import torch_internals as internals
from support import SUPPORT

NAMES = sorted(set(re.findall(r'"(torch\.[\w.]+)"', Path(internals.__file__).read_text())))
DEFAULT = ("torch._C.parse_schema", "torch._C._any_requires_grad", "torch._subclasses.fake_tensor.FakeTensor")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.slow) for n in NAMES])
def test_missing_part_of_torch_breaks_no_import(name):
    """Without it the operation computes, by its formulas if need be, and a tool raises an error that names it."""
    done = subprocess.run(
        [sys.executable, SUPPORT / "run_without.py", name], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(done.stdout)
    assert row["worst"] <= 2
    assert row["kernels"].startswith("C++ kernels") or f"has no {name}: use an older torch" in row["kernels"]
    assert row["inspect"] == "post_ln" or f"which has no {name}: this needs torch" in row["inspect"]


def test_any_requires_grad_ignores_other_values():
    leaf = torch.ones(2, requires_grad=True)
    assert internals.any_requires_grad(None, 1.0, torch.ones(2), leaf)
    assert not internals.any_requires_grad(None, 1.0, torch.ones(2), torch.float32)


def test_increment_version_counts_a_write():
    t = torch.ones(2)
    internals.increment_version([t])
    assert t._version == 1


def test_below_autograd_records_no_gradient():
    leaf = torch.ones(2, requires_grad=True)
    with internals.BelowAutograd():
        assert (leaf * 2).grad_fn is None
    t = torch.ones(2)
    with internals.BelowAutogradInPlace():
        t.add_(1)
    assert t._version == 0


def test_in_transform_sees_transforms_and_dual_numbers():
    seen = [internals.in_transform()]
    torch.func.vmap(lambda t: seen.append(internals.in_transform()) or t)(torch.ones(2))
    with forward_ad.dual_level():
        seen.append(internals.in_transform())
    assert seen == [False, True, True]


def test_modes_and_traces_are_seen():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **kwargs or {})

    def state():
        return internals.is_recording(), internals.has_dispatch_mode(), internals.is_tracing()

    seen = [state()]
    with Mode():
        seen.append(state())
    make_fx(lambda t: seen.append(state()) or t + 1)(torch.ones(2))
    assert seen == [(False, False, False), (True, True, False), (True, True, True)]


def test_schemas_of_defined_operators_are_found():
    schema = internals.parse_schema("addnorm::add_norm.kernel(Tensor x) -> Tensor")
    assert schema.overload_name == "kernel"
    assert "kernel" in {other.overload_name for other in internals.find_schemas(schema.name)}
    assert internals.find_schemas("addnorm::unknown") == []


def test_without_autocast_keeps_the_dtype():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with internals.without_autocast("AutocastCPU"):
            assert (x @ x).dtype == torch.float32


def test_constant_functions_are_marked_as_torch_does():
    theirs = torch.compiler.assume_constant_result(lambda: 1)
    mine = internals.mark_as_constant(lambda: 1)
    assert vars(mine) == {name: value for name, value in vars(theirs).items() if name.startswith("_dynamo")}


def test_excluded_function_is_not_captured():
    seen = []

    def inner(t):
        seen.append(torch.compiler.is_compiling())
        return t + 1

    internals.exclude_from_capture(inner)
    torch._dynamo.reset()
    torch.compile(lambda t: inner(t * 2), backend="eager")(torch.ones(2))
    torch.compile(inner, backend="eager")(torch.ones(2))
    assert False in seen


def test_subclasses_and_transforms_are_told_apart():
    class Sub(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    with internals.WithoutSubclasses():
        assert torch.add(torch.ones(1).as_subclass(Sub), 1) is not None
    seen = []
    torch.func.vmap(lambda t: seen.append((internals.is_transformed(t), internals.in_function_transform())) or t)(
        torch.ones(2)
    )
    assert seen == [(True, True)]
    assert not internals.is_transformed(torch.ones(1))


def test_frames_of_torch_are_recognized():
    codes = []

    class Module(torch.nn.Module):
        def forward(self, x):
            frame = sys._getframe(1)
            while frame is not None and frame.f_code is not internals.MODULE_CALL:
                frame = frame.f_back
            codes.append(frame is not None)
            return x

    Module()(torch.ones(1))
    assert codes == [True]
    assert torch.nn.Linear.forward.__code__.co_filename.startswith(internals.TORCH_FOLDER)
    assert inspect.getsourcefile(torch.distributed.fsdp.FullyShardedDataParallel).startswith(internals.FSDP_FOLDER)


def test_hooks_of_all_modules_are_seen():
    assert not internals.has_any_global_hook()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert internals.has_any_global_hook()
    assert any(internals.GLOBAL_HOOKS)
    handle.remove()


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
    with internals.HookGuards(), internals.keep_donated_buffers(True):
        assert (dynamo_config.skip_nnmodule_hook_guards, functorch_config.donated_buffer) == (False, False)
    assert (dynamo_config.skip_nnmodule_hook_guards, functorch_config.donated_buffer) == before


def test_forgotten_code_is_compiled_again():
    counter = CompileCounter()
    function = lambda x: x + 1  # noqa: E731
    for _ in range(2):
        torch.compile(function, backend=counter)(torch.ones(2))
        internals.forget_code(function.__code__)
    assert counter.frame_count == 2
