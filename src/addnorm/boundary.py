"""The boundary between two sublayers of a model with n residual streams, as a function.

X' = A X + b w                    the write of the sublayer before
c', b', A' = gates(X')            the coefficients of the next sublayer
r = N(c' X')                      its read

`add_norm_streams` has many parameters: one for each tensor and each option of the formula, as in torch's functions.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from addnorm._util.arguments import check_choice
from addnorm._util.norms import Norm
from addnorm._util.torch_internals import in_transform, is_recording
from addnorm.ops import dispatch, dtensor
from addnorm.ops.options import NORMS
from addnorm.ops.streams import autograd, eager, formula, validation
from addnorm.ops.streams.kinds import GATE_KINDS
from addnorm.ops.streams.schema import reads
from addnorm.reference import compute_dtype

__all__ = ["StreamGates", "StreamStep", "add_norm_streams", "compute_gates"]

_op: Any = torch.ops.addnorm.add_norm_streams
_compiling = torch.compiler.is_compiling
GateKind = Literal["manifold", "independent", "gates", "hyper"]


class StreamGates(NamedTuple):
    r"""Formula and parameters by which the coefficients c, b and A are computed from the streams of each token.

        z = φ R(vec X)         R divides by the root mean square of all n d features
        "manifold"             c = σ(α_1 z_c + β_c) + ε    b = m σ(α_2 z_b + β_b)        A = Sinkhorn(α_3 Z_A + β_A)
        "independent"          c = σ(α_1 z_c + β_c) + ε    b = m σ(α_2 z_b + β_b) + ε
        "gates"                c = σ(α z_c + β_c) + ε
        "hyper"                c = β_c + α_1 tanh(z_c)     b = β_b + α_2 tanh(z_b)       A = β_A + α_1 tanh(Z_A)

    In "hyper" the logits of c_j, b_j and A_1j ... A_nj are φ N(X_j) + β', where N is a LayerNorm without parameters.

    Attributes:
        kind: "manifold" (mHC), "independent" (HY-V4), "gates" (the last read, before the head, of both) or "hyper"
            (hyper-connections).
        project: φ, `(logits, n * d_model)` with the rows for c, then b, then A row by row; "hyper": `(n + 2, d_model)`.
        scale: α, of shape `(3,)`, `(2,)`, `(1,)` or `(2,)` for the kinds in this order.
        base: β, `(logits,)`; "hyper": followed by the n + 2 numbers of β'.
        iterations: how often Sinkhorn normalizes columns and rows, 1 to 10000.
        gate_eps: ε, also added to the sums that Sinkhorn divides by.
        project_eps: added to the mean square, or to the variance.
        magnitude: m.

    Example:
        >>> from addnorm.boundary import compute_gates
        >>> n, d = 4, 8  # mHC
        >>> project, scale, base = torch.randn(n * (n + 2), n * d), torch.full((3,), 0.01), torch.zeros(n * (n + 2))
        >>> gates = addnorm.StreamGates("manifold", project, scale, base, iterations=20)
        >>> collapse, mix, inject = compute_gates(torch.randn(5, n, d), gates)
        >>> torch.testing.assert_close(mix.sum(-1), torch.ones(5, n), atol=1e-4, rtol=0)
    """

    kind: GateKind
    project: Tensor
    scale: Tensor
    base: Tensor
    iterations: int = 20
    gate_eps: float = 1e-6
    project_eps: float = 1e-6
    magnitude: float = 2.0


# The settings of a call without gates, to which the caller passes the coefficients.
NO_GATES: Any = StreamGates("given", None, None, None, 0, 0.0, 0.0, 0.0)  # type: ignore[arg-type]  # the schema allows it


class StreamStep(NamedTuple):
    """Result of `add_norm_streams`; a field is None if the call does not compute it.

    Attributes:
        streams: X', `(*, n, d_model)`.
        read: r, `(*, d_model)`.
        collapse, mix, inject: c', `(*, n)`; A', `(*, n, n)`; b', `(*, n)`.

    Example:
        >>> streams, write = torch.randn(5, 4, 8), torch.randn(5, 8)
        >>> step = addnorm.add_norm_streams(streams, write, inject=torch.ones(4), collapse=torch.full((4,), 0.25), norm="rms")
        >>> step.streams.shape, step.read.shape, step.mix
        (torch.Size([5, 4, 8]), torch.Size([5, 8]), None)
    """

    streams: Tensor
    read: Tensor | None
    collapse: Tensor | None
    mix: Tensor | None
    inject: Tensor | None


def add_norm_streams(
    streams: Tensor,
    branch: Tensor | None = None,
    *,
    mix: Tensor | None = None,
    inject: Tensor | None = None,
    collapse: Tensor | None = None,
    gates: StreamGates | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    norm: Norm | Literal["none"] = "layer",
    streams_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> StreamStep:
    r"""Return the updated streams and the next sublayer's input, for a model with n residual streams, in one call.

        X' = A X + b w                          the write of the sublayer before
        c', b', A' = gates(X')                  the coefficients of the next sublayer
        r = N(c' X')                            its read, normalized

    Each part is optional: without a branch nothing is written, without `gates` no coefficient is computed, and without
    `collapse` and `gates` nothing is read. With n = 1 and constant coefficients it computes what `add_layer_norm` does.

    Args:
        streams: X, `(*, n, d_model)`, of dtype float32, bfloat16, float16 or float64.
        branch: w, `(*, d_model)`, the output of the sublayer before; None: there is no write.
        mix: A, `(*, n, n)`, or `(n, n)` for all tokens; None: the identity.
        inject: b, `(*, n)`, or `(n,)` for all tokens; required with `branch`, and only then.
        collapse: c for this read, `(*, n)`, or `(n,)` for all tokens, or `(*, n, d_model)`, a gate for each feature. If `gates`
            is passed too, the read uses `collapse`, and the computed c' is returned for the next call (single-pass mHC).
        gates: formula and parameters of c', b' and A'; None: they are not computed.
        weight: γ of the norm, `(d_model,)`; None: ones.
        bias: β of the norm, `(d_model,)`; None: zeros.
        eps: added to the variance or mean square of the norm.
        norm: "layer", "rms", or "none" for a read without a norm.
        streams_dtype: dtype of X'; None: that of the streams.
        out_dtype: dtype of the read; None: that of the streams.

    Returns:
        A `StreamStep` with X', r, c', A' and b'; X' is `streams` itself without a branch.

    The arithmetic is in float32 (float64 for float64), also that of the coefficients, whatever autocast says. X' is rounded
    once, to its dtype, and all else is computed from the rounded X'; c' X' is not rounded before the norm. Every tensor has a
    gradient, to any order. The sums of parameters' gradients over the tokens do not depend on the number of threads.

    Raises:
        ValueError: shapes, devices or values do not fit together.
        TypeError: an argument is not a tensor, or its dtype is not supported.

    Source: hyper-connections, arXiv 2409.19606; mHC, arXiv 2512.24880; the code of transformers' DeepSeek V4 and HY-V4.

    Example:
        >>> X, w = torch.randn(2, 4, 8), torch.randn(2, 8)
        >>> step = addnorm.add_norm_streams(X, w, inject=torch.ones(4), collapse=torch.full((4,), 0.25))
        >>> torch.allclose(step.read, torch.nn.functional.layer_norm((X + w[:, None]).mean(1), (8,)), atol=1e-6)
        True
    """
    check_choice("norm", norm, NORMS)
    if gates is not None and not isinstance(gates, StreamGates):
        raise TypeError(f"gates is of type {type(gates).__name__}, expected addnorm.StreamGates.")
    if gates is not None and gates.kind not in GATE_KINDS:
        raise ValueError(f"gates.kind is {gates.kind!r}, expected 'manifold', 'independent', 'gates' or 'hyper'.")
    settings = gates or NO_GATES
    a = autograd.Inputs(
        streams, branch, mix, inject, collapse, settings.project, settings.scale, settings.base, weight, bias, eps, NORMS[norm],
        GATE_KINDS[settings.kind], *settings[4:], streams_dtype, out_dtype,
    )  # fmt: skip
    try:
        new, read, *computed, _, _ = _call(a)
    except dispatch.ERRORS:
        validation.check(a)  # raises if the arguments are invalid
        if not dtensor.register_rules():  # the first call with DTensors
            raise
        new, read, *computed, _, _ = _call(a)
    return StreamStep(
        streams if branch is None else new,
        read if reads(a) else None,
        *(t if t.numel() or t.dim() > 1 else None for t in computed),
    )


def _call(a: Any) -> Any:
    """Return the operator's outputs, by the cheapest way that keeps the gradients."""
    if torch.compiler.is_dynamo_compiling() or (_compiling() and not dispatch.exports_onnx()):
        return _op(*a)
    if in_transform() or _compiling():  # torch.onnx.export knows torch's operators only
        return eager.add_norm_streams(a)
    if not dispatch.requires_grad(*a):
        return autograd.without_gradient(*a)
    if is_recording():
        return _op(*a)  # a recorder of operators, such as torch.export, does not see an autograd node
    return autograd.apply(*a)


def compute_gates(streams: Tensor, gates: StreamGates) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the coefficients c, A and b that `add_norm_streams` computes from streams `(*, n, d_model)`.

    The computation is in torch's own operators. A or b is None if this kind of gates does not compute it.
    """
    a = gates._replace(kind=GATE_KINDS[gates.kind])  # type: ignore[arg-type]  # the number of the schema
    return formula.compute_gates(a, streams, compute_dtype(streams))[2]
