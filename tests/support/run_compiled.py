"""Program that compiles the Triton kernels without a GPU and prints the resources of the machine code as JSON.

test_compiled.py runs it without TRITON_INTERPRET, so that Triton's compiler is used. Kernels are compiled for sm_90 (H100 and H200),
but neither loaded nor launched. The compiler does not check the device of the tensors, which may be on the CPU. The machine code
shows the resources of a kernel: registers, spills, shared memory, and the width of its accesses.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from addnorm.ops.triton import backward, forward, launch
from addnorm.ops.triton.streams import backward as streams_backward
from addnorm.ops.triton.streams import forward as streams_forward
from support import stream_calls
from support.cases import DTYPES, cotangents, gradients, make
from support.memory_layouts import make_layouts, make_view
from support.triton_operators import TRITON, OnTriton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Utils:
    """The functions of a driver that a compiled kernel calls."""

    def load_binary(self, name, kernel, shared, device):
        """Return module, function, registers, spills and the maximal number of threads."""
        return 1, 1, 0, 0, 1024

    def unload_module(self, module):
        """Do nothing: no kernel is loaded."""

    def get_device_properties(self, device):
        """Return the properties of an H200."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class Device:
    """Driver of a GPU that does not exist."""

    def __init__(self, capability=90):
        self.target = GPUTarget("cuda", capability, 32)
        self.launcher_cls = lambda source, metadata: lambda *arguments: None  # a launch does nothing
        self.utils = Utils()

    def get_current_device(self):
        """Return the index of the only device."""
        return 0

    def get_current_stream(self, device):
        """Return the default stream."""
        return 0

    def get_current_target(self):
        """Return the compilation target."""
        return self.target


class Usage(NamedTuple):
    """Resources of one kernel: registers per thread, spilled bytes per thread, bytes of shared memory per program."""

    registers: int
    stack: int
    shared: int


def usage(cubin):
    """Return the resources that the machine code uses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        said = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = {name: int(re.search(rf"\b{name}:(\d+)", said)[1]) for name in ("REG", "STACK", "SHARED", "LOCAL")}
    return Usage(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], numbers["SHARED"])


DEVICE = Device()
KERNELS = (
    forward.forward_kernel, backward.means_kernel, backward.backward_kernel, backward.finalize_kernel,
    streams_forward.write_kernel, streams_forward.read_kernel, streams_backward.read_backward_kernel,
    streams_backward.gates_backward_kernel, streams_backward.write_backward_kernel, streams_backward.project_backward_kernel,
)  # fmt: skip


def forget():
    """Clear all compiled kernels."""
    launch._compiled.clear()
    for kernel in KERNELS:
        kernel.device_caches.clear()


def compiled():
    """Yield the name and the kernel of each compilation since `forget`."""
    for kernel in KERNELS:
        for compilation in kernel.device_caches[0][0].values():
            yield kernel.__name__, compilation


def reductions(ttgir):
    """Return the layout of each sum along a row, written out."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    summed = re.findall(r'"tt\.reduce"\(.*?\) <\{axis = 1.*?\}\) : \(tensor<(\w+), (#\w+)>\)', ttgir, re.DOTALL)
    return [f"{shape} {layouts[layout]}" for shape, layout in summed]


def described(name, kernel):
    """Return the resources, accesses and instructions of one kernel."""
    resources = usage(kernel.asm["cubin"])
    accesses = re.findall(r"(?:ld|st)\.global\.(\S+)", kernel.asm["ptx"])
    # Calls of `tl.fma` in the kernel itself, some of them on several elements.
    written = sum(
        int(width or 1) for width in re.findall(r"call (?:<(\d+) x )?float>? @llvm\.fma\.", kernel.asm["llir"])
    )
    return {
        "kernel": name, **resources._asdict(), "dynamic": kernel.metadata.shared, "accesses": accesses,
        "reductions": reductions(kernel.asm["ttgir"]), "float64": kernel.asm["ptx"].count(".f64"), "fused": len(re.findall(r"\bfma\.", kernel.asm["ptx"])) - written,
        "approximate": re.findall(r"\b(?:div|rcp|sqrt|rsqrt)\.(?:full|approx)\S*", kernel.asm["ptx"]),
    }  # fmt: skip


def of(variant, dtypes, d):
    """Return the descriptions of the kernels of a forward and a backward."""
    forget()
    with OnTriton():
        gradients(make(variant, dtypes, (4, d)))
    return [described(*pair) for pair in compiled()]


def outputs(variant, dtypes, d):
    """Return the layouts of the forward's sums for each set of outputs."""
    call, results = make(variant, dtypes, (4, d)), {}
    for what in ("y", "y and z", "y, z and statistics"):
        forget()
        with OnTriton():
            if what == "y":
                call.y_alone()
            elif what == "y and z":
                call()
            else:  # with the statistics, which a backward would read
                call({name: t.detach().requires_grad_() for name, t in call.tensors.items()})
        results[what] = next(reductions(kernel.asm["ttgir"]) for name, kernel in compiled() if name == "forward_kernel")
    return results


def batches(variant, dtypes, d, sizes):
    """Return the number of kernels after each batch size, in Triton's own cache and in ours together."""
    forget()
    results = []
    for rows in sizes:
        with OnTriton():
            gradients(make(variant, dtypes, (rows, d)))
        launch._compiled.clear()  # clear our cache, so that Triton's is used
        results.append(len(list(compiled())))
    return results


def in_given_memory(d):
    """Return the layouts of y's sums in a new tensor, and in an out= tensor at the start of its storage and two bytes later."""
    results = []
    for begin in (None, 0, 1):
        forget()
        x, s = (make_view(torch.zeros(4, d, dtype=torch.bfloat16), begin or 0, d) for _ in range(2))
        with OnTriton():
            if begin is None:
                torch.ops.addnorm.add_norm_stream(x, s, None, None, 1e-5, 0)
            else:
                torch.ops.addnorm.add_norm_out(x, s, None, None, 1e-5, 0, s, x)
        results.append([sums for _, kernel in compiled() for sums in reductions(kernel.asm["ttgir"])])
    return results


def kept(d):
    """Return the number of kernels in our cache after each call, for several layouts of the first input."""
    forget()
    branch, results = torch.zeros(4, d, dtype=torch.bfloat16), []
    for begin, width in ((0, d), (1, d), (0, d + 16), (0, d + 32), (0, d + 1)):
        TRITON["add_norm"](make_view(branch, begin, width), branch, None, None, 1e-5, 0)
        results.append(len(launch._compiled))
    return results


def somewhere(variant, dtypes, d):
    """Return the layouts of each kernel's sums along a row, while each input or gradient in turn has another memory layout."""
    call = make(variant, dtypes, (4, d))
    fresh = call.tensors | cotangents(call())
    forget()
    for name, t in fresh.items():
        for elsewhere in (t, *make_layouts(t).values(), *([t[:1].expand(4, d)] if t.dim() == 2 else [])):
            moved = fresh | {name: elsewhere}
            tensors = {key: moved[key].detach().requires_grad_() for key in call.tensors}
            with OnTriton():
                if call.norm != "none":
                    call.y_alone({key: t.detach() for key, t in tensors.items()})
                outputs = call(tensors)
                torch.autograd.backward(list(outputs.values()), [moved[key] for key in outputs])
    results = {}
    for kernel, compiled_kernel in compiled():
        orders = results.setdefault(kernel, [])
        order = reductions(compiled_kernel.asm["ttgir"])
        orders += [order] if order not in orders else []
    return results


def of_streams(kind, dtype, n, d, capability, sizes):
    """Return the descriptions of the kernels of a forward and a backward of n streams, for each number of tokens together."""
    forget()
    triton.runtime.driver.set_active(Device(capability))
    for rows in sizes:
        call = stream_calls.make_call(n, d, (rows,), kind, dtype=DTYPES[dtype].residual)
        cotangents = stream_calls.make_cotangents(call)
        with OnTriton():
            stream_calls.run(call, call.leaves(), cotangents)
        launch._compiled.clear()  # clear our cache, so that Triton's is used
    results = [described(*pair) for pair in compiled()]
    forget()
    triton.runtime.driver.set_active(DEVICE)
    return results


def main():
    """Compute the requests on stdin, a list of [function, arguments]."""
    triton.runtime.driver.set_active(DEVICE)
    asked = (of, of_streams, outputs, batches, in_given_memory, kept, somewhere)
    functions = {function.__name__: function for function in asked}
    json.dump([functions[name](*arguments) for name, arguments in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
