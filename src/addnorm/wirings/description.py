"""A wiring in words, made from its stages: what a sublayer reads and writes, and how factors start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from addnorm._util.numbers import join_words
from addnorm.wirings.equation import ELSEWHERE, End, Part, find_end, find_parts
from addnorm.wirings.factors import format_factor
from addnorm.wirings.stage_form import find_entries
from addnorm.wirings.stage_text import ONE, FactorText, NewStream, Product, StageText

SHALLOW, DEEP = 12, 100  # layers of the examples
STREAM, STREAMS, STATES = "the stream", "the streams", "all states so far"
SUMS = {"Σ_i {x}": "the sum of", "Σ_i {x} / n": "the mean of"}


def describe(wiring: Any) -> str:
    """Return a wiring in words."""
    parts = find_parts(wiring)
    texts, end = [text for part in parts for text in part.texts], find_end(wiring)
    stream = [*_describe_start(wiring, texts[0]), *map(_describe_sublayer, parts), *_describe_plain_sums(parts)]
    return " ".join([*stream, _describe_output(end), *_describe_factors(wiring, [*texts, *filter(None, [end.head])])])


def _describe_start(wiring: Any, text: StageText) -> list[str]:
    """Return the sentences on the streams' initial values."""
    start = ["The embedding is normalized first."] * wiring.embedding_norm
    if text.is_counted:
        return [*start, "The states that can be read are the embedding, x_0, and those that the sublayers append."]
    n, is_copied = len(wiring.embedding), {*wiring.embedding} == {1.0}
    begin = (
        f"The {n} streams {join_words(text.names)} begin as {'copies' if is_copied else 'multiples'} of the embedding."
    )
    return start + [begin] * (n > 1)


def _describe_sublayer(part: Part) -> str:
    """Return the sentence on what a sublayer reads and what becomes of its output."""
    text, subject = part.texts[0], _subject(part.label)
    read = text.factors.get("c", ONE).in_words(_norm(text.stage.norm_in) + _read(text))
    if len(part.texts) > 1:
        subject += ", in parallel with the others of its layer,"
        if sum(other.stage.norm_in for other in part.texts) > 1:
            read = read.replace("the norm", "its own norm")
    verb = "reads"
    if text.stage.reads > 1:
        verb, read = f"has {text.stage.reads} inputs, each", read.replace("with weights", "with its own weights")
    return f"{subject} {verb} {read}; {'; '.join(_describe_change(text, streams) for streams in text.changes('w').values())}."


def _subject(label: str) -> str:
    if label.startswith("sublayer"):
        return f"{label.capitalize()} of each layer"
    if ", sublayer" in label and ";" not in label:
        return f"In {label}"
    place = label if label in ("", ELSEWHERE) else f"in {label}"
    return f"{place} each sublayer".strip().capitalize()


def _describe_change(text: StageText, streams: Sequence[NewStream]) -> str:
    """Return in words the new value of streams that share one equation."""
    stream, names = streams[0], join_words([_name(text, stream.plain) for stream in streams])
    kept = [_sum(text, stream.kept)] if stream.kept else []
    write = [stream.factor.in_words(f"{_norm(text.stage.norm_branch)}what it returns")] if stream.factor else []
    if not (kept and write):
        only, ablation = (kept or write or ["0"])[0], ": there is no residual connection" * text.is_single
        return f"{_norm(stream.norm)}{only} becomes {names}{ablation}"
    has_result = names not in (STREAM, STREAMS) and not (stream.is_same and len(streams) == 1)
    result = ", and the sum is normalized" * stream.norm + f", which gives {names}" * has_result
    return f"{write[0]} is added to {kept[0]}{result}"


def _describe_plain_sums(parts: Sequence[Part]) -> list[str]:
    """State whether each stream that is written stays a plain sum of writes."""
    first = parts[0].texts[0]
    streams = [stream for part in parts for text in part.texts for stream in text.streams]
    if first.is_counted or not any(stream.kept for stream in streams):
        return []
    sentences = []
    for name in first.names:
        if not any(stream.plain == name and stream.factor for stream in streams):
            continue
        subject = "each stream" if first.is_matrix else _name(first, name)
        plain = [part.label for part in parts if all(_is_plain_sum(text, name) for text in part.texts)]
        if len(plain) == len(parts):
            sentences.append(f"So {subject} is a plain sum: x_0 and every write.")
        elif plain and first.is_single:
            sentences.append(f"The stream is a plain sum of writes in {' and '.join(plain)} alone.")
        else:
            sentences.append(
                f"So {subject} is no plain sum of writes: later sublayers rescale or mix the earlier ones."
            )
    return sentences


def _is_plain_sum(text: StageText, name: str) -> bool:
    return any(stream.plain == name and stream.is_sum for stream in text.streams)


def _describe_output(end: End) -> str:
    """State what the output is."""
    if end.has_norm or end.head is not None:
        return f"The output is {_norm(end.has_norm)}{STREAM if end.head is None else _read(end.head)}."
    if end.last.norms_out[0]:
        return "There is no final norm: the last sublayer ends in one."
    return "The output is the stream, without a final norm."


# Sums of streams.


def _norm(is_normed: bool) -> str:
    return "the norm of " * is_normed


def _read(text: StageText) -> str:
    """Return the sum that a stage or the head reads, before its norm."""
    before = " that the sublayer before computed" if text.stage.delayed else ""
    return f"{_sum(text, text.read())}{before}"


def _sum(text: StageText, terms: Sequence[Product]) -> str:
    return " plus ".join(_product(text, term) for term in terms)


def _product(text: StageText, term: Product) -> str:
    factor, name = term.factor, _name(text, re.sub(r"N\((.*)\)", r"\1", term.operand))
    has_norm = term.operand.startswith("N(") or bool(re.search(r"R\(|Y_i", factor.term))
    if name not in (STREAMS, STATES):
        return factor.in_words(_norm(has_norm) + name)
    names = f"the norms of {name}" if has_norm else name
    if factor.text:
        return f"a sum of {names} with weights {factor.text}"
    return f"{SUMS[factor.term]} {names}" if factor.term else names


def _name(text: StageText, name: str) -> str:
    """Return a stream, all streams or all states in words."""
    if text.is_single:
        return STREAM
    if text.is_matrix:
        return STREAMS if name in ("X", "X_i") else name
    if text.is_counted:
        return {"i": STATES, "n": "the newest state"}.get(name[-1], "a new state")
    return name


# Factors.


def _describe_factors(wiring: Any, texts: Sequence[StageText]) -> list[str]:
    """Return one sentence for each letter that has a value, and for each module how its coefficients start."""
    sentences: dict[str, None] = {}
    for text in texts:
        starts = [text.notation.start] if text.notation else []
        factors = [_describe_factor(wiring, text, place, factor) for place, factor in text.factors.items()]
        sentences |= dict.fromkeys(filter(None, starts + factors))
    return [*sentences]


def _describe_factor(wiring: Any, text: StageText, place: str, factor: FactorText) -> str:
    """Return the sentence on the value of a factor; empty for a number, or if a module computes it."""
    letter, is_learned, start = factor.definition.partition(" starts ")
    if is_learned:
        start = start.replace("as measured", "as one forward pass on data measures it")
        return f"{letter} is a learned {'vector' if factor.is_vector else 'number'} that starts {start}."
    entry = find_entries(text.stage).get(place)
    if text.is_single and isinstance(entry, float) and factor.text not in ("", format_factor(entry)):
        examples = [f"{_format_at_depth(wiring, place, depth)} in {depth}" for depth in (SHALLOW, DEEP)]
        return f"{factor.definition or factor.text}: {' layers, '.join(examples)}."
    return f"{factor.definition}." if factor.definition else ""


def _format_at_depth(wiring: Any, place: str, depth: int) -> str:
    """Return the number of a factor in a stack of `depth` layers, or the first and the last one."""
    texts = [text.factors.get(place, ONE).text for part in find_parts(wiring, depth) for text in part.texts]
    numbers = re.findall(r"[^\s()]*\d[^\s()]*", " ".join(texts)) or ["1"]
    return numbers[0] if numbers[0] == numbers[-1] else f"from {numbers[0]} to {numbers[-1]}"
