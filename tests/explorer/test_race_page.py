"""Tests of the race view in Chromium: its marks equal the lab's numbers at every step, however the race ends."""

import json

import pytest

from addnorm.lab.measure import BY_DEPTH
from support.browser import READY, drawn
from support.explorer_requests import RACE_ADDRESS as ADDRESS

NAMES = ("post_ln", "pre_ln")


@pytest.fixture(scope="module")
def steps(race_events):
    """Return the steps of each racer, which are the lab's (test_race.py)."""
    return {name: [event for event in race_events if event.get("racer") == k] for k, name in enumerate(NAMES)}


def assert_drawn(explorer, steps, step):
    """Check that every chart by depth shows the numbers of this step, to the last digit."""
    marks, _ = explorer.charts()
    for name, taken in steps.items():
        for chart in BY_DEPTH:
            assert marks[f"race-{chart}"][name] == drawn(taken[step][chart]), (chart, name, step)


def test_race_marks_equal_events(explorer, steps, race_events):
    page = explorer.race(ADDRESS)
    marks, _ = explorer.charts()
    for name, taken in steps.items():
        assert marks["race-loss"][name] == [step["loss"] for step in taken]
        assert marks["race-logit-change"][name] == [step["logit_change"] for step in taken]
    assert_drawn(explorer, steps, 5)
    slider = page.get_by_role("slider", name="Step", exact=True)
    for step in (4, 3):
        slider.press("ArrowLeft")
        assert f"at={step}" in explorer.fragment()
        assert_drawn(explorer, steps, step)
    low, high = sorted(NAMES, key=lambda name: steps[name][3]["loss"])
    verdict = explorer.read(".race-verdict:not(.race-end)")
    assert verdict.startswith(f"Step 3: {low} has a loss of {steps[low][3]['loss']:.3g}, {high} of ")
    assert race_events[-1]["verdict"][0] in explorer.read(".race-end")


def test_race_steps_by_keys_and_chart(explorer, steps, race_events):
    page = explorer.race(ADDRESS, race_events)
    panel = page.locator("#panel-race")
    page.locator("h2").click()
    for key, step in (("[", 4), ("[", 3), ("]", 4), ("n", 5)):
        page.keyboard.press(key)
        assert panel.get_attribute("data-step") == str(step)
    assert "at=" not in explorer.fragment()
    page.get_by_role("slider", name="Change of the logits in a step: data cursor").focus()
    page.keyboard.press("Home")
    assert_drawn(explorer, steps, 0)
    explorer.pass_time(1100)  # steps within a second are one step for the Back button
    explorer.click("Next step")
    assert_drawn(explorer, steps, 1)
    page.go_back()
    assert_drawn(explorer, steps, 0)
    assert page.get_by_role("button", name="Previous step").is_disabled()
    explorer.click("Play")
    assert page.get_by_role("button", name="Pause").is_visible()
    page.wait_for_selector("#panel-race[data-step='5']")
    page.get_by_role("button", name="Play").wait_for()
    assert_drawn(explorer, steps, 5)


def test_stopped_race_keeps_steps(explorer):
    page = explorer.open("#v=1&view=race&L=1&steps=500&rd=16&rT=8&rB=2", READY["race"])
    other = page.get_by_label("Against")
    explorer.click("Start")
    page.wait_for_function("() => Number(document.querySelector('#panel-race').dataset.step) >= 3")
    assert page.locator("#panel-race").get_attribute("data-phase") == "running"
    assert other.is_disabled(), "it runs with what it was started with"
    assert page.get_by_role("progressbar").is_visible()
    explorer.click("Stop")
    page.wait_for_selector("#panel-race[data-phase=stopped]")
    done = int(page.locator("#panel-race").get_attribute("data-step")) + 1
    assert explorer.read(".race-status") == f"Stopped after {done} of 500 steps."
    document = json.loads(explorer.download("JSON"))
    assert document["phase"] == "stopped"
    losses = [event["loss"] for event in document["raced"]["events"] if event.get("racer") == 1]
    assert explorer.marks("race-loss", "pre_ln") == losses
    assert 3 < done <= len(losses) < 500
    other.select_option("deepnorm")
    assert page.get_by_text("The settings have changed: Start runs a race with the new ones.").is_visible()


def test_failed_race_keeps_steps(explorer, race_events):
    page = explorer.open(ADDRESS, READY["race"])
    explorer.answer_race([*race_events[:4], {"event": "failed", "error": "The memory is full: take fewer layers."}])
    explorer.click("Start")
    page.wait_for_selector("#panel-race[data-phase=failed]")
    assert page.get_by_role("alert").inner_text() == "The memory is full: take fewer layers."
    assert explorer.read(".race-status") == "1 of 6 steps were finished."
    assert explorer.marks("race-loss", "pre_ln") == [race_events[2]["loss"]]
    explorer.answer_race(race_events[:3])
    explorer.click("Start again")
    page.get_by_text("The race ended early.").wait_for()
    explorer.answer_race(race_events)
    explorer.run_race()
    assert not page.get_by_role("alert").is_visible()


def test_diverged_racer_is_reported(explorer, race_events):
    taken = [event for event in race_events if event.get("racer") != 0 or event["step"] <= 3]
    diverged = {**taken[7], "loss": "NaN", "logit_change": "NaN"}
    assert (diverged["racer"], diverged["step"]) == (0, 3)
    page = explorer.race(ADDRESS, [*taken[:7], diverged, *taken[8:]])
    assert page.locator("#panel-race").get_attribute("data-step") == "5"
    assert "post_ln has stopped: its loss at step 3 is nan." in page.locator(".race-verdict").all_inner_texts()[1]
    odd = page.locator("#chart-race-loss .mark.odd")
    assert [odd.get_attribute("data-index"), odd.get_attribute("data-value")] == ["3", "NaN"]
    assert explorer.marks("race-stream", "post_ln, at its last step 3") == diverged["stream"]


# The settings.


def test_race_settings(explorer):
    page = explorer.open("#v=1&view=race&steps=20", READY["race"])
    explorer.click("warm-up helps")
    assert "warm=20" in explorer.fragment(), "no longer than the race"
    assert "lr=" not in explorer.fragment(), "the opening rate, at which post-LN fails"
    explorer.click("both learn")
    assert "lr=0.001" in explorer.fragment()
    explorer.click("DeepNorm helps")
    assert page.locator(".race-equation").nth(1).inner_text().startswith("x' = N(")
    assert page.get_by_role("img", name="deepnorm as a drawing").is_visible()
    rate = page.get_by_label("Learning rate")
    rate.fill("fast")
    rate.press("Enter")
    message = page.locator(f"#{rate.get_attribute('aria-describedby')}")
    assert message.inner_text() == "Learning rate is 'fast', expected a number from 0.00001 to 1."
    assert rate.get_attribute("aria-invalid") == "true"
    rate.fill("1e-2")
    rate.press("Enter")
    assert rate.get_attribute("aria-invalid") is None
    assert "lr=0.01" in explorer.fragment()


def test_race_code_trains_the_same(explorer, steps, race_events):
    explorer.open(ADDRESS, READY["race"])
    printed, _ = explorer.run_code()
    for end, taken in zip(race_events[-1]["racers"], steps.values(), strict=True):
        assert f"validation loss: {end['validation']}" in printed
        assert f"stream by depth at the last step: {taken[-1]['stream']}" in printed
