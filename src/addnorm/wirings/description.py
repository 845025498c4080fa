"""A wiring in words, made from its stages: what a sublayer reads and writes, and how factors start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from addnorm.wirings.equation import ELSEWHERE, Part, end_of, find_parts, shown_depth
from addnorm.wirings.factors import Learned, format_factor
from addnorm.wirings.stage_form import find_entries, names_of
from addnorm.wirings.stage_text import PER_LAYER, FactorText, StageText

__all__ = ["describe"]

SHALLOW, DEEP = 12, 100  # layers of the examples
FACTORS = {"mix_0_0": "a", "inject_0": "b", "c": "c"}  # of a single stream, by their places

READS = {False: "the stream", True: "the norm of the stream"}
WRITES = {False: "what it returns", True: "the norm of what it returns"}
ENDS_IN_NORM = "There is no final norm: the last sublayer ends in one."
SUM = "a plain sum: x_0 and every write"
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
    """Return what a sublayer reads and what becomes of its output."""
    text, subject = part.texts[0], _subject(part.label)
    if len(part.texts) > 1:
        return f"In {part.label}: {' '.join(_parallel(part.texts))}"
    if text.is_single:
        return _of_one_stream(subject, text)
    fates = _matrix_fate(text) if text.is_matrix else _counted_fate(text) if text.is_counted else _named_fate(text)
    return f"{subject} {_reads(text)}; {fates}."


# One stream.


def _of_one_stream(subject: str, text: StageText) -> str:
    stage, a = text.stage, text.factor("mix")
    read, write, norm_out = f"{READS[stage.norm_in]}{_times(text.factor('c'))}", _write(text), stage.norms_out[0]
    if not text.has_stream:
        fate = "is normalized and takes" if norm_out else "takes"
        return f"{subject} reads {read}; {write} {fate} the place of the stream: there is no residual connection."
    stream = f"{a.text} times the stream" if a.text else "the stream"
    stream = a.term.format(x="the stream") if a.term else stream
    fate = ", and the sum is normalized" if norm_out else ", which is passed on as it is" if text.is_sum else ""
    return f"{subject} reads {read}; {write} is added to {stream}{fate}."


def _write(text: StageText) -> str:
    write, b = WRITES[text.stage.norm_branch], text.factor("inject")
    if b.term:
        return b.term.format(x=write)
    times = _times(b)
    return f"{write}{times}," if times else write


def _times(factor: FactorText) -> str:
    return f", times {factor.text}" if factor.text else ""


def _is_sum(parts: Sequence[Part]) -> list[str]:
    """State whether the stream is a plain sum of writes."""
    texts = [text for part in parts for text in part.texts]
    plain = [part.label for part in parts if all(text.is_sum for text in part.texts)]
    if len(plain) == len(parts):
        return [f"So the stream is {SUM}."]
    if plain:
        return [f"The stream is a plain sum of writes in {' and '.join(plain)} alone."]
    if not any(text.has_stream for text in texts):
        return []
    cause = "norm" if any(text.stage.norms_out[0] for text in texts) else "factor"
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
    stage, notation = text.stage, text.read_notation
    if text.is_matrix or text.is_counted:
        streams = "the norms of " * any(stage.norm_streams) + ("the streams" if text.is_matrix else "all states so far")
        if notation is not None:
            if stage.delayed:
                return f"a sum of {streams} with the weights {notation.collapse} that the sublayer before computed"
            terms = notation.terms.get("collapse", "")
            is_normed = "R({x})" in terms or "Y_i" in terms
            return f"a sum of {'the norms of ' * is_normed}{streams} with weights {notation.collapse}"
        if text.is_counted and not text.read().startswith("Σ"):
            return "the newest state"
        if text.is_matrix:
            return {"Σ_i X_i": "the sum of the streams", "Σ_i X_i / n": "the mean of the streams"}.get(
                text.read(), text.read()
            )
        return f"a sum of {streams} with weights {text.factors['collapse_0'].text}"
    return _in_words(text.read())


def _in_words(expression: str) -> str:
    """Return a short sum in words: the norm of v for N(v)."""
    text = re.sub(r"([\w.]+) N\(", r"\1 times N(", expression)
    return re.sub(r"N\((\w+)\)", r"the norm of \1", text).replace(" + ", " plus ")


def _matrix_fate(text: StageText) -> str:
    stage, notation = text.stage, text.notation
    letter = notation.inject if stage.inject is None else "b"
    is_mixed = stage.mix is not None or "mix" in stage.computes
    mixed = f", after the matrix {notation.mix} has mixed the streams" if is_mixed else ""
    return f"{WRITES[stage.norm_branch]} is added to each stream, times its entry of {letter}{mixed}"


def _counted_fate(text: StageText) -> str:
    stage = text.stage
    write = WRITES[stage.norm_branch]
    if stage.n_out == stage.n:
        return f"{write} is added to the newest state"
    old = text.mixed(0)
    if not old:
        return f"{write} is appended as the newest state"
    source = (
        "the newest state" if old == text.names[0] else f"a sum of all states so far with weights {_first_letter(old)}"
    )
    return f"{write} is added to {source}, and the result is appended as the newest state"


def _first_letter(total: str) -> str:
    """Return the letter of the weights in "Σ_i α_i x_i"."""
    return total.removeprefix("Σ_i ").partition("_")[0]


def _named_fate(text: StageText) -> str:
    """Return what becomes of the streams that change: they receive the write, or become something else."""
    stage, write = text.stage, WRITES[text.stage.norm_branch]
    adds: list[str] = []
    scaled: list[str] = []
    others: list[str] = []
    normed: list[str] = []
    for target, _ in text.changes("w"):
        names = [name.removesuffix("'") for name in target.split(" = ")]
        k = text.plain_names_after.index(names[0])
        old, added = text.mixed(k), text.injected(k, "w")
        times = "" if added in ("w", "") else f"times {added.removesuffix(' w').removesuffix(' ⊙')}"
        if old == names[0] and added and len(names) == 1:
            (scaled if times else adds).append(f"{times}, to {names[0]}" if times else names[0])
            normed += [names[0]] * bool(stage.norms_out[k])
        else:
            total = " plus ".join(filter(None, (_in_words(old), write + f", {times}" * bool(times) if added else "")))
            norm = "the norm of " * bool(stage.norms_out[k])
            others.append(f"{_join(names)} {'becomes' if len(names) == 1 else 'become'} {norm}{total}")
    targets = [f" to {_join(adds)}"] * bool(adds) + [f", {target}" for target in scaled]
    pieces = [f"{write} is added{' and'.join(targets)}"] * bool(targets) + others
    pieces += [f"{_join(normed)} {'is' if len(normed) == 1 else 'are'} then normalized"] * bool(normed)
    return "; ".join(pieces)


def _sums(parts: Sequence[Part]) -> list[str]:
    """State which streams stay plain sums of writes."""
    texts = [text for part in parts for text in part.texts]
    if any(text.is_counted for text in texts):
        return []
    if any(text.is_matrix for text in texts):
        is_mixed = any("mix" in text.stage.computes or text.stage.mix is not None for text in texts)
        return [] if is_mixed else ["So each stream is a plain sum: x_0 and every write, times its weight."]
    written = {name for text in texts for k, name in enumerate(text.plain_names_after) if text.injected(k, "w")}
    names = names_of(texts[0].stage)
    plain = [name for name in names if name in written and all(_stays_sum(text, name) for text in texts)]
    if not plain:
        return ["So no stream is a plain sum of writes."]
    return [f"So {_join(plain)} {'stays' if len(plain) == 1 else 'stay'} {SUM}."]


def _stays_sum(text: StageText, name: str) -> bool:
    names, after = names_of(text.stage), text.plain_names_after
    if name not in names or name not in after:
        return False
    k = after.index(name)
    return text.mixed(k) == name and not text.stage.norms_out[k] and len(after) == len(names)


def _output(wiring: Any) -> str:
    """State what the output is."""
    end = end_of(wiring)
    if end.head is None:
        is_normed = wiring.stages(shown_depth(wiring))[-1].norms_out[0]
        return ENDS_IN_NORM if is_normed else "The output is the stream."
    head = end.head
    norm = "the norm of " * wiring.ends_in_norm(shown_depth(wiring))
    if head.stage.delayed:
        return f"The output is {norm}the sum of the streams with the weights {head.read_notation.collapse} of the last sublayer."
    return f"The output is {norm}{_read_words(head)}."


def _join(names: Sequence[str]) -> str:
    """Return names as "u, v and w"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""


# Factors.


def _factors(wiring: Any, parts: Sequence[Part]) -> list[str]:
    """Return one sentence for each letter of a single stream that states its value."""
    sentences = {}
    for place, name in FACTORS.items():
        for part in parts:
            for one in part.texts:
                factor, text = find_entries(one.stage).get(place, 0.0), one.factors.get(place, FactorText())
                if not one.is_single:
                    continue
                if isinstance(factor, Learned):
                    if text.definition:
                        sentences[text.text] = _learned(name, factor, text)
                elif text.text and text.text != format_factor(factor):
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
    found = [text.factors.get(place, FactorText()) for part in find_parts(wiring, depth) for text in part.texts]
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
