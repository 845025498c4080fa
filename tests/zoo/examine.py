"""Examine models of one package in the environment of this process; print one JSON line a model.

    python tests/zoo/examine.py PACKAGE inspect|fuse SECONDS MODEL...

A line with the model's name is printed before it is examined, so that the parent process knows which one ended this process.
The stage "inspect" is `inspect`, `record`, `decompose` and `ablate`; "fuse" is `fuse`, which takes most of the time.
"""

from __future__ import annotations

import importlib.machinery
import json
import signal
import sys
import time
import types
import warnings
from typing import Any

import torch
from torch import nn

import addnorm
from support.families import shake
from zoo.answer import Model, Package
from zoo.judge import judge
from zoo.packages import load
from zoo.use import attempt, check_fuse, split, use


class Stub(types.ModuleType):
    """Module whose names are all None; it takes the place of a module that the models do not use."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class OutOfTime(BaseException):
    """The time of a model is up; no Exception, which torch.compile and the models may catch."""


def prepare(package: Package) -> None:
    """Let the package import: the operators of torchvision's and torchaudio's CUDA builds are missing, and no model uses them."""
    register = torch.library.register_fake

    def register_fake(name: Any, *args: Any, **options: Any) -> Any:
        if isinstance(name, str) and name.startswith("torchvision::"):
            return lambda function: function
        return register(name, *args, **options)

    torch.library.register_fake = register_fake
    for name in package.stubs:
        sys.modules[name] = Stub(name)


def examine(model: Model) -> dict[str, Any]:
    """Return what `inspect` says of a model, the verdict, and the results of the other functions."""
    module = build(model)
    args, kwargs = split(model.inputs())
    row: dict[str, Any] = {
        "model": model.name,
        "expected": "none: " + model.refuse if model.refuse else _expected(model),
    }
    found = None

    def run() -> str:
        nonlocal found
        found = addnorm.inspect(module, *args, **kwargs)
        return "ok"

    answer = attempt(run)
    if found is None:
        row |= {"verdict": "refused" if answer.startswith("refused") else "crash", "detail": answer}
    else:
        verdict = judge(found, model)
        row |= {
            "verdict": verdict.word, "detail": verdict.detail, "wiring": [s.wiring.name if s.wiring else None for s in found.streams],
            "sublayers": [len(s.sites) for s in found.streams], "closes": found.closes,
            "closure": float(f"{found.closure:.1e}") if found.streams else None, "unknown": [str(u.reason) for u in found.unknown],
        }  # fmt: skip
    return row | dict(use(module, model.inputs, found))


def build(model: Model) -> nn.Module:
    """Return the model in eval mode with random weights."""
    torch.manual_seed(0)
    return shake(model.make().eval().float())


def _expected(model: Model) -> str:
    return ", ".join(
        (stream.wiring or "rows").replace("|none", " or no name").replace("|", " or ") for stream in model.streams
    )


def main(name: str, stage: str, seconds: str, *names: str) -> None:
    """Examine the models of a package."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    package = load()[name]
    prepare(package)
    signal.signal(signal.SIGALRM, _stop)
    late = f"not finished after {seconds} s"
    for model in package.models:
        if model.name in names:
            print(json.dumps({"begin": model.name}), flush=True)
            started = time.perf_counter()
            signal.alarm(int(seconds))
            try:
                if stage == "fuse":
                    row = {"model": model.name, "fuse": attempt(check_fuse, build(model), model.inputs())}
                else:
                    row = examine(model)
            except OutOfTime:
                row = {
                    "model": model.name,
                    **({"fuse": late} if stage == "fuse" else {"verdict": "crash", "detail": late}),
                }
            except Exception as error:
                row = {"model": model.name, "verdict": "not built", "detail": f"{type(error).__name__}: {error}"[:200]}
            signal.alarm(0)
            print(json.dumps(row | {"seconds": round(time.perf_counter() - started, 1)}), flush=True)


def _stop(signum: int, frame: object) -> None:
    raise OutOfTime


if __name__ == "__main__":
    main(*sys.argv[1:])
