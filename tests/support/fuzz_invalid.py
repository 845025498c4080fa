"""Invalid calls, which must raise an error that names the argument, and calls of operators with unchecked arguments."""

import contextlib
import math

import torch
from torch import Tensor

from support.cases import FUNCTIONS
from support.fuzz_calls import FLOATS
from support.operator_calls import Recorder

OTHER_DTYPES = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
VECTORS = ("weight", "bias", "branch_bias")
SCALES = ("residual_scale", "layer_scale")
# Values that are wrong for an option in any call. Options that are not listed are tensors.
VALUES = {
    "eps": (-1.0, math.nan, "1e-5", [], torch.ones(2)),
    "dropout_p": (-0.1, 1.5, math.nan, "0.5", True),
    "residual_scale": ("2", True, [1.0]),
    "layer_scale": ("2", True, {}),
    "row_scale": (0.5, "2", [1.0]),
    "branch_bias": (0.5, [1.0]),
    "seed": (7, 1.5, "seed", torch.tensor(1.0), torch.tensor([1])),
    "offset": (-1, 1.5, 2**63, "0"),
    "residual_dtype": (torch.int32, torch.complex64, "float32"),
    "out_dtype": (torch.bool, torch.float8_e5m2),
    "weight_offset": ("1", [1.0]),
    "casting": ("gemma", 3),
    "normalized_shape": ((), (0, 7, 0, 3), 10**6),
}


def check_error(case):
    """Return one line if the case with one wrong argument does not raise an error that names this argument."""
    rng, call = case.rng, case.call
    name, value = _fault(case, rng)
    arguments = {**call.tensors, **call.options, name: value}
    if name in ("seed", "offset"):
        arguments |= {"dropout_p": 0.5, "seed": arguments.get("seed")}
    if call.norm != "none":
        arguments = {"eps": call.eps, "return_residual": rng.random() < 0.5, **arguments}
    tensors = {key for key, t in arguments.items() if isinstance(t, Tensor) and t.is_floating_point()}
    for key in tensors & set(case.wants) - {name}:
        arguments[key] = arguments[key].detach().requires_grad_()
    # The error may name an argument whose shape, dtype or device is compared with this one.
    blamed = (name, *call.tensors) if name in ("residual", "branch") else (name,)
    described = f"{name} = {_described(value)}"
    return check_refused(lambda: FUNCTIONS[call.norm](**arguments), described, blamed)


def check_refused(call, described, blamed):
    """Return one line if an invalid call does not raise an error that has one of the blamed words."""
    try:
        call()
    except (ValueError, TypeError) as error:
        if any(word in str(error) for word in blamed):
            return []
        return [f"invalid call: {described} is refused without its name: {error!r}"]
    except Exception as error:
        return [f"invalid call: {described} raises {type(error).__name__}, expected ValueError or TypeError: {error}"]
    return [f"invalid call: {described} is accepted"]


def _described(value):
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.layout} {value.device}"
    return repr(value)


def _fault(case, rng):
    """Return an argument's name and a value that is wrong in this call."""
    call = case.call
    names = [name for name in VALUES if _takes(call.norm, name)] if rng.random() < 0.3 else list(call.tensors)
    name = rng.choice(names)
    if name not in call.tensors or (name in VALUES and rng.random() < 0.2):
        return name, rng.choice(VALUES[name])
    t = call.tensors[name]
    faults = [
        lambda: t.to(rng.choice(OTHER_DTYPES)),
        lambda: t.to("meta"),
        t.to_sparse,
        lambda: rng.choice([t.tolist(), "tensor", object(), {}]) if name not in SCALES else "tensor",
        lambda: t.new_ones(_wrong_shape(name, tuple(t.shape), call.d, rng)),
    ]
    if name == "residual":  # for residual alone on another device, the error names the other tensors
        faults[2:2] = [lambda: t.new_ones(())]
    if t.dim() == 0:
        del faults[2]
    return name, rng.choice(faults)()


def _takes(norm, name):
    if norm == "none":
        return name not in ("eps", "weight_offset", "out_dtype", "casting", "normalized_shape")
    return norm == "rms" or name != "casting"


def _wrong_shape(name, shape, d, rng):
    """Return a small shape that does not fit."""
    if name in SCALES:
        return rng.choice([(d + 1,), (1, d), (d, 1), (d + 1, 1)])
    if name == "row_scale":
        return (2, *shape, 3, 2, 5, 7, 2)  # more dimensions than the rows have
    if name in VECTORS:
        return rng.choice([(d + 1,), (1, d), (), (d, 1), (2, d)])
    return rng.choice([(*shape[:-1], d + 1), (*shape, 1), (2, *shape), (1, 1, *shape)])


def call_operators(use, like, rng):
    """Call the operators that a function uses with meaningless arguments. They may raise or return, but must not crash.

    `like` is the call's largest tensor, whose size broadcasting could multiply.
    """
    if like.numel() > 2000:
        return
    with Recorder() as recorder:
        use()
    shape = tuple(like.shape)
    numbers = [-1, 0, 1, 3, 5, 0.5, 2**31, 2**40, 2**62, math.nan, math.inf]
    tensors = [
        None, torch.ones(()), torch.ones(0), torch.ones(shape[-1]), torch.ones(shape[-1] + 1), torch.ones(*shape, 2), torch.ones(3),
        torch.ones(1, *shape).to(rng.choice(FLOATS)), torch.ones(shape, device="meta"), torch.ones(shape).long(),
        torch.ones(shape).transpose(0, -1), torch.ones(*shape[:-1], 0),
    ]  # fmt: skip
    for one in recorder.calls:
        arguments = getattr(torch.ops.addnorm, one.name).default._schema.arguments
        for argument in rng.sample(arguments, 4):
            value = rng.choice(tensors if "Tensor" in str(argument.type) else numbers)
            with contextlib.suppress(Exception):
                one._replace(arguments={**one.arguments, argument.name: value}).repeat()
