"""torch.nn.TransformerEncoder's closed fast path in inference, opened: one operator a layer becomes the steps that it does.

The operator is `torch._transformer_encoder_layer_fwd`; its attention stays the operator that it calls itself.

Given a padding mask that path also returns zeros for the tokens that are padding. The frontend of torch.compile does not take
it then, and returns other numbers there; `as_eager` makes an encoder return the same in both.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from addnorm.fusion.traced import given_to

__all__ = ["as_eager", "lower", "padded"]

CLOSED = torch._transformer_encoder_layer_fwd
FUSED: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # in how many models: nested, or shared
NAMES = (
    "src", "embed_dim", "num_heads", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias", "use_gelu", "norm_first", "eps",
    "norm_weight_1", "norm_bias_1", "norm_weight_2", "norm_bias_2", "ffn_weight_1", "ffn_bias_1", "ffn_weight_2",
    "ffn_bias_2", "mask", "mask_type",
)  # fmt: skip


def lower(graph: fx.Graph) -> None:
    """Opens every such layer of a graph."""
    for node in graph.find_nodes(op="call_function", target=CLOSED):
        given: dict[str, Any] = {
            "mask": None,
            "mask_type": None,
            **dict(zip(NAMES, node.args, strict=False)),
            **node.kwargs,
        }
        with graph.inserting_before(node):
            node.replace_all_uses_with(_Layer(graph, node, given).run())
        graph.erase_node(node)


class _Layer:
    """The nodes of one layer."""

    def __init__(self, graph: fx.Graph, node: fx.Node, given: dict[str, Any]) -> None:
        self.graph, self.node, self.given = graph, node, given

    def run(self) -> fx.Node:
        """In the order of torch's C++ (aten/src/ATen/native/transformers/transformer.cpp)."""
        given, x = self.given, self.given["src"]
        read = self._norm(x, 1) if given["norm_first"] else x
        x = self._add(x, self._attention(read))
        if not given["norm_first"]:
            x = self._norm(x, 1)
        read = self._norm(x, 2) if given["norm_first"] else x
        x = self._add(x, self._feed_forward(read))
        return x if given["norm_first"] else self._norm(x, 2)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {
            "example_value": given_to(self.given["src"]),
            "nn_module_stack": self.node.meta.get("nn_module_stack", {}),
        }
        return node

    def _add(self, x: fx.Node, branch: fx.Node) -> fx.Node:
        return self._call(operator.add, x, branch)

    def _norm(self, x: fx.Node, number: int) -> fx.Node:
        given = self.given
        weight, bias = given[f"norm_weight_{number}"], given[f"norm_bias_{number}"]
        return self._call(F.layer_norm, x, (given["embed_dim"],), weight, bias, given["eps"])

    def _attention(self, x: fx.Node) -> fx.Node:
        given = self.given
        both = self._call(
            torch._native_multi_head_attention, x, x, x, given["embed_dim"], given["num_heads"], given["qkv_weight"],
            given["qkv_bias"], given["proj_weight"], given["proj_bias"], given["mask"], False, True, given["mask_type"],
        )  # fmt: skip
        both.meta["example_value"] = (given_to(given["src"]), None)
        return self._call(operator.getitem, both, 0)

    def _feed_forward(self, x: fx.Node) -> fx.Node:
        given = self.given
        hidden = self._call(F.linear, x, given["ffn_weight_1"], given["ffn_bias_1"])
        size = (*given_to(x).shape[:-1], given_to(given["ffn_weight_1"]).shape[0])
        hidden.meta["example_value"] = given_to(x).new_empty(size)
        active = self._call(F.gelu if given["use_gelu"] else F.relu, hidden)
        active.meta["example_value"] = hidden.meta["example_value"]
        return self._call(F.linear, active, given["ffn_weight_2"], given["ffn_bias_2"])


def padded(model: nn.Module) -> list[nn.TransformerEncoder]:
    """The encoders of a model that return zeros for padding."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoder)
        and getattr(module.forward, "__func__", None) in OURS
        and getattr(module, "use_nested_tensor", False)
    ]


def as_eager(encoder: nn.TransformerEncoder) -> Callable[[], None]:
    """Has an encoder return the zeros when it is compiled, too; what is returned undoes it, the last one of several."""

    def undo() -> None:
        FUSED[encoder] -= 1
        if not FUSED[encoder]:
            vars(encoder).pop("forward", None)

    FUSED[encoder] = FUSED.get(encoder, 0) + 1
    vars(encoder)["forward"] = types.MethodType(forward, encoder)
    return undo


def forward(
    self: nn.TransformerEncoder, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:  # fmt: skip
    """`torch.nn.TransformerEncoder.forward`, its choice of the path that zeroes padding made as in eager."""
    if not torch.compiler.is_compiling() or src_key_padding_mask is None or not _zeroes(self, src, mask):
        return nn.TransformerEncoder.forward(self, src, mask, src_key_padding_mask, is_causal)
    padding = F._canonical_mask(src_key_padding_mask, "src_key_padding_mask", None, "src_mask", src.dtype)
    assert padding is not None
    x = src
    for layer in self.layers:
        x = layer(x, is_causal=is_causal is True, src_key_padding_mask=padding)
    kept = padding.logical_not()
    zeroed = kept.logical_not()
    if self.mask_check:  # it is taken only where every row is tokens first, padding after
        zeroed = zeroed & (kept[:, 1:] <= kept[:, :-1]).all()
    x = x.masked_fill(zeroed[..., None], 0.0)
    return x if self.norm is None else self.norm(x)


OURS = (nn.TransformerEncoder.forward, forward)  # the latter in one that is fused, and in a copy of it


def _zeroes(encoder: nn.TransformerEncoder, src: Tensor, mask: Tensor | None) -> bool:
    """Whether torch takes that path for these inputs, but for the order of the padding."""
    first = encoder.layers[0]
    wants = torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in first.parameters()))
    return (
        torch.backends.mha.get_fastpath_enabled()
        and not first.training
        and src.dim() == 3
        and mask is None
        and not torch.is_autocast_enabled()
        and not wants
    )
