"""Parts of a model that no `Row` describes, and their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from addnorm._util.site_tables import MAX_PATHS


@dataclass(frozen=True)
class Unknown:
    """Part of the model that no `Row` describes, and the reason.

    Attributes:
        path: path of the module, id of the site, or name of the stream.
        reason: why this part is not understood.
        source: operator and line of the model's source, as in "add, model.py:12"; empty if not known.
    """

    path: str
    reason: str
    source: str = ""


def group_unknown(unknown: Sequence[Unknown]) -> list[str]:
    """Return one line of text for each reason, with the parts of the model that have this reason."""
    by_reason: dict[str, list[Unknown]] = {}
    for part in unknown:
        by_reason.setdefault(part.reason, []).append(part)
    texts = []
    for reason, parts in by_reason.items():
        paths = ", ".join(part.path or "the model" for part in parts[:MAX_PATHS])
        more = f" and {len(parts) - MAX_PATHS} more" if len(parts) > MAX_PATHS else ""
        source = f" ({parts[0].source})" if parts[0].source else ""
        texts.append(f"{paths}{more}: {reason}{source}")
    return texts
