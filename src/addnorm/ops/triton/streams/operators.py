"""The operators of n streams by the Triton kernels: checks, allocation, launch. Other calls go to the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm.ops.options import NORMS
from addnorm.ops.schema import empty_placeholder, make_empty
from addnorm.ops.streams import eager, gradients
from addnorm.ops.streams.kinds import GATE_KINDS, Sizes, sizes_of
from addnorm.ops.streams.schema import (
    GRADIENTS,
    fill_gradients,
    gradient_shape,
    is_per_feature,
    outputs_of,
    requested,
)
from addnorm.ops.streams.validation import check, check_backward
from addnorm.ops.triton import plan
from addnorm.ops.triton.arguments import to_contiguous
from addnorm.ops.triton.launch import launch
from addnorm.ops.triton.norms import COMPUTED
from addnorm.ops.triton.streams.backward import (
    gates_backward_kernel,
    project_backward_kernel,
    read_backward_kernel,
    write_backward_kernel,
)
from addnorm.ops.triton.streams.forward import read_kernel, write_kernel

f32 = torch.float32
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HYPER, _NONE = GATE_KINDS["hyper"], NORMS["none"]
MAX_STREAMS = 8
MAX_FEATURES = 16384
BLOCK_TOKENS = 16  # tokens of a block, the least that `tl.dot` multiplies
BLOCK_ELEMENTS = 128  # elements of a token at a time, of all streams together
PROJECT_ELEMENTS = 8192  # the largest chunk of φ: what is in shared memory then fits GPUs with 99 KB for one program
WARPS = 4
# For the gradient of φ: tokens of a program, and the largest number of programs along the tokens, each of which writes a whole φ.
PROJECT_TOKENS, PROJECT_PROGRAMS = 256, 8
PROJECT_WARP = 1024  # elements of a chunk of φ for each warp of this kernel, which has their sums in registers


class Block(NamedTuple):
    """Tile of one program: tokens, streams, features and rows of `project`."""

    tokens: int
    streams: int
    d: int
    rows_of_project: int


class Call:
    """The arguments of a call as the kernels take them: contiguous, and by name."""

    def __init__(self, a: Any) -> None:
        self.a = a = type(a)(*(to_contiguous(value) if isinstance(value, Tensor) else value for value in a))
        self.streams: Tensor = a.streams
        self.shape = self.streams.shape[:-2]
        self.n, self.d = self.streams.shape[-2:]
        self.rows = self.streams.numel() // (self.n * self.d)
        self.kind: int = a.kind
        self.sizes: Sizes = sizes_of(self.kind, self.n)
        self.stats = 2 + self.sizes.stats

    @property
    def block(self) -> Block:
        """Sizes of the tile of one program, for the kernels that process BLOCK_TOKENS tokens per program."""
        streams = 1 << (self.n - 1).bit_length()
        count = self.n + 2 if self.kind == _HYPER else max(self.sizes.logits, 1)
        rows_of_project = max(16, 1 << (count - 1).bit_length())
        elements = min(BLOCK_ELEMENTS, PROJECT_ELEMENTS // rows_of_project)
        return Block(BLOCK_TOKENS, streams, elements // streams, rows_of_project)

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The grid of the kernels that process BLOCK_TOKENS tokens per program."""
        return -(-self.rows // BLOCK_TOKENS), 1, 1

    def width(self, name: str, size: int) -> int:
        """Return the distance in elements between two tokens' coefficients: `size`, or 0 if all tokens share them."""
        t = getattr(self.a, name)
        own = 2 if name == "mix" else 1
        return 0 if t is None or t.dim() == own else size

    @property
    def widths(self) -> tuple[int, int]:
        """The distances between two tokens in A and in b, as `width` returns them."""
        return self.width("mix", self.n * self.n), self.width("inject", self.n)

    def empty(self, *tail: int, dtype: torch.dtype = f32) -> Tensor:
        """Return an uninitialized tensor of shape `(*, *tail)`: `tail` is the shape for each token."""
        return self.streams.new_empty((*self.shape, *tail), dtype=dtype)

    def write(self, new: Tensor | None, outputs: tuple[Tensor | None, ...] = (None,) * 5, kind: int = 0) -> None:
        """Launch the kernel that writes X', the logits, their statistics and the coefficients."""
        a = self.a
        parameters = (a.project, a.scale, a.base) if kind else (None, None, None)
        launch(
            write_kernel, self.blocks,
            (self.streams, a.branch, a.mix, a.inject, *parameters, new, *outputs),
            (a.gate_eps, a.project_eps, a.magnitude), (), (self.rows, a.iterations),
            (self.n, self.d, kind, *self.widths, self.sizes.logits, self.stats, *self.block), WARPS,
        )  # fmt: skip


def _is_supported(a: Any) -> bool:
    """Return whether the kernels support a call; its arguments must be valid."""
    tensors = [t for t in a if isinstance(t, Tensor)]
    return (
        a.norm in COMPUTED
        and a.streams.numel() > 0
        and a.streams.shape[-2] <= MAX_STREAMS
        and a.streams.shape[-1] <= MAX_FEATURES
        and all(t.dtype in _DTYPES and t.device == a.streams.device for t in tensors)
        and all(dtype in (None, *_DTYPES) for dtype in (a.streams_dtype, a.out_dtype))
    )


def add_norm_streams(a: Any) -> tuple[Tensor, ...]:
    """Return the outputs of the forward."""
    check(a)
    if not _is_supported(a):
        return eager.add_norm_streams(a)
    call = Call(a)
    a, n, d, kind, streams = call.a, call.n, call.d, call.kind, call.streams
    outputs = [None if output is None else make_empty(streams, output) for output in outputs_of(a)]
    new, read, collapse, mix, inject, logits, stats = outputs
    if new is not None or kind:
        call.write(new, (logits, stats if kind else None, collapse, mix, inject), kind)
    if read is not None:
        used = collapse if a.collapse is None else a.collapse
        width = n if a.collapse is None else call.width("collapse", n)
        tile = plan.forward(d)
        norm = a.norm
        parameters = (None, None) if norm == _NONE else (a.weight, a.bias)
        launch(
            read_kernel, (-(-call.rows // tile.rows), 1, 1), (streams if new is None else new, used, *parameters, read, stats),
            (a.eps,), (), (call.rows,), (n, d, norm, width, is_per_feature(a), call.stats, tile.rows, tile.d), tile.warps,
        )  # fmt: skip
    return tuple(empty_placeholder(streams) if t is None else t for t in outputs)


def add_norm_streams_backward(a: Any) -> tuple[Tensor, ...]:
    """Return the gradients that `grad_mask` requests, in the order of `GRADIENTS`."""
    check_backward(a, GRADIENTS)
    if not _is_supported(a):
        return eager.add_norm_streams_backward(a)
    return fill_gradients(a, _compute(Call(a), requested(a)))


def _compute(call: Call, wanted: set[str]) -> dict[str, Tensor]:
    """Return the requested gradients by name, without those that are zero."""
    a, n, d, kind, rows = call.a, call.n, call.d, call.kind, call.rows
    results: dict[str, Tensor] = {}
    new = call.streams
    if a.branch is not None and (kind or a.dread is not None):
        new = call.empty(n, d, dtype=a.streams_dtype or call.streams.dtype)
        call.write(new)
    is_given = a.collapse is not None
    used = a.collapse if is_given else a.computed_collapse
    width = call.width("collapse", n) if is_given else n
    du = dread_collapse = None
    if a.dread is not None:
        du = call.empty(d)
        found = None
        if not is_given or "collapse" in wanted:
            found = make_empty(a.streams, gradient_shape(a, "collapse"))
        if is_given and found is not None:
            results["collapse"] = found
        dread_collapse = None if is_given else found
        results |= _read_backward(call, new, used, width, du, found, wanted)
    factors = offsets = None
    if kind:
        factors, offsets = call.empty(call.sizes.logits), call.empty(n, 2)
        pre = _gates_backward(call, dread_collapse, factors, offsets)
        if wanted & {"scale", "base"}:
            dscale, dbase = gradients.parameters_backward(a, pre)
            results |= {"scale": dscale.to(a.scale.dtype), "base": dbase.to(a.base.dtype)}
        if "project" in wanted:
            results["project"] = _project_backward(call, new, factors)
    written = [name for name in ("streams", "branch", "mix", "inject") if name in wanted]
    if written:
        results |= {name: make_empty(a.streams, gradient_shape(a, name)) for name in written}
        launch(
            write_backward_kernel, call.blocks,
            (
                a.dnew, du, used if du is not None else None, new if kind else None, call.streams, a.branch, a.mix,
                a.inject, a.project, a.stats if kind else None, factors, offsets,
                *(results.get(name) for name in ("streams", "branch", "mix", "inject")),
            ),
            (), (), (rows,),
            (n, d, kind, *call.widths, width, is_per_feature(a), call.sizes.logits, call.stats, *call.block), WARPS,
        )  # fmt: skip
    return {name: t for name, t in results.items() if name in wanted}


def _read_backward(
    call: Call, new: Tensor, used: Tensor, width: int, du: Tensor, found: Tensor | None, wanted: set[str]
) -> dict[str, Tensor]:
    """Launch the backward kernel of the read, which writes du and `found`, and return the gradients of weight and bias.

    `found` is the gradient of c, or None if it is not requested.
    """
    a, d, rows, norm = call.a, call.d, call.rows, call.a.norm
    tile = plan.forward(d)
    programs = max(plan.MIN_PROGRAMS, plan.BACKWARD_ELEMENTS // (tile.rows * tile.d))
    chunk = min(-(-rows // (programs * tile.rows)), plan.MAX_CHAIN) * tile.rows
    programs = -(-rows // chunk)
    sums = wanted & {"weight", "bias"} and norm != _NONE
    partials = call.streams.new_empty((programs, 2, d), dtype=f32) if sums else None
    launch(
        read_backward_kernel, (programs, 1, 1),
        (a.dread, new, used, a.stats, None if norm == _NONE else a.weight, du, found, partials),
        (), (), (rows, chunk), (call.n, d, norm, width, is_per_feature(a), call.stats, tile.rows, tile.d), tile.warps,
    )  # fmt: skip
    if partials is None:
        return {}
    totals = partials.sum(0)
    return {
        name: totals[i].to(getattr(a, name).dtype, copy=True)
        for i, name in enumerate(("weight", "bias"))
        if name in wanted
    }


def _gates_backward(call: Call, dread_collapse: Tensor | None, factors: Tensor, offsets: Tensor) -> Tensor:
    """Launch the backward kernel of the gates and return the gradient of their arguments α z + β.

    z are the logits. For hyper it is the gradient of the coefficients β + α tanh(z). The kernel also fills `factors` and
    `offsets`, from which `write_backward_kernel` computes the gates' part of the gradient of X'.
    """
    a, n, kind = call.a, call.n, call.kind
    pre = torch.empty_like(factors)
    iterates = sums = None
    if kind == GATE_KINDS["manifold"] and a.dmix is not None:
        iterates = call.streams.new_empty((2 * a.iterations - 1, call.rows, n, n), dtype=f32)
    if kind == _HYPER:
        sums = a.project.float().sum(1)
    launch(
        gates_backward_kernel, call.blocks,
        (
            dread_collapse, a.dcollapse, a.dmix if call.sizes.mix else None, a.dinject if call.sizes.inject else None,
            a.logits, a.stats, a.scale, a.base, sums, iterates, pre, factors, offsets,
        ),
        (a.gate_eps, a.magnitude), (), (call.rows, a.iterations),
        (n, call.d, kind, call.sizes.logits, call.stats, BLOCK_TOKENS, call.block.streams), WARPS,
    )  # fmt: skip
    return pre


def _project_backward(call: Call, new: Tensor, factors: Tensor) -> Tensor:
    """Return the gradient of φ, summed over fixed chunks of tokens."""
    project, block, rows = call.a.project, call.block, call.rows
    programs = min(-(-rows // PROJECT_TOKENS), PROJECT_PROGRAMS)
    chunk = -(-rows // (programs * BLOCK_TOKENS)) * BLOCK_TOKENS
    programs = -(-rows // chunk)
    partials = project.new_empty((programs, *project.shape), dtype=f32)
    warps = max(WARPS, block.rows_of_project * block.d * (1 if call.kind == _HYPER else block.streams) // PROJECT_WARP)
    launch(
        project_backward_kernel, (programs, -(-call.d // block.d), 1), (new, call.a.stats, factors, partials), (), (),
        (rows, chunk), (call.n, call.d, call.kind, call.sizes.logits, call.stats, *block), warps,
    )  # fmt: skip
    total: Tensor = partials.sum(0)
    return total.to(project.dtype)


KERNELS = {"add_norm_streams": add_norm_streams, "add_norm_streams_backward": add_norm_streams_backward}
