"""Activation memory of encoders in training, and what `addnorm.save_outputs` saves of it. Writes results/memory.json.

Bytes are counted from tensors, each storage once, so they do not depend on the load of the machine. README.md in this folder has
the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

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

LAYERS, D_MODEL, NHEAD, STREAMS = 12, 256, 4, 4
BATCH, TOKENS = 16, 128
WIRINGS: dict[str, Callable[[], Wiring]] = {
    "pre_ln": wirings.pre_ln, "post_ln": wirings.post_ln, "hyper_connections": partial(wirings.hyper_connections, STREAMS),
    "mhc": partial(wirings.mhc, STREAMS),
}  # fmt: skip
CHECKPOINTS = (0, 1, 3)  # layers for each checkpoint; 0: none
STATES = 4  # parameter, gradient, and two moments of AdamW
Storages = dict[int, int]  # bytes by address


def make_stack(wiring: str, dtype: torch.dtype, layers: int = LAYERS, d_model: int = D_MODEL) -> ResidualStack:
    """Return an encoder without embedding and head."""
    torch.manual_seed(0)
    sublayers = [
        kind for _ in range(layers)
        for kind in (SelfAttention(d_model, NHEAD, dtype=dtype), FeedForward(d_model, dtype=dtype))
    ]  # fmt: skip
    return ResidualStack(sublayers, d_model, WIRINGS[wiring](), dtype=dtype)


def run_layers(stack: ResidualStack, x: Tensor) -> tuple[list[Storages], list[Storages]]:
    """Return the storages of the state before each layer, and those that autograd saves in each layer and in the final norm.

    Storages of parameters and of the input do not count.
    """
    left_out = {t.untyped_storage().data_ptr() for t in (x, *stack.parameters(), *stack.buffers())}
    alive: list[Any] = []  # so that no address is used twice
    states: list[Storages] = []
    saved: list[Storages] = []

    def enter(storages: Storages, value: Any) -> Any:
        for t in tree_leaves(value):
            if isinstance(t, Tensor) and (storage := t.untyped_storage()).data_ptr() not in left_out:
                alive.append(storage)
                storages[storage.data_ptr()] = storage.nbytes()
        return value

    def saving() -> Any:
        saved.append({})
        return torch.autograd.graph.saved_tensors_hooks(partial(enter, saved[-1]), lambda t: t)

    state = stack._start(x)
    for layer in stack.layers:
        states.append({})
        enter(states[-1], state)
        with saving():
            state = stack._run_layers([layer], state, {})
    with saving():
        stack._finish(state)
    return states, saved


def held_bytes(states: Sequence[Storages], saved: Sequence[Storages], size: int) -> int:
    """Return the bytes of activations at the peak of a step; `size` as in `CHECKPOINTS`.

    Without checkpoints the peak is before the backward, with checkpoints when the last layers are computed again: what the
    final norm saved is freed by then.
    """
    last = (len(states) - 1) // size * size if size else 0
    return count_bytes((*states[::size], *saved[last:-1]) if size else saved)


def count_bytes(parts: Iterable[Storages]) -> int:
    """Return the bytes of all storages, each once."""
    return sum({place: n for part in parts for place, n in part.items()}.values())


def measure(
    case: Case, *, rounds: int = 1, batch: int = BATCH, layers: int = LAYERS, d_model: int = D_MODEL
) -> Results:
    """Return a row for each number of layers a checkpoint. `rounds` has no effect: bytes do not vary."""
    dtype = getattr(torch, case.dtype)
    stack = make_stack(case.wiring, dtype, layers, d_model)
    x = torch.randn(batch, TOKENS, d_model, dtype=dtype)
    states, saved = run_layers(stack, x)
    with save_outputs():
        states_of_outputs, saved_with_outputs = run_layers(stack, x)
    state_bytes, rows = STATES * sum(p.nbytes for p in stack.parameters()), []
    for size in CHECKPOINTS:
        held = held_bytes(states, saved, size)
        rows.append(case.row(
            variant=f"checkpoint={size}" if size else "no checkpoint", checkpoint=size, saved_bytes=held,
            checkpoint_bytes=count_bytes(states[::size]) if size else 0, state_bytes=state_bytes,
            peak_bytes=state_bytes + held, gain_bytes=held - held_bytes(states_of_outputs, saved_with_outputs, size),
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
