"""Components of a stream: its sum by source, propagated through adds and norms, and each source's share of it.

    x = c_0 + c_1 + ... + c_n        sources: x_0, every sublayer's write, the biases of the norms on the stream

LayerNorm with its recorded denominator is linear in x except for its bias, so the sum is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

import torch
from torch import Tensor

from addnorm.stream.dataflow.arithmetic import Term
from addnorm.stream.find.adds import Add
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.paths import Path, trace_multiples
from addnorm.stream.find.sublayers import Sublayer

BIASES = "norm biases"
Components = dict[str, Tensor]


def propagate(
    chain: Chain,
    names: dict[int, str],
    start: Tensor,
    write: Callable[[Sublayer], Tensor],
    scale_residual: Callable[[Add, Tensor], Tensor],
    scale_sum: Callable[[Path, Components], Components],
) -> Iterator[Components]:
    """Yield the components of each state of a stream, from x_0 to the end.

    Args:
        chain: the stream.
        names: ids of the sublayers, by `id(sublayer)`.
        start: x_0.
        write: returns the term that a sublayer adds, in the layout of the stream.
        scale_residual: applies an add's factor to a component of the stream: a * x.
        scale_sum: applies the views and factors of a path from a sum, or its norm, to the next norm or add.
    """
    parts: Components = {"x_0": start}
    yield dict(parts)
    for k, (add, sublayers, norms) in enumerate(zip(chain.adds, chain.sublayers, chain.norms_out, strict=True)):
        parts = {name: scale_residual(add, part) for name, part in parts.items()}
        for sublayer in sublayers:
            name = names.get(id(sublayer), BIASES)
            new = write(sublayer)
            parts[name] = parts[name] + new if name in parts else new
        paths = _find_paths(chain, k)
        for norm in norms:
            parts = propagate_through(norm, scale_sum(next(paths), parts))
        for path in paths:
            parts = scale_sum(path, parts)
        yield dict(parts)


def _find_paths(chain: Chain, k: int) -> Iterator[Path]:
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
    """Error for a step on a stream that is no view, factor or norm."""


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
            factors = [factor for path in _find_paths(chain, k) for factor in path.factors]
        except NoPathError:
            return f"the stream is changed {where} by more than factors and norms"
        if any(factor.kind not in kinds for factor in factors):
            return f"the stream is multiplied or masked {where}"
    return ""


def propagate_through(norm: Norm, parts: Components) -> Components:
    """Return the components of Norm(x): the norm with the denominator of the sum, applied to each."""
    total = sum_components(parts)
    denominator = norm.denominator(total)
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


def source_shares(parts: Components, total: Tensor) -> dict[str, Tensor]:
    """Return the share of each source in each token, <c_s, x> / |x|^2; the shares of a token sum to 1.

    The share of a source at a depth is the mean of these over the tokens that count, in `Decomposition.mean_shares`, in
    recordings, and wherever it is shown. (A ratio of means would count a token the more the longer it is.)
    """
    size = total.square().sum(-1).clamp_min(torch.finfo(total.dtype).tiny)
    return {name: (part * total).sum(-1) / size for name, part in parts.items()}
