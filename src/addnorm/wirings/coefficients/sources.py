"""Reads of earlier states: weights of the sources, which are a tuple of n tensors `(*, d_model)`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from addnorm._util.arguments import check_bool, check_not_negative
from addnorm.ops import attend
from addnorm.ops.dtensor import linear
from addnorm.wirings.coefficients.base import (
    CoefficientModule,
    Coefficients,
    Notation,
    is_eager,
    rms_scale,
    widen,
    widen_dtype,
)
from addnorm.wirings.factors import Place


class SourceAttention(CoefficientModule):
    """Attention over the sources, with a learned query: attention residuals.

        p = softmax_i(q · (γ ⊙ R(X_i)) s)      r = Σ_i p_i X_i

    R divides by the root mean square of a source. There is a query for each read. q = 0 at first, so that all sources have the
    weight 1/n. This is pre-LN, since the norm of the read removes the factor 1/n.

    Args:
        weighted: whether the keys have the weight γ, 1 at first.
        normed_values: whether the read is a sum of R(X_i) instead of X_i; then C has the factor of R too.
        scaled: whether s is 1/sqrt(d_model) instead of 1.
        eps: epsilon of R.

    Source: arXiv 2603.15031; `weighted=False, normed_values=True, scaled=True` is Inkling 2's form.
    """

    computes = ("collapse",)
    stacked = False
    counterparts: ClassVar = {"eps": "norm.eps", "query": "query"}
    starts: ClassVar = {"query": 0.0, "weight": 1.0}

    @classmethod
    def notate(cls, **options: Any) -> Notation:
        """Return the letters and formulas of the attention, with the keys and values that the options choose."""
        is_weighted, scale = options.get("weighted", True), " / √d" * options.get("scaled", False)
        score = f"q{{_m}} · {'(γ ⊙ R(x_i))' if is_weighted else 'R(x_i)'}{scale}"
        value = "R({x})" if options.get("normed_values", False) else "{x}"
        return Notation(
            "p", terms={"collapse": f"Σ_i p_{{m}}i {value}"}, formulas=(f"p_{{m}}i = softmax_i({score})",),
            learned="q, γ" if is_weighted else "q", start="q starts at 0, so that all sources have the same weight.",
        )  # fmt: skip

    def __init__(
        self, d_model: int, n: int, reads: int, place: Place, *, weighted: bool = True, normed_values: bool = False,
        scaled: bool = False, eps: float = 1e-6, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__(d_model, n, reads, place)
        for name, value in (("weighted", weighted), ("normed_values", normed_values), ("scaled", scaled)):
            check_bool(name, value)
        self.weighted, self.normed_values, self.scaled = weighted, normed_values, scaled
        self.eps = check_not_negative("eps", eps)
        self.query = self.parameter(reads, d_model, **factory)
        self.weight = self.parameter(d_model, **factory) if weighted else None
        self.reset_parameters()

    def compute(self, streams: tuple[Tensor, ...]) -> Coefficients:
        """Return C: for each read a tuple of n entries `(*, 1)`."""
        scores, factors = attend.compute_scores(streams, *self._parameters_for(streams[0]), self.eps)
        weights = attend.compute_weights(scores, factors, self.normed_values)
        return Coefficients(tuple(tuple(p.unsqueeze(-1) for p in row.unbind(-1)) for row in weights.unbind(-2)))

    def read(self, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Return C X for each read, computed by one operator, or None if only the formula can compute it."""
        is_operator = is_eager(*streams) or attend.is_in_graph(streams)
        if not is_operator or streams[0].is_meta:
            return None
        return attend.read(streams, *self._parameters_for(streams[0]), self.eps, self.normed_values)

    def _parameters_for(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return q times s and the keys' weight, in the dtype of the coefficients."""
        dtype = widen_dtype(like.dtype)
        query, weight = self.query.to(dtype), self.weight
        return query * self.d_model**-0.5 if self.scaled else query, None if weight is None else weight.to(dtype)

    def load_transformers(self, source: Any) -> None:
        """Copy the query of an `Inkling2BlockAttentionResidual`."""
        self.check_settings(weighted=False, normed_values=True, scaled=True)
        super().load_transformers(source)


class DynamicSources(CoefficientModule):
    """Weights of the sources, computed from the newest source: a row for each read, and one for the next state.

        w = GELU(R(X_n) W_1) W_2 + w_0

    There is no softmax. At first W_2 = 0 and w_0 reads the newest source: pre-LN.

    Args:
        residual: whether a row of A is computed as well: the next state, Σ_j w_j X_j + write, is appended to the sources.

    Source: Xiao et al. 2025 (MUDDFormer), arXiv 2502.12170. Its PyTorch port draws w_0 from a normal distribution.
    """

    computes = ("collapse", "mix")
    stacked = False
    appends = True
    decays = ("up", "down")

    def __init__(
        self,
        d_model: int,
        n: int,
        reads: int,
        place: Place,
        *,
        residual: bool = True,
        eps: float = 1e-6,
        **factory: Any,
    ) -> None:
        super().__init__(d_model, n, reads, place)
        check_bool("residual", residual)
        self.residual, self.rows, self.eps = residual, reads + residual, check_not_negative("eps", eps)
        self.up = self.parameter(self.rows * n, d_model, **factory)
        self.down = self.parameter(self.rows * n, self.rows * n, **factory)
        self.static = self.parameter(self.rows, n, **factory)
        self.reset_parameters()

    @classmethod
    def find_computed(cls, *, residual: bool = True, **options: Any) -> tuple[str, ...]:
        """Return which coefficients are computed: a row of A only with `residual`."""
        return cls.computes if residual else ("collapse",)

    @classmethod
    def notate(cls, **options: Any) -> Notation:
        """Return the letters and formulas of the weights; with `residual=False` without those of the next state."""
        computed = "(w, v)" if options.get("residual", True) else "w"
        return Notation(
            "w", "v", terms={"collapse": "Σ_i w_{m}i {x}", "mix": "Σ_i v_i {x}"},
            formulas=(f"{computed} = GELU(R(x_n) W_1) W_2 + B",), learned="W_1, W_2, B",
            start="W_2 starts at 0 and B reads the newest state alone.",
        )  # fmt: skip

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the parameters so that every read is the newest source alone."""
        nn.init.xavier_normal_(self.up)
        nn.init.zeros_(self.down)
        nn.init.zeros_(self.static)
        self.static[:, -1] = 1.0

    def compute(self, streams: tuple[Tensor, ...]) -> Coefficients:
        """Return C, a tuple of n entries `(*, 1)` for each read, and A if the residual is computed."""
        newest = widen(streams[-1])
        hidden = F.gelu(linear(newest * rms_scale(newest, self.eps), self.up.to(newest.dtype)))
        weights = linear(hidden, self.down.to(newest.dtype)).unflatten(-1, (self.rows, self.n)) + self.static
        rows = [tuple(w.unsqueeze(-1) for w in row.unbind(-1)) for row in weights.unbind(-2)]
        if not self.residual:
            return Coefficients(tuple(rows))
        kept = tuple(tuple(float(j == k) for j in range(self.n)) for k in range(self.n))
        return Coefficients(tuple(rows[:-1]), (*kept, rows[-1]))
