"""Tests of the stack view's address and of the browser's history in Chromium."""

CURSORS = "#panel-stack g.cursor > *"


def test_slider_keys_are_one_history_entry(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2")
    slider = page.get_by_role("slider", name="Sublayers")
    slider.focus()
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    assert "S=20" in explorer.fragment()
    page.go_back()
    page.wait_for_function("() => location.hash.includes('S=4')")
    assert slider.input_value() == "4"


def test_back_and_forward_move_placement_and_cursors(explorer):
    page = explorer.stack("#v=1&S=8&d=8&T=2")
    explorer.after(page.keyboard.press, "2")
    page.get_by_role("slider", name="Residual stream: data cursor", exact=True).press("Home")
    assert explorer.fragment() == "#v=1&place=pre&S=8&d=8&T=2&depth=0"
    explorer.after(page.go_back)
    assert (explorer.fragment(), page.locator(CURSORS).count()) == ("#v=1&S=8&d=8&T=2", 0)
    explorer.after(page.go_forward)
    assert page.get_by_role("radio", name="pre-LN").is_checked()
    assert page.locator(CURSORS).count() == 7
    explorer.after(page.go_back)
    explorer.after(page.keyboard.press, "3")
    explorer.after(page.go_back)
    assert explorer.fragment() == "#v=1&S=8&d=8&T=2", "moving a cursor was no step of its own"


def test_depth_removed_in_another_view(new_explorer):
    page = new_explorer.stack("#v=1&S=8&d=8&T=2&depth=3")
    page.get_by_role("tab", name="Trace").click()
    page.evaluate("location.hash = '#v=1&view=trace&S=8&d=8&T=2'")
    page.wait_for_selector("#panel-trace")
    new_explorer.after(page.get_by_role("tab", name="Stack").click)
    assert new_explorer.fragment() == "#v=1&S=8&d=8&T=2"
    assert page.locator(CURSORS).count() == 0
    texts = page.locator("#panel-stack .cursor[role=slider]").evaluate_all("all => all.map((one) => one.ariaValueText)")
    assert texts == ["no place selected"] * 7


def test_drag_is_drawn_and_one_history_entry(explorer):
    page = explorer.stack("#v=1&S=4&d=8&T=2&pins=place:pre,S:4,d:8,T:2")
    # The view is drawn three times during the move; with a debounce that waits for the end of the move this would time out.
    page.evaluate("""() => new Promise((done, fail) => {
        const [slider, panel] = ['.stack-side input[type=range]', '#panel-stack'].map(css => document.querySelector(css));
        const [drawn, end] = [Number(panel.dataset.ready) + 3, Date.now() + 15000];
        let value = 4;
        const move = () => {
            if (Number(panel.dataset.ready) >= drawn) return done();
            if (Date.now() > end) return fail(new Error('it does not move under the hand'));
            value = value < 60 ? value + 2 : 6;
            slider.value = String(value);
            slider.dispatchEvent(new Event('input', {bubbles: true}));
            setTimeout(move, 16);  // faster than it can be computed
        };
        move();
    })""")
    explorer.after(lambda: page.evaluate(
        "() => { const slider = document.querySelector('.stack-side input[type=range]'); slider.value = '70'; "
        "for (const type of ['input', 'change']) slider.dispatchEvent(new Event(type, {bubbles: true})); }"
    ))  # fmt: skip
    page.wait_for_function(
        "() => document.querySelectorAll(`#chart-stream .mark[data-series='post-LN']`).length === 71"
    )
    explorer.after(page.go_back)
    assert len(explorer.marks("stream", "post-LN")) == 5


WRONG_ADDRESSES = {
    "#v=2&place=pre": "The address has version '2', expected 1",
    "#v=1&place=front": "place is 'front' in the address, expected one of post, pre, sandwich, reordered, deepnorm, none: post was used.",
    "#v=1&S=1000": "S is '1000' in the address, expected a whole number from 2 to 96 in steps of 2: 96 was used.",
    "#v=1&S=%F0%9F&d=": "d is '' in the address, expected a whole number from 8 to 256",
    "#v=1&gain=NaN": "gain is 'NaN' in the address, expected a number from 0.1 to 3: 1 was used.",
    "#v=1&__proto__=1&constructor=2": "'__proto__' in the address is unknown and was ignored.",
    "#v=1&pins=place:front": "pins is 'place:front' in the address, expected place to be one of post",
    "#v=1&pins=place:pre,S:1000": "expected S to be a whole number from 2 to 96 in steps of 2: the default was used.",
    "#" + "&".join(f"k{i}=1" for i in range(3000)): "And 2992 more.",
    "#v=1&pins=a;b;c;d": "expected at most 3 pinned settings",
    "#v=1&place=pre&place=post": "'place' occurs more than once in the address: the first value was used.",
    "#v=1&view=cellar": "view is 'cellar' in the address",
}  # fmt: skip


def test_wrong_address_is_reported(explorer):
    for fragment, sentence in WRONG_ADDRESSES.items():
        explorer.stack(fragment)
        assert sentence in explorer.read("#notices")
        assert all(len(values) > 2 for values in explorer.charts()[0]["stream"].values()), "known settings are drawn"
