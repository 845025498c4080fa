"""Activation memory of encoders in training, and what `addnorm.save_outputs` saves of it. Writes results/memory.json.

python benchmarks/bench_memory.py [--threads 1] [--json FILE]

Bytes are counted from tensors, each storage once, so they do not depend on the load of the machine. README.md in this folder has
the protocol.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Benchmark, Case, Column, Document, Results, Row, digits, markdown, right
from torch import Tensor

from addnorm import ResidualStack, save_outputs, wirings
from addnorm.bench.harness import write
from addnorm.nn import FeedForward, SelfAttention
from addnorm.ops import autograd

LAYERS, D_MODEL, NHEAD, STREAMS = 12, 256, 4, 4
BATCH, TOKENS = 16, 128
FIELDS = ("wiring", "dtype", "threads")
WIRINGS = ("pre_ln", "post_ln", "hyper_connections", "mhc")
CHECKPOINTS = (0, 1, 3)  # layers for each checkpoint; 0: none
STATES = 4  # parameter, gradient, and two moments of AdamW
# What the autograd nodes of Add & Norm save, in their order. Parameters are not counted.
SAVED = {
    "AddNormFunctionBackward": ("z", "statistics", "", "", "z", "branch"),
    "StreamsFunctionBackward": (
        "streams", "branch", *("coefficients",) * 3, "", "", "", "", "", "coefficients", "statistics", "coefficients",
    ),
}  # fmt: skip
KINDS = ("z", "streams", "branch", "statistics", "coefficients")
Storages = dict[int, int]  # bytes by address


autograd.node = None  # the node in Python, whose saved tensors can be read


def cases(threads: int) -> list[Case]:
    """Return every wiring in both dtypes."""
    return [
        Case(wiring=wiring, dtype=dtype, threads=threads) for wiring in WIRINGS for dtype in ("float32", "bfloat16")
    ]


def make_stack(wiring: str, dtype: torch.dtype, layers: int = LAYERS, d_model: int = D_MODEL) -> ResidualStack:
    """Return an encoder without embedding and head."""
    torch.manual_seed(0)
    sublayers = [
        kind for _ in range(layers)
        for kind in (SelfAttention(d_model, NHEAD, dtype=dtype), FeedForward(d_model, dtype=dtype))
    ]  # fmt: skip
    makers: dict[str, Any] = {
        "hyper_connections": lambda: wirings.hyper_connections(STREAMS),
        "mhc": lambda: wirings.mhc(STREAMS),
    }
    return ResidualStack(sublayers, d_model, makers.get(wiring, lambda: wiring)(), dtype=dtype)


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
        for t in tensors_in(value):
            storage = t.untyped_storage()
            if storage.data_ptr() not in self._left_out:
                self._alive.append(storage)
                storages[storage.data_ptr()] = storage.nbytes()
        return storages

    def _find_add_norm(self, root: Any) -> dict[str, Storages]:
        """Return the storages that the nodes of Add & Norm save and no other node does, by kind."""
        found: dict[str, Storages] = {kind: {} for kind in KINDS}
        others: Storages = {}
        for node in nodes_of(root):
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
        if not size:
            return {place: n for saved in self.layers for place, n in saved.items()}
        *layers, _ = self.layers
        last = (len(layers) - 1) // size * size
        return {place: n for part in (*self.states[::size], *layers[last:]) for place, n in part.items()}

    def kept_states(self, size: int) -> Storages:
        """Return the storages that checkpoints hold, whatever the norms save."""
        states = self.states[::size] if size else []
        return {place: n for part in states for place, n in part.items()}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])


def nodes_of(root: Any) -> list[Any]:
    """Return the nodes of an autograd graph."""
    found, left = {root}, [root]
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                left.append(node)
    return [*found]


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


def summarize(results: Results) -> list[Row]:
    """Return the highest share of the peak that `save_outputs` saves, by wiring."""
    best = {w: max((share(row) for row in results["rows"] if row["wiring"] == w), default=None) for w in WIRINGS}
    return [
        {"name": f"{w}: highest share of the peak that save_outputs saves", "value": value, "compare": "<=",
         "target": None, "met": None}
        for w, value in best.items() if value is not None
    ]  # fmt: skip


def section(document: Document) -> str:
    """Return the table: a line a wiring, dtype and checkpoint."""
    lines = []
    for row in document["rows"]:
        n = {name: digits(row[f"{name}_bytes"] / 1e6) if row[f"{name}_bytes"] else "0" for name in (
            "z", "streams", "branch", "statistics", "coefficients", "saved", "peak", "checkpoint"
        )}  # fmt: skip
        lines.append([
            f"`{row['wiring']}`", row["dtype"], str(row["checkpoint"] or "none"), n["peak"], n["saved"], n["checkpoint"],
            n["z"], n["streams"], n["branch"], n["statistics"], n["coefficients"], f"{100 * share(row):.1f} %",
        ])  # fmt: skip
    head: list[str | Column] = [
        "wiring", "dtype", *right("layers a checkpoint", "peak of a step, MB", "activations, MB", "held by checkpoints, MB",
        "z, MB", "streams, MB", "writes, MB", "statistics, MB", "coefficients, MB", "`save_outputs` saves"),
    ]  # fmt: skip
    size = document["protocol"]
    versions = document["versions"]
    return (
        f"{markdown(head, lines)}\n\n{size['layers']} layers, d_model {size['d_model']}, {size['batch']} x {size['tokens']} "
        f"tokens; torch {versions['torch']}, addnorm {versions['addnorm']}, commit {document['commit'][:10]}; "
        f"{document['date'][:10]}."
    )


BENCHMARK = Benchmark(
    "memory", "activation memory of encoders in training", FIELDS, cases, measure, summarize,
    lambda case: f"{case.wiring} {case.dtype}", threads=1, rounds=1,
    protocol={"layers": LAYERS, "d_model": D_MODEL, "nhead": NHEAD, "streams": STREAMS, "batch": BATCH, "tokens": TOKENS,
              "dim_feedforward": "4 d", "dropout": 0.0},
)  # fmt: skip


def main() -> int:
    """Measure and write; return 130 if the run was interrupted. A busy machine has the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=BENCHMARK.threads, help="number of threads of torch")
    parser.add_argument("--json", type=Path, default=harness.RESULTS / "memory.json", help="results file")
    given = parser.parse_args()
    document = harness.run(
        BENCHMARK, BENCHMARK.cases(given.threads), progress=lambda line: print(line, file=sys.stderr, flush=True)
    )
    print(section(document))
    print(f"Written: {write(document, given.json)}")
    return 0 if document["complete"] else 130


if __name__ == "__main__":
    raise SystemExit(main())
