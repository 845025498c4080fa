"""Hyper-connections and related wirings: coefficients of n streams in one tensor `(*, n, d_model)`."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from addnorm._util.arguments import check_bool, check_float, check_int, check_not_negative
from addnorm.boundary import GateKind, StreamGates
from addnorm.ops.streams.kinds import GATE_KINDS, sizes_of
from addnorm.wirings.coefficients.base import CoefficientModule, Coefficients, Notation
from addnorm.wirings.factors import Place


class HyperConnection(CoefficientModule):
    """Coefficients that are learned, plus in the dynamic form a bounded function of each normalized stream.

        c_j  = c0_j + s_A tanh(N(X_j) w_c)       A_kj = A0_kj + s_A tanh(N(X_j) W_A)_k       b_k = b0_k + s_b tanh(N(X_k) w_b)

    N is a LayerNorm. At first W = 0, so the coefficients are constant: c reads stream k mod n in sublayer k, A is the identity
    and b = 1. With equal streams that is pre-LN. s starts at 0.01.

    Args:
        dynamic: whether the coefficients depend on the streams.
        eps: epsilon of the LayerNorm.

    Source: Zhu et al. 2024, arXiv 2409.19606, equations 1, 2 and 10 to 14, and the code in its appendix.
    """

    computes = ("collapse", "mix", "inject")
    decays = ("project_collapse", "project_mix", "project_inject")
    starts: ClassVar = {
        **dict.fromkeys(("collapse", "norm_bias", *decays), 0.0),
        **dict.fromkeys(("inject", "norm_weight"), 1.0),
        **dict.fromkeys(("scale_mix", "scale_inject"), 0.01),
    }

    def __init__(
        self, d_model: int, n: int, reads: int, place: Place, *, dynamic: bool = True, eps: float = 1e-5, **factory: Any
    ) -> None:
        super().__init__(d_model, n, reads, place)
        check_bool("dynamic", dynamic)
        self.dynamic, self.eps = dynamic, check_not_negative("eps", eps)

        def make(*shape: int) -> nn.Parameter:
            return self.parameter(*shape, **factory)

        self.collapse, self.mix, self.inject = make(n), make(n, n), make(n)
        if dynamic:
            self.norm_weight, self.norm_bias = make(d_model), make(d_model)
            self.project_collapse, self.project_mix, self.project_inject = (
                make(d_model),
                make(n, d_model),
                make(d_model),
            )
            self.scale_mix, self.scale_inject = make(1), make(1)  # not 0-d, which fully_shard refuses
        self.reset_parameters()

    @classmethod
    def notate(cls, **options: Any) -> Notation:
        """Return the letters and formulas of the coefficients, in the static or the dynamic form."""
        start = "In sublayer k, c reads stream k mod n alone, A is the identity and b = 1"
        if not options.get("dynamic", True):
            return Notation(learned="c, A, b", start=f"{start}.")
        return Notation(
            formulas=("c = c_0 + s tanh(N(X) w_c)", "A = A_0 + s tanh(N(X) W_A)ᵀ", "b = b_0 + t tanh(N(X) w_b)"),
            learned="c_0, A_0, b_0, w_c, W_A, w_b, s, t",
            start=f"{start}, since w_c, W_A and w_b start at 0; s and t start at 0.01.",
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the parameters so that the coefficients are those of pre-LN."""
        super().reset_parameters()
        self.collapse[self.place.position % self.n] = 1.0
        nn.init.eye_(self.mix)

    @property
    def is_constant(self) -> bool:
        """Whether the coefficients are the same for all tokens, as in the static form."""
        return not self.dynamic

    def gates(self) -> StreamGates | None:
        """Return the gates of the dynamic form, with the norm's parameters merged in, or None in the static form."""
        if not self.dynamic:
            return None
        rows = torch.cat([self.project_collapse[None], self.project_inject[None], self.project_mix])
        constants = self.collapse, self.inject, self.mix.flatten(), rows @ self.norm_bias
        scale = torch.cat([self.scale_mix, self.scale_inject])
        return StreamGates("hyper", rows * self.norm_weight, scale, torch.cat(constants), project_eps=self.eps)

    def compute(self, streams: Tensor) -> Coefficients:
        """Return C `(*, n)`, A `(*, n, n)` and B `(*, n)`. In the static form they have no leading dimensions."""
        return super().compute(streams) if self.dynamic else Coefficients(self.collapse, self.mix, self.inject)


# Names of constants and parameters here, and their names in the hyper-connections of transformers.
_HC = {
    "n": "hc_mult", "eps": "hc_eps", "norm_eps": "input_norm.eps", "project": "fn", "bias": "base", "scale": "scale",
}  # fmt: skip


class _Projected(CoefficientModule):
    """Base of coefficients that are functions of φ R(vec X), where R divides by the root mean square of all n d features."""

    decays = ("project",)
    starts: ClassVar = {"project": 0.0, "bias": 0.0, "scale": 0.01}
    kind: ClassVar[GateKind]  # of the gates
    iterations: int = 0
    magnitude: float = 2.0

    def __init__(
        self,
        d_model: int,
        n: int,
        reads: int,
        place: Place,
        *,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        **factory: Any,
    ) -> None:
        super().__init__(d_model, n, reads, place)
        self.eps, self.norm_eps = check_not_negative("eps", eps), check_not_negative("norm_eps", norm_eps)
        sizes = sizes_of(GATE_KINDS[self.kind], n)
        self.project = self.parameter(sizes.logits, n * d_model, **factory)
        self.bias, self.scale = self.parameter(sizes.base, **factory), self.parameter(sizes.scales, **factory)
        self.reset_parameters()

    def gates(self) -> StreamGates:
        """Return the parameters and constants of the gates."""
        return StreamGates(
            self.kind, self.project, self.scale, self.bias, self.iterations, self.eps, self.norm_eps, magnitude=self.magnitude
        )  # fmt: skip


class ManifoldConnection(_Projected):
    """Coefficients of manifold-constrained hyper-connections: gates, and a mixing matrix that is nearly doubly stochastic.

        z = φ R(vec X)      c = σ(α_1 z_c + β_c) + ε      b = 2 σ(α_2 z_b + β_b)      A = SK(α_3 Z_A + β_A)

    SK divides exp(Z) by its column sums and then by its row sums, and repeats both: the rows of A sum to 1, its columns nearly.
    The paper states α = 0.01 at first. φ and β are not published; they start as in PaddleFleet: φ = 0, β_b = 0, β_A = 6 I - 3,
    and β_c = -3 but +3 for stream k mod n in sublayer k. Then c and A are near those of hyper-connections.

    Args:
        iterations: how often rows and columns are normalized.
        eps: ε, added to c, to the entries after SK's first division, and to each later sum that it divides by.
        norm_eps: epsilon of R.

    Source: arXiv 2512.24880, equations 7 to 9; the code of DeepSeek V4, which is transposed: `load_transformers`.
    """

    computes = ("collapse", "mix", "inject")
    kind = "manifold"
    counterparts: ClassVar = _HC | {"iterations": "hc_sinkhorn_iters"}
    notation = Notation(
        formulas=(
            "(z_c, z_b, Z_A) = φ R(vec X)", "c = σ(α_1 z_c + β_c) + ε", "b = 2 σ(α_2 z_b + β_b)", "A = SK(α_3 Z_A + β_A)",
        ),
        learned="φ, α, β",
        start="φ starts at 0 and α at 0.01. In sublayer k, c is 0.953 for stream k mod n and 0.047 for the others, b is 1, and "
        "A is nearly the identity, by the values of β.",
    )  # fmt: skip

    def __init__(
        self, d_model: int, n: int, reads: int, place: Place, *, iterations: int = 20, eps: float = 1e-6,
        norm_eps: float = 1e-6, **factory: Any,
    ) -> None:  # fmt: skip
        check_int("iterations", iterations, 1)
        super().__init__(d_model, n, reads, place, eps=eps, norm_eps=norm_eps, **factory)
        self.iterations = iterations

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the parameters to PaddleFleet's initial values."""
        super().reset_parameters()
        n = self.n
        self.bias[:n] = -3.0
        self.bias[self.place.position % n] = 3.0
        self.bias[2 * n :] = (6.0 * torch.eye(n, device=self.bias.device) - 3.0).flatten()

    @torch.no_grad()
    def load_transformers(self, source: Any) -> None:
        """Copy the weights of a `DeepseekV4HyperConnection` or `Glm5NextHyperConnection`, and transpose its A to our order."""
        super().load_transformers(source)
        self.transpose_mix()

    @torch.no_grad()
    def transpose_mix(self) -> None:
        """Transpose Z_A: exchange the rows of φ and β that belong to entries (k, j) and (j, k) of A."""
        n = self.n
        order = [*range(2 * n), *(2 * n + j * n + k for k in range(n) for j in range(n))]
        for own in (self.project, self.bias):
            own.copy_(own[order])


class IndependentConnection(_Projected):
    """Coefficients of hyper-connections whose streams do not mix: gates for the read and for the write.

        z = φ R(vec X)      c = σ(α_1 z_c + β_c) + ε      b = m σ(α_2 z_b + β_b) + ε

    At first α = 0.01, φ is normal with standard deviation 0.006, β_c = -ln(n - 1), so that c is nearly 1/n, and β_b = 0.

    Args:
        magnitude: m, above 0.
        eps: ε.
        norm_eps: epsilon of R.

    Source: transformers' HY-V4.
    """

    computes = ("collapse", "inject")
    kind = "independent"
    counterparts: ClassVar = _HC | {"magnitude": "hc_post_magnitude"}  # of an `HYV4HyperConnection`

    @classmethod
    def notate(cls, **options: Any) -> Notation:
        """Return the letters and formulas of the coefficients, with the value of `magnitude`."""
        return Notation(
            formulas=(
                "(z_c, z_b) = φ R(vec X)", "c = σ(α_1 z_c + β_c) + ε",
                f"b = {options.get('magnitude', 2.0):g} σ(α_2 z_b + β_b) + ε",
            ),
            learned="φ, α, β",
            start="φ is drawn with standard deviation 0.006 and α starts at 0.01. So c is nearly 1/n, by the value of β_c, and b "
            f"is nearly {options.get('magnitude', 2.0) / 2:g}.",
        )  # fmt: skip

    def __init__(
        self, d_model: int, n: int, reads: int, place: Place, *, magnitude: float = 2.0, eps: float = 1e-6,
        norm_eps: float = 1e-6, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__(d_model, n, reads, place, eps=eps, norm_eps=norm_eps, **factory)
        self.magnitude = check_float("magnitude", magnitude)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the parameters so that c is nearly 1/n and b nearly m / 2. φ is drawn at random."""
        super().reset_parameters()
        nn.init.normal_(self.project, std=0.006)
        self.bias[: self.n] = mean_logit(self.n)


class SigmoidRead(_Projected):
    """A gated sum of n streams, the head of DeepSeek V4 and HY-V4: c = σ(α φ R(vec X) + β) + ε.

    φ = 0 and α = 0.01 at first, and β = -ln(n - 1), so that the read is the mean.

    Args:
        eps: ε.
        norm_eps: epsilon of R.
    """

    computes = ("collapse",)
    kind = "gates"
    counterparts: ClassVar = _HC | {
        "eps": "eps",
        "project": "hc_fn",
        "bias": "hc_base",
        "scale": "hc_scale",
    }  # of a head
    notation = Notation(
        "h", formulas=("h = σ(α_h φ_h R(vec X) + β_h) + ε",), learned="φ_h, α_h, β_h",
        start="φ_h starts at 0 and h at 1/n, by the value of β_h.",
    )  # fmt: skip

    def reset_parameters(self) -> None:
        """Set the parameters so that the read is the mean of the streams."""
        super().reset_parameters()
        nn.init.constant_(self.bias, mean_logit(self.n))


def mean_logit(n: int) -> float:
    """Return the logit of 1/n. For one stream it would be infinite: return the logit of 0.999."""
    return -math.log(n - 1) if n > 1 else math.log(999.0)
