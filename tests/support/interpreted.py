"""The Triton kernels on the CPU, in Triton's interpreter: a mode in which the library's operators are computed by them.

`TRITON_INTERPRET=1` must be in the environment before Triton is imported; conftest.py puts it there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from addnorm.ops.schema import SCHEMAS
from addnorm.ops.triton import operators


def bfloat16_as_on_the_device(builder: Any, src: Any, dst_type: Any) -> Any:
    """Casts between float32 and bfloat16 as hardware and torch make them: the interpreter cuts the mantissa off instead."""
    pair = (src.dtype.scalar, dst_type.scalar)
    data = np.ascontiguousarray(src.data)
    if pair == (tl.float32, tl.bfloat16):
        data = torch.from_numpy(data).to(torch.bfloat16).view(torch.uint16).numpy()
    elif pair == (tl.bfloat16, tl.float32):
        data = torch.from_numpy(data).view(torch.bfloat16).to(torch.float32).numpy()
    else:
        return _cast(builder, src, dst_type)
    return interpreter.TensorHandle(data, dst_type.scalar)


_cast = interpreter.InterpreterBuilder.cast_impl
interpreter.InterpreterBuilder.cast_impl = bfloat16_as_on_the_device


class Language:
    """Stands for a kernel whose globals are both of Triton's modules."""

    __globals__: ClassVar[dict[str, Any]] = {"tl": tl, "core": tl.core}


class Patched:
    """Triton's language made the interpreter's, once for a kernel and not again for every function that it calls.

    The interpreter does the latter and takes most of its time for it.
    """

    depth = 0

    def __call__(self, function: Any) -> Any:
        """Called before a kernel with `restore` after it, and before each function that a kernel calls, without."""
        if not Patched.depth:
            Patched.depth, self.scope = 1, _patch_lang(Language)
        return self

    def restore(self) -> None:
        """The kernel is done."""
        Patched.depth = 0
        self.scope.restore()


_patch_lang = interpreter._patch_lang
interpreter._patch_lang = Patched()


class Interpreted(TorchDispatchMode):
    """While it is on, the operators are Triton's; `ran` has the names of those that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Ours instead of the dispatcher's."""
        name = func._schema.name.removeprefix("addnorm::")
        if name not in SCHEMAS:
            return func(*args, **(kwargs or {}))
        self.ran.append(name)
        again = self if name == "add_norm_out" else nullcontext()  # which may call another operator
        with np.errstate(all="ignore"), again:  # a GPU does not warn of an overflow either
            return getattr(operators, name)(*args, **(kwargs or {}))

    @contextmanager
    def off(self) -> Iterator[None]:
        """For a while the operators are those of the CPU again."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


def on_triton(function):
    """A function as it is while the kernels are Triton's."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        with Interpreted():
            return function(*args, **kwargs)

    return run
