"""What is wrong with a call, in one sentence: the argument, what came, what was expected, and the remedy.

The C++ kernels only notice that something is wrong; the sentence is found here, after the fact, so that a call that is
right pays nothing for it. The reference calls `check` first.
"""

from __future__ import annotations

import itertools
import math
import operator
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from addnorm.ops import aliasing

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FLOATS_WORDS = "float32, bfloat16, float16 or float64"


def check(
    residual: Any,
    branch: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 0.0,
    *,
    residual_scale: Any = None,
    row_scale: Any = None,
    layer_scale: Any = None,
    branch_bias: Any = None,
    dropout_p: Any = 0.0,
    seed: Any = None,
    offset: Any = 0,
    weight_offset: Any = 0.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Raises TypeError or ValueError if the arguments of an add + norm do not fit together."""
    if not (is_number(eps) and eps >= 0):
        raise ValueError(f"eps is {eps!r}, expected a number that is not negative: 1e-5 is LayerNorm's usual one.")
    stream = "x" if branch is None else "residual"  # what it is called by the norm alone
    _tensor(stream, residual)
    if residual.dim() == 0:
        raise ValueError(
            f"{stream} is a 0-d tensor, expected shape (*, d): give it a last dimension to normalize over."
        )
    if branch is not None:
        _tensor("branch", branch)
        if branch.shape != residual.shape:
            raise ValueError(
                f"branch has shape {_shape(branch)}, expected {_shape(residual)}, the shape of residual: they are added "
                f"element by element. {_shape_remedy(residual, branch)}"
            )
        _same_device("branch", branch, stream, residual)
    d = residual.shape[-1]
    for name, value in (("weight", weight), ("bias", bias), ("branch_bias", branch_bias)):
        if value is not None:
            _tensor(name, value)
            if value.shape != (d,):
                remedy = (
                    "for a norm over more than the last dimension pass normalized_shape"
                    if value.dim() > 1
                    else "build it with the model's width"
                )
                raise ValueError(
                    f"{name} has shape {_shape(value)}, expected ({d},), one element for each feature of {stream} "
                    f"{_shape(residual)}: {remedy}."
                )
            _same_device(name, value, stream, residual)
    for name, value in (("residual_scale", residual_scale), ("layer_scale", layer_scale)):
        if isinstance(value, Tensor):
            _tensor(name, value)
            if value.shape not in ((), (d,)):
                raise ValueError(
                    f"{name} has shape {_shape(value)}, expected a number, a 0-d tensor or shape ({d},), one element for "
                    f"each feature: to scale whole rows use row_scale."
                )
            _same_device(name, value, stream, residual)
        elif value is not None and not is_number(value):
            raise TypeError(f"{name} is {_kind(value)}, expected a number or a tensor of shape () or ({d},).")
    if row_scale is not None:
        _tensor("row_scale", row_scale)
        rows = residual.shape[:-1]
        if not _broadcasts(tuple(row_scale.shape), tuple(rows)):
            raise ValueError(
                f"row_scale has shape {_shape(row_scale)}, expected {tuple(rows)} or a shape that broadcasts to it, one "
                f"element for each row of residual {_shape(residual)}: to scale features use layer_scale."
            )
        _same_device("row_scale", row_scale, stream, residual)
    if not (is_number(dropout_p) and 0.0 <= dropout_p <= 1.0):
        raise ValueError(f"dropout_p is {dropout_p!r}, expected a probability: a number from 0 to 1.")
    if seed is not None and not (isinstance(seed, Tensor) and seed.dim() == 0 and seed.dtype == torch.int64):
        raise TypeError(f"seed is {_kind(seed)}, expected a 0-d int64 tensor: torch.tensor(1234).")
    if seed is not None:
        _same_device("seed", seed, stream, residual)
    if not (isinstance(offset, int | torch.SymInt) and 0 <= offset < 2**62):
        raise ValueError(f"offset is {offset!r}, expected a whole number of blocks to skip, from 0 to 2**62.")
    if not is_number(weight_offset):
        raise TypeError(f"weight_offset is {_kind(weight_offset)}, expected a number: 1.0 for Gemma's weights.")
    if weight_offset and weight is None:
        raise ValueError(f"weight_offset is {weight_offset!r} but there is no weight to add it to: pass weight.")
    for name, dtype in (("residual_dtype", residual_dtype), ("out_dtype", out_dtype)):
        if dtype is not None and dtype not in FLOATS:
            raise TypeError(f"{name} is {dtype!r}, expected {_FLOATS_WORDS} (or None).")


def dimensions(normalized_shape: Any) -> tuple[int, ...]:
    """`normalized_shape` as a tuple; TypeError if it is no whole number and no sequence of them."""
    try:
        return (operator.index(normalized_shape),)
    except TypeError:
        pass
    try:
        return tuple(operator.index(n) for n in normalized_shape)
    except TypeError:
        raise TypeError(
            f"normalized_shape is {normalized_shape!r}, expected a whole number or a sequence of them: (d,), say."
        ) from None


def check_normalized_shape(normalized_shape: tuple[int, ...], residual: Any, stream: str = "residual") -> None:
    """Raises ValueError unless `residual`, called `stream`, ends in `normalized_shape`."""
    _tensor(stream, residual)
    if not normalized_shape:
        raise ValueError("normalized_shape is empty, expected at least one dimension: pass (d,) or None.")
    if tuple(residual.shape[-len(normalized_shape) :]) != normalized_shape:
        raise ValueError(
            f"normalized_shape is {normalized_shape}, expected the last dimensions of {stream} {_shape(residual)}: "
            f"pass None to normalize over the last one."
        )


def check_ends_in(normalized_shape: tuple[int, ...], branch: Any, **parameters: Any) -> None:
    """Raises unless `branch` ends in `normalized_shape` and each parameter that is there has it."""
    for name, value in {"branch": branch, **parameters}.items():
        if value is None:
            continue
        _tensor(name, value)
        end = value.shape[-len(normalized_shape) :] if name == "branch" else value.shape
        if tuple(end) != normalized_shape:
            place = "to end in normalized_shape" if name == "branch" else "normalized_shape"
            raise ValueError(f"{name} has shape {_shape(value)}, expected {place} {normalized_shape}: reshape it.")


def check_branch(branch: Any) -> None:
    """Raises TypeError if there is nothing to add."""
    if branch is None:
        raise TypeError(
            "branch is None, expected a tensor of residual's shape: for the norm alone use addnorm.layer_norm or "
            "addnorm.rms_norm."
        )


def check_out(out: Any, return_residual: bool) -> None:
    """Raises TypeError unless `out` is the kind of thing that the results are: y, or `(y, z)`."""
    if return_residual:
        if not (isinstance(out, tuple | list) and len(out) == 2 and all(isinstance(t, Tensor) for t in out)):
            raise TypeError(
                f"out is {_kind(out)}, expected two tensors (y, z): for y alone leave return_residual at False."
            )
    elif not isinstance(out, Tensor):
        raise TypeError(f"out is {_kind(out)}, expected one tensor: for (y, z) pass return_residual=True.")


def check_targets(targets: dict[str, Any], residual: Tensor) -> None:
    """Raises unless each of `targets`, by the name its caller knows, is like a result of the call."""
    for name, target in targets.items():
        _tensor(name, target)
        if target.shape != residual.shape:
            raise ValueError(
                f"{name} has shape {_shape(target)}, expected {_shape(residual)}, that of the result: nothing is resized. "
                f"Make it with torch.empty{tuple(residual.shape)}."
            )
        if target.device != residual.device:
            raise ValueError(
                f"{name} is on {target.device}, expected {residual.device}, the device of the inputs: make it with "
                f"device={str(residual.device)!r}."
            )


def check_memory(targets: dict[str, Tensor], inputs: dict[str, Any]) -> None:
    """Raises ValueError if writing `targets` would write an element twice, or one that is still to be read."""
    for name, target in targets.items():
        if aliasing.folds(target):
            raise ValueError(
                f"{name} has elements that share memory (it is expanded, say), expected a place for each: pass {name}.clone()."
            )
    for (other, t), (name, target) in itertools.combinations(targets.items(), 2):
        if aliasing.shared(target, t):
            raise ValueError(
                f"{name} shares memory with {other}, expected memory of its own, since both are written: pass {name}.clone()."
            )
    for (name, target), (other, t) in itertools.product(targets.items(), inputs.items()):
        # An element of these is read before it is written in its place; a parameter is read by every row.
        in_place = other in ("x", "residual", "branch")
        if isinstance(t, Tensor) and aliasing.shared(target, t) and not (in_place and aliasing.same(target, t)):
            expected = "exactly its memory or none of it" if in_place else "memory of its own"
            raise ValueError(f"{name} shares memory with {other}, expected {expected}: pass {name}.clone().")


def refuse_gradients(inputs: dict[str, Any], instead: str) -> NoReturn:
    """Raises RuntimeError about the first of `inputs` that wants a gradient."""
    name = next(name for name, t in inputs.items() if isinstance(t, Tensor) and t.requires_grad)
    raise RuntimeError(
        f"{name} wants a gradient, expected none: what writes into given memory keeps nothing for the backward. Call it "
        f"under torch.no_grad(), or {instead}."
    )


def refuse_dtype(name: str, target: Tensor, dtype: torch.dtype) -> NoReturn:
    """Raises TypeError about memory whose dtype is not the one that was asked for."""
    raise TypeError(
        f"{name} has dtype {_dtype(target.dtype)}, expected {_dtype(dtype)}, which was asked for: leave the dtype to the "
        f"memory, or make it with dtype={dtype}."
    )


def _tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {_kind(value)}, expected a tensor: torch.as_tensor(...) makes one.")
    if value.dtype not in FLOATS:
        raise TypeError(
            f"{name} has dtype {_dtype(value.dtype)}, expected {_FLOATS_WORDS}: convert it with {name}.float()"
            + (" (its real part, say)." if value.is_complex() else ".")
        )
    if value.is_nested:
        raise TypeError(
            f"{name} is a nested tensor, expected an ordinary one: {name}.to_padded_tensor(0.0), or a call for each part."
        )
    if value.layout != torch.strided:
        raise TypeError(f"{name} has layout {value.layout}, expected an ordinary strided tensor: {name}.to_dense().")


def _same_device(name: str, value: Tensor, stream: str, residual: Tensor) -> None:
    if value.device != residual.device:
        raise ValueError(
            f"{name} is on {value.device}, expected {residual.device}, the device of {stream}: move it with "
            f"{name}.to({str(residual.device)!r})."
        )


def _shape_remedy(residual: Tensor, branch: Tensor) -> str:
    if residual.shape[-1] != branch.shape[-1]:
        return (
            f"The sublayer must return {residual.shape[-1]} features, not {branch.shape[-1]}: end it with a projection "
            f"back to the width of the stream."
        )
    if residual.dim() != branch.dim() or math.prod(residual.shape) != math.prod(branch.shape):
        return "Nothing is broadcast: expand branch, or residual, to the same shape."
    return "Permute or reshape branch."


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    if len(shape) > len(to):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def is_number(value: Any) -> bool:
    """A real number, known or symbolic; True and False are none."""
    if value.__class__ is float:  # at every call with an option: the question below takes half a microsecond
        return True
    if isinstance(value, int) and not -(2**1023) < value < 2**1023:
        return False  # no float is as large
    return isinstance(value, Real | torch.SymFloat | torch.SymInt) and not isinstance(value, bool)


def _shape(t: Tensor) -> str:
    return str(tuple(t.shape))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {_dtype(value.dtype)} tensor of shape {_shape(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
