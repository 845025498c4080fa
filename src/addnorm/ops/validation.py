"""Argument checks, whose error messages name the argument, its value, the expectation and the remedy in one sentence.

The C++ kernels only detect that arguments are invalid, and pass the call on to the reference. The reference and the fake kernels
call `check` first, which raises the error. So a valid call of a kernel does not take the time of these checks.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from addnorm._util.arguments import FLOAT_DTYPES, FLOAT_WORDS, check_dtype, is_number
from addnorm._util.torch_internals import FakeTensor
from addnorm.ops import aliasing
from addnorm.ops.options import ADD_OPTIONS, CASTINGS, GRADIENTS, NORMS, OPTIONS, Option

# The smallest and the largest value of integer arguments that only a caller of the operators themselves can pass.
_CODES = {
    "norm": (0, len(NORMS) - 1), "casting": (0, len(CASTINGS) - 1), "outputs": (1, 3),
    "grad_mask": (0, 2 ** len(GRADIENTS) - 1),
}  # fmt: skip


def check(residual: Any, branch: Any, weight: Any = None, bias: Any = None, eps: Any = 0.0, **options: Any) -> None:
    """Raise TypeError or ValueError unless the arguments of an add + norm fit together.

    Args:
        residual: the residual stream, or the input of a norm without an add.
        branch: the sublayer's output, or None.
        weight: gamma, or None.
        bias: beta, or None.
        eps: added to the variance.
        options: options by name, and numbers of an operator's schema (`norm`, `casting`, `outputs`); others are ignored.
    """
    check_codes(**options)
    check_eps("eps", eps)
    stream = "x" if branch is None else "residual"  # the name of the argument in the public functions
    check_tensor(stream, residual)
    if residual.dim() == 0:
        raise ValueError(
            f"{stream} is a 0-d tensor, expected shape (*, d): give it a last dimension to normalize over."
        )
    check_tensors({"branch": branch, "weight": weight, "bias": bias}, stream, residual)
    if branch is not None and branch.shape != residual.shape:
        raise ValueError(
            f"branch has shape {_shape(branch)}, expected {_shape(residual)}, the shape of residual: they are added "
            f"element by element. {_shape_remedy(residual, branch)}"
        )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            _check_features(name, value, stream, residual)
    for option in OPTIONS:
        value = options.get(option.name, option.default)
        if value is not None or option.default is not None:  # where None is not the default, None is wrong too
            _check_option(option, value, stream, residual)
    if options.get("weight_offset") and weight is None:
        offset = options["weight_offset"]
        raise ValueError(f"weight_offset is {offset!r} but there is no weight to add it to: pass weight.")


def _check_option(option: Option, value: Any, stream: str, residual: Tensor) -> None:
    """Raise TypeError or ValueError unless an option's value is of its kind. `dispatch.run` checks the name of a casting."""
    name, d, rows = option.name, residual.shape[-1], tuple(residual.shape[:-1])
    if option.kind in ("rows", "features") or (option.kind == "scale" and isinstance(value, Tensor)):
        check_tensors({name: value}, stream, residual)
    match option.kind:
        case "features":
            _check_features(name, value, stream, residual)
        case "rows" if not _broadcasts(tuple(value.shape), rows):
            raise ValueError(
                f"{name} has shape {_shape(value)}, expected {rows} or a shape that broadcasts to it, one "
                f"element for each row of residual {_shape(residual)}: to scale features use layer_scale."
            )
        case "scale" if isinstance(value, Tensor):
            if value.shape not in ((), (d,)):
                raise ValueError(
                    f"{name} has shape {_shape(value)}, expected a number, a 0-d tensor or shape ({d},), one element for "
                    f"each feature: to scale whole rows use row_scale."
                )
        case "scale" if not is_number(value):
            raise TypeError(f"{name} is {kind_of(value)}, expected a number or a tensor of shape () or ({d},).")
        case "probability" if not (is_number(value) and 0.0 <= value <= 1.0):
            raise ValueError(f"{name} is {value!r}, expected a probability: a number from 0 to 1.")
        case "seed":
            if not (isinstance(value, Tensor) and value.dim() == 0 and value.dtype == torch.int64):
                raise TypeError(f"{name} is {kind_of(value)}, expected a 0-d int64 tensor: torch.tensor(1234).")
            check_device(name, value, stream, residual)
        case "offset" if not (isinstance(value, int | torch.SymInt) and 0 <= value < 2**62):
            raise ValueError(f"{name} is {value!r}, expected a whole number of blocks to skip, from 0 to 2**62.")
        case "number" if not is_number(value):
            raise TypeError(f"{name} is {kind_of(value)}, expected a number: 1.0 for Gemma's weights.")
        case "dtype":
            check_dtype(name, value)


def check_codes(**codes: Any) -> None:
    """Raise ValueError unless all integer codes among an operator's arguments (`_CODES`) are in range; ignore other names."""
    for name, (smallest, largest) in _CODES.items():
        check_code(name, codes.get(name, smallest), largest, smallest)


def check_code(name: str, code: int, largest: int, smallest: int = 0) -> None:
    """Raise ValueError unless an integer code, such as that of the norm, is in its range."""
    if not smallest <= code <= largest:
        raise ValueError(
            f"{name} is {code}, expected {smallest} to {largest}: call addnorm's functions, which pass it."
        )


def check_eps(name: str, value: Any) -> None:
    """Raise ValueError unless a value is a number that can be added to a variance."""
    if not (is_number(value) and value >= 0):
        raise ValueError(f"{name} is {value!r}, expected a number that is not negative: 1e-5 is LayerNorm's usual one.")


def check_operator(row_scale: Any, seed: Any, dropout_p: float, residual: Tensor) -> None:
    """Raise ValueError unless `row_scale` has one number per row (already expanded), and a seed is given if dropout_p > 0."""
    if row_scale is not None and row_scale.shape != residual.shape[:-1]:
        raise ValueError(
            f"row_scale has shape {_shape(row_scale)}, expected {tuple(residual.shape[:-1])}, one for each row: expand it."
        )
    if dropout_p > 0.0 and seed is None:
        raise ValueError(f"seed is None, expected a 0-d int64 tensor with dropout_p {dropout_p}: torch.tensor(1234).")


def check_backward(
    dy: Any, dz: Any, z: Any, stats: Any, weight: Any, norm: int, *, grad_mask: int, weight_offset: float = 0.0,
    residual: Any = None, branch: Any = None, **options: Any,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError unless the arguments of a backward operator fit together. `options` include the dtypes.

    The parameters are the arguments of the operator's schema.
    """
    check(z, None, weight, weight_offset=weight_offset, norm=norm, grad_mask=grad_mask, **options)
    for name in ("dresidual_dtype", "branch_dtype", "bias_dtype"):
        check_dtype(name, options[name])
    if dy is None and dz is None:
        raise ValueError("dy and dz are None, expected the gradient of y or of z: without both there is no gradient.")
    rows = {"dy": dy, "dz": dz, "residual": residual, "branch": branch}
    moments = {"stats": stats} if dy is not None and norm != NORMS["none"] else {}
    check_tensors({**rows, **moments}, "z", z)
    for name, t in {**rows, **moments}.items():
        expected = (*z.shape[:-1], 2) if name == "stats" else tuple(z.shape)
        if t is not None and tuple(t.shape) != expected:
            raise ValueError(
                f"{name} has shape {_shape(t)}, expected {expected} for z {_shape(z)}: pass the forward's."
            )
    check_operator(options.get("row_scale"), options.get("seed"), options.get("dropout_p", 0.0), z)
    # A scale's gradient is computed from the tensor that it multiplies.
    given = {name for name, t in {**rows, **options, "z": z}.items() if t is not None}
    absent = {option.name for option in ADD_OPTIONS if option.gradient and not {option.name, option.gradient} <= given}
    if dy is None or norm == NORMS["none"]:
        absent |= {"weight", "bias"}
    for bit, name in enumerate(GRADIENTS):
        if grad_mask >> bit & 1 and name in absent:
            raise ValueError(f"grad_mask is {grad_mask}, expected no bit {bit}: this call has no gradient of {name}.")


def _check_features(name: str, value: Tensor, stream: str, residual: Tensor) -> None:
    d = residual.shape[-1]
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


def to_dimensions(normalized_shape: Any) -> tuple[int, ...]:
    """Return `normalized_shape` as a tuple; raise TypeError unless it is a whole number or a sequence of them."""
    try:
        return (operator.index(normalized_shape),)
    except TypeError:
        pass
    try:
        return tuple(operator.index(n) for n in normalized_shape)
    except TypeError:
        raise TypeError(
            f"normalized_shape is {normalized_shape!r}, expected a whole number or a sequence of them: (d,), for example."
        ) from None


def check_normalized_shape(normalized_shape: tuple[int, ...], residual: Any, stream: str = "residual") -> None:
    """Raise ValueError unless `residual`, the argument named `stream`, ends in `normalized_shape`."""
    check_tensor(stream, residual)
    if not normalized_shape:
        raise ValueError("normalized_shape is empty, expected at least one dimension: pass (d,) or None.")
    if tuple(residual.shape[-len(normalized_shape) :]) != normalized_shape:
        raise ValueError(
            f"normalized_shape is {normalized_shape}, expected the last dimensions of {stream} {_shape(residual)}: "
            f"pass None to normalize over the last one."
        )


def check_normalized_arguments(normalized_shape: tuple[int, ...], branch: Any, **parameters: Any) -> None:
    """Raise unless `branch` ends in `normalized_shape` and each parameter that is not None has this shape."""
    for name, value in {"branch": branch, **parameters}.items():
        if value is None:
            continue
        check_tensor(name, value)
        end = value.shape[-len(normalized_shape) :] if name == "branch" else value.shape
        if tuple(end) != normalized_shape:
            place = "to end in normalized_shape" if name == "branch" else "normalized_shape"
            raise ValueError(f"{name} has shape {_shape(value)}, expected {place} {normalized_shape}: reshape it.")


def check_branch(branch: Any) -> None:
    """Raise TypeError if branch is None."""
    if branch is None:
        raise TypeError(
            "branch is None, expected a tensor of residual's shape: for the norm alone use addnorm.layer_norm or "
            "addnorm.rms_norm."
        )


def check_out(out: Any, return_residual: bool) -> None:
    """Raise TypeError unless `out` has the structure of the result: y, or `(y, z)`."""
    if return_residual:
        if not (isinstance(out, tuple | list) and len(out) == 2 and all(isinstance(t, Tensor) for t in out)):
            raise TypeError(
                f"out is {kind_of(out)}, expected two tensors (y, z): for y alone leave return_residual at False."
            )
    elif not isinstance(out, Tensor):
        raise TypeError(f"out is {kind_of(out)}, expected one tensor: for (y, z) pass return_residual=True.")


def check_outputs(y: Any, z: Any, *, with_y: bool, with_z: bool) -> None:
    """Raise ValueError if a tensor is passed for a result that the operator does not compute."""
    for name, t, computed, part in (("y", y, with_y, "a norm"), ("z", z, with_z, "a branch")):
        if t is not None and not computed:
            raise ValueError(f"{name} is a tensor, expected None: without {part} there is no {name}.")


def check_targets(targets: dict[str, Any], residual: Tensor) -> None:
    """Raise unless each of `targets` (tensors by argument name) has the shape and device of the result."""
    check_tensors(targets, "the input", residual)
    for name, target in targets.items():
        if target.is_neg():
            raise TypeError(
                f"{name} is a negative view (the imaginary part of a conjugate, for example), expected ordinary memory: write "
                "to another tensor and copy that."
            )
        if target.shape != residual.shape:
            raise ValueError(
                f"{name} has shape {_shape(target)}, expected {_shape(residual)}, the shape of the result: out is not resized. "
                f"Make it with torch.empty{_shape(residual)}."
            )


def check_memory(targets: dict[str, Tensor], inputs: dict[str, Any]) -> None:
    """Raise ValueError if writing `targets` would write an element twice, or before it is read."""
    for name, target in targets.items():
        if aliasing.overlaps_itself(target):
            raise ValueError(
                f"{name} has elements that share memory (it is expanded, for example), expected separate elements: "
                f"pass {name}.clone()."
            )
    for (other, t), (name, target) in itertools.combinations(targets.items(), 2):
        if aliasing.shares_memory(target, t):
            raise ValueError(
                f"{name} shares memory with {other}, expected memory of its own, since both are written: pass {name}.clone()."
            )
    for (name, target), (other, t) in itertools.product(targets.items(), inputs.items()):
        # Each element of residual or branch is read before it is written; every row reads the parameters again.
        in_place = other in ("x", "residual", "branch")
        if (
            isinstance(t, Tensor)
            and aliasing.shares_memory(target, t)
            and not (in_place and aliasing.is_same_memory(target, t))
        ):
            expected = "exactly its memory or none of it" if in_place else "memory of its own"
            raise ValueError(f"{name} shares memory with {other}, expected {expected}: pass {name}.clone().")


def refuse_gradients(inputs: dict[str, Any], instead: str) -> NoReturn:
    """Raise RuntimeError about the first of `inputs` that requires a gradient."""
    name = next(name for name, t in inputs.items() if isinstance(t, Tensor) and t.requires_grad)
    raise RuntimeError(
        f"{name} requires a gradient, expected none: out= and in-place calls save nothing for the backward. Call it "
        f"under torch.no_grad(), or {instead}."
    )


def refuse_dtype(name: str, target: Tensor, dtype: torch.dtype) -> NoReturn:
    """Raise TypeError about a tensor of out= whose dtype is not the requested one."""
    raise TypeError(
        f"{name} has dtype {_dtype(target.dtype)}, expected {_dtype(dtype)}, the requested dtype: leave the dtype out, "
        f"or make {name} with dtype={dtype}."
    )


def check_tensor(name: str, value: Any) -> None:
    """Raise TypeError unless a value is an ordinary tensor of a supported dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {kind_of(value)}, expected a tensor: torch.as_tensor(...) makes one.")
    if value.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name} has dtype {_dtype(value.dtype)}, expected {FLOAT_WORDS}: convert it with {name}.float()"
            + (" (its real part, for example)." if value.is_complex() else ".")
        )
    if value.is_nested:
        raise TypeError(
            f"{name} is a nested tensor, expected an ordinary one: {name}.to_padded_tensor(0.0), or one call for each part."
        )
    if value.layout != torch.strided:
        raise TypeError(f"{name} has layout {value.layout}, expected an ordinary strided tensor: {name}.to_dense().")


def check_tensors(tensors: Mapping[str, Any], stream: str, residual: Tensor) -> None:
    """Raise unless each of `tensors` is None, or an ordinary tensor of a supported dtype on the device of `residual`.

    `stream` is the name of the argument `residual` in the message.
    """
    for name, value in tensors.items():
        if value is not None:
            check_tensor(name, value)
            check_device(name, value, stream, residual)


def check_device(name: str, value: Tensor, stream: str, residual: Tensor) -> None:
    """Raise unless `value` is on the device of `residual`, and both or neither are FakeTensors."""
    if isinstance(value, FakeTensor) != isinstance(residual, FakeTensor):  # a FakeTensor has no elements
        fake, real = (name, stream) if isinstance(value, FakeTensor) else (stream, name)
        raise TypeError(
            f"{fake} is a FakeTensor and {real} is not, expected all or none: convert {real} with from_tensor of its "
            "FakeTensorMode."
        )
    if value.device != residual.device:
        raise ValueError(
            f"{name} is on {value.device}, expected {residual.device}, the device of {stream}: move it with "
            f"{name}.to({str(residual.device)!r})."
        )


def _shape_remedy(residual: Tensor, branch: Tensor) -> str:
    if residual.shape[-1:] != branch.shape[-1:]:
        features = branch.shape[-1] if branch.dim() else "a single number"
        return (
            f"The sublayer must return {residual.shape[-1]} features, not {features}: end it with a projection "
            f"back to the width of the stream."
        )
    if residual.dim() != branch.dim() or math.prod(residual.shape) != math.prod(branch.shape):
        return "Nothing is broadcast: expand branch, or residual, to the same shape."
    return "Permute or reshape branch."


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    if len(shape) > len(to):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def _shape(t: Tensor) -> str:
    return str(tuple(t.shape))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind_of(value: Any) -> str:
    """Return a value's type for an error message, such as "a float32 tensor of shape (2, 3)"."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return "a nested tensor"  # whose shape torch refuses to tell
        return f"a {_dtype(value.dtype)} tensor of shape {_shape(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
