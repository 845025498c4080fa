"""A wiring in words, made from its stages: what a sublayer reads and writes, and how factors start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from addnorm.wirings.equation import ELSEWHERE, Part, end_of, find_parts, shown_depth
from addnorm.wirings.factors import Learned, format_factor
from addnorm.wirings.stage_form import find_entries, names_of
from addnorm.wirings.stage_text import ONE, PER_LAYER, FactorText, Product, StageText, join_terms

SHALLOW, DEEP = 12, 100  # layers of the examples
FACTORS = {"mix_0_0": "a", "inject_0": "b", "c": "c"}  # of a single stream, by their places

READS = {False: "the stream", True: "the norm of the stream"}
WRITES = {False: "what it returns", True: "the norm of what it returns"}
ENDS_IN_NORM = "There is no final norm: the last sublayer ends in one."
SUM = "a plain sum: x_0 and every write"
STATES = "all states so far"
NUMBERS = {1: "One", 2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six", 7: "Seven", 8: "Eight"}


def describe(wiring: Any) -> str:
    """Return a wiring in words."""
    parts = find_parts(wiring)
    if all(text.is_single for part in parts for text in part.texts):
        parallel = len(parts) == 1 and len(parts[0].texts) > 1
        first = _parallel(parts[0].texts) if parallel else map(_sublayer, parts)
        sentences = [*first, *_is_sum(parts), *_ends(wiring, parts)]
    else:
        sentences = [*_begin(wiring, parts[0].texts[0]), *map(_sublayer, parts), *_sums(parts), _output(wiring)]
    return " ".join([*sentences, *_factors(wiring, parts), *_starts(wiring, parts)])


def _subject(label: str) -> str:
    if label in ("", ELSEWHERE):
        return f"{label.capitalize()} each sublayer" if label else "Each sublayer"
    if label.startswith("sublayer"):
        return f"{label.capitalize()} of each layer"
    return f"In {label}" if ", sublayer" in label and ";" not in label else f"In {label} each sublayer"


def _sublayer(part: Part) -> str:
    """Return the sentence on what a sublayer reads and what becomes of its output."""
    text, subject = part.texts[0], _subject(part.label)
    if len(part.texts) > 1:
        return f"In {part.label}: {' '.join(_parallel(part.texts))}"
    if text.is_single:
        return _of_one_stream(subject, text)
    fates = _matrix_fate(text) if text.is_matrix else _counted_fate(text) if text.is_counted else _named_fate(text)
    return f"{subject} {_reads(text)}; {fates}."


# One stream.


def _of_one_stream(subject: str, text: StageText) -> str:
    (stream,) = text.streams
    read = f"{READS[text.stage.norm_in]}{_times(text.factors.get('c', ONE))}"
    if not stream.kept:
        fate = "is normalized and takes" if stream.norm else "takes"
        return (
            f"{subject} reads {read}; {_write(text)} {fate} the place of the stream: there is no residual connection."
        )
    a = stream.kept[0].factor
    old = a.term.format(x="the stream") if a.term else f"{a.text} times the stream" if a.text else "the stream"
    fate = ", and the sum is normalized" if stream.norm else ", which is passed on as it is" if stream.is_same else ""
    return f"{subject} reads {read}; {_write(text)} is added to {old}{fate}."


def _write(text: StageText) -> str:
    write, b = WRITES[text.stage.norm_branch], text.factors.get("inject_0", ONE)
    if b.term:
        return b.term.format(x=write)
    times = _times(b)
    return f"{write}{times}," if times else write


def _times(factor: FactorText) -> str:
    return f", times {factor.text}" if factor.text else ""


def _is_sum(parts: Sequence[Part]) -> list[str]:
    """State whether the stream is a plain sum of writes."""
    streams = [text.streams[0] for part in parts for text in part.texts]
    plain = [part.label for part in parts if all(text.streams[0].is_sum for text in part.texts)]
    if len(plain) == len(parts):
        return [f"So the stream is {SUM}."]
    if plain:
        return [f"The stream is a plain sum of writes in {' and '.join(plain)} alone."]
    if not any(stream.kept for stream in streams):
        return []
    cause = "norm" if any(stream.norm for stream in streams) else "factor"
    return [f"So the stream is no plain sum of writes: each {cause} rescales all that came before it."]


def _ends(wiring: Any, parts: Sequence[Part]) -> list[str]:
    """Describe the norms before the first and after the last sublayer."""
    depth = shown_depth(wiring)
    stages = [text.stage for part in parts for text in part.texts]
    embedding = ["The embedding is normalized before the first sublayer."] * wiring.embedding_norm
    if wiring.ends_in_norm(depth):
        return [*embedding, "A final norm follows the last sublayer."]
    if wiring.stages(depth)[-1].norms_out[0]:
        return [*embedding, ENDS_IN_NORM]
    normless = not any(stage.norm_in or stage.norm_branch or stage.norms_out[0] for stage in stages)
    return [*embedding, "There is no other norm." if embedding else "There is no norm."] if normless else embedding


def _parallel(texts: Sequence[StageText]) -> list[str]:
    norms = sum(text.stage.norm_in for text in texts)
    read = "the stream" if not norms else "the same norm of the stream" if norms == 1 else "its own norm of the stream"
    return [
        f"The sublayers of a layer run in parallel: each reads {read}, and none reads what another of its layer writes.",
        f"{_write(texts[0]).capitalize().replace('it returns', 'they return')} is added to the stream.",
    ]


# Several streams.


def _begin(wiring: Any, text: StageText) -> list[str]:
    """State how the streams begin."""
    start = ["The embedding is normalized first."] * wiring.embedding_norm
    n = len(wiring.embedding)
    if n == 1 and text.is_matrix:
        return [*start, "One stream begins as the embedding."]
    if n == 1 and not text.is_counted:
        return start
    count, are_copies = NUMBERS.get(n, str(n)), {*wiring.embedding} == {1.0}
    if text.is_counted:
        return [*start, "The states that can be read are the embedding, x_0, and those that the sublayers append."]
    names = "" if text.is_matrix else f", {_join(list(names_of(text.stage)))},"
    return [*start, f"{count} streams{names} begin as {'copies' if are_copies else 'multiples'} of the embedding."]


def _reads(text: StageText) -> str:
    stage = text.stage
    read = ("the norm of " if stage.norm_in else "") + _read_words(text)
    if stage.reads == 1:
        return f"reads {read}"
    return f"has {stage.reads} inputs, each {read.replace(' with weights', ' with its own weights')}"


def _read_words(text: StageText) -> str:
    """Return the sum that is read."""
    read, notation = join_terms(text.read()), text.read_notation
    if not text.is_matrix and not text.is_counted:
        return _in_words(read)
    streams = "the norms of " * any(text.stage.norm_streams) + ("the streams" if text.is_matrix else STATES)
    if notation is not None and text.stage.delayed:
        return f"a sum of {streams} with the weights {notation.collapse} that the sublayer before computed"
    if notation is not None:
        term = notation.terms.get("collapse", "")
        return f"a sum of {'the norms of ' * ('R({x})' in term or 'Y_i' in term)}{streams} with weights {notation.collapse}"
    if text.is_matrix:
        return {"Σ_i X_i": "the sum of the streams", "Σ_i X_i / n": "the mean of the streams"}.get(read, read)
    return _state_words(text.read(), streams)


def _state_words(terms: Sequence[Product], states: str = STATES) -> str:
    """Return the newest of counted states, or a sum of all, in words."""
    factor = terms[0].factor
    if factor.is_sum:
        return f"a sum of {states} with weights {factor.text}"
    return f"{factor.text} times the newest state" if factor.text else "the newest state"


def _in_words(expression: str) -> str:
    """Return a short sum in words: the norm of v for N(v)."""
    text = re.sub(r"([\w.]+) N\(", r"\1 times N(", expression)
    return re.sub(r"N\((\w+)\)", r"the norm of \1", text).replace(" + ", " plus ")


def _matrix_fate(text: StageText) -> str:
    (stream,), letter = text.streams, text.factors["inject_0"].text
    mixed = "" if stream.is_same else f", after the matrix {text.notation.mix} has mixed the streams"
    return f"{WRITES[text.stage.norm_branch]} is added to each stream, times its entry of {letter}{mixed}"


def _counted_fate(text: StageText) -> str:
    (stream,), write = text.streams, WRITES[text.stage.norm_branch]
    if text.stage.n_out == text.stage.n:
        return f"{write} is added to the newest state"
    if not stream.kept:
        return f"{write} is appended as the newest state"
    return f"{write} is added to {_state_words(stream.kept)}, and the result is appended as the newest state"


def _named_fate(text: StageText) -> str:
    """Return in words which streams the write is added to, which become another sum, and which are then normalized."""
    streams, write = {stream.plain: stream for stream in text.streams}, WRITES[text.stage.norm_branch]
    targets: list[str] = []
    scaled: list[str] = []
    others: list[str] = []
    normed: list[str] = []
    for target, _ in text.changes("w"):
        names = [name.removesuffix("'") for name in target.split(" = ")]
        name, stream = names[0], streams[names[0]]
        factor = stream.factor
        if stream.is_same and factor and len(names) == 1:
            (scaled if factor.text else targets).append(f", times {factor.text}, to {name}" if factor.text else name)
            normed += [name] * stream.norm
        else:
            added = [write + f", times {factor.text}" * bool(factor.text)] if factor else []
            total = " plus ".join([*([_in_words(join_terms(stream.kept))] if stream.kept else []), *added])
            others.append(
                f"{_join(names)} {'becomes' if len(names) == 1 else 'become'} {'the norm of ' * stream.norm}{total}"
            )
    to = [f" to {_join(targets)}"] * bool(targets) + scaled
    pieces = [f"{write} is added{' and'.join(to)}"] * bool(to) + others
    pieces += [f"{_join(normed)} {'is' if len(normed) == 1 else 'are'} then normalized"] * bool(normed)
    return "; ".join(pieces)


def _sums(parts: Sequence[Part]) -> list[str]:
    """State which streams stay plain sums of writes."""
    texts = [text for part in parts for text in part.texts]
    if any(text.is_counted for text in texts):
        return []
    if any(text.is_matrix for text in texts):
        is_mixed = any(not text.streams[0].is_same for text in texts)
        return [] if is_mixed else ["So each stream is a plain sum: x_0 and every write, times its weight."]
    written = {stream.plain for text in texts for stream in text.streams if stream.factor}
    sums = [
        {stream.plain for stream in text.streams if stream.is_sum} for text in texts if text.stage.n == text.stage.n_out
    ]
    plain = [name for name in names_of(texts[0].stage) if name in written and all(name in some for some in sums)]
    if not plain or len(sums) < len(texts):
        return ["So no stream is a plain sum of writes."]
    return [f"So {_join(plain)} {'stays' if len(plain) == 1 else 'stay'} {SUM}."]


def _output(wiring: Any) -> str:
    """State what the output is."""
    end, depth = end_of(wiring), shown_depth(wiring)
    if end.head is None:
        return ENDS_IN_NORM if wiring.stages(depth)[-1].norms_out[0] else "The output is the stream."
    read = _read_words(end.head)
    if end.head.stage.delayed:
        read = f"the sum of the streams with the weights {end.head.read_notation.collapse} of the last sublayer"
    return f"The output is {'the norm of ' * wiring.ends_in_norm(depth)}{read}."


def _join(names: Sequence[str]) -> str:
    """Return names as "u, v and w"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""


# Factors.


def _factors(wiring: Any, parts: Sequence[Part]) -> list[str]:
    """Return one sentence for each letter of a single stream that states its value."""
    sentences = {}
    singles = [text for part in parts for text in part.texts if text.is_single]
    for place, name in FACTORS.items():
        for one in singles:
            factor, text = find_entries(one.stage).get(place), one.factors.get(place, ONE)
            if isinstance(factor, Learned):
                if text.definition:
                    sentences[text.text] = _learned(name, factor, text)
            elif isinstance(factor, float) and text.text and text.text != format_factor(factor):
                examples = [_format_at_depth(wiring, place, depth) for depth in (SHALLOW, DEEP)]
                definition = f"{text.definition}:" if text.definition else f"{text.text} is"
                sentences[text.text] = f"{definition} {examples[0]} in {SHALLOW} layers, {examples[1]} in {DEEP}."
    return [*sentences.values()]


def _learned(name: str, factor: Learned, text: FactorText) -> str:
    kind = "vector" if factor.per_feature else "number"
    scope = "for all the sublayers of a layer" if factor.shared else "for each sublayer"
    start = text.definition.removeprefix(f"{text.text} ").removesuffix(PER_LAYER)
    start = start.replace("as measured", "as one forward pass on data measures it")
    effect = ", so that nothing is added before training" * (name == "b" and start == "starts at 0")
    return f"{text.text} is learned, a {kind} {scope}, and {start}{effect}."


def _format_at_depth(wiring: Any, place: str, depth: int) -> str:
    """Return the number of a factor in a stack of `depth` layers, or the first and the last one."""
    found = [text.factors.get(place, ONE) for part in find_parts(wiring, depth) for text in part.texts]
    texts = [factor.text.strip("()") for factor in found]
    numbers = [number for text in texts if text for number in re.split(r" (?:\.\.\.|to) ", text)] or ["1"]
    return numbers[0] if numbers[0] == numbers[-1] else f"from {numbers[0]} to {numbers[-1]}"


def _starts(wiring: Any, parts: Sequence[Part]) -> list[str]:
    """Return how the coefficients of stages and head start."""
    texts = [text for part in parts for text in part.texts]
    head = end_of(wiring).head
    sentences: dict[str, None] = {}
    for text in texts if head is None else [*texts, head]:
        if text.notation is not None and text.notation.start:
            sentences[text.notation.start] = None
        if text is head or not text.is_single:
            for factor in text.factors.values():
                if " starts at " in factor.definition:
                    letter, _, start = factor.definition.partition(" starts at ")
                    sentences[f"{letter} is learned and starts at {start}."] = None
                elif factor.definition:
                    sentences[f"{factor.definition}."] = None
    return [*sentences]
