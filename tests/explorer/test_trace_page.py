"""Tests of the trace view in Chromium: it shows `addnorm.trace`; mouse, keys, address, code, geometry."""

import itertools
import math
import re

import pytest
import torch

from addnorm.trace import PRESETS, trace
from support.browser import READY, ExplorerPage

CHOICES = [
    ("", {}),
    ("&tplace=pre&tnorm=rms&rg=1,0,-2", {"placement": "pre", "norm": "rms", "read_grad": [1, 0, -2]}),
    ("&var=unbiased&epsat=outside&eps=1e-6", {"variance": "unbiased", "eps_place": "outside", "eps": 1e-6}),
    ("&gamma=2&beta=1,0,-1&g=0,1,0.5&digits=8", {"weight": 2, "bias": [1, 0, -1], "grad": [0, 1, 0.5], "digits": 8}),
]
X, SUBLAYER = [3.0, -1.5, 0.25], [0.5, 1.0, -2.0]


def address(x=X, sublayer=SUBLAYER, more=""):
    numbers = [",".join(map(str, of)).replace("+", "%2B") for of in (x, sublayer)]
    return f"#v=1&view=trace&x={numbers[0]}&F={numbers[1]}{more}"


def show(explorer, *token, more=""):
    """Show the trace of a token, and of what its sublayer returns."""
    return explorer.show(address(*token, more=more), "trace")


def assert_shows(page, followed):
    """Check every step of the trace to the last digit, also of steps that are out of sight."""
    page.wait_for_selector(READY["trace"])
    shown = page.eval_on_selector_all(
        "#panel-trace [data-step]",
        """all => all.map((row) => [
          row.dataset.step,
          [...row.querySelectorAll('.trace-math .trace-scroll:not([hidden]) math')].map(m => m.getAttribute('aria-label')).join(' '),
          row.querySelector('.trace-note').textContent,
          [...row.querySelectorAll('.trace-bars li')].map(li => String(Number(li.dataset.value)))
        ])""",
    )
    for row, step in zip(shown, followed, strict=True):
        formula = " = ".join(filter(None, (step.symbol, step.formula, step.numbers)))
        assert row[:3] == [step.name, formula, step.note]
        values = step.value if isinstance(step.value, tuple) else (step.value,)
        numbers = [float(text.replace("Infinity", "inf")) for text in row[3]]
        assert numbers == pytest.approx(values, rel=0, abs=0, nan_ok=True)


def assert_mathml(page):
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
        text = formula.pop("text")
        assert formula == {"namespace": "http://www.w3.org/1998/Math/MathML", "fractions": True, "empty": False}
        assert not re.search(r"[√Σ²ₖᵀ\[\]_]|\de", text), "these have elements of their own"
    assert page.locator("#panel-trace mfrac").count() >= 5
    assert page.locator("#panel-trace msqrt").count() >= 2


@pytest.mark.parametrize(("more", "options"), CHOICES)
def test_trace_page_and_code_show_steps(explorer, more, options):
    page = show(explorer, more=more)
    expected = trace(X, SUBLAYER, **options)
    assert_shows(page, expected)
    assert_mathml(page)
    assert explorer.run_code()[0] == f"{expected}\n"


def test_trace_page_shows_non_finite(explorer):
    page = show(explorer, [1e200, -1e200, 0.0], [0.0, 0.0, 0.0])
    assert_shows(page, trace([1e200, -1e200, 0.0], [0.0, 0.0, 0.0]))
    assert page.locator("[data-step=variance] .unwell .trace-value").text_content() == "inf"
    assert "cannot be drawn" in explorer.read(".trace-geometry")


# Moving the norm


def test_trace_norm_moves(explorer):
    page = show(explorer)
    post, pre = trace(X, SUBLAYER), trace(X, SUBLAYER, placement="pre")
    picture, straight = page.locator(".trace-diagram"), page.locator("[data-step=straight]")
    moves = (
        lambda: page.locator("[name=trace-tplace]:checked").press("ArrowRight"),
        lambda: page.keyboard.press("f"),
        picture.click,
        page.get_by_role("button", name="Move the norm after the add").click,
    )
    for k, move in enumerate(moves):
        move()
        assert_shows(page, post if k % 2 else pre)
        assert ("after the add" if k % 2 else "before the sublayer") in picture.get_attribute("aria-label")
        assert ("tplace=pre" in explorer.fragment()) == (k % 2 == 0)
        if k == 0:
            assert "straight" in straight.get_attribute("class")
            bars = straight.locator("li").evaluate_all("all => all.map((bar) => Number(bar.dataset.value))")
            assert bars == [1, 0, 0]
        if k == 1:
            page.wait_for_function("() => document.getElementById('live').textContent.startsWith('post-LN')")


def test_trace_compares_gradients(explorer):
    show(explorer, more="&g=0,3,4")
    arrives = math.hypot(*trace(X, SUBLAYER, grad=[0, 3, 4])["dx"].value)
    assert f"its L2 norm changes from 5 to {arrives:.3g}" in explorer.read(".trace-comparison")


# Typing and dragging


def test_trace_reports_length_mismatch(explorer):
    page = show(explorer)
    field, stale = page.get_by_role("textbox", name="Sublayer(x)"), page.locator(".trace-page.stale")
    field.fill("0.5, 1")
    with pytest.raises(ValueError) as rule:  # noqa: PT011 the sentence is compared
        trace(X, [0.5, 1])
    assert page.locator(f"#{field.get_attribute('aria-describedby')}").inner_text() == str(rule.value)
    assert (field.get_attribute("aria-invalid"), stale.count()) == ("true", 1)
    assert_shows(page, trace(X, SUBLAYER))
    field.fill("0.5, 1, 2")
    assert_shows(page, trace(X, [0.5, 1, 2]))
    assert (field.get_attribute("aria-invalid"), stale.count()) == (None, 0)


WRONG = [
    ("&eps=-1", "eps", "eps is -1, expected a number >= 0"),
    ("&gamma=1,2", "gamma", "weight has 2 numbers, expected 3"),
    ("&g=a,b,c", "g", "grad[0] is 'a', expected a number"),
    ("&tplace=pre&rg=1", "rg", "read_grad has 1 number, expected 3"),
    ("&tnorm=rms&var=unbiased", "trace-var", "RMSNorm has no variance"),
]


def test_trace_reports_bad_address(explorer):
    for more, name, sentence in WRONG:
        page = show(explorer, more=more)
        assert page.locator(f"[name='{name}'][aria-invalid=true]").count() == 1
        assert sentence in explorer.read(".trace-problem:not([hidden])")
        assert_shows(page, trace([99], [1]))  # the trace before it
    page = explorer.open(address(more=WRONG[0][0]), READY["trace"])
    assert_shows(page, PRESETS["lesson-000"].trace())


def test_trace_limits_numbers(explorer):
    show(explorer, [1.0] * 17, [1.0] * 17)
    assert "x has 17 numbers, expected 1 to 16" in explorer.read(".trace-problem:not([hidden])")


def test_trace_sliders(explorer):
    page = show(explorer, [1, 2, 3], [0, 0, 0])
    for _ in range(3):
        page.get_by_role("slider", name="x, feature 2").press("ArrowRight")
    text = page.get_by_role("textbox", name="Token x").input_value()
    x = [*map(float, text.split(","))]
    assert x == [1, pytest.approx(2.5, abs=0.49), 3]
    assert_shows(page, trace(x, [0, 0, 0]))
    assert f"x={text}&" in explorer.fragment()


def test_trace_examples(explorer):
    page = show(explorer)
    choose = page.get_by_label("Example")
    chosen = choose.locator("option:checked")
    for preset in [*PRESETS.values()][:3]:
        assert chosen.inner_text() == "Your own numbers"
        choose.select_option(label=preset.title)
        assert_shows(page, preset.trace())
        assert chosen.inner_text() == preset.title
        page.get_by_role("textbox", name="Token x").fill("9,8,7")
        page.wait_for_selector(READY["trace"])
        assert "lesson" not in page.locator(".trace-steps").first.inner_text()


# Stepping


def test_trace_steps_by_keys(explorer):
    page = show(explorer)
    walker, here = page.locator(".trace-walk"), page.locator("[aria-current=step]")
    names = [step.name for step in trace(X, SUBLAYER)]
    for key, name in (
        *(("ArrowRight", name) for name in names[:5]),
        ("k", names[3]),
        ("End", names[-1]),
        ("k", names[-2]),
    ):
        walker.press(key)
        assert here.get_attribute("data-step") == name
        assert f"step={name}" in explorer.fragment()
        box = here.bounding_box()
        assert 0 <= box["y"] <= page.viewport_size["height"] - box["height"]
    page.wait_for_function("() => document.getElementById('live').textContent.startsWith('Step 22 of 23, ')")


def test_trace_player(server_address, browser):
    page = browser.new_page()  # in a context of its own, which the clock belongs to
    explorer = ExplorerPage(page, server_address)
    page.clock.install()
    show(explorer, more="&step=dsublayer")
    explorer.click("Play")
    for milliseconds, step in ((0, "dweight"), (2000, "dbias"), (5000, "dbias")):
        page.clock.run_for(milliseconds)
        assert page.locator("[aria-current=step]").get_attribute("data-step") == step
    assert explorer.read(".trace-play") == "Play"
    explorer.assert_clean()
    page.context.close()


# The geometry


def jacobian(z, norm):
    z = torch.tensor(z, dtype=torch.float64)
    function = {"layer": torch.nn.functional.layer_norm, "rms": torch.nn.functional.rms_norm}[norm]
    return torch.autograd.functional.jacobian(lambda v: function(v, (len(z),), eps=1e-5), z)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_eigenvalues_equal_autograd(explorer, norm):
    show(explorer, more=f"&tnorm={norm}")
    z = [a + b for a, b in zip(X, SUBLAYER, strict=True)]
    values = sorted(torch.linalg.eigvalsh(jacobian(z, norm)).tolist())
    sentence = re.search(r"eigenvalues are (.*?):", explorer.read(".trace-geometry"))
    eigenvalues = [float(text.replace("−", "-")) for text in sentence[1].split(", ")]
    assert eigenvalues == pytest.approx(values, rel=5e-3, abs=1e-9)
    assert len([value for value in eigenvalues if value > 0.1]) == (1 if norm == "layer" else 2)


def normalized_points(page):
    """Return where the normalized token is, in each drawing."""
    dots = page.locator("circle.dot[data-series=landed]")
    return dots.evaluate_all("all => all.map((dot) => [dot.cx.baseVal.value, dot.cy.baseVal.value])")


def test_normalized_token_is_on_circle(explorer):
    page = show(explorer)
    [(x, y)] = normalized_points(page)
    assert math.hypot(x, y) == pytest.approx(float(page.locator("circle.circle").get_attribute("r")), rel=1e-3)
    values = page.locator("circle.dot[data-series=landed]").get_attribute("data-value").split(",")
    assert [*map(float, values)] == pytest.approx(trace(X, SUBLAYER)["normalized"].value, rel=1e-12)
    # What remains of the gradient is a tangent there.
    path = page.locator("path.rest").first.get_attribute("d")
    x0, y0, x1, y1 = map(float, re.match(r"M(\S+) (\S+)L(\S+) (\S+)M", path).groups())
    assert [x0, y0] == pytest.approx([x, y], abs=0.02)
    cosine = ((x1 - x0) * x + (y1 - y0) * y) / math.hypot(x1 - x0, y1 - y0) / math.hypot(x, y)
    assert abs(cosine) < 0.01


def test_scaling_and_shifting_the_token(explorer):
    for norm, more in itertools.product(("layer", "rms"), ("&times=3", "&plus=4")):
        before, after = (normalized_points(show(explorer, more=f"&tnorm={norm}{change}")) for change in ("", more))
        stays = (norm, more) != ("rms", "&plus=4")
        assert (max(map(math.dist, before, after)) < 0.05) == stays
        sentence = explorer.read(".trace-moved")
        assert ("its normalized point does not move" in sentence) == stays


def test_geometry_of_other_lengths(explorer):
    sentences = {
        1: "One feature equals its own mean",
        2: "only a sign is left",
        4: "2 of the gradient's 4 dimensions remain",
    }
    for d, sentence in sentences.items():
        show(explorer, [1.0, 4.0, 2.0, 8.0][:d], [0.0] * d)
        assert sentence in explorer.read(".trace-geometry")
