"""Names of the parameters of wirings that weight decay should leave out."""

from __future__ import annotations

from torch import nn

from addnorm.wirings.coefficients.base import CoefficientModule


def find_no_decay(module: nn.Module) -> set[str]:
    """Return the names of the parameters of all stacks in a module that should not decay.

    They are the weights and biases of norms, the learned factors, and the static coefficients, biases and scales of computed
    coefficients. The sublayers' parameters, and the projections that compute coefficients from the streams, are not included.
    """
    names: set[str] = set()
    for prefix, inner in module.named_modules(remove_duplicate=False):
        path = f"{prefix}." if prefix else ""
        if isinstance(inner, CoefficientModule):
            names |= {path + name for name in inner._parameters if name not in inner.decays}
        elif hasattr(inner, "stage") or hasattr(inner, "wiring"):  # a connection, a stack or its head
            names |= {path + name for name in inner._parameters}  # learned factors
            for name, child in inner.named_children():
                if name.startswith("norm"):
                    names |= {f"{path}{name}.{parameter}" for parameter, _ in child.named_parameters()}
    return names & {name for name, _ in module.named_parameters()}  # these name a shared parameter once
