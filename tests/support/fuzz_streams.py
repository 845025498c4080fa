"""Random calls of `add_norm_streams` for the fuzz target: accuracy, and equal bits of equal calls."""

import math
import random
from dataclasses import replace

import torch
from torch.utils._pytree import tree_map

from addnorm.ops.options import NORMS
from addnorm.ops.streams.kinds import GATE_KINDS
from support.fuzz_bits import compute, is_same, list_differences, on_other_threads
from support.fuzz_calls import lay_out
from support.fuzz_operators import call_operators
from support.stream_calls import BY_TOKEN, MODES, assert_accurate, make_call, make_cotangents, run

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def make(seed):
    """Return the call of this seed."""
    rng = random.Random(f"streams {seed}")
    torch.manual_seed(seed)
    kind, dtype = rng.choice([*GATE_KINDS]), rng.choice([*FLOATS, torch.float64])
    rows = rng.choice([(), (1,), (rng.randint(0, 40),), (2, rng.randint(1, 9)), (rng.randint(100, 300),)])
    d = rng.choice([rng.randint(1, 9), rng.randint(1, 80), rng.randint(1, 600)])
    d = max(d, 33) if kind == "hyper" else d  # the norm of a few features may be that of a constant
    options = {
        name: rng.choice(FLOATS) for name in ("streams_dtype", "out_dtype") if rng.random() < 0.3 and dtype in FLOATS
    }
    n = rng.choice([1, 2, 4, rng.randint(1, 18)])
    norm = rng.choice([*NORMS]) if n > 1 and d > 9 else "none"  # nor does that of one stream depend on c
    call = make_call(n, d, rows, kind, dtype=dtype, mode=rng.choice(MODES), norm=norm, **options)
    return replace(call, iterations=rng.randint(1, 6)), rng


def find_errors(seed):
    """Return one line for each error of the call of this seed."""
    call, rng = make(seed)
    lines = []
    if call.tensors["streams"].numel():
        try:
            # The terms of random sums, and the arguments of small gates, may be a hundred times their result.
            assert_accurate(call, roundings=128)
        except AssertionError as error:
            lines.append(str(error))
    lines += find_differences(call, rng) + find_spread(call, rng)
    call_operators(lambda: run(call, call.leaves(), make_cotangents(call)), call.tensors["streams"], rng)
    return [f"{describe(call)}: {line}" for line in lines]


def describe(call):
    """Return the arguments of a call as text."""
    shapes = {name: f"{t.dtype} {tuple(t.shape)}" for name, t in call.tensors.items()}
    return f"{call.kind}, {call.norm}, {call.iterations} iterations, {call.options}, {shapes}"


def find_differences(call, rng):
    """Compare the bits of a call with those of the same call in other ways."""
    tensors = tree_map(lambda t: lay_out(t, rng), call.tensors)
    plain = tree_map(torch.Tensor.contiguous, tensors)
    cotangents = make_cotangents(call)
    expected = compute(call, plain, cotangents, plain)
    wants = [name for name in tensors if rng.random() < 0.4]
    ways = {
        "a part of the gradients": compute(call, plain, cotangents, wants),
        "no gradients": compute(call, plain, {}, ()),
    }
    lines = []
    computes_by_reference = call.tensors["streams"].shape[-2] > 16 or torch.float64 in [
        call.tensors["streams"].dtype, *call.options.values()
    ]  # fmt: skip
    if not computes_by_reference:  # torch's matrix product has other bits for other layouts, threads and sizes
        ways["another layout"] = compute(call, tensors, cotangents, tensors)
        ways["another number of threads"] = on_other_threads(lambda: compute(call, plain, cotangents, plain))
        rows = plain["streams"].shape[0] if plain["streams"].dim() == 3 else 0
        per_token = {name for name in BY_TOKEN if name in plain and plain[name].shape[:1] == (rows,)}
        if rows > 1 and rows != plain["streams"].shape[1]:
            i = rng.randrange(rows)
            alone = {name: t[i : i + 1] if name in per_token else t for name, t in plain.items()}
            results = compute(call, alone, tree_map(lambda t: t[i : i + 1], cotangents), alone)
            names = [name for name in results if not name.startswith("d") or name[1:] in per_token]
            lines = [
                f"a token alone: other bits of {name}"
                for name in names
                if not is_same(results[name][0], expected[name][i])
            ]
    return lines + list_differences(ways, expected)


def find_spread(call, rng):
    """Check that a NaN or an infinity changes no other token, and none of its gradients."""
    shape = call.tensors["streams"].shape[:-2]
    rows = shape.numel()
    if rows < 2 or call.tensors["streams"].shape[-2] in shape:
        return []
    per_token = [name for name in BY_TOKEN if name in call.tensors and call.tensors[name].shape[: len(shape)] == shape]
    i, name = rng.randrange(rows), rng.choice(per_token)
    each = call.tensors[name].contiguous().reshape(rows, -1).clone()
    each[i, rng.randrange(each.shape[1])] = rng.choice([math.nan, math.inf, -math.inf])
    poisoned = {**call.tensors, name: each.view(call.tensors[name].shape)}
    cotangents = make_cotangents(call)
    changed, plain = (compute(call, tensors, cotangents, tensors) for tensors in (poisoned, call.tensors))
    others = [j for j in range(rows) if j != i]
    return [
        f"the token {i} of {name} changes others of {key}"
        for key, value in changed.items()
        if not key.startswith("d") or key[1:] in per_token
        # To the bit in kernels, not in torch's matrix product.
        if not torch.allclose(
            value.reshape(rows, -1)[others], plain[key].reshape(rows, -1)[others], rtol=1e-5, atol=1e-6
        )
    ]
