"""What the server and an export share: the page's files, its content security policy, and the description of its views.

The trace view has no module: the page computes the trace itself; tests compare it with `addnorm.trace`.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import addnorm
from addnorm.explorer import race, stack, streams
from addnorm.explorer.recording import Recordings
from addnorm.trace import PRESETS, Preset

STATIC = Path(__file__).parent / "static"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
)


def describe(recordings: Recordings) -> dict[str, Any]:
    """Return parameters with their bounds, wirings, worked examples and recordings, for the page."""
    return {
        "version": addnorm.__version__, "stack": stack.describe(), "streams": streams.describe(),
        "presets": list_presets(), "race": race.describe(), "recordings": recordings.describe(),
    }  # fmt: skip


def list_presets() -> list[dict[str, Any]]:
    """Return the worked examples as JSON types: numbers, options of `addnorm.trace.trace`, printed values, notes.

    `printed[step]["note"]` is a whole sentence. The page shows it only while the forward pass is still that of the example.

    Example:
        >>> from addnorm.explorer.page import list_presets
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
