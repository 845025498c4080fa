"""Dispatch mode that replaces the operators of this library by their Triton kernels."""

from contextlib import nullcontext

from torch.utils._python_dispatch import TorchDispatchMode

from addnorm.ops.schema import kernels_of
from addnorm.ops.triton import operators

# The operators by name, each by the Triton kernels.
TRITON = {
    op: function for name, kernel in operators.KERNELS.items() for op, function in kernels_of(name, kernel, ("",))
}


class OnTriton(TorchDispatchMode):
    """Mode under which each operator calls its Triton version; `ran` lists the names of the called operators."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("addnorm::")
        if name not in TRITON:
            return func(*args, **(kwargs or {}))
        self.ran.append(name)
        with self if name == "add_norm_out" else nullcontext():  # which may call another operator
            return TRITON[name](*args, **(kwargs or {}))
