"""Attention masks, checked and merged once for all layers into arguments of `F.scaled_dot_product_attention`.

Masks have that function's meaning: a bool mask is True where a query may attend to a key, a float mask is added to the scores.
(In the bool masks of `torch.nn.Transformer` and `torch.nn.MultiheadAttention`, True means "may not attend".)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

INFINITY = float("inf")
LAYOUTS = {2: "(queries, keys)", 3: "(batch, queries, keys)", 4: "(batch, heads, queries, keys)"}


class MergedMask(NamedTuple):
    """Mask arguments of `F.scaled_dot_product_attention`. An attention accepts a `MergedMask` as its `mask`."""

    mask: Tensor | None
    is_causal: bool


def merge_masks(
    x: Tensor,
    n_keys: int,
    nhead: int,
    mask: Tensor | MergedMask | None,
    key_mask: Tensor | None,
    causal: bool = False,
    name: str = "mask",
) -> MergedMask:
    """Merge masks and causality into one mask: bool masks become 0 or -inf in the dtype of x, float masks are added.

    Args:
        x: the attention's input, `(batch, queries, d_model)`. If `causal`, the queries are the last of the keys.
        n_keys: the number of keys, including those of a cache.
        nhead: the number of heads.
        mask: `(queries, keys)`, `(batch, queries, keys)` or `(batch, heads, queries, keys)`; every dimension but keys may be 1. A
            `MergedMask` is returned unchanged.
        key_mask: `(batch, keys)`.
        causal: whether a query attends only to its own and earlier keys.
        name: the name of the mask in error messages.

    Example:
        >>> from addnorm.nn.masks import merge_masks
        >>> merge_masks(torch.zeros(1, 2, 8), 3, 4, None, torch.tensor([[False, True, True]]), causal=True).mask
        tensor([[[[-inf, 0., -inf],
                  [-inf, 0., 0.]]]])
    """
    if isinstance(mask, MergedMask):
        return mask
    batch, n_queries = x.shape[:2]
    if mask is None and key_mask is None:
        if not causal or n_queries == 1:
            return MergedMask(None, False)
        if n_keys == n_queries:
            return MergedMask(None, True)
    masks = []
    if mask is not None:
        full = {2: (n_queries, n_keys), 3: (batch, n_queries, n_keys), 4: (batch, nhead, n_queries, n_keys)}
        if not _fits(name, mask, x, full):
            rank = mask.dim() if mask.dim() in full else 2
            remedy = f"{name[:-4]}key_mask is for masks of shape (batch, keys)"
            if mask.dim() == 3 and mask.shape[0] == batch * nhead:
                remedy = f"torch.nn.MultiheadAttention's becomes {name}.unflatten(0, ({batch}, {nhead}))"
            _refuse(name, mask, f"{LAYOUTS[rank]} = {full[rank]}, or 1 in the place of any but keys", remedy)
        masks.append(mask[:, None] if mask.dim() == 3 else mask)
    if key_mask is not None:
        key_name = name.replace("mask", "key_mask")
        if not _fits(key_name, key_mask, x, {2: (batch, n_keys)}):
            remedy = f"every key has an entry, also the keys of a cache; {name} is for other shapes"
            _refuse(key_name, key_mask, f"(batch, keys) = {(batch, n_keys)}", remedy)
        masks.append(key_mask[:, None, None])
    if causal:
        masks.append(torch.ones(n_queries, n_keys, dtype=torch.bool, device=x.device).tril(n_keys - n_queries))
    added: Tensor | None = None
    allowed: Tensor | None = None
    for part in masks:
        if part.dtype is torch.bool:
            allowed = part if allowed is None else allowed & part
        else:
            added = part if added is None else added + part
    if allowed is None:
        return MergedMask(added, False)
    if added is None:
        zeros = torch.zeros(allowed.shape, dtype=x.dtype, device=x.device)  # not a DTensor where x is one
        return MergedMask(zeros.masked_fill_(~allowed, -INFINITY), False)
    return MergedMask(added.masked_fill(~allowed, -INFINITY), False)


def _fits(name: str, mask: Any, x: Tensor, shapes: Mapping[int, tuple[int, ...]]) -> bool:
    """Check a mask's type. Return whether it has the shape of its rank, in which each dimension but the keys may be 1."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} is {type(mask).__name__}, expected a tensor.")
    if mask.dtype not in (torch.bool, x.dtype, torch.float32):
        remedy = f"{name}.bool()" if not mask.is_floating_point() else f"{name}.to({x.dtype})"
        raise TypeError(
            f"{name} has dtype {mask.dtype}, expected torch.bool (True: may attend) or {x.dtype} (added to the scores): "
            f"give it as {remedy}."
        )
    full = shapes.get(mask.dim())
    if full is None or mask.shape[-1] != full[-1]:
        return False
    return all(n in (1, m) for n, m in zip(mask.shape, full, strict=True))


def _refuse(name: str, mask: Tensor, expected: str, remedy: str) -> NoReturn:
    raise ValueError(f"{name} has shape {tuple(mask.shape)}, expected {expected}: {remedy}.")
