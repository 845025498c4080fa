"""Activation memory of encoders in training, and what `addnorm.save_outputs` saves of it. Writes results/memory.json.

Bytes are counted from tensors, each storage once, so they do not depend on the load of the machine. README.md in this folder has
the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from addnorm import ResidualStack, Wiring, save_outputs, wirings
from addnorm.bench.case import Case, Document, Results, Row, grid
from addnorm.bench.harness import Benchmark
from addnorm.bench.pages import digits, markdown
from addnorm.bench.script import main
from addnorm.bench.targets import Target, has
from addnorm.nn import FeedForward, SelfAttention
from addnorm.ops import autograd

LAYERS, D_MODEL, NHEAD, STREAMS = 12, 256, 4, 4
BATCH, TOKENS = 16, 128
WIRINGS: dict[str, Callable[[], Wiring]] = {
    "pre_ln": wirings.pre_ln, "post_ln": wirings.post_ln, "hyper_connections": partial(wirings.hyper_connections, STREAMS),
    "mhc": partial(wirings.mhc, STREAMS),
}  # fmt: skip
CHECKPOINTS = (0, 1, 3)  # layers for each checkpoint; 0: none
STATES = 4  # parameter, gradient, and two moments of AdamW
# What the autograd nodes of Add & Norm save, in their order. Parameters are not counted.
SAVED = {
    "AddNormFunctionBackward": ("z", "statistics", "", "", "z", "branch"),
    "StreamsFunctionBackward": (
        "streams", "branch", *("coefficients",) * 3, "", "", "", "", "", "coefficients", "statistics", "coefficients",
    ),
}  # fmt: skip
KINDS = {"z": "z", "streams": "streams", "branch": "writes", "statistics": "statistics", "coefficients": "coefficients"}
Storages = dict[int, int]  # bytes by address


def make_stack(wiring: str, dtype: torch.dtype, layers: int = LAYERS, d_model: int = D_MODEL) -> ResidualStack:
    """Return an encoder without embedding and head."""
    torch.manual_seed(0)
    sublayers = [
        kind for _ in range(layers)
        for kind in (SelfAttention(d_model, NHEAD, dtype=dtype), FeedForward(d_model, dtype=dtype))
    ]  # fmt: skip
    return ResidualStack(sublayers, d_model, WIRINGS[wiring](), dtype=dtype)


class Tally:
    """Storages that autograd saves and that layers pass on, and those that Add & Norm saves.

    Attributes:
        layers: storages that each layer saves; the last entry is that of the final norm.
        states: storages of the state before each layer.
        add_norm: storages that only Add & Norm saves, by kind.
        parameters: bytes of the parameters.
    """

    def __init__(self, stack: ResidualStack, x: Tensor, *, outputs: bool = False) -> None:
        self._context = save_outputs if outputs else nullcontext
        self._alive: list[Any] = []  # so that no address is used twice
        self._left_out = {t.untyped_storage().data_ptr() for t in (x, *stack.parameters(), *stack.buffers())}
        self.parameters = sum(p.nbytes for p in stack.parameters())
        self.layers: list[Storages] = []
        self.states: list[Storages] = []
        state = stack._start(x)
        for layer in stack.layers:
            self.states.append(self._enter({}, state))
            with self._saving(), self._context():
                state = stack._run_layers([layer], state, {})
        with self._saving(), self._context():
            y = stack._finish(state)[1]
        self.add_norm = self._find_add_norm(y.grad_fn)

    def _saving(self) -> Any:
        saved: Storages = {}
        self.layers.append(saved)

        def pack(t: Tensor) -> Tensor:
            self._enter(saved, t)
            return t

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)

    def _enter(self, storages: Storages, value: Any) -> Storages:
        """Enter the storages of all tensors in a value, without those of parameters and input."""
        for t in tree_leaves(value):
            if isinstance(t, Tensor) and (storage := t.untyped_storage()).data_ptr() not in self._left_out:
                self._alive.append(storage)
                storages[storage.data_ptr()] = storage.nbytes()
        return storages

    def _find_add_norm(self, root: Any) -> dict[str, Storages]:
        """Return the storages that the nodes of Add & Norm save and no other node does, by kind."""
        found: dict[str, Storages] = {kind: {} for kind in KINDS}
        others: Storages = {}
        nodes, left = {root}, [root]
        while left:
            new = {node for node, _ in left.pop().next_functions if node is not None} - nodes
            nodes |= new
            left += new
        for node in nodes:
            kinds = SAVED.get(node.name())
            if kinds is None:
                self._enter(others, [getattr(node, name) for name in dir(node) if name.startswith("_saved_")])
                continue
            for kind, t in zip(kinds, node.saved_tensors, strict=False):
                if kind:
                    self._enter(found[kind], t)
        return {
            kind: {place: n for place, n in storages.items() if place not in others} for kind, storages in found.items()
        }

    def held(self, size: int) -> Storages:
        """Return the storages held at the peak; `size` as in `CHECKPOINTS`.

        Without checkpoints that is before the backward, with checkpoints when the last layers are computed again: what the
        final norm saved is freed by then.
        """
        *layers, _ = self.layers
        last = (len(layers) - 1) // size * size if size else 0
        parts = (*self.states[::size], *layers[last:]) if size else self.layers
        return {place: n for part in parts for place, n in part.items()}

    def kept_states(self, size: int) -> Storages:
        """Return the storages that checkpoints hold, whatever the norms save."""
        return {place: n for part in (self.states[::size] if size else []) for place, n in part.items()}


@patch.object(autograd, "node", None)  # the node in Python, whose saved tensors can be read
def measure(
    case: Case, *, rounds: int = 1, batch: int = BATCH, layers: int = LAYERS, d_model: int = D_MODEL
) -> Results:
    """Return a row for each number of layers a checkpoint. `rounds` has no effect: bytes do not vary."""
    dtype = getattr(torch, case.dtype)
    stack = make_stack(case.wiring, dtype, layers, d_model)
    x = torch.randn(batch, TOKENS, d_model, dtype=dtype)
    tally, with_outputs = Tally(stack, x), Tally(stack, x, outputs=True)
    states, rows = STATES * tally.parameters, []
    for size in CHECKPOINTS:
        held, kept = tally.held(size), tally.kept_states(size)
        by_kind = {
            kind: sum(n for place, n in own.items() if place in held and place not in kept)
            for kind, own in tally.add_norm.items()
        }
        rows.append(case.row(
            variant=f"checkpoint={size}" if size else "no checkpoint", checkpoint=size, saved_bytes=sum(held.values()),
            checkpoint_bytes=sum(kept.values()), **{f"{kind}_bytes": n for kind, n in by_kind.items()},
            state_bytes=states, peak_bytes=states + sum(held.values()),
            gain_bytes=sum(held.values()) - sum(with_outputs.held(size).values()),
        ))  # fmt: skip
    return {"rows": rows}


def share(row: Row) -> float:
    """Return what `save_outputs` saves, as a share of the step's peak."""
    return float(row["gain_bytes"] / row["peak_bytes"])


def highest(rows: Mapping[str, Row]) -> float:
    """Return the highest share, with and without checkpoints."""
    return max(map(share, rows.values()))


TARGETS = [
    Target(f"{name}: highest share of the peak that save_outputs saves", "<=", None, highest, max, has(wiring=name))
    for name in WIRINGS
]


def section(document: Document) -> str:
    """Return the table: a line a wiring, dtype and checkpoint."""
    columns = {"peak of a step": "peak", "activations": "saved", "held by checkpoints": "checkpoint"}
    columns |= {what: kind for kind, what in KINDS.items()}
    lines = [
        {
            "wiring": f"`{row['wiring']}`", "dtype": row["dtype"], "layers a checkpoint": str(row["checkpoint"] or "none"),
            **{f"{what}, MB": digits(row[f"{kind}_bytes"] / 1e6) for what, kind in columns.items()},
            "`save_outputs` saves": f"{100 * share(row):.1f} %",
        }
        for row in document["rows"]
    ]  # fmt: skip
    size, versions = document["protocol"], document["versions"]
    return (
        f"{markdown(lines)}\n\n{size['layers']} layers, d_model {size['d_model']}, {size['batch']} x {size['tokens']} "
        f"tokens; torch {versions['torch']}, addnorm {versions['addnorm']}, commit {document['commit'][:10]}; "
        f"{document['date'][:10]}."
    )


BENCHMARK = Benchmark(
    "memory", ("wiring", "dtype", "threads"), grid(wiring=WIRINGS, dtype=("float32", "bfloat16")), measure,
    lambda case: f"{case.wiring} {case.dtype}", TARGETS,
    protocol={"layers": LAYERS, "d_model": D_MODEL, "nhead": NHEAD, "streams": STREAMS, "batch": BATCH, "tokens": TOKENS,
              "dim_feedforward": "4 d", "dropout": 0.0},
    sections={"docs/performance.md#memory": section}, threads=1, rounds=1, idle=False, report=section,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
