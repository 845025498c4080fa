"""What the server and an export share: the page's files, its content security policy, and the description of its views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import addnorm
from addnorm.explorer import race, stack, streams, trace
from addnorm.explorer.recording import Recordings

STATIC = Path(__file__).parent / "static"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
)


def describe(recordings: Recordings) -> dict[str, Any]:
    """Return parameters with their bounds, wirings, worked examples and recordings, for the page."""
    return {
        "version": addnorm.__version__, "stack": stack.describe(), "streams": streams.describe(),
        "presets": trace.list_presets(), "race": race.describe(), "recordings": recordings.describe(),
    }  # fmt: skip
