"""Dispatch mode that computes the library's operators with the Triton kernels, in Triton's interpreter on the CPU.

`TRITON_INTERPRET=1` must be in the environment before Triton is imported; conftest.py sets it.
"""

from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from support.triton_operators import OnTriton


def bfloat16_as_on_the_device(builder, src, dst_type):
    """Cast between float32 and bfloat16 with rounding, as hardware and torch do; the interpreter truncates the mantissa."""
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


def dot_in_one_order(builder, a, b, d, input_precision, max_num_imprecise_acc):
    """Multiply matrices so that a row's bits depend on its place no more than on a GPU; a BLAS library has other loops at the edges."""
    product = np.einsum("ik,kj->ij", a.data, b.data)
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = dot_in_one_order


class Language:
    """Stand-in for a kernel whose globals are both of Triton's modules."""

    __globals__: ClassVar[dict[str, Any]] = {"tl": tl, "core": tl.core}


class Patched:
    """Replacement of `interpreter._patch_lang` that patches Triton's language once for each kernel.

    The interpreter's own version patches it again for every function that a kernel calls, and spends most of its time there.
    """

    depth = 0

    def __call__(self, function):
        """Patch the language before a kernel; do nothing for the functions that the kernel calls, which do not call `restore`."""
        if not Patched.depth:
            Patched.depth, self.scope = 1, _patch_lang(Language)
        return self

    def restore(self):
        """Restore the language after a kernel."""
        Patched.depth = 0
        self.scope.restore()


_patch_lang = interpreter._patch_lang
interpreter._patch_lang = Patched()


class Interpreted(OnTriton):
    """Mode under which the Triton kernels are interpreted."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with np.errstate(all="ignore"):  # a GPU does not warn about overflow either
            return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def off(self):
        """Use the CPU operators again inside a `with` block."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()
