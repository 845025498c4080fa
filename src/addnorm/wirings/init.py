"""Initialization: the roles of a stack's weights and the distribution of each.

A role names the use of a weight in its sublayer: "query", "key", "value" and "out" in attention; "up", "gate" and "down" in a
feed-forward block. A rule, `rule(role, place)`, returns the `Draw` of a role at a place; `Wiring.init` is one. Biases become
zeros, norms ones and zeros, learned factors their initial values.

A module states its roles with a method `weight_roles() -> list[tuple[str, Tensor]]` (the tensors may be slices of a parameter).
The modules of `addnorm.nn` have this method. The roles of `torch.nn.MultiheadAttention`, `torch.nn.Linear` and a `Sequential` of
them are built in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from addnorm.wirings.factors import Place, format_factor

ROLES = ("query", "key", "value", "out", "up", "gate", "down")
PACKED = ("query", "key", "value")  # one matrix in most implementations
WRITES = ("out", "down")  # the last projection of a sublayer, in which its output is linear


class Draw(NamedTuple):
    """Distribution of a weight, with the gain of Xavier's rule (Glorot, Bengio 2010).

    For "normal" the gain is the standard deviation.
    """

    kind: str
    gain: float = 1.0

    def __call__(self, weight: Tensor) -> None:
        """Fill the weight."""
        FILL[self.kind](weight, self.gain)

    def __str__(self) -> str:
        text = self.kind.replace("_", "-").replace("xavier", "Xavier")
        if self.kind == "normal":
            return f"{text}, standard deviation {format_factor(self.gain)}"
        return text if self.gain == 1 else f"{text}, gain {format_factor(self.gain)}"


FILL: dict[str, Callable[[Tensor, float], object]] = {
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "normal": lambda weight, std: nn.init.normal_(weight, 0.0, std),
    "zeros": lambda weight, _: nn.init.zeros_(weight),
}

InitRule = Callable[..., Draw]


class UnknownRoleError(LookupError):
    """Error for a weight of unknown role under a rule that depends on the role."""


def xavier(role: str | None, place: Place, **_: Any) -> Draw:
    """Return Xavier-uniform, +-sqrt(6 / (fan_in + fan_out)), as in "Attention Is All You Need"."""
    return Draw("xavier_uniform")


def xavier_packed(role: str | None, place: Place, **_: Any) -> Draw:
    """Return Xavier-uniform with queries, keys and values as one matrix of 3 d_model rows.

    The bound of these three is divided by sqrt(2).

    `torch.nn.Transformer`, fairseq and most models that were trained with "Xavier" draw them this way.
    """
    return Draw("xavier_uniform", 1 / math.sqrt(2) if require_role(role) in PACKED else 1.0)


def xavier_normal(role: str | None, place: Place, **_: Any) -> Draw:
    """Return Xavier-normal: standard deviation sqrt(2 / (fan_in + fan_out))."""
    return Draw("xavier_normal")


def gpt2(role: str | None, place: Place, **_: Any) -> Draw:
    """Return the draw of GPT-2: standard deviation 0.02, and 0.02 / sqrt(2L) for the last projection of each sublayer.

    2L is the number of sublayers. Source: Radford et al. 2019; Megatron-LM (arXiv 1909.08053).
    """
    return Draw("normal", 0.02 / math.sqrt(place.num_sublayers) if require_role(role) in WRITES else 0.02)


def depth_scaled(role: str | None, place: Place, **_: Any) -> Draw:
    """Return DS-Init: Xavier-uniform divided by the square root of the layer's number.

    Source: Zhang et al. 2019 (arXiv 1908.11365).
    """
    return Draw("xavier_uniform", 1 / math.sqrt(place.number))


def zero_out(role: str | None, place: Place, **_: Any) -> Draw:
    """Return Xavier-uniform, and zeros for the last projection of each sublayer: every write is zero at first."""
    return Draw("zeros") if require_role(role) in WRITES else Draw("xavier_uniform")


RULES: dict[str, InitRule] = {
    rule.__name__: rule for rule in (xavier, xavier_packed, xavier_normal, gpt2, depth_scaled, zero_out)
}


def require_role(role: str | None) -> str:
    """Return the role, or raise an UnknownRoleError if it is None."""
    if role is None:
        raise UnknownRoleError
    return role


def weight_roles(sublayer: Any) -> Iterator[tuple[str | None, Tensor]]:
    """Yield a sublayer's weights, each with its role, such as "query" or "down"; None if it is unknown.

    Raises:
        ValueError: a module has a parameter that is no weight of a `Linear`, and no `weight_roles`.
    """
    if hasattr(sublayer, "weight_roles"):
        yield from sublayer.weight_roles()
    elif isinstance(sublayer, nn.MultiheadAttention):
        packed = sublayer.in_proj_weight
        separate = (sublayer.q_proj_weight, sublayer.k_proj_weight, sublayer.v_proj_weight)
        yield from zip(("query", "key", "value"), separate if packed is None else packed.chunk(3), strict=True)
        yield "out", sublayer.out_proj.weight
    elif isinstance(sublayer, nn.Linear):
        yield "down", sublayer.weight
    elif isinstance(sublayer, nn.Module):
        linears = [module for module in sublayer.modules() if isinstance(module, nn.Linear)]
        weights = {id(module.weight) for module in linears}
        other = [name for name, p in sublayer.named_parameters() if p.dim() > 1 and id(p) not in weights]
        if other:
            raise ValueError(
                f"{type(sublayer).__name__} has the parameter {other[0]!r}, whose role is not known: give the module a "
                "method weight_roles() that lists its weights as (role, tensor)."
            )
        chain = isinstance(sublayer, nn.Sequential) and all(module in [*sublayer] for module in linears)
        for module in linears:
            yield ("down" if module is linears[-1] else "up") if chain else None, module.weight


def init_(wiring: Any, stack: nn.Module, *inputs: Any, **context: Any) -> None:
    """Initialize a stack as `Wiring.init_` states; all rules and weights are checked before any weight is drawn."""
    stacks: list[Any] = [
        module for module in stack.modules() if hasattr(module, "connections") and hasattr(module, "wiring")
    ]
    if not stacks:
        raise TypeError(f"stack is a {type(stack).__name__}, expected a ResidualStack or a module that has one.")
    draws: list[tuple[Draw, Tensor]] = []
    for stack_module in stacks:
        if stack_module.wiring != wiring and not (wiring.pair and stack_module.wiring.name == wiring.name):
            raise ValueError(
                f"stack was built with {stack_module.wiring!r}, expected {wiring!r}: initialize it by its own wiring, "
                "stack.wiring.init_(stack)."
            )
        if wiring.profile is not None and not inputs:
            raise TypeError(f"{wiring.name} measures its factors: give init_ the inputs of the stack, init_(stack, x).")
        for position, connection in enumerate(stack_module.connections):
            try:
                for role, weight in weight_roles(connection.sublayer):
                    draw = stack_module.wiring.init(role, connection.place, **dict(stack_module.wiring.options))
                    _check_draw(draw, weight, connection.sublayer, f"sublayers[{position}]")
                    draws.append((draw, weight))
            except UnknownRoleError:
                raise ValueError(
                    f"sublayers[{position}] ({type(connection.sublayer).__name__}) states no roles for its weights, "
                    f"and the init of {wiring.name} depends on them: give it a method weight_roles() that lists them as "
                    f"(role, tensor); roles are {', '.join(ROLES)}."
                ) from None
    with torch.no_grad():
        for draw, weight in draws:
            draw(weight)
        for stack_module in stacks:
            stack_module.reset_parameters()
            for connection in stack_module.connections:
                if isinstance(connection.sublayer, nn.Module):
                    _zero_biases(connection.sublayer)
    if wiring.profile is not None:
        _profile(stack, stacks, *inputs, **context)


def _check_draw(draw: Any, weight: Tensor, sublayer: Any, where: str) -> None:
    """Check that the distribution is known, and that the weight is a parameter of the sublayer or a view of one."""
    if not isinstance(draw, Draw) or draw.kind not in FILL:
        raise TypeError(f"the init of {where} gave {draw!r}, expected a Draw of {', '.join(map(repr, FILL))}.")
    if isinstance(sublayer, nn.Module) and not weight.is_meta:
        memory = {p.untyped_storage().data_ptr() for p in sublayer.parameters()}
        if weight.untyped_storage().data_ptr() not in memory:
            raise ValueError(
                f"a weight of {where} ({type(sublayer).__name__}) is no parameter, nor a part of one, expected one of them: "
                "it may be computed from others (weight norm, a parametrization); initialize those yourself."
            )


def _profile(module: nn.Module, stacks: list[Any], *inputs: Any, **context: Any) -> None:
    """Let `wiring.profile` measure the factors of each stack, on the inputs that the stack gets in one call of the module.

    A decoder is measured after its encoder. Dropout is off.
    """
    handles = [
        submodule.register_forward_pre_hook(
            lambda submodule, x, named: submodule.wiring.profile(submodule, *x, **named), with_kwargs=True
        )
        for submodule in stacks
    ]
    try:
        with evaluate(module):
            module(*inputs, **context)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluate(module: nn.Module) -> Iterator[None]:
    """Set a module and its submodules to eval mode in the block, without gradients. Restore their modes afterwards."""
    modes = {submodule: submodule.training for submodule in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for submodule, mode in modes.items():
            submodule.training = mode


def _zero_biases(sublayer: nn.Module) -> None:
    for module in sublayer.modules():
        for name in ("bias", "in_proj_bias"):
            bias = getattr(module, name, None)
            if isinstance(bias, Tensor) and isinstance(module, nn.Linear | nn.MultiheadAttention):
                nn.init.zeros_(bias)
