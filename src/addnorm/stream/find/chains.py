"""Streams: chains of residual adds, each of which begins where the one before ended, perhaps with norms in between.

What lies inside a sublayer of a longer stream (the cube in a GELU written by hand, a skip in a convolution) is that sublayer's
own affair. Every add is in a stream, inside of a sublayer, or left over and told.
"""

from __future__ import annotations

from addnorm.stream.dataflow.graph import Flow, Op, Value
from addnorm.stream.find.adds import Add, between, find_adds, mixes
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.ops import mixing, up

__all__ = ["find_streams"]


def find_streams(flow: Flow, norms: list[Norm]) -> tuple[list[list[Add]], list[Add]]:
    """The streams, in the order in which they begin, each a list of adds in the order of depth; and the adds of no stream."""
    return _chains(find_adds(flow, norms), {up(norm.x) for norm in norms})


def _chains(adds: list[Add], normed: set[Value]) -> tuple[list[list[Add]], list[Add]]:
    """The longest chain first; then those that no sublayer of a longer one contains; and the adds that are in neither.

    `normed` is what norms are of.
    """
    chosen: list[list[Add]] = []
    taken: dict[Op, Add] = {}  # the operators of the branches
    used: set[Add] = set()
    leaves = {*adds} - {add.before for add in adds}
    for leaf in sorted(leaves, key=lambda add: (-len([*add.states()]), -add.op.index)):
        chain = [add for add in leaf.states() if add not in used][::-1]
        outside = _trimmed([add for add in chain if add.op not in taken])
        for add in chain:
            if add.op in taken:
                taken[add.op].inside.append(add)
        if not outside or not _worth(outside, normed, alone=not chosen):
            continue
        used.update(outside)
        chosen.append(outside)
        for add in outside:
            for write in add.writes:
                for op in between(add.read, write.path.source):
                    taken.setdefault(op, add)
    left = [add for add in adds if add not in used and add.op not in taken and mixes(add)]
    return sorted(chosen, key=lambda chain: chain[0].op.index), left


def _trimmed(chain: list[Add]) -> list[Add]:
    """Without activations at either end: x + sin(x)^2 is one."""
    plain = [k for k, add in enumerate(chain) if any(write.role != "branch" for write in add.writes) or mixes(add)]
    return chain[plain[0] : plain[-1] + 1] if plain else chain


def _worth(chain: list[Add], normed: set[Value], alone: bool) -> bool:
    """Whether adds are a stream: sublayers that compute more than element by element; one alone only with a norm."""
    branches = [between(add.read, write.path.source) for add in chain for write in add.writes if write.role == "branch"]
    mixed = sum(any(mixing(op) for op in ops) for ops in branches)
    if not mixed:
        return alone and len(chain) > 1 and all(branches)
    if 2 * mixed <= len(branches):  # the gates of a recurrent cell
        return False
    inside = any(value.norm is not None for ops in branches for op in ops for value in op.outputs)
    return len(chain) > 1 or inside or chain[0].out in normed
