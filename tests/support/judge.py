"""Judgement of an inspection by the expected answer: right, partly right, refused or wrong, with a sentence for each difference."""

from dataclasses import dataclass, field, replace

from addnorm import Learned, wirings
from support.answers import ANY

NO_ADD = "no residual add was found"
NAMED_BY_PARAMETERS = {"rezero", "skipinit"}  # their rows are equal


@dataclass
class Judgement:
    """Verdict on an inspection.

    Attributes:
        wrong: claims that are not so.
        missing: what the inspection does not claim.
        reasons: what it says that it does not understand.
        is_named: whether it names a wiring.
    """

    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    is_named: bool = False

    @property
    def status(self):
        if self.wrong:
            return "wrong"
        if not self.missing and not self.reasons:
            return "right"
        return "partly" if self.is_named or not self.reasons else "refused"

    def __str__(self):
        parts = {"WRONG": self.wrong, "missing": self.missing, "it says": self.reasons}
        return "; ".join(f"{name}: {text}" for name, texts in parts.items() for text in texts)


def judge(result, answer):
    """Compare an inspection with the answer, or with the one of two answers that fits better."""
    refused = [str(unknown.reason) for unknown in result.unknown]
    if result.sites and not result.closes:
        refused.append(f"closure {result.closure:.1e}")
    if not result.sites:
        refused.append("no stream")
    verdicts = [
        _judge_streams(result, answer, streams, refused)
        for streams in (answer.streams, answer.also)
        if streams or not answer.also
    ]
    return min(verdicts, key=lambda verdict: (len(verdict.wrong), len(verdict.missing)))


def _judge_streams(result, answer, expected, refused):
    is_named = any(stream.wiring is not None for stream in result.streams)
    verdict = Judgement(reasons=refused, is_named=is_named)
    if answer.has_adds:
        verdict.wrong += [f"false reason: {unknown.reason}" for unknown in result.unknown if NO_ADD in unknown.reason]
    if answer.reason:
        _judge_indescribable(result, answer, bool(refused), verdict)
    elif len(result.streams) == len(expected) and _are_complete(result, expected):
        for stream, truth in zip(result.streams, expected, strict=True):
            _judge_stream(stream, truth, result, verdict)
    else:
        counts = [sum(site.role == "branch" for site in stream.sites) for stream in result.streams]
        text = f"sites by stream {counts}, expected {[len(truth.sites) for truth in expected]}"
        (verdict.missing if refused or result.outside else verdict.wrong).append(text)
        _judge_parts(result, expected, verdict)
    return verdict


def _list_sublayers(stream, truth):
    """Return the sublayers of a stream. Answers that were read in the code count injections too."""
    return [site for site in stream.sites if site.role == "branch" or (site.role == "injection" and not truth.is_whole)]


def _are_complete(result, expected):
    pairs = zip(result.streams, expected, strict=True)
    return all(len(_list_sublayers(stream, truth)) == len(truth.sites) for stream, truth in pairs)


def _judge_stream(stream, truth, result, verdict):
    """Judge a stream that has as many sublayers as the true one."""
    for site, expected in zip(_list_sublayers(stream, truth), truth.sites, strict=True):
        texts = [f"{expected.path}: {text}" for text in _compare_site(site, expected)]
        is_true = _is_refused(site, result) or _has_other_split(site, expected, stream)
        (verdict.missing if is_true else verdict.wrong).extend(texts)
    if truth.is_whole:
        verdict.wrong += _compare_others(stream, truth)
    for name in ("embedding_norm", "final_norm"):
        found, norm = getattr(stream, name), getattr(truth, name)
        is_missing = found is None and bool(result.unknown)
        texts = [f"{name.replace('_', ' ')}: {text}" for text in _compare_norm(found, norm)]
        (verdict.missing if is_missing else verdict.wrong).extend(texts)
    if truth.norm is not ANY and stream.norm not in (truth.norm.split("|") if truth.norm else [None]):
        is_missing = stream.norm is None and bool(result.unknown)
        (verdict.missing if is_missing else verdict.wrong).append(f"norm {stream.norm}, expected {truth.norm}")
    verdict.wrong += _compare_facts(stream, truth)
    _judge_name(stream, truth, result, verdict)


def _compare_others(stream, truth):
    """Yield the sites that are no sublayers, except for biases after an add."""
    roles = [site.role for site in stream.sites if site.role != "branch"]
    biases = sum(site.has_bias for site in truth.sites)
    if {*roles} - {"injection"} or len(roles) > biases:
        yield f"sites that are no branches {roles}, expected at most {biases} biases"


def _compare_facts(stream, truth):
    """Yield how the facts of the whole stream differ."""
    options = dict(stream.wiring.options) if stream.wiring else {}
    for option, value in truth.options.items():
        if not are_equal(options.get(option), value):
            yield f"option {option} {options.get(option)}, expected {value}"
    for name, actual in (("width", stream.width), ("eps", stream.eps), ("shared", _count_shared_layers(stream))):
        expected = getattr(truth, name)
        if expected is not ANY and not are_equal(actual, expected):
            yield f"{name} {actual}, expected {expected}"


def _count_shared_layers(stream):
    """Return the number of different layers if one is used more than once, otherwise 0."""
    paths = [site.path for site in stream.sites if site.shared > 1]
    per_layer = sum(site.layer == 0 for site in stream.sites)
    return len({*paths}) // per_layer if paths else 0


def _judge_name(stream, truth, result, verdict):
    if stream.wiring is None:
        if None not in truth.names:
            text = f"no wiring named, expected {truth.wiring}"
            is_open = bool(result.unknown) or _has_rows_of_wiring(stream, truth)
            (verdict.missing if is_open else verdict.wrong).append(text)
        return
    if not fits(stream.wiring, truth):
        verdict.wrong.append(f"named {stream.wiring.name}, expected {truth.wiring or truth.reason}")
        return
    if truth.final_norm is ANY or not truth.num_layers:
        return
    ends_in_norm = stream.wiring.ends_in_norm(truth.num_layers)
    expects_final = ends_in_norm or stream.wiring.name == "resi_dual"  # whose head normalizes its second stream
    differs = expects_final != (truth.final_norm is not None)
    if differs and not any("final norm" in remark for remark in stream.remarks):
        verdict.wrong.append("the final norm differs from the wiring's, without a remark")


def _has_rows_of_wiring(stream, truth):
    """Return whether the rows of an unnamed stream are stated by the answer, or are those of the wiring it should have."""
    if all(site.row is not ANY for site in truth.sites):
        return True
    wiring = wirings.get(truth.wiring.split("|")[0])
    row = wiring.row(0, 0, 2)
    return all(rows_match(site.row, row) for site in stream.sites if site.role != "skip")


def fits(wiring, truth):
    """Return whether a wiring is that of a stream by its name or by its rows."""
    is_shared = len({site.path for site in truth.sites}) < len(truth.sites)  # then all sublayers share one factor
    has_equal_rows = {truth.wiring, wiring.name} <= NAMED_BY_PARAMETERS and truth.per_layer > 1 and not is_shared
    if not truth.num_layers or has_equal_rows or not wiring.is_sequential:
        return wiring.name in truth.names
    if any(site.parallel > 1 or site.row is None for site in truth.sites):
        return False
    rows = wiring.rows(truth.num_layers, truth.per_layer)
    return len(rows) == len(truth.sites) and all(map(rows_match, rows, [site.row for site in truth.sites]))


def _compare_site(site, expected):
    if not is_same_path(site.path, expected.path):
        yield f"path {site.path!r}"
    known = ("attention", "cross-attention", "feed-forward")
    if expected.kind not in (ANY, site.kind) and (site.kind in known or expected.kind in known):
        yield f"kind {site.kind}, expected {expected.kind}"
    if expected.row is None:
        yield f"row {site.row}, but no row expresses it"
    elif expected.row is not ANY and not rows_match(site.row, expected.row):
        yield f"row {site.equation}, expected {expected.row}"
    for name in ("norm_in", "norm_branch", "norm_out"):
        yield from (f"{name}: {text}" for text in _compare_norm(getattr(site, name), getattr(expected, name)))
    if expected.parallel not in (ANY, site.parallel):
        yield f"parallel {site.parallel}, expected {expected.parallel}"


def _has_other_split(site, expected, stream):
    """Return whether a row is true, but has the parts of the model at other places than usual.

    The weight of a norm may be a learned factor, and the norm of a sum may follow a bias or a skip that is a site of its own.
    """
    row, truth = site.row, expected.row
    if truth is None or truth is ANY or not is_same_path(site.path, expected.path):
        return False
    if truth.norm_in and isinstance(row.c, Learned):
        row = replace(row, c=truth.c)
    if truth.norm_branch and isinstance(row.b, Learned):
        row = replace(row, b=truth.b)
    after = stream.sites[stream.sites.index(site) + 1 :][:1]
    if after and after[0].role != "branch":
        row = replace(row, norm_out=after[0].row.norm_out)
    return row != site.row and rows_match(row, truth)


def is_same_path(path, expected):
    """Return whether one path contains the other."""
    if not path or not expected:  # the model itself
        return True
    return f"{path}.".startswith(f"{expected}.") or f"{expected}.".startswith(f"{path}.")


def _compare_norm(norm, expected):
    if expected is ANY:
        return
    if norm is None or expected is None:
        if (norm is None) != (expected is None):
            yield f"{norm.path if norm else None}, expected {expected.path if expected else None}"
        return
    if not is_same_path(norm.path, expected.path):
        yield f"path {norm.path!r}, expected {expected.path!r}"
    for name, actual in (("kind", norm.kind), ("eps", norm.eps), ("outside", norm.eps_outside)):
        fact = getattr(expected, name)
        if fact is not ANY and not are_equal(actual, fact):
            yield f"{name} {actual}, expected {fact}"


def _is_refused(site, result):
    """Return whether the inspection says that it does not understand a site."""
    return not site.closes or any(unknown.path == site.id for unknown in result.unknown)


def _judge_parts(result, expected, verdict):
    """Judge the sites of an incomplete inspection against the true sites of the same path."""
    truths = [site for truth in expected for site in truth.sites]
    for stream in result.streams:
        if stream.wiring is not None and not any(fits(stream.wiring, truth) for truth in expected):
            verdict.wrong.append(f"named {stream.wiring.name}, which no stream is")
        for site in (site for site in stream.sites if site.role == "branch"):
            rows = [truth.row for truth in truths if is_same_path(site.path, truth.path)]
            if _is_refused(site, result):
                continue
            if not rows:
                verdict.wrong.append(f"{site.path} is no site")
            elif not any(row is ANY or (row is not None and rows_match(site.row, row)) for row in rows):
                verdict.wrong.append(f"{site.path}: row {site.equation}, expected {rows[0]}")


def _list_texts(result):
    """Return all notes, remarks and reasons."""
    notes = [note for site in result.sites for note in site.notes]
    remarks = [remark for stream in result.streams for remark in stream.remarks]
    return [*notes, *remarks, *(unknown.reason for unknown in result.unknown)]


def _judge_indescribable(result, answer, is_refused, verdict):
    """Judge an inspection of a model that rows do not describe: it must refuse it."""
    says = any(word in text for text in _list_texts(result) for word in answer.words)
    for stream in result.streams:
        allowed = {truth.wiring for truth in answer.streams} if says else set()
        if stream.wiring is not None and stream.wiring.name not in allowed:
            verdict.wrong.append(f"named {stream.wiring.name}, but {answer.reason}")
    if not is_refused and not says:
        verdict.wrong.append(f"nothing is in unknown, but {answer.reason}")
    if answer.streams and not verdict.wrong:
        _judge_parts(result, answer.streams, verdict)


def are_equal(actual, expected):
    """Compare values; numbers to the round-off of float32."""
    numbers = isinstance(actual, int | float) and isinstance(expected, float)
    return abs(actual - expected) <= 1e-4 * abs(expected) if numbers else actual == expected


def rows_match(actual, expected):
    """Return whether rows have the same norms and constants, and learned factors at the same places, of any value."""
    norms = all(getattr(actual, name) == getattr(expected, name) for name in ("norm_in", "norm_branch", "norm_out"))
    return norms and all(_factors_match(getattr(actual, name), getattr(expected, name)) for name in "abc")


def _factors_match(actual, expected):
    if isinstance(actual, Learned) and isinstance(expected, Learned):
        return actual.per_feature == expected.per_feature
    return not isinstance(actual, Learned) and not isinstance(expected, Learned) and are_equal(actual, float(expected))
