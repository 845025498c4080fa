"""Checks that a random call's results are bitwise equal under changes that must not matter.

The changes are: gradients or none, the number of threads, memory layouts, some rows without their batch, in-place and out= forms.
"""

import math
from dataclasses import replace

import torch
from torch.utils._pytree import tree_map

import addnorm
from support.cases import FUNCTIONS, Call
from support.inplace_calls import in_place, into, nan


def is_same(a, b):
    """Return whether two tensors are bitwise equal, except for the payload of a NaN."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def compute(call, tensors, grad_outputs, wants):
    """Return the outputs of a call, and the gradients (as `d` and the argument's name) of the tensors in `wants`."""
    leaves = {name: t.detach().requires_grad_(name in wants) for name, t in tensors.items()}
    outputs = call(leaves)
    actual = tree_map(torch.Tensor.detach, outputs)
    used = {name: g for name, g in grad_outputs.items() if outputs[name].requires_grad}
    if used:
        torch.autograd.backward([outputs[name] for name in used], list(used.values()))
        actual |= {f"d{name}": leaves[name].grad for name in wants}
    return actual


def compute_results(case):
    """Return outputs and gradients of a case."""
    return compute(case.call, case.call.tensors, case.grad_outputs, case.wants)


def on_other_threads(compute):
    """Return what a function computes with another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        return compute()
    finally:
        torch.set_num_threads(before)


def find_differences(case, first):
    """Return one line for each variant of the call whose bits differ from `first`, the results of the call itself."""
    call = case.call
    variants = {
        "without gradients": _without,
        "some rows alone": _rows,
        "in place": _in_place,
        "with out=": _out,
    }
    if call.norm != "none":
        variants |= {"in many dimensions": _dimensions, "in many dimensions in place": _dimensions_in_place}
    actual = {name: variant(case, first) for name, variant in variants.items()}
    if call.norm != "none":
        tensors = {name: t.detach().requires_grad_(name in case.wants) for name, t in call.tensors.items()}
        actual["y alone"] = {"y": call.y_alone(tensors)}
        with torch.no_grad():
            actual["y alone without gradients"] = {"y": call.y_alone()}
            actual["y alone with out="] = {"y": into(call, nan(first["y"]))}
    actual["another number of threads"] = on_other_threads(lambda: compute_results(case))
    copies = tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), (call.tensors, case.grad_outputs))
    actual["contiguous copies"] = compute(call, *copies, case.wants)
    with torch.inference_mode():
        actual["in inference mode"] = tree_map(torch.clone, call())
    return list_differences(actual, first)


def list_differences(actual, expected):
    """Return one line for each tensor of a variant whose bits are not the expected ones."""
    return [
        f"{variant}: other bits of {name}"
        for variant, tensors in actual.items()
        for name, t in tensors.items()
        if not is_same(t, expected[name])
    ]


def _without(case, first):
    with torch.no_grad():
        return case.call()


def _rows(case, first):
    """Replace some rows of the results by those of the rows alone, whose dropout offset is that of the first."""
    call, rows = case.call, case.call.tensors["residual"].shape[:-1]
    count, options = math.prod(rows), dict(call.options)
    if not count:
        return {}
    begin = case.rng.randrange(count)
    if options.get("dropout_p"):
        begin = begin if begin * call.d % 4 == 0 else 0
        options["offset"] = options.get("offset", 0) + begin * call.d // 4
    part = slice(begin, case.rng.randint(begin + 1, count))

    def cut(t):
        return t.reshape(count, call.d)[part]

    tensors = {name: cut(t) if name in ("residual", "branch") else t for name, t in call.tensors.items()}
    if "row_scale" in tensors:
        tensors["row_scale"] = tensors["row_scale"].expand(rows).reshape(count)[part]
    grad_outputs = tree_map(cut, case.grad_outputs)
    alone = compute(Call(call.norm, call.eps, tensors, options), tensors, grad_outputs, case.wants)
    results = {}
    for name in ("y", "z", "dresidual", "dbranch"):
        if (t := first.get(name)) is not None:
            # At the rows' place, so that an error is reported as one of the whole result.
            results[name] = t.reshape(count, call.d).clone()
            results[name][part] = alone[name]
            results[name] = results[name].reshape(t.shape)
    return results


def _split(case):
    """Return the call with the features as two dimensions, by `normalized_shape`, and its output gradients."""
    call = case.call
    split = case.rng.choice([n for n in range(1, call.d + 1) if call.d % n == 0] or [0])
    shape = case.rng.choice([tuple, list, torch.Size])((split, call.d // split) if split else (2, 0))
    place = case.rng.choice([lambda t: t, lambda t: t.mT.contiguous().mT])

    def widen(tensors):
        return {
            name: t if name == "row_scale" or t.dim() == 0 else place(t.unflatten(-1, shape))
            for name, t in tensors.items()
        }

    split_call = Call(call.norm, call.eps, widen(call.tensors), call.options | {"normalized_shape": shape})
    return split_call, widen(case.grad_outputs)


def _dimensions(case, first):
    call, grad_outputs = _split(case)
    actual = compute(call, call.tensors, grad_outputs, case.wants)
    return {name: None if t is None else t.reshape(first[name].shape) for name, t in actual.items()}


def _dimensions_in_place(case, first):
    written = _in_place(case, first, _split(case)[0])
    return tree_map(lambda t: t.flatten(-2), written)


def _in_place(case, first, call=None):
    """Return the contents of residual and branch after the in-place form, if it can have these dtypes."""
    call = call or case.call
    if call.residual_dtype != call.tensors["residual"].dtype or call.out_dtype != call.tensors["branch"].dtype:
        return {}
    with torch.no_grad():
        return in_place(call.without_dtypes())


def _out(case, first):
    """Return the results with `out=`: new buffers, or residual or branch where their dtype fits; `out` decides the dtypes."""
    call, names = case.call, [name for name in ("y", "z") if name in first]
    tensors = tree_map(torch.clone, call.tensors)
    out = {name: nan(first[name]) for name in names}
    for name, source in zip(names, case.rng.sample(["residual", "branch", None, None], 2), strict=False):
        if source is not None and out[name].dtype == tensors[source].dtype:
            out[name] = tensors[source]
    if case.rng.random() < 0.5:
        call = call.without_dtypes()
    targets = tuple(out.values())
    with torch.no_grad():
        result = into(replace(call, tensors=tensors), targets if len(targets) > 1 else targets[0])
    result = result if isinstance(result, tuple) else (result,)
    return {name: t if t is out[name] else t.new_empty(0) for name, t in zip(names, result, strict=True)}


def check_norm_alone(case):
    """Check that the norm of residual alone has the outputs and gradients of the norm of residual + 0."""
    call = case.call
    if call.norm == "none":
        return []
    tensors = {name: call.tensors[name] for name in ("weight", "bias") if name in call.tensors}
    options = {name: call.options[name] for name in ("weight_offset", "casting") if name in call.options}
    x = call.tensors["residual"].contiguous()
    function = addnorm.layer_norm if call.norm == "layer" else addnorm.rms_norm
    zero = torch.zeros_like(x)

    def alone(t):
        return {"y": function(t["residual"], t.get("weight"), t.get("bias"), call.eps, **options)}

    def added(t):
        return {"y": FUNCTIONS[call.norm](**t, branch=zero, eps=call.eps, **options)}

    dy = {"y": case.grad_outputs.get("y", zero).contiguous().to(x.dtype)}
    results = [compute(one, {"residual": x, **tensors}, dy, ["residual", *tensors]) for one in (alone, added)]
    # Adding zero changes the sign of a zero.
    different = [name for name, t in results[0].items() if not is_same(t + 0, results[1][name] + 0)]
    lines = [f"the norm alone is not that of the sum with 0: {different}"] if different else []
    y, same = results[0]["y"], x.clone()
    for source, out in ((x, nan(x)), (same, same)):
        if function(source, **tensors, eps=call.eps, **options, out=out) is not out or not is_same(out, y):
            lines.append("the norm alone has other bits with out=")
    return lines
