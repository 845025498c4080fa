"""Statistics of one forward of a model with several streams, and the sample of its tokens, from a run captured before.

The coefficients differ from forward to forward, so the matrices are measured anew. Gradients are observed in the forward itself,
and so are the streams where the equations of the captured run do not close.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from addnorm.stream.dataflow.arithmetic import is_view
from addnorm.stream.dataflow.graph import DATA, Flow, Value, walk
from addnorm.stream.dataflow.wrappers import has_flat_parameters
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.sublayers import find_parameters
from addnorm.stream.layout.mixing import Mixing
from addnorm.stream.layout.token_layout import Piece, TokenLayout
from addnorm.stream.program.cuts import find_coefficient_ops, list_coefficients
from addnorm.stream.program.maps import Map, join_streams, measure_map, shrink, to_streams
from addnorm.stream.program.result import NAME, Program, ProgramSite
from addnorm.stream.program.statistics import measure_matrices, split_sums
from addnorm.stream.record.forward import Forward
from addnorm.stream.record.gradients import StateGradients
from addnorm.stream.record.probes import Observed, Probes, SiteProbe
from addnorm.stream.record.sample import Equation, Operand, Sample, multiply, normalize, scale
from addnorm.stream.shares import Components, source_shares
from addnorm.stream.tokens import OmittedError, Statistics, TokenMask, Tokens, rstd_statistics, write_statistics

OTHER_TOKENS = "the sublayer has other tokens than the streams"


class ProgramProbes(Probes):
    """The sites of a recording, and the layouts of the values, of one captured run.

    Args:
        program: the program of the run.
        flow: the run.
        layers: measure the sublayers of these layers only; None: of all.
        shapes: shapes of the model's inputs.

    Attributes:
        leaving: for each state of the program the recorded sites whose output it is.
        tokens: mask that selects the tokens to measure; all by default.
        is_released: whether the tensors of the run are released, since it was measured.
    """

    def __init__(self, program: Program, flow: Flow, layers: Collection[int] | None, shapes: Any) -> None:
        super().__init__([program], shapes)
        self.program, self.flow = program, flow
        self.tokens, self.is_released = TokenMask(), False
        self.leaving = [[self.add_end("x_0", "", "start", NAME)]]
        for k, site in enumerate(program.sites):
            is_recorded = layers is None or site.layer in layers
            call = site, _format_equation(site), k, find_parameters(site.write.ops)
            self.leaving.append([self.add_sublayer(*call)] if is_recorded else [])
        if (norm := program.final_norm) is not None:
            self.add_end("final", norm.path, "final", NAME)
        self._sizes = program.carrier.list_sizes(program.spine.states[0][0])
        self._mixed = _find_mixed(program, self._sizes)

    def is_stale(self, shapes: Any, masked: bool) -> bool:
        """Return True: the coefficients differ from forward to forward."""
        return True

    def find_layout(self, k: int) -> TokenLayout:
        """Return the layout of state k as `(*tokens, features)`.

        The dimensions of a sequence are those along which a sublayer combines tokens. If there are none, all dimensions but the
        first are taken: a guess, which the mask may correct.
        """
        parts = self.program.carrier.list_tokens(self.program.spine.states[k][0])
        sizes = [part.size for part in parts]
        is_same = any(self._mixed) and sizes == self._sizes
        are_tokens = self._mixed if is_same else [k > 0 or len(parts) == 1 for k in range(len(parts))]
        pieces = tuple((Piece(part, own, k),) for k, (part, own) in enumerate(zip(parts, are_tokens, strict=True)))
        return self.tokens.orient(TokenLayout((*sizes, 1), (len(sizes),), pieces, is_same), sizes)

    def find_mask(self, k: int) -> Tensor | None:
        """Return the mask of the tokens of state k to measure, `(tokens,)`; None for all tokens.

        Raises:
            MaskError: the mask does not fit.
        """
        layout = self.find_layout(k)
        return self.tokens.flatten(layout, layout.shape[:-1], self.program.spine.states[k][0].tensor.device)

    def arrange(self, streams: Tensor, k: int, by_stream: bool = False) -> Tokens:
        """Return the streams of state k arranged for statistics of all streams together, and with `by_stream` of each.

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
            OmittedError: no gradient with these coefficients frozen can be computed.
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


def _find_mixed(program: Program, sizes: Sequence[int]) -> list[bool]:
    """Return for each dimension of tokens, of these sizes, whether a sublayer combines elements along it."""
    carrier, mixed = program.carrier, [False] * len(sizes)
    for write in (site.write for site in program.sites):
        own = {out for op in write.ops for out in op.outputs}
        inputs = dict.fromkeys(v for op in write.ops for v in op.inputs if v in carrier.known and v not in own)
        for value in inputs:
            parts = carrier.list_tokens(value)
            if [part.size for part in parts] == sizes:
                mixing = Mixing(carrier.roots)
                mixing.follow(value, carrier.known[value].dims, write.ops)
                for k, part in enumerate(parts):
                    # A part of an axis lies in another part of it.
                    mixed[k] |= any(
                        part.root == other.root and part.stride <= other.stride < part.stride * part.size
                        for other in mixing.strong or mixing.weak
                    )
    return mixed


def _format_equation(site: ProgramSite) -> str:
    """Return the equation of a sublayer: "X' = A X + B f(N(C X))"."""
    read = "f(N(C X))" if site.norm_in is not None else "f(C X)"
    total = f"A X + B N({read})" if site.norm_branch is not None else f"A X + B {read}"
    return f"X' = N({total})" if any(site.norms_out) else f"X' = {total}"


@dataclass(eq=False)
class ProgramForward(Forward):
    """Statistics of one forward of a model with a residual program. The tensors of its captured run are released."""

    probes: ProgramProbes
    _values: dict[Value, Tensor] = field(default_factory=dict)  # of the states
    _states: list[Tensor] = field(default_factory=list)  # the same, or the wrappers of them

    def list_observers(self) -> Observed:
        """Measure the captured run, and yield the values of the states, each with an observer of its gradient."""
        probes = self.probes
        probes.tokens = self.tokens[NAME]
        self._is_measured = not probes.is_released
        with torch.no_grad(), self.omitting("", NAME):
            if self._is_measured:
                self._measure()
                self.samples[NAME] = ProgramSample(probes.program, probes.find_mask(0))
            else:
                self.samples[NAME] = Sample((), 0.0)
                self.samples[NAME].refuse("the equations do not close in the last step")
        coefficients: list[Value] = []
        hooks = self.gradients
        if hooks is not None:
            with self.omitting("gradients with frozen coefficients"):
                if has_flat_parameters(self.leaves.model):  # torch ends the process in a backward within a backward
                    raise OmittedError("FullyShardedDataParallel allows no second backward: shard it with fully_shard")
                coefficients = probes.find_coefficients()
        probes.flow.release_tensors()  # the graph of its operators remains
        probes.is_released = True
        before: set[Value] = set()
        for k, (state, leaving) in enumerate(zip(probes.program.spine.states, probes.leaving, strict=True)):
            new = [value not in before for value in state for _ in range(probes.program.carrier.count_streams(value))]
            gradients = StateGradients(state, leaving, partial(self._arrange_state, k), new)
            gradients.frozen = replace(gradients, role="grad_frozen") if coefficients else None
            for value in state:
                if value not in before and leaving and not self._mask_errors:
                    yield value, partial(self.add_gradient, gradients, value)
                if value not in before and (coefficients or not self._is_measured):
                    yield value, partial(self._on_value, value)
            before.update(state)
        if hooks is not None and coefficients:
            yield from ((value, partial(self.defer, hooks.add_coefficient)) for value in coefficients)

            def hook_end(end: Tensor) -> None:
                hooks.add_end(end, [state for state in self._states if state is not end], self.step)

            yield probes.program.spine.end, partial(self.defer, hook_end)

    def release(self) -> None:
        """Release the tensors that wait for a later observer."""
        self._values.clear()
        self._states.clear()

    def _on_value(self, value: Value, tensor: Tensor) -> None:
        """Keep a value of a state. Measure the states that are complete with it, if those of the captured run were not."""
        self._values[value] = tensor
        self.defer(self._states.append, tensor)
        for k, state in enumerate(self.probes.program.spine.states):
            if self._is_measured or value not in state or not self._values.keys() >= {*state}:
                continue
            with torch.no_grad(), self.omitting(f"the streams at depth {k}", NAME):
                if any(self._values[other].shape != other.shape for other in state):
                    raise OmittedError(OTHER_TOKENS)
                self._measure_state(k, [self._values[other].detach() for other in state])

    def _arrange_state(self, k: int, tensors: Sequence[Tensor]) -> Tokens:
        """Return the values of state k, or their gradients, arranged for statistics of all streams and of each."""
        program = self.probes.program
        return self.probes.arrange(join_streams(program.carrier, program.spine.states[k], tensors), k, by_stream=True)

    def _join(self, values: Sequence[Value], k: int) -> Tensor:
        """Return the streams of values, `(tokens, n, d)`, in the order of tokens of state `k`."""
        program, tensors = self.probes.program, [value.tensor.detach() for value in values]
        return join_streams(program.carrier, values, tensors, program.spine.states[k])

    def _measure(self) -> None:
        """Measure the states, the sublayers and the norms of the captured run."""
        probes, program = self.probes, self.probes.program
        for k, state in enumerate(program.spine.states):
            self._measure_state(k, [value.tensor.detach() for value in state])
        for probe in probes.sites:
            self._measure_site(probe)
        if program.final_norm is not None:
            self._put_norms(len(probes.recorded) - 1, "norm_final", len(program.sites), [program.final_norm])

    def _measure_state(self, k: int, tensors: Sequence[Tensor]) -> None:
        entering = [probe.index for probe in self.probes.sites if probe.place == k]
        self.put_state(entering, self.probes.leaving[k], self._arrange_state(k, tensors))

    def _measure_site(self, probe: SiteProbe) -> None:
        site, index, k = probe.site, probe.index, probe.place
        for role, values in {"read": [part.target for part in site.reads], "raw": [site.write.raw]}.items():
            if len(values) == 1:
                with self.omitting(f"{role} at {site.id}"):
                    self.put([index], role, self.probes.arrange(self._join(values, k), k).statistics.items())
        norms = {"norm_in": [site.norm_in], "norm_branch": [site.norm_branch], "norm_out": site.norms_out}
        for role, of_role in norms.items():
            self._put_norms(index, role, k, of_role)
        self.put([index], "matrices", measure_matrices(site, self.probes.find_mask(k)).items())
        with self.omitting(f"write at {site.id}"):
            if (sums := split_sums(self.probes.program, site)) is None:
                raise OmittedError(OTHER_TOKENS)
            total, write = (self.probes.arrange(part, k + 1) for part in sums)
            before = replace(total, t=total.t - write.t)
            shares = self._measure_shares(total.counted, write.counted)
            self.put([index], "write", [*write.statistics.items(), *write_statistics(before, write), *shares])

    def _measure_shares(self, total: Tensor, write: Tensor) -> Statistics:
        """Yield the share of `write`, B W, in `total`, A X + B W: of all streams and of each. Both: `(tokens, n d)`."""
        of_each = zip(*(part.split(self.probes.program.width, -1) for part in (total, write)), strict=True)
        for k, (whole, part) in enumerate([(total, write), *of_each], -1):
            name = "share" if k < 0 else f"share_{k}"
            yield name, float(source_shares({name: part}, whole)[name].mean())

    def _put_norms(self, index: int, role: str, k: int, norms: Iterable[Norm | None]) -> None:
        """Record the rstd of a sublayer's norms of one role. Their inputs have the tokens of state `k`."""
        program, arrange = self.probes.program, self.probes.arrange
        with self.omitting(f"{role} at {self.probes.recorded[index].id}"):
            inputs = {norm: to_streams(program.carrier, norm.x, like=program.spine.states[k]) for norm in norms if norm}
            rstds = [arrange(1.0 / norm.denominator(x), k).counted.flatten() for norm, x in inputs.items()]
            if rstds:
                self.put([index], role, rstd_statistics(torch.cat(rstds)))


class ProgramSample(Sample):
    """Sample of the tokens of a program: its states and writes, and its equations with frozen norms.

    Args:
        program: the program, with the values of its run.
        mask: mask that selects the tokens to sample; None for all.
    """

    def __init__(self, program: Program, mask: Tensor | None) -> None:
        super().__init__((site.id for site in program.sites), program.tolerance)
        self._carrier = program.carrier
        first = to_streams(program.carrier, program.spine.states[0][0])
        entries = sum(
            column.matrix[0].numel() for site in program.sites for part in site.sums for column in part.columns
        )
        size = 8 * (program.width * (sum(program.sizes) + len(program.sites)) + entries)
        self._rows, self._tokens = self.choose(first, mask, size), len(first)
        try:
            self.states = [[*map(self._take, state)] for state in program.spine.states]
            for site in program.sites:
                self.writes.append([(site.id, self._take(site.write.value))])
                self.equations.append([self._freeze(part, [*site.state, site.write.value]) for part in site.sums])
        except OmittedError as error:
            self.refuse(str(error))

    def _take(self, value: Value) -> Tensor:
        """Return the sampled tokens of a carried value, `(tokens, n, d)` in float64."""
        return self._choose_rows(to_streams(self._carrier, value))

    def _choose_rows(self, t: Tensor) -> Tensor:
        if len(t) not in (1, self._tokens):
            raise OmittedError("tokens join or leave the streams on the way")
        return t if len(t) == 1 else t[self._rows]

    def _freeze(self, part: Map, sources: Sequence[Value]) -> Equation:
        operands: list[Operand] = []
        for column in part.columns:
            steps = [partial(multiply, self._choose_rows(shrink(column.matrix)))]
            if column.norm is not None:  # it may read a multiple of the source
                of_norm = measure_map(self._carrier, column.norm.x, [column.source])
                inner = partial(multiply, self._choose_rows(shrink(of_norm.columns[0].matrix)))
                steps = [inner, self._freeze_norm(column.norm), *steps]
            operands.append((sources.index(column.source), steps))
        norms = [] if part.norm is None else [self._freeze_norm(part.norm)]
        product: Tensor | float = 1.0  # of the factors after the norm
        for factor in part.factors:
            value = None if factor.value is None else factor.value.exact
            is_known = factor.kind in ("constant", "learned")
            if not is_known or (value is not None and value.numel() not in (1, part.target.shape[-1])):
                raise OmittedError("a norm's output is multiplied by another factor for each token")
            product = product * (factor.number if value is None else value.reshape(-1))
        bias = None if part.bias is None else self._choose_rows(part.bias)
        return Equation(operands, [*norms, partial(scale, product)], bias)

    def _freeze_norm(self, norm: Norm) -> partial[Components]:
        gains = (norm.weight, norm.bias)  # an optimizer may change them before the map is computed
        weight, bias = (gain and replace(gain, tensor=gain.tensor.detach().clone()) for gain in gains)
        bias = bias if bias is not None and bool(bias.tensor.any()) else None  # zeros are no source
        return partial(normalize, replace(norm, weight=weight, bias=bias), norm.denominator(self._take(norm.x)))
