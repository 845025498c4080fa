"""Initialization: which weights a stack has, by role, and how each is drawn.

A weight's role says what it does in its sublayer: "query", "key", "value" and "out" in attention; "up", "gate" and "down" in a
feed-forward block. A rule, `rule(role, place)`, gives the `Draw` of a role at a place; `Wiring.init` is one. Biases become
zeros, norms ones and zeros, learned factors their initial values.

A module tells its roles by a method `weight_roles() -> list[tuple[str, Tensor]]` (the tensors may be slices of a parameter).
Those of `addnorm.nn` have it; `torch.nn.MultiheadAttention`, `torch.nn.Linear` and a `Sequential` of them are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from addnorm.wirings.equation import number

if TYPE_CHECKING:  # wiring.py stands on this file
    from addnorm.wirings.spec import Place, Wiring

__all__ = [
    "Draw",
    "InitRule",
    "depth_scaled",
    "gpt2",
    "init_",
    "weight_roles",
    "xavier",
    "xavier_normal",
    "xavier_packed",
    "zero_out",
]

ROLES = ("query", "key", "value", "out", "up", "gate", "down")
PACKED = ("query", "key", "value")  # one matrix in most implementations
WRITES = ("out", "down")  # the last projection of a sublayer: what it returns is linear in it


class Draw(NamedTuple):
    """A distribution and its gain: of Xavier's rule (Glorot, Bengio 2010), or the standard deviation of "normal"."""

    kind: str
    gain: float = 1.0

    def __call__(self, weight: Tensor) -> None:
        """Fills the weight."""
        FILL[self.kind](weight, self.gain)

    def __str__(self) -> str:
        text = self.kind.replace("_", "-").replace("xavier", "Xavier")
        if self.kind == "normal":
            return f"{text}, standard deviation {number(self.gain)}"
        return text if self.gain == 1 else f"{text}, gain {number(self.gain)}"


FILL: dict[str, Callable[[Tensor, float], object]] = {
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "normal": lambda weight, std: nn.init.normal_(weight, 0.0, std),
    "zeros": lambda weight, _: nn.init.zeros_(weight),
}

InitRule = Callable[..., Draw]


class UnknownRole(LookupError):
    """A rule that depends on the role met a weight that has none."""


def xavier(role: str | None, at: Place, **_: Any) -> Draw:
    """Xavier-uniform, as "Attention Is All You Need" was trained: +-sqrt(6 / (fan_in + fan_out))."""
    return Draw("xavier_uniform")


def xavier_packed(role: str | None, at: Place, **_: Any) -> Draw:
    """Xavier-uniform over queries, keys and values as one matrix of 3d rows: for each the bound is smaller by the root of 2.

    So `torch.nn.Transformer` and fairseq draw them, and most models that were trained with "Xavier".
    """
    return Draw("xavier_uniform", 1 / math.sqrt(2) if known(role) in PACKED else 1.0)


def xavier_normal(role: str | None, at: Place, **_: Any) -> Draw:
    """Xavier-normal: standard deviation sqrt(2 / (fan_in + fan_out))."""
    return Draw("xavier_normal")


def gpt2(role: str | None, at: Place, **_: Any) -> Draw:
    """GPT-2's: standard deviation 0.02, and 0.02 / sqrt(2L) for the last projection of each sublayer.

    2L is the number of sublayers. Source: Radford et al. 2019; Megatron-LM (arXiv 1909.08053).
    """
    return Draw("normal", 0.02 / math.sqrt(at.n_sublayers) if known(role) in WRITES else 0.02)


def depth_scaled(role: str | None, at: Place, **_: Any) -> Draw:
    """DS-Init: Xavier's over the root of the layer's number. Source: Zhang et al. 2019 (arXiv 1908.11365)."""
    return Draw("xavier_uniform", 1 / math.sqrt(at.number))


def zero_out(role: str | None, at: Place, **_: Any) -> Draw:
    """Xavier's, and zeros for the last projection of each sublayer: every write is zero at first."""
    return Draw("zeros") if known(role) in WRITES else Draw("xavier_uniform")


RULES: dict[str, InitRule] = {
    rule.__name__: rule for rule in (xavier, xavier_packed, xavier_normal, gpt2, depth_scaled, zero_out)
}


def known(role: str | None) -> str:
    """The role, where there is one."""
    if role is None:
        raise UnknownRole
    return role


def weight_roles(sublayer: Any) -> Iterator[tuple[str | None, Tensor]]:
    """The weights of a sublayer with their roles; None where a module does not tell, ValueError where it cannot be known."""
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
        known = {id(module.weight) for module in linears}
        other = [name for name, p in sublayer.named_parameters() if p.dim() > 1 and id(p) not in known]
        if other:
            raise ValueError(
                f"{type(sublayer).__name__} has the parameter {other[0]!r}, whose role is not known: give the module a "
                "method weight_roles() that lists its weights as (role, tensor)."
            )
        chain = isinstance(sublayer, nn.Sequential) and all(module in [*sublayer] for module in linears)
        for module in linears:
            yield ("down" if module is linears[-1] else "up") if chain else None, module.weight


def init_(wiring: Wiring, stack: nn.Module, *inputs: Any, **context: Any) -> None:
    """What `Wiring.init_` does: rules and weights are judged before anything is drawn."""
    stacks: list[Any] = [module for module in stack.modules() if hasattr(module, "connections")]
    if not stacks:
        raise TypeError(f"stack is a {type(stack).__name__}, expected a ResidualStack or a module that has one.")
    draws: list[tuple[Draw, Tensor]] = []
    for one in stacks:
        if one.wiring != wiring and not (wiring.pair and one.wiring.name == wiring.name):
            raise ValueError(
                f"stack was built with {one.wiring!r}, expected {wiring!r}: initialize it by its own wiring, "
                "stack.wiring.init_(stack)."
            )
        if wiring.profile is not None and not inputs:
            raise TypeError(
                f"{wiring.name} measures its factors: give init_ what the stack is called with, init_(stack, x)."
            )
        for position, connection in enumerate(one.connections):
            try:
                for role, weight in weight_roles(connection.sublayer):
                    draw = one.wiring.init(role, connection.place, **dict(one.wiring.options))
                    _judge(draw, weight, connection.sublayer, f"sublayers[{position}]")
                    draws.append((draw, weight))
            except UnknownRole:
                raise ValueError(
                    f"sublayers[{position}] ({type(connection.sublayer).__name__}) does not tell the roles of its weights, "
                    f"and the init of {wiring.name} depends on them: give it a method weight_roles() that lists them as "
                    f"(role, tensor); roles are {', '.join(ROLES)}."
                ) from None
    with torch.no_grad():
        for draw, weight in draws:
            draw(weight)
        for one in stacks:
            one.reset_parameters()
            for connection in one.connections:
                if isinstance(connection.sublayer, nn.Module):
                    _zero_biases(connection.sublayer)
    if wiring.profile is not None:
        _profile(stack, stacks, *inputs, **context)


def _judge(draw: Any, weight: Tensor, sublayer: Any, where: str) -> None:
    """Refuses what cannot be drawn, or would be drawn into a tensor that nobody reads."""
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
    """Each stack is measured with what reaches it in a call of the module, a decoder after its encoder; dropout is off."""
    modes = {one: one.training for one in module.modules()}
    handles = [
        one.register_forward_pre_hook(lambda one, x, named: one.wiring.profile(one, *x, **named), with_kwargs=True)
        for one in stacks
    ]
    try:
        with torch.no_grad():
            module.eval()(*inputs, **context)
    finally:
        for handle in handles:
            handle.remove()
        for one, mode in modes.items():
            one.training = mode


def _zero_biases(sublayer: nn.Module) -> None:
    for module in sublayer.modules():
        for name in ("bias", "in_proj_bias"):
            bias = getattr(module, name, None)
            if isinstance(bias, Tensor) and isinstance(module, nn.Linear | nn.MultiheadAttention):
                nn.init.zeros_(bias)
