"""Deviations of a residual program from a wiring: which matrix differs, in which sublayers, and how.

Each matrix is compared with the wiring's, and with the wiring's mutants: transposed, not applied, scaled, with its streams in
reverse, computed with a norm of each stream alone or from the streams before the last write. If the model's matrix equals a
mutant, the difference is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from addnorm._util.numbers import format_number
from addnorm.stream.find.naming import factors_match
from addnorm.stream.find.norm import Norm
from addnorm.stream.program import naming
from addnorm.stream.program.expected import Expected, build_expected
from addnorm.stream.program.maps import join_blocks
from addnorm.stream.program.result import Program, ProgramSite
from addnorm.wirings.coefficients import ManifoldConnection
from addnorm.wirings.factors import Place
from addnorm.wirings.spec import CONSTRUCTORS, Wiring
from addnorm.wirings.stage import Stage

TERMS = {
    "collapse": "C, the weights of the read,", "mix": "A, the mixing matrix,", "inject": "B, the weights of the write,",
}  # fmt: skip
FORMULA = "the formula's"
RULE = "the rule of the stream"
MOST_ORDERS = 24  # number of orders of the streams that are tried
NOISE = 5e-6  # a matrix with a smaller error is never said to be transposed
PLACES = {"norm_in": "before the sublayer", "norm_branch": "on the sublayer's output", "norm_out": "after the add"}


class Difference(NamedTuple):
    """Difference in one term: what was found, what is expected, and the place where.

    The place is the id of a sublayer, the path of a norm or the name of a stream; it is empty for the whole model.
    """

    term: str
    found: str
    expected: str
    place: str


@dataclass
class _Fit:
    """Comparison of a sublayer's matrices with the formula's, for one assignment of the model's parameters to it.

    `labels` says how each matrix differs: "" if it agrees, None if it differs and equals no mutant. `variant` says what is wrong
    in this variant of the formula; it is None for the formula itself.
    """

    variant: tuple[str, str] | None
    labels: dict[str, str | None]
    error: float

    @property
    def is_different(self) -> bool:
        """Whether a matrix differs, or all of them are those of a wrong variant of the formula."""
        return self.variant is not None or any(label != "" for label in self.labels.values())

    @property
    def score(self) -> tuple[int, int, bool, float]:
        same = sum(label == "" for label in self.labels.values())
        named = sum(label is not None for label in self.labels.values())
        return same, named, self.variant is None, -self.error


def compare_program(program: Program, wiring: Wiring) -> list[Difference]:
    """Return the differences of a program from a wiring."""
    match = naming.compare(program, wiring)
    tolerance = naming.get_close(program)
    options = [*_compare_options(program, wiring, match.error)]
    if options or (match.error <= tolerance and not _is_transposed(program, wiring, tolerance)):
        return options
    found = [*_compare_sites(program, wiring, tolerance)]
    if found:
        return found
    has_norm = program.final_norm is not None
    if has_norm == wiring.ends_in_norm(program.num_layers):
        return [Difference("the read at the end", "another one", f"that of {wiring.name}", "")]
    words = ("after the last sublayer", "none") if has_norm else ("missing", "after the last sublayer")
    return [Difference("the final norm", *words, "")]


def compare_norms(norms: Iterable[tuple[str, Norm]], eps: float | None, kind: str | None) -> Iterator[Difference]:
    """Yield a difference for each norm whose eps or kind is not the expected one; None accepts any.

    `norms` has pairs of a place and a norm. The place is reported for a norm without a path: one that the model itself computes.
    """
    for place, norm in norms:
        if eps is not None and not factors_match(eps, norm.eps or 0.0):
            found = "missing" if norm.eps is None else format_number(norm.eps, trim=True)
            yield Difference("eps", found, format_number(eps, trim=True), norm.path or place)
        if kind not in (None, norm.kind):
            yield Difference("the kind of the norm", norm.kind, str(kind), norm.path or place)


def compare_dtypes(term: str, found: torch.dtype, expected: torch.dtype | None, place: str) -> Iterator[Difference]:
    """Yield a difference if the dtype `found` is not the expected one; None accepts any."""
    if expected not in (None, found):
        yield Difference(term, str(found).removeprefix("torch."), str(expected).removeprefix("torch."), place)


def compare_program_norms(
    program: Program, eps: float | None, kind: str | None, dtype: torch.dtype | None
) -> Iterator[Difference]:
    """Yield differences for norms with another eps or kind, and for states of another dtype; None accepts any."""
    norms = [(site.id, norm) for site in program.sites for norm in site.list_norms()]
    final = [("", program.final_norm)] if program.final_norm is not None else []
    yield from compare_norms(dict.fromkeys([*norms, *final]), eps, kind)
    for site, state in zip(program.sites, program.spine.states[1:], strict=True):
        for own in {value.tensor.dtype for value in state}:
            yield from compare_dtypes("the dtype of the streams", own, dtype, site.id)


def _compare_options(program: Program, wiring: Wiring, error: float) -> Iterator[Difference]:
    """Yield a `Difference` for each option whose fitted value is not that of the wiring.

    Nothing is yielded unless the program agrees with the fitted options, and much better than with the expected ones.
    """
    make = CONSTRUCTORS.get(wiring.name)
    if make is None or error == 0.0:
        return
    matches = [*naming.search(program, make, naming.find_constants(program))]
    best = min(matches, key=lambda match: match.error, default=None)
    if best is None or best.error > naming.get_close(program) or best.error > error / 4:
        return
    expected = dict(wiring.options)
    for name, value in dict(best.wiring.options).items():
        if value != expected[name]:
            yield Difference(f"the option {name}", repr(value), repr(expected[name]), "")


def _compare_sites(program: Program, wiring: Wiring, tolerance: float) -> Iterator[Difference]:
    """Yield the differences of each sublayer."""
    per_layer = max(1, len(program.sites) // program.num_layers)
    relation = naming.start_relation(program, wiring)
    for k, site in enumerate(program.sites):
        place = Place(*divmod(k, per_layer), program.num_layers, per_layer)
        if place.layer >= program.num_layers:
            yield Difference("the number of sublayers", str(len(program.sites)), "the same in every layer", "")
            return
        stage = wiring.stage(*place)
        if relation.shape[0] != stage.n or site.mix.values.shape[2] != relation.shape[1]:
            yield Difference("the number of streams", str(program.sizes[k]), str(stage.n), site.id)
            return
        yield from _compare_places(site, stage)
        expected = _build_constants(stage)
        after = naming.relate(program, k, stage, expected, relation)
        order = after[0] if after is not None else _guess_order(site, expected, relation)
        fit = _fit(program, k, stage, place, relation, tolerance, order)
        if fit.variant is not None:
            yield Difference(*fit.variant, FORMULA, site.id)
        for name, label in fit.labels.items():
            if label != "":
                yield Difference(TERMS[name], label or "another one", FORMULA, site.id)
        if after is None and not fit.is_different and stage.learned:
            yield Difference("a learned weight", _describe_weight(site), "one number", site.id)
        count = program.sizes[k + 1]
        if after is None and (count > stage.n_out or (count < stage.n_out and fit.is_different)):
            yield Difference("the number of streams", str(count), str(stage.n_out), site.id)
            return
        relation = order


def _describe_weight(site: ProgramSite) -> str:
    """Return in words what the model has in place of a weight that is one learned number in the wiring."""
    if "learned" not in (site.mix.source, site.collapse.source):
        return "a constant"
    return "another one in the stream than in the read, or one for each feature"


def _guess_order(site: ProgramSite, expected: Expected, relation: Tensor) -> Tensor:
    """Return the relation (`naming.relate`) after a sublayer that differs: the order of streams in which it differs least."""
    rows, count = expected.mix.shape[1], site.mix.values.shape[1]
    order = torch.full((rows, count), torch.nan, dtype=torch.float64)
    pairs = ((naming.apply(expected.mix, relation), site.mix.values), (expected.inject, site.inject.values))

    def measure(places: Iterable[int]) -> float:
        errors = (
            naming.distance(own[:, i : i + 1], found[:, f : f + 1])
            for own, found in pairs
            for f, i in enumerate(places)
        )
        return sum(min(error, 1.0) for error in errors)

    orders = itertools.islice(itertools.permutations(range(rows), count), MOST_ORDERS)
    for f, i in enumerate(min(orders, key=measure, default=())):
        order[i] = torch.nn.functional.one_hot(torch.tensor(f), count).double()
    return order


def _build_constants(stage: Stage) -> Expected:
    """Return the constant matrices of a stage. If a module computes coefficients, all entries are NaN."""
    n, m = stage.n, stage.n_out
    unknown = Expected(
        *(torch.full((1, *shape, 1), torch.nan, dtype=torch.float64) for shape in ((1, n), (m, n), (m, 1)))
    )
    return unknown if stage.coefficients is not None else build_expected(stage, None)


def describe_places(of: ProgramSite | Stage) -> str:
    """Return where a sublayer has norms, in words."""
    norms = {"norm_in": of.norm_in, "norm_branch": of.norm_branch, "norm_out": any(of.norms_out)}
    return " and ".join(words for name, words in PLACES.items() if norms[name])


def _compare_places(site: ProgramSite, stage: Stage) -> Iterator[Difference]:
    found, wanted = describe_places(site), describe_places(stage)
    if found != wanted:
        yield Difference("the norm", found or "missing", wanted or "none", site.id)
    for term, maps in (("what the sublayer reads", site.reads), ("the norm after the add", site.sums)):
        for factor in dict.fromkeys(part.describe_factors() for part in maps):
            if factor:
                yield Difference(f"the factor of {term}", factor, "1", site.id)


def _fit(
    program: Program, k: int, stage: Stage, place: Place, relation: Tensor, tolerance: float, order: Tensor
) -> _Fit:
    """Return the comparison for the assignment of parameters with which most matrices agree, or else equal a mutant.

    `order` is the relation (`naming.relate`) after the sublayer; streams that the model does not keep are not compared.
    """
    kept = ~order.isnan().any(1)
    rows = order[kept].argmax(1) if bool(kept.any()) else slice(None)  # of more streams than the wiring's, all differ
    found = {name: getattr(program.sites[k], name).values[:, rows] for name in ("mix", "inject")}
    found["collapse"] = naming.measure_read(program, k, stage).values
    flags = torch.tensor(stage.norm_streams)[:, None]
    has_normed = stage.coefficients is None and bool(flags.any())
    if has_normed:  # the weights of the streams, and then those of their norms
        found["collapse"] = join_blocks([found["collapse"], program.collapse(k, normed=True).values], 2)
    fits: list[_Fit] = []
    for variant, expected, mirror in _list_expected(program, k, stage, place, relation):
        c = expected.collapse
        parts = [torch.where(flags, 0.0, c), torch.where(flags, c, 0.0)] if has_normed else [c]
        own = {
            "collapse": join_blocks([naming.apply(part, relation) for part in parts], 2),
            "mix": naming.apply(expected.mix[:, kept], relation), "inject": expected.inject[:, kept],
        }  # fmt: skip
        labels: dict[str, str | None] = {}
        total = 0.0
        if stage.delayed:
            del own["collapse"]  # it was computed by the module before, whose C the options tell
        whole_mirror = mirror if bool(kept.all()) else None
        for name, matrix in own.items():
            labels[name], error = _label(name, matrix, found[name], tolerance, whole_mirror if name == "mix" else None)
            total += min(error, 1e6)
        fits.append(_Fit(variant, labels, total))
        if variant is None and not any(label != "" for label in labels.values()) and mirror is None:
            break
    return max(fits, key=lambda fit: fit.score, default=_Fit(None, dict.fromkeys(TERMS), 0.0))


def _list_expected(
    program: Program, k: int, stage: Stage, place: Place, relation: Tensor
) -> Iterator[tuple[tuple[str, str] | None, Expected, Tensor | None]]:
    """Yield the matrices to compare with the measured ones, for each assignment of the model's parameters to the formula's.

    Each result has three items: what is wrong in this variant of the formula, as term and words (None: it is the formula itself);
    the variant's matrices; and for mHC the A of transposed logits, transposed, with which a transposed A is recognized.
    """
    if stage.coefficients is None:
        yield None, build_expected(stage, None), None
        return
    states = naming.join_state(program, k, relation)
    each = states / states.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    variants: list[tuple[tuple[str, str] | None, Tensor]] = [
        (None, states), (("the norm of the coefficients", "over each stream alone"), each),
    ]  # fmt: skip
    if k and program.sizes[k - 1] == program.sizes[k] == stage.n:
        before = naming.join_state(program, k - 1, torch.eye(stage.n, dtype=torch.float64))
        variants.append((("the input of the coefficients", "the streams before the last write"), before))
    for module, _ in naming.list_assigned(program, k, stage, place):
        for variant, streams in variants:
            mirror = None
            expected = naming.compute(module, stage, streams)
            if isinstance(module, ManifoldConnection):
                module.transpose_mix()
                mirror = naming.compute(module, stage, streams).mix.transpose(1, 2)
                module.transpose_mix()
            yield variant, expected, mirror


def _label(
    name: str, expected: Tensor, found: Tensor, tolerance: float, mirror: Tensor | None
) -> tuple[str | None, float]:
    """Return how a matrix differs from the expected one, in words, and by how much.

    The words are "" if the matrix agrees, and None if it differs and equals no mutant.
    """
    error = naming.distance(expected, found)
    transposed = float("inf")
    if name == "mix" and expected.shape[1] == expected.shape[2] > 1:
        transposed = naming.distance(expected.transpose(1, 2) if mirror is None else mirror, found)
    if error <= tolerance and not (error > NOISE and transposed < error / 5):
        return "", error
    if transposed <= tolerance:
        return "transposed", transposed
    n = found.shape[1]
    if (
        name == "mix"
        and n == found.shape[2]
        and naming.distance(torch.eye(n, dtype=torch.float64)[None, :, :, None], found) < naming.EXACT
    ):
        return "not applied: it is the identity", 0.0
    if expected.shape[1:3] == found.shape[1:3] and bool(expected.isfinite().all()):
        ratio = float((found * expected).sum() / expected.square().sum().clamp_min(1e-30))
        if ratio and naming.distance(ratio * expected, found) <= tolerance:
            return f"{format_number(ratio, 4, trim=True)} times {FORMULA}", 0.0
        flipped = expected.flip(1) if name == "inject" else expected.flip(2)
        if expected.shape[1] * expected.shape[2] > 1 and naming.distance(flipped, found) <= tolerance:
            return "with its streams in the opposite order", 0.0
    return None, error


def _is_transposed(program: Program, wiring: Wiring, tolerance: float) -> bool:
    """Return whether an A is within tolerance but agrees much better with the transpose of the wiring's A."""
    stage = wiring.stage(0, 0, program.num_layers)
    if stage.coefficients is None or not issubclass(stage.coefficients.kind, ManifoldConnection):
        return False
    return any(difference.found == "transposed" for difference in _compare_sites(program, wiring, tolerance))
