"""A stream as the sum of one component for each source: shares of the sum, and attribution of logits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch import Tensor, nn

from addnorm._util.blocks import Block, Column, Table
from addnorm._util.numbers import format_number
from addnorm._util.render import Rendered
from addnorm.stream.dataflow.replay import relative_error
from addnorm.stream.shares import BIASES, Components, source_shares, sum_components

HEAD_BIAS = "head bias"


class Decomposition(Rendered):
    """Stream as the sum of its components, from `addnorm.decompose`. It prints as a table of the shares of all tokens.

    Attributes:
        name: the name of the stream.
        sources: "x_0", the ids of the sublayers in order of depth, "joined tokens" where learned tokens join several streams on
            the way, and "norm biases" where norms on the stream have biases.
        depth: the last depth. Depth 0 is x_0, depth k the stream after k steps.
        steps: what is between x_0 and the end: "6 adds".
        closures: for each depth, the relative error of the components' sum against the recorded stream.
    """

    def __init__(self, name: str, steps: str, depth: int, sources: list[str], tolerance: float) -> None:
        self.name, self.steps, self.depth = name, steps, depth
        self.closures: list[float] = []
        if not self.state(0).numel():
            raise ValueError(f"{name} cannot be decomposed: the inputs hold no token.")
        found = dict.fromkeys(["x_0", *sources])
        for k, parts in enumerate(self._iter_components()):
            self.closures.append(self._check_sum(f"at depth {k}", parts, self.state(k), tolerance))
            found |= dict.fromkeys(parts)
        self.sources, self._tolerance = [*found], tolerance

    def _check_sum(self, place: str, parts: Components, expected: Tensor, tolerance: float) -> float:
        error = relative_error(expected, sum_components(parts))
        if not error <= tolerance:
            raise ValueError(
                f"{self.name} cannot be decomposed: {place} the components add up to the stream with a relative "
                f"error of {format_number(error, 2)}, tolerance "
                f"{format_number(tolerance, 1)}: addnorm.inspect lists what is not understood."
            )
        return error

    @property
    def closure(self) -> float:
        """Largest relative error over all depths."""
        return max(self.closures)

    def components(self, depth: int = -1) -> Components:
        """Return the component of each source at a depth, `(*, d)` in float64; they sum to `state(depth)`.

        Args:
            depth: 0 is x_0, k the stream after k steps, -1 the end.

        Raises:
            IndexError: there is no such depth.
        """
        return next(islice(self._iter_components(), self._check_depth(depth), None))

    def state(self, depth: int = -1) -> Tensor:
        """Return the recorded stream at a depth, `(*, d)` in float64."""
        raise NotImplementedError

    def normed_components(self) -> Components:
        """Return the component of each source after the final norm, whose statistics are frozen; they sum to its output.

        Without a final norm these are the components at the end.
        """
        parts, expected = self._normalize()
        if expected is not None:
            self._check_sum("after the final norm", parts, expected, self._tolerance)
        return parts

    def attribute_logits(self, head: nn.Linear | Tensor, token: int | Tensor, other: int | Tensor) -> Components:
        """Return how much each source adds to the difference of two tokens' logits, `(*)` in float64.

        The sum is logit(token) - logit(other) of the head at every position, before any softcap or factor of the logits.

        Args:
            head: the projection of the normed stream to logits, or its weight `(vocabulary, d)`. Its bias is one more source.
            token, other: ids of the tokens: two numbers, or one for each position, `(*)`.

        Raises:
            ValueError: the head takes another number of features, or the final norm does not read the end of the stream.
        """
        parts = self.normed_components()
        weight = (head.weight if isinstance(head, nn.Linear) else head).detach().double()
        width = sum_components(parts).shape[-1]
        if weight.dim() != 2 or weight.shape[1] != width:
            raise ValueError(f"head has the weight {tuple(weight.shape)}, expected (vocabulary, {width}).")
        result = {name: (part * (weight[token] - weight[other])).sum(-1) for name, part in parts.items()}
        if isinstance(head, nn.Linear) and head.bias is not None:
            bias = head.bias.detach().double()
            result[HEAD_BIAS] = (bias[token] - bias[other]).expand_as(result["x_0"])
        return result

    def shares(self, depth: int = -1) -> dict[str, Tensor]:
        """Return the share of each source in each token, <c_s, x> / |x|^2, `(*)`; the shares of a token sum to 1."""
        return self._measure_shares(self._check_depth(depth), self.components(depth))

    def mean_shares(self, depth: int = -1, tokens: Tensor | None = None) -> dict[str, float]:
        """Return the share of each source at a depth: <c, x> / |x|^2 of its component c, averaged over tokens. They sum to 1.

        Args:
            depth: 0 is x_0, k the stream after k steps, -1 the end.
            tokens: mask of the tokens to average, `(batch, tokens)`, such as the attention mask; all by default. With the same
                mask, `addnorm.record` gives the same shares.

        Raises:
            IndexError: there is no such depth.
            ValueError: the mask has another shape.
        """
        return self._average_shares(self._check_depth(depth), self.components(depth), tokens)

    def memory_map(self, tokens: Tensor | None = None) -> tuple[list[str], list[list[float]]]:
        """Return the sources, and for each depth their shares as in `mean_shares`; each row sums to 1."""
        rows = []
        for k, parts in enumerate(self._iter_components()):
            shares = self._average_shares(k, parts, tokens)
            rows.append([shares.get(source, 0.0) for source in self.sources])
        return self.sources, rows

    def _average_shares(self, depth: int, parts: Components, tokens: Tensor | None) -> dict[str, float]:
        counted = self._flatten_mask(depth, tokens)
        shares = self._measure_shares(depth, parts)
        return {name: float(share.reshape(-1)[counted].mean()) for name, share in shares.items()}

    def _measure_shares(self, depth: int, parts: Components) -> dict[str, Tensor]:
        return source_shares(parts, sum_components(parts))

    def _check_depth(self, depth: int) -> int:
        if not -self.depth - 1 <= depth <= self.depth:
            raise IndexError(f"depth is {depth}, expected a number from 0 (x_0) to {self.depth} (the end), or -1.")
        return depth % (self.depth + 1)

    def _flatten_mask(self, depth: int, tokens: Tensor | None) -> Tensor | slice:
        """Return the mask `tokens` for the tokens of a state in their own order; `slice(None)` for all tokens."""
        raise NotImplementedError

    def _iter_components(self) -> Iterator[Components]:
        """Yield the components at each depth, with their features last."""
        raise NotImplementedError

    def _normalize(self) -> tuple[Components, Tensor | None]:
        """Return the components after the final norm, and its recorded output, which is None if it cannot be compared."""
        raise NotImplementedError

    def __repr__(self) -> str:
        size = f"{len(self.sources)} sources, {self.steps}, closure {format_number(self.closure, 2)}"
        return f"<Decomposition of {self.name}: {size}>"

    def _blocks(self) -> Iterator[Block]:
        yield tabulate_shares(repr(self)[1:-1], self.mean_shares())


def tabulate_shares(title: str, shares: dict[str, float]) -> Table:
    """Return a table of the share of each source, by depth, the biases of the norms last."""
    sources = sorted(shares, key=lambda source: source == BIASES)
    rows = [[source, f"{shares[source]:.2%}"] for source in sources]
    return Table([Column("source", fold=True), Column("share", "right")], rows, title=title)
