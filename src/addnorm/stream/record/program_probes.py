"""The sites of a recording of a residual program, and the layout and the gradients of its streams."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from addnorm.stream.dataflow.arithmetic import is_view
from addnorm.stream.dataflow.graph import DATA, Flow, Value, walk
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.sublayers import find_parameters
from addnorm.stream.layout.dimensions import Part
from addnorm.stream.layout.mixing import Mixing
from addnorm.stream.layout.token_layout import Piece, TokenLayout
from addnorm.stream.program.cuts import find_coefficient_ops, list_coefficients
from addnorm.stream.program.result import NAME, Program, ProgramSite
from addnorm.stream.record.schema import RecordedSite
from addnorm.stream.tokens import OmittedError, TokenMask, Tokens

OTHER_TOKENS = "the sublayer has other tokens than the streams"


@dataclass(eq=False)
class ProgramProbe:
    """One recorded sublayer.

    Attributes:
        index: index of its recorded site.
        k: its place in the program.
        site: the site of the program.
        parameters: names of the sublayer's parameters.
    """

    index: int
    k: int
    site: ProgramSite
    parameters: list[str]


class ProgramProbes:
    """The sites of a recording, and the layouts of the values, of one captured run.

    Args:
        program: the program of the run.
        flow: the run.
        layers: measure the sublayers of these layers only; None: of all.

    Attributes:
        recorded: the sites of the recording.
        leaving: for each state of the program the recorded sites after which it is.
        tokens: mask of the tokens that count; all by default.
        is_released: whether the tensors of the run are released, since it was measured.
    """

    def __init__(self, program: Program, flow: Flow, layers: Iterable[int] | None) -> None:
        self.program, self.flow = program, flow
        self.streams = {NAME: program}
        self.tokens, self.is_released = TokenMask(), False
        self.recorded = [RecordedSite("x_0", "", "start", None, NAME)]
        self.sites: list[ProgramProbe] = []
        self.leaving: list[list[int]] = [[0], *([] for _ in program.sites)]
        chosen = None if layers is None else {*layers}
        for k, site in enumerate(program.sites):
            if chosen is None or site.layer in chosen:
                index = len(self.recorded)
                equation = _format_equation(site)
                self.recorded.append(RecordedSite(site.id, site.path, site.kind, site.layer, NAME, equation))
                self.sites.append(ProgramProbe(index, k, site, find_parameters(site.write.ops)))
                self.leaving[k + 1].append(index)
        if (norm := program.final_norm) is not None:
            self.recorded.append(RecordedSite("final", norm.path, "final", None, NAME))
        self._sizes = tuple(part.size for part in program.carrier.list_tokens(program.spine.states[0][0]))
        self._mixed = _find_mixed(program, self._sizes)

    @property
    def num_layers(self) -> int:
        """The number of layers of the model."""
        return self.program.num_layers

    def release_tensors(self) -> None:
        """Release the tensors of the run; where its values are, and of what they are made, remains."""
        self.flow.release_tensors()
        self.is_released = True

    def find_layout(self, k: int) -> TokenLayout:
        """Return the layout of state k as `(*tokens, features)`.

        The tokens of a sequence are the dimensions that a sublayer combines. If none does, they are all but the first: a guess,
        which the mask may correct.
        """
        parts = self.program.carrier.list_tokens(self.program.spine.states[k][0])
        sizes = tuple(part.size for part in parts)
        is_same = any(self._mixed) and sizes == self._sizes
        are_tokens = self._mixed if is_same else [k > 0 or len(parts) == 1 for k in range(len(parts))]
        pieces = tuple((Piece(part, own, k),) for k, (part, own) in enumerate(zip(parts, are_tokens, strict=True)))
        return self.tokens.orient(TokenLayout((*sizes, 1), (len(sizes),), pieces, is_same), sizes)

    def find_mask(self, k: int) -> Tensor | None:
        """Return which tokens of state k count, `(tokens,)`; None for all.

        Raises:
            MaskError: the mask does not fit.
        """
        layout = self.find_layout(k)
        return self.tokens.flatten(layout, layout.shape[:-1], self.program.spine.states[k][0].tensor.device)

    def arrange(self, streams: Tensor, k: int, by_stream: bool = False) -> Tokens:
        """Arrange the streams of state k, `(tokens, n, d)`, for statistics of all, and with `by_stream` of each.

        Raises:
            OmittedError: the streams have other tokens than the mask.
        """
        layout, mask = self.find_layout(k), self.find_mask(k)
        if mask is not None and len(streams) != len(mask):
            if len(streams) > 1:
                raise OmittedError(OTHER_TOKENS)
            mask = None
        sizes = layout.shape[:-1] if len(streams) == math.prod(layout.shape) else (len(streams),)
        t = streams.reshape(*sizes, streams.shape[1] * streams.shape[2])
        return Tokens(t, mask, layout, streams=by_stream * streams.shape[1])

    def find_coefficients(self) -> list[Value]:
        """Return the coefficients that operators compute from the streams.

        Raises:
            OmittedError: the gradient with frozen coefficients cannot be told from the other one.
        """
        spine = self.program.spine

        def reads_streams(value: Value) -> bool:
            inputs = walk([value], lambda v: [] if v in spine.relevant else v.inputs)
            return bool(value.kind & DATA) and not spine.relevant.isdisjoint(inputs)

        def leave_fused(value: Value) -> Value:
            while value.op is not None and value.op.whole is not None and is_view(value.op):
                value = value.op.inputs[0]
            return value

        found = [leave_fused(value) for value in list_coefficients(spine) if reads_streams(value)]
        steps = {value.op for value in spine.relevant if value.op is not None}
        has_keys = any("attention" in op.traits and op.args[1] in self.program.carrier.used[op] for op in steps)
        if has_keys or any(value in spine.relevant or (value.op and value.op.whole) for value in found):
            raise OmittedError("an operator computes coefficients of the streams and multiplies the streams by them")
        steps.update(find_coefficient_ops(spine))
        steps |= {op.whole for op in steps if op.whole is not None}
        if not all(op in steps or op.whole in steps for value in found for op in value.users):
            raise OmittedError("a coefficient has other uses")
        results = [value for value in self.flow.list_results() if value.tensor.is_floating_point()]
        others = walk(results, lambda v: [] if v is spine.end else v.inputs)
        if found and not spine.relevant.isdisjoint(v for v in others if v is not spine.end):
            raise OmittedError("the model returns more than what it computes from the last read")
        return found


def list_norms(site: ProgramSite) -> dict[str, list[Norm]]:
    """Return the norms of a sublayer by their role."""
    norms: dict[str, Sequence[Norm | None]] = {
        "norm_in": [site.norm_in], "norm_branch": [site.norm_branch], "norm_out": site.norms_out,
    }  # fmt: skip
    return {role: [*dict.fromkeys(norm for norm in of_role if norm is not None)] for role, of_role in norms.items()}


def _find_mixed(program: Program, sizes: tuple[int, ...]) -> list[bool]:
    """Return for each dimension of tokens, of these sizes, whether a sublayer combines elements along it."""
    carrier, mixed = program.carrier, [False] * len(sizes)
    for write in (site.write for site in program.sites):
        own = {out for op in write.ops for out in op.outputs}
        inputs = dict.fromkeys(v for op in write.ops for v in op.inputs if v in carrier.known and v not in own)
        for value in inputs:
            parts = carrier.list_tokens(value)
            if tuple(part.size for part in parts) == sizes:
                mixing = Mixing(carrier.roots)
                mixing.follow(value, carrier.known[value].dims, write.ops)
                for k, part in enumerate(parts):
                    mixed[k] |= any(_is_in(part, other) for other in mixing.strong or mixing.weak)
    return mixed


def _is_in(whole: Part, part: Part) -> bool:
    """Return whether a part of an axis lies in another part of it."""
    return part.root == whole.root and whole.stride <= part.stride < whole.stride * whole.size


def _format_equation(site: ProgramSite) -> str:
    """Return the equation of a sublayer: "X' = A X + B f(N(C X))"."""
    read = "f(N(C X))" if site.norm_in is not None else "f(C X)"
    total = f"A X + B N({read})" if site.norm_branch is not None else f"A X + B {read}"
    return f"X' = N({total})" if any(site.norms_out) else f"X' = {total}"
