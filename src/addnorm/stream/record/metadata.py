"""What a recording keeps of the inspection: of each stream its wiring and how well every equation closes, as JSON types.

It lies in `Recording.facts["streams"]`, by the stream's name, and what was not understood in `facts["unknown"]`.
"""

from __future__ import annotations

from typing import Any

from addnorm.stream.find.inspection import Inspection, Site, Stream
from addnorm.stream.find.norm import Norm
from addnorm.stream.record import store

__all__ = ["known"]


def known(found: Inspection) -> dict[str, Any]:
    """The facts of a recording that its inspection tells."""
    dtypes = dict.fromkeys(stream.dtype for stream in found.streams)
    return {
        "mode": found.mode, "wiring": found.wiring, "closure": found.closure, "dtype": "/".join(dtypes),
        "streams": {stream.name: _stream(stream) for stream in found.streams},
        "unknown": [{"path": one.path, "reason": one.reason} for one in found.unknown],
    }  # fmt: skip


def _stream(stream: Stream) -> dict[str, Any]:
    """Its wiring's name (None: none of those known), and the closure of x_L = x_0 + all writes (None: it is no plain sum)."""
    facts = {
        "wiring": stream.wiring and stream.wiring.name, "equation": stream.equation, "width": stream.width,
        "layers": stream.num_layers, "dtype": stream.dtype, "norms": _words(stream.norms()),
        "embedding_norm": _words([stream.embedding_norm]), "final_norm": _words([stream.final_norm]),
        "closure": stream.closure, "closes": stream.closes, "remarks": [*stream.remarks],
        "sites": {site.id: _site(site) for site in stream.sites},
    }  # fmt: skip
    plain: dict[str, Any] = store.plain(facts)  # infinity is a word at once: what is loaded again is what was recorded
    return plain


def _site(site: Site) -> dict[str, Any]:
    norms = _words([site.norm_in, site.norm_branch, site.norm_out])
    return {"closure": site.closure, "closes": site.closes, "norms": norms, "notes": [*site.notes]}


def _words(norms: Any) -> str:
    """Norms with their eps, each kind once: "LayerNorm 1e-12"."""
    from addnorm.stream.find.format import norm_text  # stands on rich, which `import addnorm` does without

    there: list[Norm] = [norm for norm in norms if norm is not None]
    return ", ".join(dict.fromkeys(map(norm_text, there)))
