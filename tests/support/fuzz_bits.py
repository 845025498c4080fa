"""Checks that a random call's results are bitwise equal under changes that must not matter.

The changes are: gradients or none, the number of threads, memory layouts, one row without its batch, in-place and out= forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

import addnorm
from support.cases import FUNCTIONS, Call
from support.fuzz_calls import Case


def is_same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors are bitwise equal, except for the payload of a NaN."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def list_differing(actual: dict, expected: dict) -> list[str]:
    return [name for name in actual if not is_same(actual[name], expected[name])]


def compute(
    call: Any, tensors: dict[str, Tensor], grad_outputs: dict[str, Tensor], wants: Collection[str]
) -> dict[str, Any]:
    """Return the outputs of a call, and the gradients (as `d` and the argument's name) of the tensors in `wants`."""
    leaves = {name: t.detach().requires_grad_(name in wants) for name, t in tensors.items()}
    outputs = call(leaves)
    actual = {name: t.detach() for name, t in outputs.items()}
    used = {name: g for name, g in grad_outputs.items() if outputs[name].requires_grad}
    if used:
        torch.autograd.backward([outputs[name] for name in used], list(used.values()))
        actual |= {f"d{name}": leaves[name].grad for name in wants}
    return actual


def compute_results(case: Case, call: Call | None = None) -> dict[str, Tensor | None]:
    """Return outputs and gradients of a case, or of a call in its place."""
    call = call or case.call
    return compute(call, call.tensors, case.grad_outputs, case.wants)


def on_other_threads(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function computes with another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        return compute()
    finally:
        torch.set_num_threads(before)


def find_differences(case: Case, first: dict[str, Tensor | None]) -> list[str]:
    """Return one line for each variant of the call whose bits differ from `first`, the results of the call itself."""
    call, lines = case.call, []
    outputs = {name: first[name] for name in ("y", "z") if name in first}
    variants = {
        "without gradients": _without,
        "a row alone": _row,
        "in many dimensions": _dimensions,
        "in place": _in_place,
        "with out=": _out,
    }
    actual = {name: variant(case, outputs) for name, variant in variants.items()}
    if call.norm != "none":
        tensors = {name: t.detach().requires_grad_(name in case.wants) for name, t in call.tensors.items()}
        actual["y alone"] = {"y": call.y_alone(tensors)}
        with torch.no_grad():
            actual["y alone without gradients"] = {"y": call.y_alone()}
    lines += [
        f"{variant}: other bits of {names}" for variant, t in actual.items() if (names := list_differing(t, outputs))
    ]

    if names := list_differing(on_other_threads(lambda: compute_results(case)), first):
        lines.append(f"another number of threads: other bits of {names}")
    copies = {name: t.clone(memory_format=torch.contiguous_format) for name, t in call.tensors.items()}
    if names := list_differing(compute_results(case, Call(call.norm, call.eps, copies, call.options)), first):
        lines.append(f"contiguous copies: other bits of {names}")
    return lines


def _without(case: Case, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        return case.call()


def _row(case: Case, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace one row of the results by that of the row alone, whose dropout offset is that of the row."""
    call, rows = case.call, case.call.tensors["residual"].shape[:-1]
    count, options = math.prod(rows), dict(call.options)
    if not count:
        return {}
    index = case.rng.randrange(count)
    if options.get("dropout_p"):
        if index * call.d % 4:
            index = 0
        options["offset"] += index * call.d // 4
    tensors = dict(call.tensors)
    for name in ("residual", "branch"):
        tensors[name] = tensors[name].reshape(count, call.d)[index : index + 1]
    if "row_scale" in tensors:
        tensors["row_scale"] = tensors["row_scale"].expand(rows).reshape(count)[index : index + 1]
    alone = Call(call.norm, call.eps, tensors, options)()
    # Compare at the row's place, so that an error is reported as one of the whole result.
    results = {name: t.reshape(count, call.d).clone() for name, t in outputs.items()}
    for name, t in alone.items():
        results[name][index] = t[0]
    return {name: t.reshape(outputs[name].shape) for name, t in results.items()}


def _dimensions(case: Case, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the results with the features as two dimensions, by `normalized_shape`."""
    call = case.call
    split = case.rng.choice([n for n in range(1, call.d + 1) if call.d % n == 0] or [0])
    shape = (split, call.d // split) if split else (2, 0)
    if call.norm == "none":
        return {}
    tensors = {
        name: t if name == "row_scale" or t.dim() == 0 else t.reshape(*t.shape[:-1], *shape)
        for name, t in call.tensors.items()
    }
    actual = Call(call.norm, call.eps, tensors, call.options | {"normalized_shape": shape})()
    return {name: t.flatten(-2) for name, t in actual.items()}


def _in_place(case: Case, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the contents of residual and branch after the in-place form; y must be the branch itself."""
    call = case.call
    residual, branch = call.tensors["residual"], call.tensors["branch"]
    if call.residual_dtype != residual.dtype or call.out_dtype != branch.dtype:
        return {}
    tensors = call.tensors | {"residual": residual.clone(), "branch": branch.clone()}
    eps = {} if call.norm == "none" else {"eps": call.eps}
    options = {name: value for name, value in call.options.items() if name not in ("residual_dtype", "out_dtype")}
    with torch.no_grad():
        result = getattr(addnorm, f"{FUNCTIONS[call.norm].__name__}_")(**tensors, **eps, **options)
    z, y = tensors["residual"], tensors["branch"]
    if call.norm == "none":
        return {"z": z if result is z else result.new_empty(0)}
    return {"z": z, "y": y if result is y else result.new_empty(0)}


def _out(case: Case, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the results with `out=`: new buffers, or residual and branch where their dtype fits."""
    call = case.call
    tensors = {name: t.clone() for name, t in call.tensors.items()}
    out = {name: torch.full_like(t, math.nan) for name, t in outputs.items()}
    for name, source in (("z", "residual"), ("y", "branch")):
        if name in out and out[name].dtype == tensors[source].dtype and case.rng.random() < 0.3:
            out[name] = tensors[source]
    with torch.no_grad():
        if call.norm == "none":
            addnorm.add_residual(**tensors, **call.options, out=out["z"])
        else:
            options = call.options | {"eps": call.eps, "return_residual": True}
            FUNCTIONS[call.norm](**tensors, **options, out=(out["y"], out["z"]))
    return out


def check_norm_alone(case: Case) -> list[str]:
    """Check that the norm of residual alone equals that of residual + 0."""
    call = case.call
    if call.norm == "none":
        return []
    names = ("weight", "bias")
    tensors = {name: call.tensors[name] for name in names if name in call.tensors}
    options = {name: call.options[name] for name in ("weight_offset", "casting") if name in call.options}
    x = call.tensors["residual"].contiguous()
    function = addnorm.layer_norm if call.norm == "layer" else addnorm.rms_norm
    y = function(x, **tensors, eps=call.eps, **options)
    zero = torch.zeros_like(x)
    added = FUNCTIONS[call.norm](x, zero, **tensors, eps=call.eps, **options)
    # Adding zero changes the sign of a zero.
    return [] if is_same(y + 0, added + 0) else ["the norm alone is not that of the sum with 0"]
