"""Tests of the page's trace against Python's, in Chromium: equal texts, and bitwise equal numbers."""

import json
import math
import random
import re
import struct
from pathlib import Path

import pytest

import addnorm
from addnorm.explorer.page import list_presets
from addnorm.trace import PRESETS, show, trace
from support.trace_variants import SUBLAYER, VARIANTS, X, adversarial_cases


@pytest.fixture
def within(explorer):
    """Yield a page of the explorer that can import its modules."""
    return explorer.show("#v=1&view=trace", "trace")


# Numbers are sent as 16 hexadecimal digits, since JSON has no NaN and loses the sign of zero.

HEX = """
const word = new DataView(new ArrayBuffer(8));
const hex = (value) => { word.setFloat64(0, value); return word.getBigUint64(0).toString(16).padStart(16, "0"); };
const from = (text) => { word.setBigUint64(0, BigInt(`0x${text}`)); return word.getFloat64(0); };
const given = (value) => Array.isArray(value) ? value.map(given) : typeof value === "string" && value.length === 16 ? from(value) : value;
"""


def bits(value):
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack(">d", value).hex()
    return [bits(v) for v in value]


def pack(case):
    """Return a case in the form that the browser reads."""
    x, sublayer, options = case
    packed = {key: bits(of) if isinstance(of, float | list) else of for key, of in options.items()}
    return [bits(x), bits(sublayer), packed]


def unpack(steps):
    """Return a trace in the form that the browser writes."""
    return [[s.name, s.section, s.symbol, s.formula, s.numbers, s.note, bits(s.value)] for s in steps]


TELL = (
    HEX
    + """
const bits = (value) => Array.isArray(value) ? value.map(bits) : Number.isNaN(value) ? "nan" : hex(value);
const told = (of) => of.steps.map((s) => [s.name, s.section, s.symbol, s.formula, s.numbers, s.note, bits(s.value)]);
"""
)


# Tokens


def random_cases(count):
    """Yield (x, sublayer, options) with random numbers and options."""
    draw = random.Random(0)

    def vector(d, scale):
        return [draw.gauss(0, 1) * scale for _ in range(d)]

    for k in range(count):
        d, variant = draw.randint(1, 16), VARIANTS[k % len(VARIANTS)]
        scale = draw.choice([1.0, 1.0, 1e3, 1e-3, 10.0 ** draw.randint(-300, 300)])
        options = {**variant, "eps": draw.choice([1e-5, 1e-6, 1e-12, 0.0, 0.5]), "digits": draw.randint(1, 17)}
        for name in ("weight", "bias"):
            if draw.random() < 0.6:
                options[name] = vector(d, 1.0) if draw.random() < 0.8 else draw.gauss(name == "weight", 1)
        if draw.random() < 0.7:
            options["grad"] = vector(d, draw.choice([1.0, 1.0, scale]))
        if variant["placement"] == "pre" and draw.random() < 0.7:
            options["read_grad"] = vector(d, 1.0)
        yield vector(d, scale), vector(d, draw.choice([scale, 1.0])), options


ERRORS = {"they are added element by element"}


def compare_traces(page, cases):
    """Check that the page's traces equal Python's; return the notes in them."""
    sent = json.dumps([pack(case) for case in cases])  # as text, which playwright sends much faster than objects
    received = page.evaluate(
        f"""async (cases) => {{ {TELL}
        const {{ trace }} = await import("/static/trace/trace.js");
        return JSON.stringify(JSON.parse(cases).map(([x, sublayer, options]) => told(trace(given(x), given(sublayer),
          Object.fromEntries(Object.entries(options).map(([key, of]) => [key, given(of)]))))));
        }}""",
        sent,
    )
    notes = set()
    for (x, sublayer, options), steps in zip(cases, json.loads(received), strict=True):
        expected = unpack(trace(x, sublayer, **options))
        assert steps == expected, (x, sublayer, options)
        notes |= {note for step in expected for note in step[5].split("; ")}
    return notes


def test_page_trace_equals_python_bitwise(within):
    notes = compare_traces(within, [*adversarial_cases(), *random_cases(150)])
    # Every sentence of calculation.py must occur in some case, otherwise it is not compared.
    source = (Path(addnorm.__file__).parent / "trace" / "calculation.py").read_text()
    sentences = set(re.findall(r'(?:note=|note = |return |why = )f?"([^"{}]{12,})"', source)) - ERRORS
    assert len(sentences) > 12
    assert [s for s in sentences if not any(part in notes for part in (s, *s.split("; ")))] == []


def test_page_json_equals_command(within):
    cases = [(list(X), list(SUBLAYER), variant) for variant in VARIANTS]
    cases += [([1e300, -1e300, 0.0], [0.0, 0.0, 0.0], {"title": "overflow"})]
    traces = within.evaluate(
        """async (cases) => {
        const { described, trace } = await import("/static/trace/trace.js");
        return JSON.stringify(cases.map(([x, sublayer, options]) => described(trace(x, sublayer, options))));
        }""",
        cases,
    )
    assert json.loads(traces) == [json.loads(json.dumps(trace(x, s, **options).to_dict())) for x, s, options in cases]


def test_page_formats_numbers_as_python(within):
    draw = random.Random(1)
    values = [struct.unpack(">d", draw.randbytes(8))[0] for _ in range(1000)]
    values += [draw.gauss(0, 1) * 10.0 ** draw.randint(-8, 8) for _ in range(1000)]
    values += [draw.randint(-(10**6), 10**6) / 2**k for k in range(1, 13) for _ in range(100)]  # ties
    values += [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 0.5, 1.5, 2.5, 1e22, 99999.5]
    cases = [(value, draw.choice([1, 2, 3, 4, 5, 5, 6, 9, 10, 12, 15, 16, 17])) for value in values]
    texts = within.evaluate(
        f"""async (cases) => {{ {HEX}
        const {{ show }} = await import("/static/numbers.js");
        return JSON.parse(cases).map(([value, digits]) => show(from(value), digits)).join("|");
        }}""",
        json.dumps([(struct.pack(">d", value).hex(), digits) for value, digits in cases]),
    )
    for (value, digits), text in zip(cases, texts.split("|"), strict=True):
        assert text == show(value, digits), (value.hex(), digits)


# Presets


@pytest.mark.parametrize("grad", [None, [0.25, -1.0, 3.0]], ids=["no-grad", "grad"])
def test_page_presets_equal_python(within, grad):
    options = {} if grad is None else {"grad": grad}
    presets = json.loads(json.dumps(list_presets()))
    assert [preset["name"] for preset in presets] == list(PRESETS)
    results = within.evaluate(
        f"""async ([presets, more]) => {{ {TELL}
        const {{ trace }} = await import("/static/trace/trace.js");
        const {{ matching, noted }} = await import("/static/trace/presets.js");
        return JSON.stringify(presets.map((preset) => {{
          const plain = trace(preset.x, preset.sublayer, {{ ...preset.options, ...more }});
          const match = matching(presets, plain);
          const of = noted(plain, match);
          return [match.name, of.title, told(of)];
        }}));
        }}""",
        [presets, options],
    )
    for browser, preset in zip(json.loads(results), PRESETS.values(), strict=True):
        expected = preset.trace(**options)
        assert browser == [preset.name, expected.title, unpack(expected)]


def test_other_forward_matches_no_preset(within):
    results = within.evaluate(
        """async (presets) => {
        const { trace } = await import("/static/trace/trace.js");
        const { matching } = await import("/static/trace/presets.js");
        const others = [{ bias: 1 }, { weight: [1, 1, 2] }, { eps: 1e-3 }, { eps_place: "outside" }];
        const [{ x, sublayer }] = presets;
        return [...others.map((options) => trace(x, sublayer, options)), trace([1, 2, 4], sublayer), trace([1, 2], [0.5, -1])]
          .map((of) => matching(presets, of)?.name ?? null);
        }""",
        list_presets(),
    )
    assert results == [None] * 6


# Rejected inputs

WRONG_OPTIONS = [
    {"weight": [1, 2, 3]}, {"weight": ["1"]}, {"weight": "1"}, {"bias": []}, {"grad": [1, 2, 3, 4]}, {"read_grad": [1, 2]},
    {"placement": "pre", "read_grad": [1]}, {"norm": "rms", "variance": "unbiased"}, {"placement": "sandwich"}, {"norm": ""},
    {"variance": "it's"}, {"eps_place": "in\tside"}, {"eps": -1e-5}, {"eps": "-1234567"}, {"eps": "small"}, {"eps": ""},
    {"eps": "inf"}, {"digits": 0}, {"digits": 18}, {"digits": 2.5},
]  # fmt: skip
WRONG_TOKENS = ["1,2", "x" * 100, None, ["nan", 1], [], [1, 2, 3], [1], [1, None]]
WRONG_NUMBERS = [
    "", "abc", "0x10", "1__0", "_1", "1_", "1e", "e5", ".", "--1", "1.2.3", "½", "a'b", 'a"b', "a'\"b", "\\", "\n", "y" * 80, "1,5",
    "1e999", "-Infinity",
]  # fmt: skip
BAD = [
    *(([1, 2], [1, 2], options) for options in WRONG_OPTIONS),
    *((token, [1, 2], {}) for token in WRONG_TOKENS),
    *(([1, 2], token, {}) for token in WRONG_TOKENS),
    *(([1, text], [1, 2], {}) for text in WRONG_NUMBERS),
]
GOOD = [" 1.5\t", "1_000", "+.5", "5.", "1E5", "-1e-3", "-0", "1_0.2_5e1_0"]


def test_page_errors_equal_python(within):
    results = within.evaluate(
        """async (cases) => {
        const { trace } = await import("/static/trace/trace.js");
        return cases.map(([x, sublayer, options]) => { try { trace(x, sublayer, options); } catch (error) { return error.message; } return null; });
        }""",
        BAD,
    )
    for (x, sublayer, options), browser in zip(BAD, results, strict=True):
        with pytest.raises(ValueError) as python:  # noqa: PT011 the sentence is compared
            trace(x, sublayer, **options)
        assert browser == str(python.value)


def test_page_parses_numbers_as_python(within):
    results = within.evaluate(
        """async (texts) => { const { float } = await import("/static/trace/parsing.js"); return texts.map(float); }""",
        GOOD,
    )
    assert results == [float(text) for text in GOOD]
