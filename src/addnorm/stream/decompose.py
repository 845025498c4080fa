"""`decompose`: the stream at any depth as the sum of one component for each source.

    x = c_0 + c_1 + ... + c_n        sources: x_0, every sublayer's write, the biases of the norms on the stream

Where the stream is a plain sum (pre-LN) the component of a sublayer is its write. Where norms are placed on the stream (post-LN,
DeepNorm) each write is propagated through the norms after it: LayerNorm with its recorded denominator is linear in x except for
its bias, so the sum is exact. Components that do not add up to the recorded stream raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor, nn

from addnorm._util.arguments import check_choice
from addnorm._util.numbers import format_count
from addnorm.stream.dataflow.replay import replay_op
from addnorm.stream.decomposition import Decomposition
from addnorm.stream.edits import list_edits
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.equation_errors import compute_operand, compute_write
from addnorm.stream.find.paths import Path
from addnorm.stream.find.sites import Stream
from addnorm.stream.inspect import check_inputs, inspect_run
from addnorm.stream.layout.dimensions import apply_layout, find_layout
from addnorm.stream.program.decompose import ProgramDecomposition
from addnorm.stream.shares import (
    BIASES,
    Components,
    find_paths,
    find_step_obstacle,
    find_tolerance,
    propagate_through,
    sum_components,
)
from addnorm.stream.tokens import OmittedError, TokenMask, Tokens


class StreamDecomposition(Decomposition):
    """Decomposition of a `Stream`: depth k is the stream after the k-th add and its norm.

    Attributes:
        stream: the inspected `Stream`.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        chain: Chain = stream.chain
        self._chain = chain
        self._names = {site.sublayer: site.id for site in stream.sites}
        if reason := find_step_obstacle(chain, ("constant", "learned", "mask", "noise", "guard")):
            raise ValueError(f"{stream.name} cannot be decomposed: {reason}.")
        self._states = [state.exact for state in chain.states()]
        self._layouts = [stream.layout.of(state) for state in chain.states()]
        ids, depth = [site.id for site in stream.sites], len(chain.adds)
        super().__init__(stream.name, format_count(depth, "add"), depth, ids, find_tolerance(chain))

    def _flatten_mask(self, depth: int, tokens: Tensor | None) -> Tensor | slice:
        """Return the mask `tokens` for the tokens of a state in their own order; `slice(None)` for all tokens."""
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

    def _iter_components(self) -> Iterator[Components]:
        """Yield the components at each depth, with their features last."""
        chain, parts = self._chain, {"x_0": self._states[0]}
        with torch.no_grad():
            yield {"x_0": self._features_last(0, self._states[0])}
            for k, (add, sublayers, norms) in enumerate(zip(chain.adds, chain.sublayers, chain.norms_out, strict=True)):
                path, shape = add.residual_path, add.out.shape
                parts = {
                    name: compute_operand(path, part.reshape(add.x.shape)).reshape(shape)
                    for name, part in parts.items()
                }
                for sublayer in sublayers:
                    name = self._names.get(sublayer, BIASES)
                    new = compute_write(sublayer).expand(shape)
                    parts[name] = parts[name] + new if name in parts else new
                for path, norm in zip_longest(find_paths(chain, k), norms):
                    parts = _replay_path(path, parts)
                    if norm is not None:
                        parts = propagate_through(norm, parts)
                yield {name: self._features_last(k + 1, part) for name, part in parts.items()}

    def _normalize(self) -> tuple[Components, Tensor | None]:
        parts, expected = self.components(), None
        for norm in self._chain.final_norms:
            parts = propagate_through(norm, parts)
            y, order = norm.y.exact, find_layout(norm.y, end := self._chain.find_end(-1))
            layout = self.stream.layout.of(norm.y) if order is None else self._layouts[-1]
            y = y if order is None else apply_layout(order, y).reshape(end.shape)
            y = y if layout is None else layout.move_features_last(y)
            expected = y.reshape(parts["x_0"].shape) if y.numel() == parts["x_0"].numel() else None
        return parts, expected


def _replay_path(path: Path, parts: Components) -> Components:
    """Return the components after a path: the views and factors from a sum or a norm to the next norm or add."""
    parts = {name: part.reshape(path.source.shape) for name, part in parts.items()}
    for op in reversed(path.ops):
        total = sum_components(parts)
        # A clamp is not linear; one that leaves the stream unchanged is skipped.
        if "guard" not in op.traits or not torch.equal(replay_op(op, total), total):
            parts = {name: replay_op(op, part) for name, part in parts.items()}
    return parts


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
    check_inputs(model, args, kwargs, "addnorm.decompose(model, *args, **kwargs)")
    if list_edits(model):
        raise RuntimeError(
            "decompose is called inside addnorm.ablate or scale_write, expected outside: it decomposes the whole model."
        )
    inspection = inspect_run(model, args, kwargs, float64)
    program = inspection.with_program().program
    if program is None:
        names = [one.name for one in inspection.streams]
        if not names:
            raise ValueError(f"{inspection.model} has no residual stream to decompose: {inspection.unknown[0].reason}.")
        if stream is None and len(names) > 1:
            raise ValueError(f"stream is None, expected one of {', '.join(map(repr, names))}: the model has several.")
        if stream is not None:
            check_choice("stream", stream, names)
        return StreamDecomposition(inspection.streams[0 if stream is None else names.index(stream)])
    if stream is not None:
        raise ValueError(f"stream is {stream!r}, expected None: the streams of this model are decomposed together.")
    return ProgramDecomposition(program)
