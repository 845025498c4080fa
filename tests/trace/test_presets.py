"""Tests of the trace against the numbers that the lessons print, to the printed places."""

import pytest
import torch

from addnorm._util.numbers import format_number
from addnorm.trace import PRESETS


@pytest.mark.parametrize(
    ("preset", "step"), [(preset, step) for preset in PRESETS.values() for step in preset.printed], ids=str
)
def test_printed_numbers_are_right_to_their_places(preset, step):
    followed, printed = preset.trace(), preset.printed[step]
    assert printed.agrees(followed[step].value)
    assert f"the lesson prints {printed.values[0]}" in followed[step].note.replace("[", "")


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
    assert f"equal to z within {format_number(off, 2)}:" in followed["shifted"].note


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
