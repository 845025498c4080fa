"""Declaration of the operation's options: the one place that names them, orders them and gives their defaults.

Derived from it: the operators' schemas and argument indices (`schema.py`, `csrc/arguments.h`), the argument checks
(`validation.py`), the options that are saved and differentiated (`autograd.py`), the tests' table of variants
(`tests/support/cases.py`) and the table in docs/numerics.md.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from addnorm._util.norms import KINDS, NONE

Kind = Literal["scale", "rows", "features", "probability", "seed", "offset", "number", "casting", "dtype"]

# Schema arguments for an option of each kind. A scale has two: a float for a number, and a tensor.
_SCHEMA: dict[Kind, str] = {
    "scale": "float {factor}=1.0, Tensor? {name}=None",
    "rows": "Tensor? {name}=None",
    "features": "Tensor? {name}=None",
    "probability": "float {name}=0.0",
    "seed": "Tensor? {name}=None",
    "offset": "SymInt {name}=0",
    "number": "float {name}=0.0",
    "casting": "int {name}=0",
    "dtype": "ScalarType? {name}=None",
}


class Option(NamedTuple):
    """One keyword argument of `addnorm.add_layer_norm` and the related functions.

    Attributes:
        name: name of the keyword argument.
        kind: kind of value, which decides the argument check and the type in the schema.
        value: value that a caller can pass, for the documentation.
        doc: effect, in a few words.
        default: default value of the keyword argument.
        gradient: tensor from which the gradient is computed, or "z" where the gradient of z is enough; None: not
            differentiable.
        factor: for an option of kind "scale", the schema argument that holds its value if that is a number.
        additive: whether the option is only added, so that no other gradient depends on it.
    """

    name: str
    kind: Kind
    value: str
    doc: str
    default: Any = None
    gradient: Literal["residual", "branch", "z"] | None = None
    factor: str = ""
    additive: bool = False

    @property
    def schema(self) -> str:
        """The option's arguments in the schema of an operator."""
        return _SCHEMA[self.kind].format(name=self.name, factor=self.factor)


# Before the norm: z = residual_scale * residual + row_scale * layer_scale * dropout(branch + branch_bias).
ADD_OPTIONS = (
    Option(
        "residual_scale", "scale", "number, `()` or `(d,)`", "multiplies residual (DeepNorm's alpha)",
        gradient="residual", factor="residual_factor",
    ),
    Option("row_scale", "rows", "broadcasts to `(*)`", "multiplies the branch of a row (stochastic depth)", gradient="branch"),
    Option(
        "layer_scale", "scale", "number, `()` or `(d,)`", "multiplies the branch (LayerScale's gamma)",
        gradient="branch", factor="branch_factor",
    ),
    Option("branch_bias", "features", "`(d,)`", "is added to the branch before dropout", gradient="z", additive=True),
    Option("dropout_p", "probability", "number from 0 to 1", "probability that an element of the branch is dropped", 0.0),
    Option("seed", "seed", "0-d int64 tensor", "seed of the dropout mask; None: drawn from torch's generator"),
    Option("offset", "offset", "whole number", "blocks of four elements to skip in the mask's random sequence", 0),
)  # fmt: skip
# After the add: y = norm(z) * (weight + weight_offset) + bias.
NORM_OPTIONS = (
    Option("weight_offset", "number", "number", "is added to weight (1.0 for Gemma's weights)", 0.0),
    Option(
        "casting", "casting", '"float32", "llama" or "t5"', "place of the rounding before weight (RMSNorm)", "float32"
    ),
)
DTYPE_OPTIONS = (
    Option("residual_dtype", "dtype", "float dtype", "dtype of z; None: that of residual"),
    Option("out_dtype", "dtype", "float dtype", "dtype of y; None: that of branch"),
)
OPTIONS = ADD_OPTIONS + NORM_OPTIONS + DTYPE_OPTIONS
SCALES = tuple(option for option in ADD_OPTIONS if option.kind == "scale")

# Inputs and options that have a gradient: the order of the backward operators' outputs and of the bits of `grad_mask`.
GRADIENTS = ("residual", "branch", "weight", "bias", *(option.name for option in ADD_OPTIONS if option.gradient))

NORMS: dict[str, int] = {**{name: kind.code for name, kind in KINDS.items()}, "none": NONE}
CASTINGS = {"float32": 0, "llama": 1, "t5": 2}


def to_schema(options: tuple[Option, ...]) -> str:
    """Return the options as arguments of an operator's schema."""
    return ", ".join(option.schema for option in options)
