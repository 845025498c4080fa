"""Examine models of one package in the environment of this process; print one JSON line a model.

    python tests/zoo/examine.py PACKAGE inspect|fuse SECONDS MODEL...

A line with the model's name is printed before it is examined, so that the parent process knows which one ended this process.
The stage "inspect" is `inspect`, `record`, `decompose` and `ablate`; "fuse" is `fuse`, which takes most of the time.
"""

import importlib.machinery
import json
import signal
import sys
import time
import types
import warnings
from functools import partial

import torch

import addnorm
from support.judge import judge
from zoo.packages import load
from zoo.use import attempt, check_fuse, use


class Stub(types.ModuleType):
    """Module whose names are all None; it takes the place of a module that the models do not use."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


class OutOfTime(BaseException):
    """The time of a model is up; no Exception, which torch.compile and the models may catch."""


def prepare(package):
    """Let the package import: the operators of torchvision's and torchaudio's CUDA builds are missing, and no model uses them."""
    register = torch.library.register_fake

    def register_fake(name, *args, **options):
        if isinstance(name, str) and name.startswith("torchvision::"):
            return lambda function: function
        return register(name, *args, **options)

    torch.library.register_fake = register_fake
    for name in package.stubs:
        sys.modules[name] = Stub(name)


def examine(model):
    """Return what `inspect` says of a model, the verdict, and the results of the other functions."""
    module, args, kwargs = model.build()
    answer = model.answer
    names = [
        (stream.wiring or "rows").replace("|none", " or no name").replace("|", " or ") for stream in answer.streams
    ]
    row = {"expected": "none: " + answer.reason if answer.reason else ", ".join(names)}
    found = attempt(partial(addnorm.inspect, module, *args, **kwargs))
    if isinstance(found, str):
        row |= {"verdict": "refused" if found.startswith("refused") else "crash", "detail": found}
        found = None
    else:
        verdict = judge(found, answer)
        is_right = bool(answer.reason) and verdict.status == "refused"  # as it must be
        reasons = "; ".join(
            dict.fromkeys(str(getattr(part, "reason", part)) for part in (*found.unknown, *found.outside))
        )
        detail = "; ".join([*verdict.wrong, *verdict.missing]) + f"; it says: {reasons}" * bool(reasons)
        row |= {
            "verdict": "right" if is_right else verdict.status,
            "detail": reasons if verdict.status == "refused" else "" if verdict.status == "right" else detail,
            "wiring": [part.wiring.name if part.wiring else None for part in found.parts],
            "sublayers": [len(part.sites) for part in found.parts], "closes": found.closes,
            "closure": float(f"{found.closure:.1e}") if found.parts else None, "unknown": [str(u.reason) for u in found.unknown],
        }  # fmt: skip
    return row | dict(use(module, model.arguments, found))


def fuse(model):
    """Return what `fuse` does with a model."""
    return {"fuse": attempt(check_fuse, model.build()[0], model.arguments())}


def main(name, stage, seconds, *names):
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
                row = fuse(model) if stage == "fuse" else examine(model)
            except OutOfTime:
                row = {"fuse": late} if stage == "fuse" else {"verdict": "crash", "detail": late}
            except Exception as error:
                row = {"verdict": "not built", "detail": f"{type(error).__name__}: {error}"[:200]}
            signal.alarm(0)
            row = {"model": model.name, **row, "seconds": round(time.perf_counter() - started, 1)}
            print(json.dumps(row), flush=True)


def _stop(signum, frame):
    raise OutOfTime


if __name__ == "__main__":
    main(*sys.argv[1:])
