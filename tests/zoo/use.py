"""The other functions on a model: each must give a right result or refuse in a sentence."""

import linecache
import math
import traceback
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import addnorm

OWN = str(Path(addnorm.__file__).parent)
TOLERANCE = 1e-4  # of outputs of models whose layers are a few; float32 and another order of the same sums


def call(model, arguments):
    """Return the floating-point tensors of the model's output."""
    args, kwargs = arguments
    result = model(*args, **kwargs)
    leaves = tree_leaves(dict(result) if hasattr(result, "keys") else result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def attempt(function, *args):
    """Return what a function returns, its refusal in a sentence, or that it crashed."""
    try:
        return function(*args)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        line = linecache.getline(last.filename, last.lineno or 0).strip()
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if last.filename.startswith(OWN) and line.startswith("raise"):
            return f"refused: {text}"
        return f"crash: {text} ({Path(last.filename).name}:{last.lineno})"


def check_record(model, arguments):
    """Record a forward and, if the model has one in eval mode, a backward; the outputs must keep their bits."""
    torch.manual_seed(0)
    expected = call(model, arguments)
    try:
        _backward(expected)
        trains = True
    except Exception:  # such as reversible layers, which keep the state of the random generator in training alone
        trains = False
    torch.manual_seed(0)
    with addnorm.record(model) as recording:
        actual = call(model, arguments)
        if trains:
            _backward(actual)
    if any(not torch.equal(a, b) for a, b in zip(actual, expected, strict=True)):
        return "wrong: the outputs change while the model is recorded"
    # The ratio of a write to a token that is zero, as padding can be, is infinite.
    bad = [row for row in recording.table() if math.isinf(row[-1]) and row[-2] != "ratio"]
    return f"wrong: {bad[0]}" if bad else "ok"


def _backward(outputs):
    loss = sum((t.square().mean() for t in outputs if t.requires_grad), torch.zeros(()))
    if loss.requires_grad:
        loss.backward()


def check_decompose(model, arguments, found):
    """Decompose each stream, or the program; the components must add up to it."""
    args, kwargs = arguments
    for stream in found.parts:
        options = {"stream": stream.name} if found.streams else {}
        with torch.no_grad():
            parts = addnorm.decompose(model, *args, **options, **kwargs)
        total = sum(parts.components().values(), torch.zeros(()))
        error = _distance([total], [parts.state()])
        if not error <= TOLERANCE:
            return f"wrong: the components of {stream.name} differ from it by {error:.1e}"
    return "ok" if found.parts else "no stream"


def check_verify(model, arguments, found):
    """Verify the model against itself and against the wiring that `inspect` names: no difference may be reported.

    But for a final norm that is missing, which is true of many models: the answers say of which.
    """
    args, kwargs = arguments
    reference = addnorm.inspect(model, *args, **kwargs)
    compared = [addnorm.verify(model, *args, like=reference, **kwargs)] if found.parts else []
    wirings = {part.wiring and part.wiring.name: part.wiring for part in found.parts}
    if len(wirings) == 1:
        compared += [addnorm.verify(found, wiring=wiring) for wiring in wirings.values() if wiring is not None]
    for one in compared:
        wrong = [*one.different, *(deviation for deviation in one.deviations if deviation.term != "the final norm")]
        if wrong:
            return f"wrong: differs from {one.expected}: {wrong[0]}"
    return "ok" if compared else "no stream"


def check_ablate(model, arguments, found):
    """Scale the writes of the first and the last site by one, which changes nothing, and by zero, which changes the outputs."""
    with torch.no_grad():
        expected = call(model, arguments)
        sites = found.list_sites()
        for site in {id(s): s for s in (*sites[:1], *sites[-1:])}.values():
            with addnorm.scale_write(site, 1.0):
                same = call(model, arguments)
            if _distance(same, expected) > TOLERANCE:
                return f"wrong: scaling {site.id} by 1 changes the outputs by {_distance(same, expected):.1e}"
            with addnorm.ablate(site):
                call(model, arguments)
    return "ok" if sites else "no sites"


def check_fuse(model, arguments):
    """Fuse and unfuse; the outputs must agree."""
    with torch.no_grad():
        expected = call(model, arguments)
        args, kwargs = arguments
        addnorm.fuse(model, *args, **kwargs, benchmark=False)
        fused = call(model, arguments)
        addnorm.unfuse(model)
        restored = call(model, arguments)
    if _distance(fused, expected) > TOLERANCE:
        return f"wrong: fused outputs differ by {_distance(fused, expected):.1e}"
    return "ok" if _distance(restored, expected) == 0 else "wrong: unfuse does not restore the outputs"


def _distance(actual, expected):
    """Return the largest relative distance of two lists of tensors."""
    return max(
        (float((a - b).norm() / b.norm().clamp(min=1e-20)) for a, b in zip(actual, expected, strict=True)), default=0.0
    )


def use(model, arguments, found):
    """Yield the name of each function that uses an inspection, and its result."""
    yield "record", attempt(check_record, model, arguments())
    for name, check in (("verify", check_verify), ("decompose", check_decompose), ("ablate", check_ablate)):
        yield name, attempt(check, model, arguments(), found) if found else "no inspection"
