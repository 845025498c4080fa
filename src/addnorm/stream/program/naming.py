"""The name of a residual program: the wiring of the catalog whose stages have the matrices that were measured.

Constants are compared with the wiring's. Computed coefficients are computed again by the wiring's own module in float64, on the
states of the run and with the model's parameters, which are found by their shapes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from addnorm.stream.dataflow.arithmetic import get_number
from addnorm.stream.program.expected import Expected, build_expected, list_modules
from addnorm.stream.program.maps import Matrix, assemble, join_streams
from addnorm.stream.program.result import Program
from addnorm.wirings.factors import Place
from addnorm.wirings.spec import CONSTRUCTORS, Wiring
from addnorm.wirings.stage import Head, Stage

CLOSE = 1e-4  # largest difference of coefficients that were computed in another order, relative to the largest
CLOSE_FLOAT64 = 1e-6  # the same in float64, where some models compute their coefficients in float32
EXACT = 1e-6  # the same of constant coefficients
FIRST = 3  # sublayers with which numbers are fitted
_Constants = tuple[list[int], list[float], list[int]]  # sizes of matrices, numbers, how often Sinkhorn divides
_Fit = tuple[Mapping[str, str], float, Tensor, Tensor | None]  # parameters, error, relation, delayed C of the next
_Source = tuple[bool, int, bool]  # whether a module computes a matrix, number of tokens, whether entries are vectors
MOST_NUMBERS = 64  # pairs of numbers that are tried
LARGE = 1e-2  # a larger option is no usual epsilon
LITTLE = 1e-2  # an epsilon may be this wrong before it is fitted


@dataclass
class Match:
    """A wiring, compared with a program.

    Attributes:
        wiring: the wiring.
        error: the largest difference of a coefficient; infinite if a matrix has another shape or a norm another place.
        errors: the largest difference of a coefficient of each sublayer, and of the last read.
        parameters: the names of the model's parameters by the names of the wiring's module, for each stage and the head.
    """

    wiring: Wiring
    error: float
    errors: list[float] = field(default_factory=list)
    parameters: list[Mapping[str, str]] = field(default_factory=list)


def get_close(program: Program) -> float:
    """Return the tolerance of computed coefficients."""
    return CLOSE_FLOAT64 if program.dtype == "float64" else max(CLOSE, program.tolerance)


def identify(program: Program) -> None:
    """Set the wiring of a program, with its options, and each site's parameters and deviation, if the catalog has its wiring.

    Wirings that rows describe are left out: a program describes what rows do not.
    """
    best: Match | None = None
    constants = find_constants(program)
    for make in CONSTRUCTORS.values():
        for match in search(program, make, constants):
            is_several = max(program.sizes) > 1 or match.wiring.stage(0, 0, program.num_layers).coefficients is not None
            is_close = match.error <= get_close(program) and not match.wiring.has_rows and is_several
            if is_close and (best is None or match.error < best.error / 4):
                best = match
    if best is not None:
        program.wiring, program.deviation = best.wiring, best.error
        for site, parameters, error in zip(program.sites, best.parameters, best.errors, strict=False):
            site.parameters, site.deviation = parameters, error


def search(program: Program, make: Any, constants: _Constants) -> Iterator[Match]:
    """Yield a constructor's matches for each choice of discrete options, with numbers fitted at the first sublayers."""
    discrete, numbers = _list_options(program, make, constants)
    defaults = {name: parameter.default for name, parameter in inspect.signature(make).parameters.items()}
    for choice in itertools.product(*discrete.values()):
        options = dict(zip(discrete, choice, strict=True))
        match = _try(program, make, options, FIRST)
        if match is None:
            continue
        steps = [[{name: value} for value in values] for name, values in numbers.items()]
        if match.error == float("inf") and any(LARGE < value < 1.0 for value in constants[1]):  # several may differ
            pairs = itertools.islice(itertools.product(*numbers.values()), MOST_NUMBERS)
            steps.insert(0, [dict(zip(numbers, pair, strict=True)) for pair in pairs])
        for changes in steps:
            is_epsilon = all(abs(defaults[name]) < LARGE for name in changes[0])  # cannot make the error infinite
            if match.error < get_close(program) / 100 or (match.error == float("inf") and is_epsilon):
                continue
            tried = [(_try(program, make, {**options, **change}, FIRST), change) for change in changes]
            for other, change in tried:
                if other is not None and other.error < match.error:
                    match, options = other, {**options, **change}
        if match.error == float("inf"):
            continue
        wholes = [_try(program, make, options)]
        if wholes[0] is not None and wholes[0].error == float("inf"):  # the option is of a later layer, and may be 0
            wholes += [_try(program, make, {**options, name: 0.0}) for name in numbers]
        yield from (whole for whole in wholes if whole is not None)


def _list_options(
    program: Program, make: Any, constants: _Constants
) -> tuple[dict[str, list[Any]], dict[str, list[float]]]:
    """Return the options of a constructor with the values to try: choices, and numbers that are fitted one after the other."""
    hints = get_type_hints(make)
    sizes, floats, counts = constants
    reads = [len(stage.reads) for stage in program.sites]
    discrete: dict[str, list[Any]] = {}
    numbers: dict[str, list[float]] = {}
    for name, parameter in inspect.signature(make).parameters.items():
        hint, default = hints[name], parameter.default
        if name == "n":
            discrete[name] = [program.sizes[min(1, len(program.sizes) - 1)]]
        elif name == "reads":
            first = reads[:: max(1, len(reads) // program.num_layers)]
            discrete[name] = [first[0] if len({*first}) == 1 else _find_period(first)]
        elif hint is bool:
            discrete[name] = [False, True]
        elif get_origin(hint) is Literal:
            discrete[name] = [*get_args(hint)]
        elif hint is int:
            values = sizes if name == "rank" else counts if name == "iterations" else range(1, 4)
            discrete[name] = [*dict.fromkeys((default, *values))]
        elif hint is float:
            numbers[name] = floats
        elif hint == (int | None):
            discrete[name] = [None, *range(1, program.num_layers + 1)]
    return discrete, numbers


def _find_period(values: Sequence[int]) -> tuple[int, ...]:
    """Return the shortest part of which a list is a repetition."""
    for size in range(1, len(values) + 1):
        if all(value == values[k % size] for k, value in enumerate(values)):
            return tuple(values[:size])
    return tuple(values)


def find_constants(program: Program) -> _Constants:
    """Return candidates for options: matrix sizes, numbers and Sinkhorn iterations that the coefficients use."""
    k = min(1, len(program.sites) - 1)
    leaves, ops = program.find_leaves(program.sites[k].matrices)
    found = [get_number(leaf) for op in ops for leaf in pytree.tree_leaves([(op.args, op.kwargs)])]
    floats = sorted({number for number in found if number is not None and 0.0 < number < 10.0} | {1.0})
    divisions = sum(op.name == "div" for op in ops)
    sizes = {size for leaf in leaves if len(leaf.shape) == 2 for size in leaf.shape}
    return sorted(sizes), floats, [count for count in ((divisions + 1) // 2, divisions // 2) if count > 0]


def _try(program: Program, make: Any, options: Mapping[str, Any], limit: int | None = None) -> Match | None:
    try:
        wiring: Wiring = make(**options)
    except (ValueError, TypeError):
        return None
    return compare(program, wiring, limit, program.fits)


def start_relation(program: Program, wiring: Wiring) -> Tensor:
    """Return the relation (`relate`) of the wiring's first streams to the model's, of which one may stand for all."""
    n = len(wiring.embedding)
    if program.sizes[0] == n > 1:
        return torch.eye(n, dtype=torch.float64)
    return torch.tensor(wiring.embedding, dtype=torch.float64)[:, None]


def compare(program: Program, wiring: Wiring, limit: int | None = None, fits: dict[Any, Any] | None = None) -> Match:
    """Return the match of a program and a wiring. `limit` compares only so many sublayers, and not the last read.

    `fits` keeps the fits of hashable stages for later calls: most options of a wiring change a few of its stages.
    """
    per_layer = len(program.sites) // program.num_layers
    failed = Match(wiring, float("inf"))
    relation = start_relation(program, wiring)
    if per_layer * program.num_layers != len(program.sites) or program.sizes[0] != relation.shape[1]:
        return failed
    found: list[_Fit] = []
    delayed = None
    last = len(program.sites)
    for k in range(last + 1 if limit is None else min(limit, last)):
        place = Place(*divmod(k, per_layer), program.num_layers, per_layer)
        try:
            stage = wiring.stage(*place) if k < last else wiring.last_read(place) or Head(1, (1.0,))
        except ValueError:
            return failed
        if not _have_same_norms(program, k, stage, wiring):
            return failed
        key = fits is not None and (k, stage, relation.numpy().tobytes(), delayed)
        fit = fits[key] if fits and key in fits else _advance(program, k, stage, place, relation, delayed)
        if fits is not None:
            fits[key] = fit
        if fit is None:
            return failed
        found.append(fit)
        *_, relation, delayed = fit
    parameters, errors, *_ = zip(*found, strict=True)
    return Match(wiring, max(errors), [*errors], [*parameters])


def _advance(
    program: Program, k: int, stage: Stage | Head, place: Place, relation: Tensor, delayed: Tensor | None
) -> _Fit | None:
    """Fit a stage of the wiring to sublayer `k` (`_fit`), and relate the streams after it (`relate`); None if they differ."""
    fitted = _fit(program, k, stage, place, relation, delayed)
    if fitted is None:
        return None
    expected, names, error, delayed = fitted
    if isinstance(stage, Head):
        return names, error, relation, delayed
    step = relate(program, k, stage, expected, relation)
    return None if step is None else (names, max(error, step[1]), step[0], delayed)


def _have_same_norms(program: Program, k: int, stage: Stage | Head, wiring: Wiring) -> bool:
    """Return whether the reads of site k, or the last read, have norms where the wiring has them, and no factors after norms."""
    if not isinstance(stage, Stage):
        return (program.final_norm is not None) == wiring.ends_in_norm(program.num_layers)
    found = program.sites[k]
    are_scaled = any(part.describe_factors() for part in (*found.reads, *found.sums))
    return not are_scaled and all((read.norm is not None) == stage.norm_in for read in found.reads)


def _fit(
    program: Program, k: int, stage: Stage | Head, place: Place, relation: Tensor, delayed: Tensor | None
) -> tuple[Expected, Mapping[str, str], float, Tensor | None] | None:
    """Fit a stage of the wiring to sublayer `k`: return its matrices that are closest to the measured ones, or None.

    For computed coefficients each assignment of the model's parameters is tried and the best one kept, whatever its error. Other
    coefficients must match, else None. Also return the names of the assigned parameters, the largest difference from the
    measured C (and A and B, if the stage computes these), and the C of the next stage, if it is `delayed`.
    """
    if stage.n != relation.shape[0]:
        return None
    source = ("collapse" in stage.computes or stage.delayed, program.count_tokens(k), _has_vectors(stage))
    found = measure_read(program, k, stage)
    if stage.coefficients is None and not stage.delayed:
        expected = build_expected(stage, None)
        flags = torch.tensor(stage.norm_streams)[:, None]
        error = _differ(torch.where(flags, 0.0, expected.collapse), found, relation, source)
        if any(stage.norm_streams):
            normed = program.collapse(k, normed=True)
            error = max(error, _differ(torch.where(flags, expected.collapse, 0.0), normed, relation, source))
        return (expected, {}, error, None) if error < EXACT else None
    if stage.coefficients is None:
        if delayed is None:
            return None
        error = _differ(delayed, found, relation, source)
        return (
            None
            if error > max(LITTLE, 2 * program.tolerance)
            else (Expected(delayed, delayed, delayed), {}, error, None)
        )
    streams = join_state(program, k, relation)
    best: tuple[Expected, Mapping[str, str], float, Tensor | None] | None = None
    for module, names in list_assigned(program, k, stage, place):
        expected = compute(module, stage, streams)
        own, carried = expected.collapse, None
        if stage.delayed:
            own = delayed if delayed is not None else torch.eye(stage.n, dtype=torch.float64)[None, :1, :, None]
            carried = expected.collapse
        error = _differ(own, found, relation, source)
        if best is not None and not error < best[2]:  # its other matrices cannot make it the best
            continue
        if not isinstance(stage, Head) and stage.computes != ("collapse",):
            step = relate(program, k, stage, expected, relation)
            error = max(error, float("inf") if step is None else step[1])
        if best is None or error < best[2]:
            best = (expected, names, error, carried)
        if error < EXACT:
            break
    return best


def measure_read(program: Program, k: int, stage: Stage | Head) -> Matrix:
    """Return C, the measured matrix of a read; norms of streams are factors in it unless the wiring has such norms."""
    if any(stage.norm_streams):
        return program.collapse(k)
    state = program.spine.states[k]
    maps = [program.freeze(part, state) for part in program.list_reads(k)]
    matrix = assemble(program.carrier, maps, state)
    is_linear = all(part.error <= program.tolerance for part in maps)  # a norm that centres combines features
    return matrix if is_linear else replace(matrix, values=torch.full_like(matrix.values, torch.inf))


def list_assigned(
    program: Program, k: int, stage: Stage | Head, place: Place
) -> Iterator[tuple[Any, Mapping[str, str]]]:
    """Yield the module of a stage's coefficients with each assignment of the model's parameters, and their names."""
    matrices = [] if stage.delayed else [program.collapse(k)]  # a delayed C was computed by the module before
    matrices += [] if isinstance(stage, Head) else [program.sites[k].mix, program.sites[k].inject]
    leaves, ops = program.find_leaves(matrices)
    assert stage.coefficients is not None
    return list_modules(stage.coefficients, program.width, stage, place, leaves, ops)


def compute(module: Any, stage: Stage | Head, streams: Tensor) -> Expected:
    """Return the matrices of a stage with the coefficients that its module computes from the streams."""
    with torch.no_grad():
        return build_expected(stage, module(streams if stage.is_stacked else streams.unbind(1)))


def join_state(program: Program, k: int, relation: Tensor) -> Tensor:
    """Return the run's streams before site k in the order of the wiring's streams, `(tokens, n, d)`."""
    streams = join_streams(program.carrier, program.spine.states[k]).cpu()
    return torch.einsum("cf,tfd->tcd", relation.nan_to_num(), streams)


def relate(program: Program, k: int, stage: Stage, expected: Expected, relation: Tensor) -> tuple[Tensor, float] | None:
    """Return the relation of the wiring's streams to the model's after a stage, and the largest error; None if unequal.

    A relation is a matrix with a row for each stream of the wiring, a column for each stream of the model, and 1 where both are
    the same stream. A row is NaN if the model does not keep the stream. `relation` is that before the stage.
    """
    found = program.sites[k]
    rows, inject, bias = found.mix.values, found.inject.values, program.bias(k)
    for name in ("mix", "inject"):
        source = (name in stage.computes, program.count_tokens(k), _has_vectors(stage))
        if not _have_same_source(getattr(expected, name), getattr(found, name), source):
            return None
    wanted_bias = torch.zeros(1, stage.n_out, 1, dtype=torch.float64) if expected.bias is None else expected.bias
    if (found.norm_branch is not None) != stage.norm_branch:
        return None
    norms = [norm is not None for norm in found.norms_out]
    count = rows.shape[1]
    new = torch.full((stage.n_out, count), float("nan"), dtype=torch.float64)
    worst, free, repeated = 0.0, {*range(count)}, _find_repeated_rows(stage)
    limit = max(LITTLE, 2 * program.tolerance) if stage.coefficients is not None else EXACT
    for i, has_norm in enumerate(stage.norms_out):
        wanted = apply(expected.mix[:, i : i + 1], relation)
        best = (float("inf"), -1)
        allowed = {*range(count)} if stage.n_out > count else free  # one value may be several streams of the wiring
        for f in sorted(allowed, key=lambda f: (f not in free, f != i)):  # most streams keep their places
            if norms[f] != has_norm or (f not in free and best[0] <= limit):
                continue
            row = rows[:, f : f + 1]
            difference = distance(wanted, row)
            if not difference < best[0]:  # the other matrices cannot make it the best
                continue
            difference = max(
                difference,
                distance(found.collapse.values[:, :1], row) if i in repeated else 0.0,
                distance(expected.inject[:, i : i + 1], inject[:, f : f + 1]),
                distance(wanted_bias[:, i : i + 1, None], bias[:, f : f + 1, None]),
            )
            if difference < best[0]:
                best = (difference, f)
            if difference < EXACT:
                break
        if best[0] <= limit:
            new[i] = torch.nn.functional.one_hot(torch.tensor(best[1]), count).double()
            free.discard(best[1])
            worst = max(worst, best[0])
        elif stage.n_out <= count:
            return None
    if free:
        return None
    return new, worst


def _find_repeated_rows(stage: Stage) -> set[int]:
    """Return the indices of the rows of A that equal the first row of C and contain learned entries."""
    (read, *_), mix = stage.entries.get("collapse", ((),)), stage.entries.get("mix", ())
    return {i for i, row in enumerate(mix) if row == read and any(isinstance(entry, str) for entry in row)}


def _has_vectors(stage: Stage | Head) -> bool:
    """Return whether any learned entry of a stage is a vector, with one number for each feature."""
    return any(entry.per_feature for entry in stage.learned.values())


def apply(matrix: Tensor, relation: Tensor) -> Tensor:
    """Return `matrix`, whose columns are the wiring's streams, with the streams of the model as its columns."""
    used = ~relation.isnan().all(1)
    part, rest = matrix[:, :, used], matrix[:, :, ~used]
    if bool((rest.nan_to_num(1.0) != 0).any()):
        return matrix.new_full((*matrix.shape[:2], relation.shape[1], 1), float("inf"))
    chosen = relation[used]
    is_unknown = torch.einsum("trcd,cf->trfd", part.isnan().double(), (chosen != 0).double()) > 0
    result = torch.einsum("trcd,cf->trfd", part.nan_to_num(0.0), chosen)
    return torch.where(is_unknown, float("nan"), result)


def _differ(expected: Tensor, found: Matrix, relation: Tensor, source: _Source) -> float:
    """Return the largest difference of two matrices. The columns of `expected` are the wiring's streams."""
    if not _have_same_source(expected, found, source):
        return float("inf")
    return distance(apply(expected, relation), found.values)


def _have_same_source(expected: Tensor, found: Matrix, source: _Source) -> bool:
    """Return whether a matrix is constant, learned or computed from the streams as the expected one is.

    `source` has whether a module computes the expected one, the number of tokens, and whether learned entries are vectors.
    """
    is_computed, tokens, has_vectors = source
    if bool(expected.isnan().any()):
        return found.source == "learned" and (has_vectors or found.values.shape[-1] == 1)
    if not is_computed:
        return found.source == "constant"
    return found.source != "computed" or len(expected) == tokens


def distance(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference, relative to the largest entry or 1. NaN is any number that all tokens share."""
    if expected.shape[1:3] != found.shape[1:3] or (
        len(expected) != len(found) and 1 not in (len(expected), len(found))
    ):
        return float("inf")
    difference = (expected - found).abs()
    constant = (found - found[:1]).abs().expand_as(difference)
    difference = torch.where(expected.isnan().expand_as(difference), constant, difference)
    size = found.abs().amax().clamp_min(1.0) if found.numel() else 1.0
    return float((difference / size).amax()) if difference.numel() else 0.0
