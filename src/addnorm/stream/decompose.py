"""`decompose`: the stream at any depth as the sum of one component for each source.

    x = c_0 + c_1 + ... + c_n        sources: x_0, every sublayer's write, the biases of the norms on the stream

Where the stream is a plain sum (pre-LN) the component of a sublayer is its write. Where norms are placed on the stream (post-LN,
DeepNorm) each write is propagated through the norms after it: LayerNorm with its recorded denominator is linear in x except for
its bias, so the sum is exact. Components that do not add up to the recorded stream raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from addnorm._util.arguments import check_choice
from addnorm._util.blocks import Block, Column, Table
from addnorm._util.numbers import format_count, format_number
from addnorm._util.render import Rendered
from addnorm.stream.dataflow.replay import relative_error, replay_op
from addnorm.stream.edits import is_edited
from addnorm.stream.find.adds import Add
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.equation_errors import compute_operand, get_tolerance
from addnorm.stream.find.inspection import Inspection, Stream
from addnorm.stream.find.paths import Path
from addnorm.stream.find.sublayers import Sublayer
from addnorm.stream.inspect import build_inspection, capture_flow, check_inputs, to_float64
from addnorm.stream.shares import BIASES, Components, find_step_obstacle, propagate, source_shares, sum_components
from addnorm.stream.tokens import OmittedError, TokenMask, Tokens


class Decomposition(Rendered):
    """Stream as the sum of its components, from `addnorm.decompose`. It prints as a table of the shares of all tokens.

    Attributes:
        stream: the inspected `Stream`.
        sources: "x_0", the ids of the sublayers in order of depth, and "norm biases" where norms on the stream have biases.
        depth: number of adds; depth 0 is x_0, depth k the stream after the k-th add and its norm.
        closures: for each depth, the relative error of the components' sum against the recorded stream.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        chain: Chain = stream.chain
        self._chain, tolerance = chain, _find_tolerance(chain)
        self._names = {id(site.sublayer): site.id for site in stream.sites}
        if reason := find_step_obstacle(chain, ("constant", "learned", "mask", "noise", "guard")):
            raise ValueError(f"{stream.name} cannot be decomposed: {reason}.")
        self._states = [state.tensor.detach().double() for state in chain.states()]
        self._layouts = [stream.layout.of(state) for state in chain.states()]
        self.depth = len(chain.adds)
        self.closures: list[float] = []
        if not self._states[0].numel():
            raise ValueError(f"{stream.name} cannot be decomposed: the inputs hold no token.")
        sources: dict[str, None] = {"x_0": None} | dict.fromkeys(site.id for site in stream.sites)
        for k, parts in enumerate(self._iter_components()):
            self.closures.append(relative_error(self.state(k), sum_components(parts)))
            sources |= dict.fromkeys(parts)
            if not self.closures[-1] <= tolerance:
                raise ValueError(
                    f"{stream.name} cannot be decomposed: at depth {k} the components add up to the stream with a relative "
                    f"error of {format_number(self.closures[-1], 2)}, tolerance "
                    f"{format_number(tolerance, 1)}: addnorm.inspect lists what is not understood."
                )
        self.sources = [*sources]

    @property
    def closure(self) -> float:
        """Largest relative error over all depths."""
        return max(self.closures)

    def components(self, depth: int = -1) -> Components:
        """Return the component of each source at a depth, `(*, d)` in float64; they sum to `state(depth)`.

        Args:
            depth: 0 is x_0, k the stream after the k-th add, -1 the end.

        Raises:
            IndexError: there is no such depth.
        """
        return next(islice(self._iter_components(), self._check_depth(depth), None))

    def shares(self, depth: int = -1) -> dict[str, Tensor]:
        """Return the share of each source in each token, <c_s, x> / |x|^2, `(*)`; the shares of a token sum to 1."""
        parts = self.components(depth)
        return source_shares(parts, sum_components(parts))

    def mean_shares(self, depth: int = -1, tokens: Tensor | None = None) -> dict[str, float]:
        """Return the share of each source at a depth: <c, x> / |x|^2 of its component c, averaged over tokens. They sum to 1.

        Args:
            depth: 0 is x_0, k the stream after the k-th add, -1 the end.
            tokens: mask of the tokens that count, `(batch, tokens)`, such as the attention mask; all by default. With the same
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
        shares = source_shares(parts, sum_components(parts))
        return {name: float(share.reshape(-1)[counted].mean()) for name, share in shares.items()}

    def _flatten_mask(self, depth: int, tokens: Tensor | None) -> Tensor | slice:
        """Return which of a state's tokens count, in their order."""
        if tokens is None:
            return slice(None)
        try:
            arranged = Tokens.arrange(self._states[depth], self._layouts[depth], TokenMask(tokens))
        except OmittedError as error:
            raise ValueError(f"the mask does not fit the stream at depth {depth}: {error}") from None
        assert arranged.mask is not None
        return arranged.mask

    def state(self, depth: int = -1) -> Tensor:
        """Return the recorded stream at a depth, `(*, d)` in float64."""
        index = self._check_depth(depth)
        return self._features_last(index, self._states[index])

    def lens(
        self, head: Callable[[Tensor], Tensor] | None = None, *, norm: Literal["recompute", "frozen"]
    ) -> list[Tensor]:
        """Return the model's head applied to the stream at every depth: head(N_final(x)).

        Args:
            head: function of the normed stream in the model's dtype, such as the projection to logits. By default the normed
                stream is returned.
            norm: "recompute" normalizes each depth by its own statistics; "frozen" by the denominators of the last depth, with
                which contributions add up. The results differ, so there is no default.
        """
        if norm not in ("recompute", "frozen"):
            raise ValueError(
                f"norm is {norm!r}, expected 'recompute' (statistics of each depth) or 'frozen' (those of the last depth)."
            )
        final = self._chain.final_norms[-1] if self._chain.final_norms else None
        outputs = []
        with torch.no_grad():
            for depth in range(self.depth + 1):
                x = self.state(depth)
                if final is not None:
                    denominator = final.denominator(self.state() if norm == "frozen" else x)
                    x = final.linear(x, denominator) + final.shift(x.dtype)
                x = x.to(self._chain.adds[0].x.tensor.dtype)
                outputs.append(x if head is None else head(x))
        return outputs

    def _features_last(self, depth: int, t: Tensor) -> Tensor:
        t, layout = t.reshape(self._states[depth].shape), self._layouts[depth]  # its tokens may be flattened
        return t if layout is None else layout.move_features_last(t)

    def _check_depth(self, depth: int) -> int:
        if not -self.depth - 1 <= depth <= self.depth:
            raise IndexError(f"depth is {depth}, expected a number from 0 (x_0) to {self.depth} (the end), or -1.")
        return depth % (self.depth + 1)

    def _iter_components(self) -> Iterator[Components]:
        """Yield the components at each depth, with their features last."""
        shapes = {id(add): add.out.shape for add in self._chain.adds}

        def write(sublayer: Sublayer) -> Tensor:
            raw = sublayer.raw.tensor.detach().double()
            if sublayer.norm is not None:
                raw = sublayer.norm(raw).reshape(sublayer.write_path.source.shape)
            return compute_operand(sublayer.write_path, raw).expand(shapes[id(sublayer.add)])

        def scale_residual(add: Add, part: Tensor) -> Tensor:
            return compute_operand(add.residual_path, part.reshape(add.x.shape)).reshape(add.out.shape)

        def scale_sum(path: Path, parts: Components) -> Components:
            parts = {name: part.reshape(path.source.shape) for name, part in parts.items()}
            for op in reversed(path.ops):
                total = sum_components(parts)
                # A clamp of larger numbers changes nothing.
                if "guard" not in op.traits or not torch.equal(replay_op(op, total), total):
                    parts = {name: replay_op(op, part) for name, part in parts.items()}
            return parts

        with torch.no_grad():
            steps = propagate(self._chain, self._names, self._states[0], write, scale_residual, scale_sum)
            for k, parts in enumerate(steps):
                yield {name: self._features_last(k, part) for name, part in parts.items()}

    def __repr__(self) -> str:
        size = (
            f"{len(self.sources)} sources, {format_count(self.depth, 'add')}, closure {format_number(self.closure, 2)}"
        )
        return f"<Decomposition of {self.stream.name}: {size}>"

    def _blocks(self) -> Iterator[Block]:
        yield tabulate_shares(repr(self)[1:-1], self.mean_shares())


def tabulate_shares(title: str, shares: dict[str, float]) -> Table:
    """Return a table of the share of each source, by depth, the biases of the norms last."""
    sources = sorted(shares, key=lambda source: source == BIASES)
    rows = [[source, f"{shares[source]:.2%}"] for source in sources]
    return Table([Column("source", fold=True), Column("share", "right")], rows, title=title)


def decompose(
    model: nn.Module, *args: Any, float64: bool = False, stream: str | None = None, **kwargs: Any
) -> Decomposition:
    r"""Decompose the stream of a model into one component for x_0 and one for each sublayer, at any depth.

    In a plain sum x_L = x_0 + w_1 + ... + w_S the components are the writes. A norm on the stream maps each component to
    (c - mean(c)) / sqrt(var + eps) * weight with its recorded denominator; the biases of the norms are a separate source.

    Args:
        model: the model, as for `addnorm.inspect`.
        args: positional arguments of the model's forward.
        float64: run a copy of the model in float64: the components then add up to 1e-10 instead of 1e-5.
        stream: name of the stream where the model has several, such as "decoder".
        kwargs: keyword arguments of the model's forward.

    Returns:
        A `Decomposition`.

    Raises:
        ValueError: there is no such stream, the components do not add up to it, or `addnorm.inspect` refuses the model.
        RuntimeError: it is called inside `addnorm.ablate`.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> parts = addnorm.decompose(torch.nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16))
        >>> parts.sources[:3]
        ['x_0', 'layers.0.self_attn', 'layers.0']
        >>> total = sum(parts.components().values())
        >>> bool((total - parts.state()).abs().max() < 1e-5), round(float(sum(parts.shares().values()).mean()), 6)
        (True, 1.0)

    Source: Mickus, Paperno, Constant, "How to dissect a Muppet" (2022), for BERT; here for every norm placement.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is {type(model).__name__}, expected a torch.nn.Module: addnorm.decompose(model, *args)."
        )
    check_inputs(model, args, kwargs, "addnorm.decompose(model, *args, **kwargs)")
    if is_edited(model):
        raise RuntimeError(
            "decompose is called inside addnorm.ablate or scale_write, expected outside: it decomposes the whole model."
        )
    eager = getattr(model, "_orig_mod", model)
    if float64:
        eager, args, kwargs = to_float64(eager, args, kwargs)
    with torch.no_grad():
        inspection = build_inspection(eager, capture_flow(eager, args, kwargs), target=model)
    return Decomposition(_select_stream(inspection, stream))


def _find_tolerance(chain: Chain) -> float:
    """Return the tolerance of the coarsest dtype to which the model rounds a state, or a value between a write and its add.

    An add in float64 whose sum is cast back to float32 is exact only up to float32.
    """
    values = [*chain.states(), *(value for add in chain.adds for value in (add.x, add.out))]
    paths = [add.residual_path for add in chain.adds] + [sublayer.write_path for sublayer in chain.list_sublayers()]
    values += [op.outputs[0] for path in paths for op in path.ops]
    norms = [norm for sublayer in chain.list_sublayers() if (norm := sublayer.norm) is not None]
    norms += [norm for after in chain.norms_out for norm in after]
    return get_tolerance(*(value.tensor.dtype for value in values), *(norm.dtype for norm in norms))


def _select_stream(inspection: Inspection, name: str | None) -> Stream:
    names = [stream.name for stream in inspection.streams]
    if not names:
        raise ValueError(f"{inspection.model} has no residual stream to decompose: {inspection.unknown[0].reason}.")
    if name is None and len(names) > 1:
        raise ValueError(f"stream is None, expected one of {', '.join(map(repr, names))}: the model has several.")
    if name is not None:
        check_choice("stream", name, names)
    return inspection.streams[0 if name is None else names.index(name)]
