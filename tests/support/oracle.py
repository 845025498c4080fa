"""The operation in float64, from its formula and without the library's code, and plain PyTorch's version of it.

`exact` is the reference for both the library and plain PyTorch. The contract defines y and the gradients at the *rounded*
stream, so `exact` takes the z that was returned and continues from it.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from support.cases import f32, f64

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def philox4x32(counter, key):
    """Return four words of Philox 4x32-10, computed with Python's integers (Salmon et al. 2011)."""
    mask = 2**32 - 1
    c = [counter >> 32 * i & mask for i in range(4)]
    k = [key & mask, key >> 32 & mask]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & mask, p0 >> 32 ^ c[3] ^ k[1], p0 & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def mean(t):
    """Return the mean over the features, which stay a dimension."""
    return t.mean(-1, keepdim=True)


@functools.cache
def keep_mask(shape, p, seed, offset=0):
    """Return the mask of the elements that dropout keeps: word `i & 3` of block `(i >> 2) + offset` is at least floor(p 2^32)."""
    count, threshold = math.prod(shape), math.floor(p * 2**32)
    words = [w for block in range(-(-count // 4)) for w in philox4x32(block + offset, seed % 2**64)]
    return torch.tensor([w >= threshold for w in words[:count]], dtype=torch.bool).reshape(shape)


def _mask(call):
    p = call.options.get("dropout_p", 0.0)
    if not p:
        return None
    shape = tuple(call.tensors["branch"].shape)
    return keep_mask(shape, p, int(call.options["seed"]), call.options.get("offset", 0))


def added(call, tensors, dtype=None):
    """Return z by the plain PyTorch formula, in the dtypes of the tensors."""
    scales = {name: call.options.get(name, 1.0) for name in ("residual_scale", "layer_scale")} | tensors
    u, mask = tensors["branch"], _mask(call)
    if "branch_bias" in tensors:
        u = u + tensors["branch_bias"]
    if mask is not None:
        u = torch.where(mask, u / (1.0 - call.options["dropout_p"] or 1.0), 0.0)
    if "layer_scale" in scales:
        u = u * scales["layer_scale"]
    if "row_scale" in tensors:
        u = u * tensors["row_scale"].unsqueeze(-1)
    z = tensors["residual"] * scales["residual_scale"] + u
    return z if dtype is None else z.to(dtype)


def exact(call, tensors, z_returned):
    """Return y and z in float64, differentiable; y and every derivative are taken at the z that was returned."""
    z = added(call, tensors)
    z = z + (z_returned.to(f64) - z).detach()
    if call.norm == "none":
        return {"z": z}
    centred = z - mean(z) if call.norm == "layer" else z
    y = centred / torch.sqrt(mean(centred.square()) + call.eps)
    if "weight" in tensors:
        y = y * (tensors["weight"] + call.options.get("weight_offset", 0.0))
    return {"y": y + tensors["bias"] if "bias" in tensors else y, "z": z}


def plain(call, tensors):
    """Return the results of plain PyTorch code in the same dtypes."""
    z = added(call, tensors, call.residual_dtype)
    if call.norm == "none":
        return {"z": z}
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is not None:
        weight = (weight + call.options.get("weight_offset", 0.0)).to(z.dtype)
    if call.norm == "layer":
        y = F.layer_norm(z, (call.d,), weight, None if bias is None else bias.to(z.dtype), call.eps)
    else:
        y = F.rms_norm(z, (call.d,), weight, call.eps)
        y = y if bias is None else y + bias
    return {"y": y.to(call.out_dtype), "z": z}


def wide_leaves(call):
    """Return a call's tensors in float64 as leaves that require gradients."""
    return tree_map(lambda t: t.detach().double().requires_grad_(), call.tensors)


def truth(call, z_returned, grad_outputs):
    """Return outputs and gradients (by name of argument) in float64."""
    tensors = wide_leaves(call)
    outputs = exact(call, tensors, z_returned.detach())
    torch.autograd.backward([outputs[name] for name in grad_outputs], [g.to(f64) for g in grad_outputs.values()])
    return tree_map(Tensor.detach, outputs) | {name: t.grad for name, t in tensors.items()}


def magnitudes(call, z, grad_outputs):
    """Return for every output and gradient the sum of the absolute values of its terms, to which its roundings are relative."""
    t = tree_map(lambda value: value.detach().double(), call.tensors)
    scales = {name: call.options.get(name, 1.0) for name in ("residual_scale", "layer_scale")} | t
    z, mask = z.detach().to(f64), _mask(call)
    kept = 1.0 if mask is None else mask / (1.0 - call.options["dropout_p"] or 1.0)
    u = t["branch"].abs() + (t["branch_bias"].abs() if "branch_bias" in t else 0.0)
    u = u if mask is None else torch.where(mask, u, 0.0) * kept  # a dropped element may be infinite
    rows = t["row_scale"].abs().unsqueeze(-1) if "row_scale" in t else torch.ones(())
    a, layer = (torch.as_tensor(scales[name], dtype=f64).abs() for name in ("residual_scale", "layer_scale"))
    m = {"z": a * t["residual"].abs() + rows * layer * u}
    dz = grad_outputs["z"].to(f64).abs() if "z" in grad_outputs else torch.zeros_like(z)
    if call.norm != "none":
        centred = z - mean(z) if call.norm == "layer" else z
        rstd = torch.rsqrt(mean(centred.square()) + call.eps)
        # The rounding error of the sum for the mean is also in each centred value.
        x_hat = ((z.abs() + mean(z.abs())) if call.norm == "layer" else z.abs()) * rstd
        weight = (
            (t["weight"].abs() + abs(call.options.get("weight_offset", 0.0))) if "weight" in t else torch.ones(call.d)
        )
        m["y"] = x_hat * weight + (t["bias"].abs() if "bias" in t else 0.0)
        if "y" in grad_outputs:
            dy = grad_outputs["y"].to(f64).abs()
            g = dy * weight
            dz = dz + rstd * (g + mean(g) + x_hat * mean(g * x_hat))
            m["weight"], m["bias"] = sum_rows(dy * x_hat), sum_rows(dy)
    m["residual"], m["branch"] = a * dz, rows * layer * kept * dz
    m["branch_bias"] = sum_rows(m["branch"])
    for name, terms in (("residual_scale", dz * t["residual"].abs()), ("layer_scale", dz * rows * u)):
        if name in t:
            m[name] = terms.sum_to_size(t[name].shape)
    if "row_scale" in t:
        m["row_scale"] = (dz * layer * u).sum(-1).sum_to_size(t["row_scale"].shape)
    return m


def sum_rows(t):
    return t.flatten(0, -2).sum(0) if t.dim() > 1 else t


def rms(t):
    return t.to(f64).square().mean().sqrt().item() if t.numel() else 0.0


def worst(t):
    return t.to(f64).abs().max().item() if t.numel() else 0.0


def relative(actual, expected):
    """Return the relative error in the L2 norm."""
    return ((actual.to(f64) - expected.to(f64)).norm() / expected.to(f64).norm()).item()


def arithmetic(call):
    """Return the unit roundoff of the arithmetic on a stream: float32's, or 4 times float64's, since the oracle rounds too."""
    return 4 * UNIT[f64] if call.residual_dtype == f64 else UNIT[f32]
