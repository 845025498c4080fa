"""Tables of shapes, dtypes and variants of the operation, and the calls built from them.

A `Call` is one call of the library as data: its differentiable tensors by argument name, and its other arguments. Weights, biases
and output gradients are random, never only ones or zeros.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

import addnorm
from addnorm.ops.options import ADD_OPTIONS
from addnorm.ops.options import OPTIONS as ALL_OPTIONS

f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16

FUNCTIONS = {"layer": addnorm.add_layer_norm, "rms": addnorm.add_rms_norm, "none": addnorm.add_residual}


class Dtypes(NamedTuple):
    residual: torch.dtype
    branch: torch.dtype
    parameter: torch.dtype


DTYPES = {
    "float32": Dtypes(f32, f32, f32),
    "bfloat16": Dtypes(bf16, bf16, bf16),
    "bfloat16 with float32 parameters": Dtypes(bf16, bf16, f32),
    "float32 stream, bfloat16 branch": Dtypes(f32, bf16, f32),
    "float32 stream, bfloat16 branch and parameters": Dtypes(f32, bf16, bf16),
    "bfloat16 stream, float32 branch": Dtypes(bf16, f32, f32),
    "float32 with bfloat16 parameters": Dtypes(f32, f32, bf16),
    "float16": Dtypes(f16, f16, f16),
    "float32 stream, float16 branch": Dtypes(f32, f16, f32),
    "float64": Dtypes(f64, f64, f64),
}

# Rows around 4 (the block of rows in backward) and 64 (a chunk of the sums over rows); features around the widths of a vector
# (4, 8, 16) and of the unrolled block of four.
SHAPES = [
    (1, 768), (2, 3, 64), (3, 1), (4, 2), (5, 7), (6, 15), (7, 16), (8, 17), (9, 31), (63, 33), (64, 48), (65, 63),
    (66, 65), (129, 100), (17,), (2, 1, 3, 130), (1, 1), (3, 1027), (260, 3),
]  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One way to use the operation. An option whose value is the name of a shape becomes a random tensor of that shape."""

    norm: str
    weight: bool = False
    bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)


LAYER, RMS = {"norm": "layer", "weight": True, "bias": True}, {"norm": "rms", "weight": True}

# Values of each kind of option, by label. Each option that ops/options.py declares has a variant for each value.
VALUES = {
    "scale": {"a number": 1.7, "0-d": "()", "(d,)": "(d,)"},
    "rows": {"a token": "(*)", "a sample": "(n, 1...)"},
    "features": {"": "(d,)"},
    "probability": {"": 0.3},
    "seed": {},  # dropout adds the seed
    "offset": {},
    "number": {"": 1.0},
    "casting": {},  # tested in test_functional.py: the oracle has no intermediate roundings
    "dtype": {"float32": f32, "bfloat16": bf16},
}
EVERYTHING = {
    option.name: 5 if option.kind == "offset" else [*VALUES[option.kind].values()][2 if option.kind == "scale" else 0]
    for option in ADD_OPTIONS
    if option.kind != "seed"
}

# Variants with no options but the norm's own parameters.
BASIC = {
    "LayerNorm": Variant(**LAYER),
    "LayerNorm without bias": Variant("layer", weight=True),
    "LayerNorm without weight": Variant("layer", bias=True),
    "LayerNorm without either": Variant("layer"),
    "RMSNorm": Variant(**RMS),
    "RMSNorm with bias": Variant("rms", weight=True, bias=True),
    "RMSNorm without weight": Variant("rms"),
}
_SINGLE = [(option, label, value) for option in ALL_OPTIONS for label, value in VALUES[option.kind].items()]
OPTIONS = {
    f"{option.name.removesuffix('_p')} {label}".strip(): Variant(
        **(RMS if i % 2 else LAYER), options={option.name: value}
    )
    for i, (option, label, value) in enumerate(_SINGLE)
} | {
    "residual_scale zero": Variant(**LAYER, options={"residual_scale": 0.0}),
    "row_scale and layer_scale": Variant(**LAYER, options={"row_scale": "(*)", "layer_scale": "()"}),
    "branch_bias under layer_scale": Variant(**RMS, options={"branch_bias": "(d,)", "layer_scale": "(d,)"}),
    "dropout of everything": Variant(**RMS, options={"dropout_p": 1.0}),
    "weight_offset, RMSNorm": Variant(**RMS, options={"weight_offset": 1.0}),
    "residual_dtype and out_dtype bfloat16": Variant(**LAYER, options={"residual_dtype": bf16, "out_dtype": bf16}),
    "residual_dtype and out_dtype float32": Variant(**RMS, options={"residual_dtype": f32, "out_dtype": f32}),
    "everything, LayerNorm": Variant(**LAYER, options=EVERYTHING | {"weight_offset": 1.0}),
    "everything, RMSNorm": Variant(**RMS, options=EVERYTHING),
    "the add alone": Variant("none"),
    "everything, the add alone": Variant("none", options=EVERYTHING),
}
VARIANTS = BASIC | OPTIONS
STATED_DTYPES = ("residual_dtype", "out_dtype")
OWN_DTYPES = {name: variant for name, variant in VARIANTS.items() if variant.options.keys().isdisjoint(STATED_DTYPES)}


@dataclass(repr=False)
class Call:
    """A call as data; `tensors` are its differentiable arguments by name."""

    norm: str
    eps: float
    tensors: dict[str, Tensor]
    options: dict[str, Any]

    def __repr__(self):
        tensors = {name: f"{t.dtype} {tuple(t.shape)} strides {t.stride()}" for name, t in self.tensors.items()}
        return f"Call({self.norm}, eps {self.eps}, {tensors}, {self.options})"

    @property
    def d(self):
        return self.tensors["residual"].shape[-1]

    @property
    def residual_dtype(self):
        return self.options.get("residual_dtype") or self.tensors["residual"].dtype

    @property
    def out_dtype(self):
        return self.options.get("out_dtype") or self.tensors["branch"].dtype

    def __call__(self, tensors=None):
        """Return `{"y": ..., "z": ...}` (only z for the add alone)."""
        arguments = {**(self.tensors if tensors is None else tensors), **self.options}
        if self.norm == "none":
            return {"z": addnorm.add_residual(**arguments)}
        y, z = FUNCTIONS[self.norm](**arguments, eps=self.eps, return_residual=True)
        return {"y": y, "z": z}

    def y_alone(self, tensors=None):
        arguments = {**(self.tensors if tensors is None else tensors), **self.options}
        return FUNCTIONS[self.norm](**arguments, eps=self.eps)

    def rows(self, index):
        """Return the same call on some rows of a call whose shape is `(rows, d)`."""
        rows = self.tensors["residual"].shape[0]
        cut = {
            name: (t[index] if name in ("residual", "branch") or (name == "row_scale" and t.shape[0] == rows) else t)
            for name, t in self.tensors.items()
        }
        return replace(self, tensors=cut)

    def without_dtypes(self):
        """Return the same call without the options that state dtypes."""
        options = {name: value for name, value in self.options.items() if name not in STATED_DTYPES}
        return replace(self, options=options)


def random(shape, dtype, generator, mean=0.0):
    return (torch.randn(shape, generator=generator, dtype=f64) + mean).to(dtype)


def make(variant, dtypes, shape, *, eps=1e-5, seed=0):
    """Return the call of a variant with random tensors."""
    variant = VARIANTS[variant] if isinstance(variant, str) else variant
    dtypes = DTYPES[dtypes] if isinstance(dtypes, str) else dtypes
    generator = torch.Generator().manual_seed(seed)
    d, rows = shape[-1], shape[:-1]
    shapes = {"()": (), "(d,)": (d,), "(*)": rows, "(n, 1...)": (*rows[:1], *(1 for _ in rows[1:]))}
    tensors = {
        "residual": random(shape, dtypes.residual, generator, mean=0.5),
        "branch": random(shape, dtypes.branch, generator),
    }
    if variant.weight:
        tensors["weight"] = random((d,), dtypes.parameter, generator, mean=1.0)
    if variant.bias:
        tensors["bias"] = random((d,), dtypes.parameter, generator)
    options = dict(variant.options)
    for name, value in variant.options.items():
        if value in shapes:
            tensors[name] = random(shapes[value], dtypes.parameter, generator, mean=1.0)
            del options[name]
    if options.get("dropout_p"):
        options["seed"] = torch.tensor(-1234567890123456789)
    return Call(variant.norm, eps, tensors, options)


def leaves(call, *frozen):
    """Return a call's tensors as new leaves that require gradients, except for the frozen ones."""
    return {name: t.detach().clone().requires_grad_(name not in frozen) for name, t in call.tensors.items()}


def cotangents(outputs):
    """Return random output gradients in the outputs' dtypes. With ones, half of a norm's backward would be zero."""
    generator = torch.Generator().manual_seed(1)
    return tree_map(lambda t: random(tuple(t.shape), t.dtype, generator, mean=0.2).to(t.device), outputs)


def gradients(call, grad_outputs=None, *frozen):
    """Return the gradient of every tensor of a call, for the output gradients in `grad_outputs` or for random ones."""
    tensors = leaves(call, *frozen)
    outputs = call(tensors)
    grad_outputs = cotangents(outputs) if grad_outputs is None else grad_outputs
    grad_outputs = {
        name: g for name, g in grad_outputs.items() if outputs[name].requires_grad
    }  # all inputs may be frozen
    torch.autograd.backward([outputs[name] for name in grad_outputs], list(grad_outputs.values()))
    return {name: t.grad for name, t in tensors.items()}


def moved(call, device="cuda"):
    """Return the call with all its tensors on a device."""
    tensors, options = tree_map_only(Tensor, lambda t: t.to(device), (call.tensors, call.options))
    return Call(call.norm, call.eps, tensors, options)
