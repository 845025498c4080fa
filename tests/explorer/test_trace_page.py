"""Tests of the trace view in Chromium: it shows `addnorm.trace`; mouse, keys, address, code, geometry."""

import math
import re

import pytest
import torch

from addnorm.trace import PRESETS, trace
from support.browser import READY, ExplorerPage

CHOICES = [
    ("", {}),
    ("&tplace=pre", {"placement": "pre"}),
    ("&tnorm=rms", {"norm": "rms"}),
    ("&tplace=pre&tnorm=rms&rg=1,0,-2", {"placement": "pre", "norm": "rms", "read_grad": [1, 0, -2]}),
    ("&var=unbiased&epsat=outside&eps=1e-6", {"variance": "unbiased", "eps_place": "outside", "eps": 1e-6}),
    ("&gamma=2&beta=1,0,-1&g=0,1,0.5&digits=8", {"weight": 2, "bias": [1, 0, -1], "grad": [0, 1, 0.5], "digits": 8}),
]
X, SUBLAYER = [3.0, -1.5, 0.25], [0.5, 1.0, -2.0]


def address(x=X, sublayer=SUBLAYER, more=""):
    numbers = [",".join(map(str, of)).replace("+", "%2B") for of in (x, sublayer)]
    return f"#v=1&view=trace&x={numbers[0]}&F={numbers[1]}{more}"


def rows(page):
    """Return the text of each step, after the steps that are out of sight are drawn too."""
    page.wait_for_selector(READY["trace"])
    return page.eval_on_selector_all(
        "#panel-trace [data-step]",
        """all => all.map((row) => ({
          name: row.dataset.step,
          math: [...row.querySelectorAll('.trace-math .trace-scroll:not([hidden]) math')].map(m => m.getAttribute('aria-label')).join(' '),
          note: row.querySelector('.trace-note').textContent,
          value: [...row.querySelectorAll('.trace-bars li')].map(li => li.dataset.value)
        }))""",
    )


def assert_shows(page, followed):
    """Check every step of the trace to the last digit."""
    shown = rows(page)
    assert [row["name"] for row in shown] == [step.name for step in followed]
    for row, step in zip(shown, followed, strict=True):
        value = step.value if isinstance(step.value, tuple) else (step.value,)
        assert [float(text.replace("Infinity", "inf")) for text in row["value"]] == pytest.approx(
            value, rel=0, abs=0, nan_ok=True
        )
        formula = (
            step.symbol
            + (f" = {step.formula}" if step.formula else "")
            + (f" = {step.numbers}" if step.numbers else "")
        )
        assert row["math"] == formula
        assert row["note"] == step.note


@pytest.mark.parametrize(("more", "options"), CHOICES)
def test_trace_page_shows_steps(explorer, more, options):
    page = explorer.show(address(more=more), "trace")
    assert_shows(page, trace(X, SUBLAYER, **options))


def test_trace_page_shows_non_finite(explorer):
    page = explorer.show(address([1e200, -1e200, 0.0], [0.0, 0.0, 0.0]), "trace")
    assert_shows(page, trace([1e200, -1e200, 0.0], [0.0, 0.0, 0.0]))
    assert page.locator("[data-step=variance] .unwell .trace-value").text_content() == "inf"
    assert "cannot be drawn" in page.locator(".trace-geometry").inner_text()


def test_formulas_are_mathml(explorer):
    for more, _ in CHOICES:
        page = explorer.show(address(more=more), "trace")
        formulas = page.eval_on_selector_all(
            "#panel-trace math",
            """all => all.map(m => ({
              text: m.textContent,
              namespace: m.namespaceURI,
              fractions: [...m.querySelectorAll('mfrac, msub, msup, munder')].every(f => f.children.length === 2),
              empty: [...m.querySelectorAll('mi, mn, mo')].some(e => !e.textContent),
            }))""",
        )
        assert len(formulas) > 40
        for formula in formulas:
            assert formula["namespace"] == "http://www.w3.org/1998/Math/MathML"
            assert formula["fractions"]
            assert not formula["empty"]
            assert not re.search(r"[√Σ²ₖᵀ\[\]_]|\de", formula["text"]), "these have elements of their own"
        assert page.locator("#panel-trace mfrac").count() >= 5
        assert page.locator("#panel-trace msqrt").count() >= 2


# Moving the norm


def test_trace_norm_moves_by_keyboard(new_explorer):
    page = new_explorer.show(address(), "trace")
    post, pre = trace(X, SUBLAYER), trace(X, SUBLAYER, placement="pre")
    assert_shows(page, post)
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.name === 'trace-tplace'"):
            break
    page.keyboard.press("ArrowRight")
    assert_shows(page, pre)
    assert "tplace=pre" in new_explorer.fragment()
    straight = page.locator("[data-step=straight]")
    assert "straight" in straight.get_attribute("class")
    assert [float(bar.get_attribute("data-value")) for bar in straight.locator("li").all()] == [1, 0, 0]
    page.keyboard.press("f")
    assert_shows(page, post)
    page.wait_for_function("() => document.getElementById('live').textContent.startsWith('post-LN')")


def test_trace_norm_moves_by_mouse(explorer):
    page = explorer.show(address(), "trace")
    picture = page.locator(".trace-diagram")
    assert "after the add" in picture.get_attribute("aria-label")
    picture.click()
    assert "before the sublayer" in picture.get_attribute("aria-label")
    assert_shows(page, trace(X, SUBLAYER, placement="pre"))
    page.get_by_role("button", name="Move the norm after the add").click()
    assert_shows(page, trace(X, SUBLAYER))


def test_trace_compares_gradients(explorer):
    page = explorer.show(address(more="&g=0,3,4"), "trace")
    arrives = math.hypot(*trace(X, SUBLAYER, grad=[0, 3, 4])["dx"].value)
    assert f"its L2 norm changes from 5 to {arrives:.3g}" in page.locator(".trace-comparison").inner_text()


# Typing and dragging


def test_trace_reports_length_mismatch(explorer):
    page = explorer.show(address(), "trace")
    field = page.get_by_role("textbox", name="Sublayer(x)")
    field.fill("0.5, 1")
    with pytest.raises(ValueError) as rule:  # noqa: PT011 the sentence is compared
        trace(X, [0.5, 1])
    message = page.locator(f"#{field.get_attribute('aria-describedby')}")
    assert message.inner_text() == str(rule.value)
    assert field.get_attribute("aria-invalid") == "true"
    assert page.locator(".trace-result.stale").count() == 1
    assert_shows(page, trace(X, SUBLAYER))
    field.fill("0.5, 1, 2")
    assert_shows(page, trace(X, [0.5, 1, 2]))
    assert field.get_attribute("aria-invalid") is None
    assert page.locator(".trace-result.stale").count() == 0


WRONG = [
    ("&eps=-1", "eps", "eps is -1, expected a number >= 0"),
    ("&gamma=1,2", "gamma", "weight has 2 numbers, expected 3"),
    ("&g=a,b,c", "g", "grad[0] is 'a', expected a number"),
    ("&tplace=pre&rg=1", "rg", "read_grad has 1 number, expected 3"),
    ("&tnorm=rms&var=unbiased", "trace-var", "RMSNorm has no variance"),
]


def test_trace_reports_bad_address(explorer):
    for more, name, sentence in WRONG:
        page = explorer.show(address(more=more), "trace")
        assert page.locator(f"[name='{name}'][aria-invalid=true]").count() == 1
        assert sentence in page.locator(".trace-problem:not([hidden])").inner_text()
        assert_shows(page, trace([99], [1]))  # the trace before it
    page = explorer.open(address(more=WRONG[0][0]), READY["trace"])
    assert_shows(page, PRESETS["lesson-000"].trace())


def test_trace_limits_numbers(explorer):
    page = explorer.show(address([1.0] * 17, [1.0] * 17), "trace")
    assert "x has 17 numbers, expected 1 to 16" in page.locator(".trace-problem:not([hidden])").inner_text()


def test_trace_sliders(explorer):
    page = explorer.show(address([1, 2, 3], [0, 0, 0]), "trace")
    slider = page.get_by_role("slider", name="x, feature 2")
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    x = [float(text) for text in page.get_by_role("textbox", name="Token x").input_value().split(",")]
    assert x[1] > 2
    assert [x[0], x[2]] == [1, 3]
    assert_shows(page, trace(x, [0, 0, 0]))
    assert f"x={','.join(f'{v:g}' for v in x)}" in explorer.fragment()


@pytest.mark.parametrize(
    "name", [*[*PRESETS][:3], *(pytest.param(name, marks=pytest.mark.slow) for name in [*PRESETS][3:])]
)
def test_trace_examples(explorer, name):
    page = explorer.show(address(), "trace")
    choose = page.get_by_label("Example")
    assert choose.locator("option:checked").inner_text() == "Your own numbers"
    choose.select_option(label=PRESETS[name].title)
    assert_shows(page, PRESETS[name].trace())
    assert choose.locator("option:checked").inner_text() == PRESETS[name].title
    page.get_by_role("textbox", name="Token x").fill("9,8,7")
    page.wait_for_selector(READY["trace"])
    assert "lesson" not in page.locator(".trace-steps").first.inner_text()


# Stepping


def test_trace_steps_by_keys(explorer):
    page = explorer.show(address(), "trace")
    page.locator(".trace-walk").focus()
    here = page.locator("[aria-current=step]")
    names = [step.name for step in trace(X, SUBLAYER)]
    for name in names[:5]:
        page.keyboard.press("ArrowRight")
        assert here.get_attribute("data-step") == name
        assert f"step={name}" in explorer.fragment()
    page.keyboard.press("k")
    assert here.get_attribute("data-step") == names[3]
    assert here.evaluate(
        "row => { const box = row.getBoundingClientRect(); return box.top >= 0 && box.bottom <= innerHeight; }"
    )
    page.wait_for_function("() => document.getElementById('live').textContent.startsWith('Step 4 of 23, The mean')")
    page.keyboard.press("End")
    assert here.get_attribute("data-step") == names[-1]
    assert page.get_by_role("button", name="Next step").is_disabled()


def test_trace_player(server_address, browser):
    page = browser.new_page()  # in a context of its own, which the clock belongs to
    explorer = ExplorerPage(page, server_address)
    page.clock.install()
    explorer.show(address(more="&step=dsublayer"), "trace")
    page.get_by_role("button", name="Play").click()
    here = page.locator("[aria-current=step]")
    assert here.get_attribute("data-step") == "dweight"
    page.clock.run_for(2000)
    assert here.get_attribute("data-step") == "dbias"
    assert page.locator(".trace-play").inner_text() == "Play"
    page.clock.run_for(5000)
    assert here.get_attribute("data-step") == "dbias"
    explorer.assert_clean()
    page.context.close()


# Downloads


def test_trace_code_prints_the_same(explorer):
    traces = {address(more=more): trace(X, SUBLAYER, **options) for more, options in CHOICES}
    traces["#v=1&view=trace&g=0,0,1"] = PRESETS["lesson-000"].trace(grad=[0, 0, 1])
    for fragment, expected in traces.items():
        explorer.show(fragment, "trace")
        assert explorer.run_code()[0] == f"{expected}\n"


# The geometry


def jacobian(z, norm):
    z = torch.tensor(z, dtype=torch.float64)
    function = {"layer": torch.nn.functional.layer_norm, "rms": torch.nn.functional.rms_norm}[norm]
    return torch.autograd.functional.jacobian(lambda v: function(v, (len(z),), eps=1e-5), z)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_eigenvalues_equal_autograd(explorer, norm):
    page = explorer.show(address(more=f"&tnorm={norm}"), "trace")
    z = [a + b for a, b in zip(X, SUBLAYER, strict=True)]
    values = sorted(torch.linalg.eigvalsh(jacobian(z, norm)).tolist())
    sentence = re.search(r"eigenvalues are (.*?):", page.locator(".trace-geometry").inner_text())
    eigenvalues = [float(text.replace("−", "-")) for text in sentence[1].split(", ")]
    assert eigenvalues == pytest.approx(values, rel=5e-3, abs=1e-9)
    assert len([value for value in eigenvalues if value > 0.1]) == (1 if norm == "layer" else 2)


def dots(page, name):
    return [
        [float(dot.get_attribute("cx")), float(dot.get_attribute("cy"))]
        for dot in page.locator(f"circle.dot[data-series={name}]").all()
    ]


def test_normalized_token_is_on_circle(explorer):
    page = explorer.show(address(), "trace")
    [point] = dots(page, "landed")
    assert math.hypot(*point) == pytest.approx(float(page.locator("circle.circle").get_attribute("r")), rel=1e-3)
    landed = page.locator("circle.dot[data-series=landed]").get_attribute("data-value").split(",")
    assert [float(value) for value in landed] == pytest.approx(trace(X, SUBLAYER)["normalized"].value, rel=1e-12)


def test_scaling_and_shifting_the_token(explorer):
    for norm, more, stays in (
        ("layer", "&times=3", True),
        ("layer", "&plus=4", True),
        ("rms", "&times=3", True),
        ("rms", "&plus=4", False),
    ):
        page = explorer.show(address(more=f"&tnorm={norm}"), "trace")
        before = dots(page, "landed")
        page = explorer.show(address(more=f"&tnorm={norm}{more}"), "trace")
        moved = max(math.dist(a, b) for a, b in zip(before, dots(page, "landed"), strict=True))
        assert (moved < 0.05) == stays
        assert ("its normalized point does not move" in page.locator(".trace-moved").inner_text()) == stays


def test_remaining_gradient_is_tangent(explorer):
    page = explorer.show(address(), "trace")
    [(x, y)] = dots(page, "landed")
    path = page.locator("path.rest").first.get_attribute("d")
    (x0, y0), (x1, y1) = (map(float, pair.split()) for pair in re.match(r"M(\S+ \S+)L(\S+ \S+)M", path).groups())
    assert [x0, y0] == pytest.approx([x, y], abs=0.02)
    cosine = ((x1 - x0) * x + (y1 - y0) * y) / math.hypot(x1 - x0, y1 - y0) / math.hypot(x, y)
    assert abs(cosine) < 0.01


def test_geometry_of_other_lengths(explorer):
    sentences = {
        1: "One feature equals its own mean",
        2: "only a sign is left",
        4: "2 of the gradient's 4 dimensions remain",
    }
    for d, sentence in sentences.items():
        page = explorer.show(address([1.0, 4.0, 2.0, 8.0][:d], [0.0] * d), "trace")
        assert sentence in page.locator(".trace-geometry").inner_text()
