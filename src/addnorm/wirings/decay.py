"""Names of the parameters of wirings that weight decay should leave out."""

from __future__ import annotations

from typing import Any

from torch import nn

from addnorm.wirings.coefficients.base import CoefficientModule

__all__ = ["find_no_decay"]


def find_no_decay(module: nn.Module) -> set[str]:
    """Return the names of the parameters of all stacks in a module that should not decay.

    They are the weights and biases of norms, the learned factors, and the static coefficients, biases and scales of computed
    coefficients; not the sublayers' parameters, and not the projections that compute coefficients from the streams.
    """
    names: set[str] = set()
    for prefix, inner in module.named_modules(remove_duplicate=False):
        own = _own_names(inner)
        names |= {f"{prefix}.{name}" if prefix else name for name in own}
    return names & {name for name, _ in module.named_parameters()}  # which name a shared parameter once


def _own_names(module: Any) -> set[str]:
    """Return the names, within a module, of the parameters that it adds."""
    if isinstance(module, CoefficientModule):
        return {
            name for name in module._parameters if name not in module.decays and module._parameters[name] is not None
        }
    names: set[str] = set()
    if not _belongs_to_wiring(module):
        return names
    names |= {name for name, p in module._parameters.items() if p is not None}  # learned factors
    for name, child in module._modules.items():
        if name.startswith("norm") and child is not None:
            names |= {f"{name}.{inner}" for inner, _ in child.named_parameters()}
    return names


def _belongs_to_wiring(module: Any) -> bool:
    """Return whether a module's norms are a wiring's: a connection, a stack or its head."""
    return hasattr(module, "stage") or hasattr(module, "wiring")
