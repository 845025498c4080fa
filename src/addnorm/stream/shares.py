"""Components of a stream: the steps between its adds, norms of sums of components, and each source's share of the stream.

    x = c_0 + c_1 + ... + c_n        sources: x_0, every sublayer's write, the biases of the norms on the stream

LayerNorm with its recorded denominator is linear in x except for its bias, so the sum is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import torch
from torch import Tensor

from addnorm.stream.dataflow.arithmetic import Term
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.equation_errors import get_tolerance
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.paths import Path, trace_multiples

BIASES = "norm biases"
Components = dict[str, Tensor]


def find_paths(chain: Chain, k: int) -> Iterator[Path]:
    """Yield the paths from add k to its first norm, from norm to norm, and from there to the next add."""
    value = chain.adds[k].out
    targets = [(norm.x, norm.y) for norm in chain.norms_out[k]]
    targets += [(add.x, add.x) for add in chain.adds[k + 1 : k + 2]]
    for target, end in targets:
        for path in trace_multiples(Term(target)):
            if path.source is value:
                yield path
                break
        else:
            raise NoPathError
        value = end


class NoPathError(Exception):
    """Error for a path between a stream's adds with a step other than a view, a factor or a norm."""


def find_step_obstacle(chain: Chain, kinds: Container[str]) -> str:
    """Return why components cannot be propagated from each add to the next one, or an empty string.

    Args:
        chain: the stream.
        kinds: the kinds of factors that the caller can apply to components.
    """
    for k in range(len(chain.adds)):
        where = f"between add {k + 1} and add {k + 2}" if k + 1 < len(chain.adds) else f"after add {k + 1}"
        if any(add.changes_tokens for add in chain.adds[k + 1 : k + 2]):
            return f"tokens join or leave the stream before add {k + 2}"
        if any(add.branch_input is not None for add in chain.adds[k + 1 : k + 2]):
            return f"add {k + 2} adds to a norm what was read before it"
        try:
            factors = [factor for path in find_paths(chain, k) for factor in path.factors]
        except NoPathError:
            return f"the stream is changed {where} by more than factors and norms"
        if any(factor.kind not in kinds for factor in factors):
            return f"the stream is multiplied or masked {where}"
    return ""


def find_tolerance(chain: Chain) -> float:
    """Return the tolerance of the coarsest dtype to which the model rounds a state, or a value between a write and its add.

    An add in float64 whose sum is cast back to float32 is exact only up to float32.
    """
    values = [*chain.states(), *(value for add in chain.adds for value in (add.x, add.out))]
    paths = [add.residual_path for add in chain.adds] + [sublayer.write_path for sublayer in chain.list_sublayers()]
    values += [op.outputs[0] for path in paths for op in path.ops]
    norms = [norm for sublayer in chain.list_sublayers() if (norm := sublayer.norm) is not None]
    norms += [norm for after in chain.norms_out for norm in after]
    return get_tolerance(*(value.tensor.dtype for value in values), *(norm.dtype for norm in norms))


def propagate_through(norm: Norm, parts: Components, denominator: Tensor | None = None) -> Components:
    """Return the components of Norm(x): each component, divided by the denominator of the whole x, and scaled.

    Args:
        norm: the norm.
        parts: the components of x.
        denominator: the denominator; None to compute it from the sum of the components.
    """
    total = sum_components(parts)
    denominator = norm.denominator(total) if denominator is None else denominator
    normed = {name: norm.linear(part, denominator) for name, part in parts.items()}
    shift = norm.shift(total.dtype)
    if isinstance(shift, Tensor):
        normed[BIASES] = normed.get(BIASES, torch.zeros_like(total)) + shift
    return {
        name: part.reshape(total.shape) for name, part in normed.items()
    }  # a weight may have more dimensions, (1, 1, d)


def sum_components(parts: Components) -> Tensor:
    """Return the sum of the components: the stream."""
    return torch.stack([*parts.values()]).sum(0) if len(parts) > 1 else next(iter(parts.values()))


def join_components(values: Sequence[Components], join: Callable[[Sequence[Tensor]], Tensor]) -> Components:
    """Return the components of several values, of which `join` makes one tensor. A component that a value lacks is zero there."""
    zeros = [torch.zeros_like(next(iter(parts.values()))) for parts in values]
    pairs = [*zip(values, zeros, strict=True)]
    names = dict.fromkeys(name for parts in values for name in parts)
    return {name: join([parts.get(name, zero) for parts, zero in pairs]) for name in names}


def source_shares(parts: Components, total: Tensor) -> dict[str, Tensor]:
    """Return the share of each source in each token, <c_s, x> / |x|^2; the shares of a token sum to 1.

    A single share of a source at a depth, as in `Decomposition.mean_shares` and in recordings, is always the mean of these over
    the tokens that the mask selects. (A ratio of means would give tokens with a larger norm more weight.)
    """
    size = total.square().sum(-1).clamp_min(torch.finfo(total.dtype).tiny)
    return {name: (part * total).sum(-1) / size for name, part in parts.items()}
