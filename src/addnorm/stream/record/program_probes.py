"""The sites of a recording of a residual program, and the layout and the gradients of its streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from addnorm._util.jsonio import to_jsonable
from addnorm.stream.dataflow.graph import Flow, Value
from addnorm.stream.find.labels import format_norm
from addnorm.stream.find.sublayers import find_parameters
from addnorm.stream.layout.dimensions import Part
from addnorm.stream.layout.mixing import Mixing
from addnorm.stream.layout.token_layout import Piece, TokenLayout
from addnorm.stream.program.carried import Carrier
from addnorm.stream.program.maps import to_streams
from addnorm.stream.program.result import Program, ProgramSite
from addnorm.stream.record.schema import RecordedSite
from addnorm.stream.tokens import TokenMask, TokenNorms, upcast

NAME = "streams"  # of the recording's only stream


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
    """

    def __init__(self, program: Program, flow: Flow, layers: Iterable[int] | None) -> None:
        self.program, self.flow = program, flow
        self.streams = {NAME: program}
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

    def arrange(self, k: int, tokens: TokenMask) -> tuple[TokenLayout, Tensor | None]:
        """Return the layout of state k as `(*tokens, features)`, and which of its tokens count, `(tokens,)`; None for all.

        The tokens of a sequence are the dimensions that a sublayer combines. If none does, they are all but the first: a guess,
        which the mask may correct.

        Raises:
            MaskError: the mask does not fit.
        """
        value = self.program.spine.states[k][0]
        parts = self.program.carrier.list_tokens(value)
        sizes, proven = tuple(part.size for part in parts), any(self._mixed)
        is_same = proven and sizes == self._sizes
        are_tokens = self._mixed if is_same else [k > 0 or len(parts) == 1 for k in range(len(parts))]
        pieces = tuple((Piece(part, own, k),) for k, (part, own) in enumerate(zip(parts, are_tokens, strict=True)))
        layout = tokens.orient(TokenLayout((*sizes, 1), (len(sizes),), pieces, is_same), sizes)
        return layout, tokens.flatten(layout, sizes, value.tensor.device)


class StateGradients:
    """The gradients of the values of one state, which arrive one by one.

    Args:
        carrier: the carried values.
        values: the values of the state.
        new: those that no earlier state has. The gradient of another one is that of its uses before this state too.
        mask: which tokens count; None for all.

    Attributes:
        expected: the new values that have a gradient.
    """

    def __init__(self, carrier: Carrier, values: Sequence[Value], new: Sequence[Value], mask: Tensor | None) -> None:
        self.carrier, self.values, self.new, self.mask = carrier, values, {*new}, mask
        self.expected: set[Value] = set()
        self._received: dict[Value, Tensor] = {}

    def add(self, value: Value, grad: Tensor) -> Iterator[tuple[str, float]]:
        """Add a gradient; with the last one, yield the statistics of each new stream, and of all if all are new."""
        self._received[value] = to_streams(self.carrier, value, grad, grad.dtype)
        if self._received.keys() < self.expected:
            return
        counts = [self.carrier.order(value)[2] for value in self.values]
        tokens = max(map(len, self._received.values()))
        zero = grad.new_zeros(1, 1, self.carrier.width)
        parts = [self._received.get(v, zero).expand(tokens, n, -1) for v, n in zip(self.values, counts, strict=True)]
        self._received = {}
        streams = torch.cat(parts, 1)
        is_new = [value in self.new for value, n in zip(self.values, counts, strict=True) for _ in range(n)]
        for name, number in measure_norms(streams if self.mask is None else streams[self.mask]):
            k = name.partition("_")[2]
            if is_new[int(k)] if k else all(is_new):
                yield name, number


@dataclass(eq=False)
class ProgramState:
    """One value of a state, with the sites after which the state is."""

    value: Value
    leaving: list[int]
    gradients: StateGradients

    def measure_gradient(self, grad: Tensor, tokens: TokenMask) -> Iterable[tuple[str, float]]:
        """Return the statistics of the gradient at the state; nothing before the gradients of all its values are there."""
        return self.gradients.add(self.value, grad)


def measure_norms(streams: Tensor) -> Iterator[tuple[str, float]]:
    """Yield l2, rms and max of streams `(tokens, n, d)` together, and those of stream k as l2_k, rms_k and max_k."""
    t = upcast(streams.detach())
    squares = torch.linalg.vector_norm(t, dim=-1).square()
    largest = t.abs().amax((0, 2)) if t.numel() else t.new_zeros(t.shape[1])
    yield from TokenNorms(squares.sum(1), t.shape[1] * t.shape[2], float(largest.max())).statistics()
    for k, size in enumerate(largest.tolist()):
        for name, value in TokenNorms(squares[:, k], t.shape[2], size).statistics():
            yield f"{name}_{k}", value


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
                combined = mixing.strong or mixing.weak
                mixed = [
                    is_mixed or any(map(partial(_is_in, part), combined))
                    for is_mixed, part in zip(mixed, parts, strict=True)
                ]
    return mixed


def _is_in(whole: Part, part: Part) -> bool:
    """Return whether a part of an axis lies in another part of it."""
    return part.root == whole.root and whole.stride <= part.stride < whole.stride * whole.size


def _format_equation(site: ProgramSite) -> str:
    """Return the equation of a sublayer: "X' = A X + B f(N(C X))"."""
    read = "f(N(C X))" if site.norm_in is not None else "f(C X)"
    total = f"A X + B N({read})" if site.norm_branch is not None else f"A X + B {read}"
    return f"X' = N({total})" if any(site.norms_out) else f"X' = {total}"


def program_metadata(program: Program, mode: str) -> dict[str, Any]:
    """Return what a recording keeps of a program, as JSON types and with the names of `inspection_metadata`."""
    texts = [(site, [site.norm_in, site.norm_branch, *site.norms_out]) for site in program.sites]
    norms = {site.id: ", ".join(dict.fromkeys(format_norm(n) for n in found if n is not None)) for site, found in texts}
    name, error = program.wiring and program.wiring.name, program.expansion
    equation, _ = program.describe()
    sites = {
        site.id: {
            "closure": site.closure, "closes": site.closure <= program.tolerance, "norms": norms[site.id], "notes": []
        }
        for site in program.sites
    }  # fmt: skip
    stream = {
        "wiring": name, "equation": "\n".join(equation), "width": program.width, "layers": program.num_layers,
        "dtype": program.dtype, "norms": ", ".join(dict.fromkeys(filter(None, norms.values()))), "embedding_norm": "",
        "final_norm": "" if program.final_norm is None else format_norm(program.final_norm), "closure": error,
        "closes": error is not None and error <= program.tolerance, "remarks": [program.count_streams()], "sites": sites,
    }  # fmt: skip
    metadata: dict[str, Any] = to_jsonable({
        "mode": mode, "wiring": name or "unknown", "closure": program.closure, "dtype": program.dtype,
        "streams": {NAME: stream}, "unknown": [],
    })  # fmt: skip
    return metadata
