"""The data of the trace view: the worked examples. The page computes the trace itself; tests compare it with `addnorm.trace`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from addnorm.trace import PRESETS, Preset


def list_presets() -> list[dict[str, Any]]:
    """Return the worked examples as JSON types: numbers, options of `addnorm.trace.trace`, printed values, notes.

    `printed[step]["note"]` is a whole sentence. The page shows it only while the forward pass is the example's own.

    Example:
        >>> from addnorm.explorer.trace import list_presets
        >>> first = list_presets()[0]
        >>> first["name"], first["sublayer"], first["printed"]["mean"]["note"]
        ('lesson-000', (0.5, -1.0, 1.5), 'the lesson prints 2.33')
    """
    return [_to_json(preset) for preset in PRESETS.values()]


def _to_json(preset: Preset) -> dict[str, Any]:
    trace = preset.trace()
    printed = {
        step: asdict(printed) | {"note": printed.note(trace[step].value)} for step, printed in preset.printed.items()
    }
    return asdict(preset) | {"printed": printed}
