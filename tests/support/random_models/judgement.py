"""Judgement of an inspection: right, refused or wrong, with a sentence for each claim that is not so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from addnorm import Learned, Row, Wiring
from addnorm.stream.find.inspection import Inspection, Site, Stream
from addnorm.stream.find.norm import Norm
from support.inspection_checks import are_equal, rows_match
from support.random_models.answers import Answer, NormAnswer, SiteAnswer, StreamAnswer

__all__ = ["Judgement", "judge"]

Status = Literal["right", "refused", "wrong"]
NO_ADD = "no residual add was found"
NAMED_BY_PARAMETERS = {"rezero", "skipinit"}  # their rows are equal


@dataclass
class Judgement:
    """Verdict on an inspection.

    Attributes:
        wrong: claims that are not so.
        missing: what the inspection does not claim.
    """

    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def status(self) -> Status:
        return "wrong" if self.wrong else "refused" if self.missing else "right"

    def __str__(self) -> str:
        return "; ".join([f"WRONG: {text}" for text in self.wrong] + [f"missing: {text}" for text in self.missing])


def judge(result: Inspection, answer: Answer) -> Judgement:
    """Compare an inspection with the answer of the grammar."""
    verdict = Judgement()
    refused = [unknown.reason for unknown in result.unknown]
    if result.sites and not result.closes:
        refused.append(f"closure {result.closure:.1e}")
    if not result.sites:
        refused.append("no stream")
    verdict.missing += refused
    if answer.has_adds:
        verdict.wrong += [f"false reason: {unknown.reason}" for unknown in result.unknown if NO_ADD in unknown.reason]
    expected = answer.streams
    if answer.reason:
        _judge_indescribable(result, answer, bool(refused), verdict)
    elif len(result.streams) == len(expected) and _are_complete(result, expected):
        for stream, truth in zip(result.streams, expected, strict=True):
            _judge_stream(stream, truth, result, verdict)
    else:
        counts = [len(_branches(stream)) for stream in result.streams]
        text = f"sites by stream {counts}, expected {[len(truth.sites) for truth in expected]}"
        (verdict.missing if refused else verdict.wrong).append(text)
        _judge_parts(result, expected, verdict)
    return verdict


def _branches(stream: Stream) -> list[Site]:
    return [site for site in stream.sites if site.role == "branch"]


def _are_complete(result: Inspection, expected: tuple[StreamAnswer, ...]) -> bool:
    pairs = zip(result.streams, expected, strict=True)
    return all(len(_branches(stream)) == sum(s.role == "branch" for s in truth.sites) for stream, truth in pairs)


def _judge_stream(stream: Stream, truth: StreamAnswer, result: Inspection, verdict: Judgement) -> None:
    """Judge a stream that has as many sites as the true one."""
    branches = [site for site in truth.sites if site.role == "branch"]
    for site, expected in zip(_branches(stream), branches, strict=True):
        texts = [f"{expected.path}: {text}" for text in _compare_site(site, expected)]
        is_true = _is_refused(site, result) or _has_other_split(site, expected, stream)
        (verdict.missing if is_true else verdict.wrong).extend(texts)
    roles = Counter(site.role for site in stream.sites if site.role != "branch")
    expected_roles = Counter(site.role for site in truth.sites if site.role != "branch")
    biases = sum(site.has_bias for site in truth.sites)
    extra = roles - expected_roles
    if expected_roles - roles or extra.keys() - {"injection"} or extra["injection"] > biases:
        verdict.wrong.append(f"sites that are no branches {dict(roles)}, expected {dict(expected_roles)}")
    verdict.wrong += _compare_ends(stream, truth)
    if truth.width and stream.width != truth.width:
        verdict.wrong.append(f"width {stream.width}, expected {truth.width}")
    _judge_name(stream, truth, verdict)


def _judge_name(stream: Stream, truth: StreamAnswer, verdict: Judgement) -> None:
    if stream.wiring is None:
        verdict.missing += ["no wiring named"] * (truth.wiring is not None)
        return
    if not fits(stream.wiring, truth):
        verdict.wrong.append(f"named {stream.wiring.name}, expected {truth.wiring or truth.reason}")
        return
    ends_in_norm = stream.wiring.ends_in_norm(truth.num_layers)
    expects_final = ends_in_norm or stream.wiring.name == "resi_dual"  # whose head normalizes its second stream
    differs = expects_final != (truth.final_norm is not None) and not truth.has_free_end
    if differs and not any("final norm" in remark for remark in stream.remarks):
        verdict.wrong.append("the final norm differs from the wiring's, without a remark")


def fits(wiring: Wiring, truth: StreamAnswer) -> bool:
    """Return whether the rows of a wiring are those of a stream."""
    is_shared = len({site.path for site in truth.sites}) < len(truth.sites)  # then all sublayers share one factor
    if {truth.wiring, wiring.name} <= NAMED_BY_PARAMETERS and truth.per_layer > 1 and not is_shared:
        return wiring.name == truth.wiring
    if not wiring.is_sequential:
        return wiring.name == truth.wiring
    sites = [site for site in truth.sites if site.role == "branch"]
    if any(site.parallel > 1 or site.row is None for site in sites):
        return False
    rows: list[Row] = wiring.rows(truth.num_layers, truth.per_layer)
    return len(rows) == len(sites) and all(
        site.row is not None and rows_match(row, site.row) for row, site in zip(rows, sites, strict=True)
    )


def _compare_site(site: Site, expected: SiteAnswer) -> Iterator[str]:
    if not is_same_path(site.path, expected.path):
        yield f"path {site.path!r}"
    known = ("attention", "cross-attention", "feed-forward")
    if site.kind != expected.kind and (site.kind in known or expected.kind in known):
        yield f"kind {site.kind}, expected {expected.kind}"
    if expected.row is None:
        yield f"row {site.row}, but no row expresses it"
    elif not rows_match(site.row, expected.row):
        yield f"row {site.equation}, expected {expected.row}"
    for name in ("norm_in", "norm_branch", "norm_out"):
        yield from (f"{name}: {text}" for text in _compare_norm(getattr(site, name), getattr(expected, name)))
    if site.parallel != expected.parallel:
        yield f"parallel {site.parallel}, expected {expected.parallel}"


def _has_other_split(site: Site, expected: SiteAnswer, stream: Stream) -> bool:
    """Return whether a row is true, but has the parts of the model at other places than usual.

    The weight of a norm may be a learned factor, and the norm of a sum may follow a bias or a skip that is a site of its own.
    """
    row, truth = site.row, expected.row
    if truth is None or not is_same_path(site.path, expected.path):
        return False
    if truth.norm_in and isinstance(row.c, Learned):
        row = replace(row, c=truth.c)
    if truth.norm_branch and isinstance(row.b, Learned):
        row = replace(row, b=truth.b)
    after = stream.sites[stream.sites.index(site) + 1 :][:1]
    if after and after[0].role != "branch":
        row = replace(row, norm_out=after[0].row.norm_out)
    return row != site.row and rows_match(row, truth)


def is_same_path(path: str, expected: str) -> bool:
    """Return whether one path contains the other."""
    if not path or not expected:  # the model itself
        return True
    return f"{path}.".startswith(f"{expected}.") or f"{expected}.".startswith(f"{path}.")


def _compare_norm(norm: Norm | None, expected: NormAnswer | None) -> Iterator[str]:
    if norm is None or expected is None:
        if (norm is None) != (expected is None):
            yield f"{norm.path if norm else None}, expected {expected.path if expected else None}"
        return
    if not is_same_path(norm.path, expected.path):
        yield f"path {norm.path!r}, expected {expected.path!r}"
    if norm.kind != expected.kind:
        yield f"kind {norm.kind}, expected {expected.kind}"
    has_other_eps = norm.eps is not expected.eps and (
        norm.eps is None or expected.eps is None or not are_equal(norm.eps, expected.eps)
    )
    if has_other_eps:
        yield f"eps {norm.eps}, expected {expected.eps}"
    if norm.eps_outside != expected.outside:
        yield f"eps outside the root {norm.eps_outside}, expected {expected.outside}"


def _compare_ends(stream: Stream, truth: StreamAnswer) -> Iterator[str]:
    yield from (f"embedding norm: {text}" for text in _compare_norm(stream.embedding_norm, truth.embedding_norm))
    if not truth.has_free_end:
        yield from (f"final norm: {text}" for text in _compare_norm(stream.final_norm, truth.final_norm))


def _is_refused(site: Site, result: Inspection) -> bool:
    """Return whether the inspection says that it does not understand a site."""
    return not site.closes or any(unknown.path == site.id for unknown in result.unknown)


def _judge_parts(result: Inspection, expected: tuple[StreamAnswer, ...], verdict: Judgement) -> None:
    """Judge the sites of an incomplete inspection against the true sites of the same path."""
    truths = [site for truth in expected for site in truth.sites]
    for stream in result.streams:
        if stream.wiring is not None and not any(fits(stream.wiring, truth) for truth in expected):
            verdict.wrong.append(f"named {stream.wiring.name}, which no stream is")
        for site in _branches(stream):
            candidates = [truth for truth in truths if is_same_path(site.path, truth.path)]
            if _is_refused(site, result):
                continue
            if not candidates:
                verdict.wrong.append(f"{site.path} is no site")
            elif all(truth.row is None or not rows_match(site.row, truth.row) for truth in candidates):
                verdict.wrong.append(f"{site.path}: row {site.equation}, expected {candidates[0].row}")


def _list_texts(result: Inspection) -> list[str]:
    """Return all notes, remarks and reasons."""
    notes = [note for site in result.sites for note in site.notes]
    remarks = [remark for stream in result.streams for remark in stream.remarks]
    return [*notes, *remarks, *(unknown.reason for unknown in result.unknown)]


def _judge_indescribable(result: Inspection, answer: Answer, is_refused: bool, verdict: Judgement) -> None:
    """Judge an inspection of a model that rows do not describe: it must refuse it."""
    says = any(word in text for text in _list_texts(result) for word in answer.words)
    for stream in result.streams:
        allowed = {truth.wiring for truth in answer.streams} if says else set()
        if stream.wiring is not None and stream.wiring.name not in allowed:
            verdict.wrong.append(f"named {stream.wiring.name}, but {answer.reason}")
    if not is_refused and not says:
        verdict.wrong.append(f"nothing is in unknown, but {answer.reason}")
    if not verdict.wrong:
        _judge_parts(result, answer.streams, verdict) if answer.streams else None
