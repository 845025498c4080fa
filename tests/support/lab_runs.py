"""Helpers of the lab's tests: a text, small runs, and planted results that were never trained."""

import pytest

from addnorm.lab import Comparison, Protocol, Run, Text, theory, train

TEXT = Text(
    "counting",
    " ".join(
        ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"][k * k % 10] for k in range(400)
    ),
)
SIZE = {"num_layers": 2, "d_model": 16, "nhead": 2, "tokens": 8, "batch": 4}
# Settings under which untrained stacks are measured at one depth, and only those of the compared wirings.
FEW_STACKS = ((theory, "DEPTHS", (2,)), (theory, "STREAM_WIRINGS", ()), (theory, "WIRINGS", ()))
NOT_MEASURED = ("seconds", "resumed", "date", "addnorm")
# Statistics by depth in the lab's results: the role and the name of each in `addnorm.record`.
RECORDED = {
    "ratio": ("write", "ratio"), "similarity": ("out", "similarity"), "gradient": ("grad", "l2"), "parameters": ("params", "grad_l2"),
}  # fmt: skip


def small(wiring="pre_ln", **options):
    return Run(wiring, **{**SIZE, "steps": 10, "every": 5, **options})


def quick(**options):
    return Protocol(**{**SIZE, "warm_ups": 0, "steps": 10, "every": 5, **options})


def interrupt_training(run, path, at):
    """Interrupt a run after `at` steps, with a checkpoint of each step."""

    def stop(step, loss):
        if step == at:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(run, TEXT, checkpoint=path, seconds=0, on_step=stop)


def measured(result):
    """Return the part of a result that must be equal, to the bit, in another run of the same settings."""
    return {name: value for name, value in result.items() if name not in NOT_MEASURED}


def planted(wiring, test=1.0, *, seed=0, lr=1e-3, warm_up=0, n=2, validation=None, diverged=False, **more):
    """Return a result with this loss."""
    names = ("steps", "logit_change", "stream", "ratio", "similarity", "gradient", "parameters")
    nothing = {name: [] for name in names}
    settings = {"wiring": wiring, "num_layers": n, "lr": lr, "warm_up": warm_up, "seed": seed}
    return {"kind": "run", "key": f"{wiring}{n}{lr}{warm_up}{seed}", "settings": settings, "test": test, "diverged": diverged,
            "validation": test if validation is None else validation, "recorded": nothing, "sites": [], "losses": [3.0, test],
            "seconds": 1.0, "resumed": 0, **more}  # fmt: skip


def compared(*runs, **protocol):
    """Return a comparison of planted results."""
    names = tuple(dict.fromkeys(run["settings"]["wiring"] for run in runs))
    text = {"name": "planted", "characters": 1000, "symbols": 20, "digest": "0", "entropy": 2.8, "uniform": 3.0}
    return Comparison(names, Protocol(**{**SIZE, "steps": 10, **protocol}), list(runs), [], text)
