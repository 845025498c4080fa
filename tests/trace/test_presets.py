"""Tests of the trace against the numbers that the lessons print, to the printed places."""

import pytest
import torch

from addnorm.trace import PRESETS


@pytest.mark.parametrize(
    ("preset", "step"), [(preset, step) for preset in PRESETS.values() for step in preset.printed], ids=str
)
def test_printed_numbers_are_right_to_their_places(preset, step):
    followed, printed = preset.trace(), preset.printed[step]
    assert printed.agrees(followed[step].value)
    assert f"the lesson prints {printed.values[0]}" in followed[step].note.replace("[", "")


# The numbers as printed in the lessons, so that no preset can lose one.
LESSONS = {
    "lesson-000": {
        "x": "1.0 2.0 3.0", "sublayer": "0.5 -1.0 1.5", "z": "1.5 1.0 4.5", "mean": "2.33", "variance": "2.39",
        "normalized": "-0.54 -0.86 1.40", "shifted": "-0.54 -0.86 1.40",
    },
    "lesson-001": {
        "x": "1.8 -0.3 0.8", "sublayer": "1.36 0.91 1.07", "z": "3.16 0.61 1.87", "mean": "1.88",
        "centred": "1.28 -1.27 -0.01", "squares": "1.6384 1.6129 0.0001", "variance": "1.08", "root": "1.04",
        "normalized": "1.23 -1.22 -0.01",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LESSONS)
def test_preset_has_all_numbers_of_its_lesson(name):
    assert {step: " ".join(printed.values) for step, printed in PRESETS[name].printed.items()} == LESSONS[name]


def test_note_gives_exact_digits_of_wrong_numbers():
    from addnorm.trace import Printed

    off = Printed(("1.23", "-1.23"), "from rounded numbers")
    assert not off.agrees((1.2295, -1.2199))
    assert off.note((1.2295, -1.2199)) == (
        "the lesson prints [1.23, -1.23], the exact digits are [1.23, -1.22]: from rounded numbers"
    )


def test_undo_preset_undoes_the_norm_up_to_eps():
    followed = PRESETS["undo"].trace()
    z, y = followed["z"].value, followed.output
    off = max(abs(a - b) for a, b in zip(y, z, strict=True))
    assert f"{off:.1e}" == "5.9e-06"
    assert "5.9e-06" in followed["shifted"].note


def test_mismatch_presets_match_torch_std():
    z = torch.tensor([1.5, 1.0, 4.5], dtype=torch.float64)
    unbiased = PRESETS["unbiased"].trace()
    assert unbiased["variance"].value == pytest.approx(z.var().item(), rel=1e-14)
    annotated = PRESETS["annotated-transformer"].trace()
    assert annotated.output == pytest.approx(((z - z.mean()) / (z.std() + 1e-6)).tolist(), rel=1e-14)
    for preset in ("unbiased", "annotated-transformer"):
        assert "[-0.53916, -0.86266, 1.4018]" in PRESETS[preset].trace()["normalized"].note


def test_changed_preset_drops_notes_of_its_forward():
    preset = PRESETS["lesson-000"]
    assert "lesson prints" in preset.trace(grad=[0, 1, 0], digits=3)["mean"].note
    changed = preset.trace(placement="pre")
    assert "lesson" not in changed["mean"].note
    assert changed.title.endswith("changed: placement")
