"""Self-attention and cross-attention as sublayers, with `F.scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from addnorm._util.arguments import check_int, check_probability
from addnorm.nn.cache import KeyValueCache
from addnorm.nn.masks import INFINITY, MergedMask, merge_masks
from addnorm.nn.norm import Device, Dtype
from addnorm.nn.unmodified import is_unmodified, methods_of

LINEAR = methods_of(nn.Linear)
PACKED = {"in_proj": ("q", "k", "v"), "kv_proj": ("k", "v")}  # the parts of projections that are one matrix


class _Attention(nn.Module):
    """Common base of `SelfAttention` and `CrossAttention`: the number of heads, the attention and the output projection."""

    causal = False
    out_proj: nn.Linear

    def __init__(self, d_model: int, nhead: int, dropout: float) -> None:
        super().__init__()
        check_int("d_model", d_model, 1)
        check_int("nhead", nhead, 1)
        if d_model % nhead:
            raise ValueError(
                f"nhead is {nhead}, expected a number that divides d_model = {d_model}: each head gets d_model / nhead features."
            )
        self.d_model, self.nhead, self.head_dim = d_model, nhead, d_model // nhead
        self.local_nhead, self.first_head = nhead, 0  # fewer under tensor parallelism, `addnorm.distributed`
        self.dropout = check_probability("dropout", dropout)
        self.register_load_state_dict_pre_hook(_join_projections)  # type: ignore[no-untyped-call]  # torch's

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
        """Return the attention's output after `out_proj`.

        `q`, `k` and `v` are `(batch, heads, tokens, head_dim)`. Under tensor parallelism they have the heads of this process.
        """
        n = self.local_nhead
        if mask is not None and n != self.nhead and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask.narrow(1, self.first_head, n)
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, is_causal)
        if mask is not None and torch.compiler.is_exporting():  # ONNX: the softmax of a query without keys is nan
            y = y.masked_fill(mask.amax(-1, keepdim=True) == -INFINITY, 0.0)
        return self.out_proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # torch does not type a module's call

    def extra_repr(self) -> str:
        """Return the settings, as torch's modules do."""
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        return f"nhead={self.nhead}{dropout}" + (", causal=True" if self.causal else "")


def _join_projections(module: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Join the projections that tensor parallelism stores separately in a state dict, such as `in_proj.q.weight`."""
    for name, names in PACKED.items():
        if not isinstance(getattr(module, name, None), nn.Linear):
            continue
        for kind in ("weight", "bias"):
            parts = [f"{prefix}{name}.{part}.{kind}" for part in names]
            if all(part in state for part in parts):
                state[f"{prefix}{name}.{kind}"] = torch.cat([state.pop(part) for part in parts])


class SelfAttention(_Attention):
    r"""Multi-head self-attention: out_proj of softmax(q k^T / sqrt(head_dim) + mask) v, with q, k, v = in_proj(x).

    Masks have the meaning of `F.scaled_dot_product_attention`: bool, True where the query may attend to the key; or float, added
    to the scores. **In the bool masks of `torch.nn.MultiheadAttention` and `torch.nn.Transformer`, True means the opposite**:
    pass `~mask`. For a query that may attend to no key the attention is zero, so its output is the bias of `out_proj`.

    Args:
        d_model: the number of features.
        nhead: the number of heads, which divides d_model.
        bias: whether the projections have biases.
        dropout: dropout probability of the attention weights.
        causal: whether a token attends only to itself and earlier tokens, including those of a cache.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        in_proj: `Linear(d_model, 3 d_model)`, whose weight has the rows of queries, keys and values, as in `MultiheadAttention`.
        out_proj: `Linear(d_model, d_model)`.

    Source: Vaswani et al. 2017, arXiv 1706.03762.

    Example:
        >>> attention = addnorm.nn.SelfAttention(16, 4, causal=True)
        >>> x = torch.randn(2, 5, 16)
        >>> not_padding = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
        >>> attention(x, key_mask=not_padding).shape
        torch.Size([2, 5, 16])
    """

    read_names = ("x", "key", "value")  # names of the inputs under a wiring with several reads

    def __init__(
        self,
        d_model: int,
        nhead: int,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        causal: bool = False,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(d_model, nhead, dropout)
        self.causal = causal
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | MergedMask | None = None,
        key_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        key: Tensor | None = None,
        value: Tensor | None = None,
    ) -> Tensor:
        """Return the output, `(batch, tokens, d_model)`.

        Args:
            x: `(batch, tokens, d_model)`.
            mask: bool or float: `(queries, keys)`, `(batch, queries, keys)` or `(batch, heads, queries, keys)`; every dimension
                but keys may be 1.
            key_mask: bool or float, `(batch, keys)`: the tokens to attend to, such as all tokens but padding.
            cache: keys and values of earlier tokens, to which x attends too. The keys and values of x are appended.
            key, value: the inputs of the keys and values, in the shape of x, for wirings that read them separately. None means x.

        Raises:
            ValueError, TypeError: a wrong shape or dtype.
        """
        if x.dim() != 3 or x.shape[2] != self.d_model:
            refuse_shape("x", x, self.d_model)
        batch, n, _ = x.shape
        packed = self.in_proj(x) if key is None and value is None else self._project_apart(x, key, value)
        projected = packed.reshape(batch, n, 3, self.local_nhead, self.head_dim)
        if mask is None and key_mask is None and cache is None:
            merged, causal = None, self.causal
        else:
            past = 0 if cache is None else cache.length_of(self)
            merged, causal = merge_masks(x, past + n, self.nhead, mask, key_mask, self.causal)
        q, k, v = (t.transpose(1, 2) for t in projected.unbind(2))
        if cache is not None:
            k, v = cache.extend(self, projected.permute(2, 0, 3, 1, 4)[1:]).unbind(0)
        return self._attend(q, k, v, merged, causal)

    def _project_apart(self, x: Tensor, key: Tensor | None, value: Tensor | None) -> Tensor:
        """Return queries of `x`, keys of `key` and values of `value` as one tensor, in the layout of the output of `in_proj`."""
        inputs = [x, x if key is None else key, x if value is None else value]
        for name, t in zip(("key", "value"), inputs[1:], strict=True):
            if t.shape != x.shape:
                raise ValueError(f"{name} has shape {tuple(t.shape)}, expected {tuple(x.shape)}, the shape of x.")
        project: Any = self.in_proj
        if not is_unmodified(project, LINEAR):
            return torch.cat([project(t).chunk(3, -1)[i] for i, t in enumerate(inputs)], -1)
        biases = (None,) * 3 if project.bias is None else project.bias.chunk(3)
        weights = project.weight.chunk(3)
        return torch.cat([F.linear(t, w, b) for t, w, b in zip(inputs, weights, biases, strict=True)], -1)

    def weight_roles(self) -> list[tuple[str, Tensor]]:
        """Return the weights with their roles for `addnorm.wirings.init`. Parts of a packed weight are views."""
        packed = _split_packed(self.in_proj, 3)
        return [*zip(("query", "key", "value"), packed, strict=True), ("out", self.out_proj.weight)]


class CrossAttention(_Attention):
    r"""Multi-head attention to a memory: out_proj of softmax(q k^T / sqrt(head_dim) + mask) v, with k, v = kv_proj(memory).

    Masks, and queries that may attend to no key, are as in `SelfAttention`.

    Args:
        d_model: the number of features of x and of the memory.
        nhead: the number of heads, which divides d_model.
        bias: whether the projections have biases.
        dropout: dropout probability of the attention weights.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        q_proj: `Linear(d_model, d_model)`.
        kv_proj: `Linear(d_model, 2 d_model)`, whose weight has the rows of keys, then of values.
        out_proj: `Linear(d_model, d_model)`.

    Source: Vaswani et al. 2017, arXiv 1706.03762.

    Example:
        >>> attention = addnorm.nn.CrossAttention(16, 4)
        >>> attention(torch.randn(2, 5, 16), memory=torch.randn(2, 9, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(d_model, nhead, dropout)
        self.q_proj = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)
        self.kv_proj = nn.Linear(d_model, 2 * d_model, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | MergedMask | None = None,
        memory_key_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return the output, `(batch, tokens, d_model)`.

        Args:
            x: `(batch, tokens, d_model)`.
            memory: `(batch, keys, d_model)`, the tokens to attend to; None means the memory in the cache.
            memory_mask: as the mask of `SelfAttention`, with the tokens of the memory as keys.
            memory_key_mask: bool or float, `(batch, keys)`: the tokens of the memory to attend to.
            cache: stores the memory's keys and values, which are computed again only for another memory tensor.

        Raises:
            ValueError, TypeError: a wrong shape or dtype, or no memory.
        """
        if x.dim() != 3 or x.shape[2] != self.d_model:
            refuse_shape("x", x, self.d_model)
        batch, n, _ = x.shape
        pairs = None
        if cache is not None:
            needs_grad = any(p.requires_grad for p in self.kv_proj.parameters())
            needs_grad = needs_grad or (memory is not None and memory.requires_grad)
            pairs = cache.recall(self, memory, needs_grad)
        is_new = pairs is None
        if pairs is None:
            pairs = self._project_memory(memory)
            if cache is not None and memory is not None:
                pairs = cache.reorder_pairs(self, memory, pairs)
        if pairs.shape[0] != batch:
            raise ValueError(
                f"memory has a batch of {pairs.shape[0]}, expected {batch}, that of x: give each sample its memory, "
                "as in memory.repeat_interleave(beams, 0), or cache.reorder(index) for a cached memory."
            )
        if is_new and cache is not None and memory is not None:
            cache.remember(self, memory, pairs)
        merged = None
        if memory_mask is not None or memory_key_mask is not None:
            merged, _ = merge_masks(x, pairs.shape[1], self.nhead, memory_mask, memory_key_mask, name="memory_mask")
        q = self.q_proj(x).reshape(batch, n, self.local_nhead, self.head_dim).transpose(1, 2)
        k, v = (t.transpose(1, 2) for t in pairs.unbind(2))
        return self._attend(q, k, v, merged)

    def _project_memory(self, memory: Tensor | None) -> Tensor:
        """Return keys and values of the memory, `(batch, keys, 2, heads, head_dim)`."""
        if memory is None:
            raise TypeError(
                "memory is None, expected the tokens to attend to, (batch, keys, d_model): pass an encoder's output as memory."
            )
        if memory.dim() != 3 or memory.shape[2] != self.d_model:
            refuse_shape("memory", memory, self.d_model)
        batch, n, _ = memory.shape
        pairs: Tensor = self.kv_proj(memory)
        return pairs.reshape(batch, n, 2, self.local_nhead, self.head_dim)

    def weight_roles(self) -> list[tuple[str, Tensor]]:
        """Return the weights with their roles for `addnorm.wirings.init`. Parts of a packed weight are views."""
        key, value = _split_packed(self.kv_proj, 2)
        return [("query", self.q_proj.weight), ("key", key), ("value", value), ("out", self.out_proj.weight)]


def refuse_shape(name: str, x: Any, d_model: int) -> NoReturn:
    """Raise an error for an input that is not a tensor `(batch, tokens, d_model)`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, expected a tensor of shape (batch, tokens, {d_model}).")
    remedy = f"its last dimension must be {d_model}"
    if x.dim() == 2 and x.shape[1] == d_model:
        remedy = f"{name}.unsqueeze(0) is a batch of one"
    raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (batch, tokens, {d_model}): {remedy}.")


def _split_packed(projection: Any, n: int) -> tuple[Tensor, ...]:
    """Return the `n` weights that a projection packs into one. Under tensor parallelism they are separate parameters."""
    return projection.weight.detach().chunk(n) if isinstance(projection, nn.Linear) else projection.parts()
