"""The trace's worked examples as JSON types, for the page's list of presets."""

from __future__ import annotations

from typing import Any

from addnorm.trace import PRESETS, Preset

__all__ = ["described"]


def described() -> list[dict[str, Any]]:
    """Each preset: its numbers, options as `addnorm.trace.trace` names them, what the lesson prints and what there is to note.

    `printed[step]["note"]` is the whole sentence: the page shows it only while the forward is the preset's own, and then the
    values that it compares are these.

    Example:
        >>> from addnorm.explorer.presets import described
        >>> first = described()[0]
        >>> first["name"], first["sublayer"], first["printed"]["mean"]["note"]
        ('lesson-000', [0.5, -1.0, 1.5], 'the lesson prints 2.33')
    """
    return [_one(preset) for preset in PRESETS.values()]


def _one(preset: Preset) -> dict[str, Any]:
    followed = preset.trace()
    return {
        "name": preset.name,
        "title": preset.title,
        "x": list(preset.x),
        "sublayer": list(preset.sublayer),
        "options": {key: list(of) if isinstance(of, tuple) else of for key, of in preset.options.items()},
        "printed": {
            step: {"values": list(of.values), "because": of.because, "note": of.note(followed[step].value)}
            for step, of in preset.printed.items()
        },
        "notes": dict(preset.notes),
    }
