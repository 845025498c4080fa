"""The fused inference path of `torch.nn.TransformerEncoder`: replaced in graphs by the steps that it computes.

Its operator, `torch._transformer_encoder_layer_fwd`, computes a whole layer. In a graph it becomes attention (the operator that
it calls internally), adds, norms and the feed-forward layer.

With a padding mask the path also returns zeros for padded tokens. The frontend of torch.compile does not take the path then and
returns other numbers there. `keep_padding_zero` makes a compiled encoder return zeros as well.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from addnorm._util.torch_internals import encoder_layer, multi_head_attention
from addnorm.fusion.graph import example_value
from addnorm.stream.dataflow.operators import bind_arguments

USERS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # encoder -> fused models that share it


def expand_encoder_layers(graph: fx.Graph) -> None:
    """Replace each fused encoder layer of a graph by the nodes that compute the same."""
    for node in graph.find_nodes(op="call_function", target=encoder_layer):
        arguments = bind_arguments(torch.ops.aten._transformer_encoder_layer_fwd.default, node.args, node.kwargs)
        with graph.inserting_before(node):
            node.replace_all_uses_with(_insert_layer(graph, node, arguments))
        graph.erase_node(node)


def _insert_layer(graph: fx.Graph, layer: fx.Node, args: Mapping[str, Any]) -> fx.Node:
    """Insert the nodes of a layer, in the order of torch's C++ (aten/src/ATen/native/transformers/transformer.cpp)."""
    x: fx.Node = args["src"]
    like = example_value(x)

    def call(example: Any, target: Any, *operands: Any) -> fx.Node:
        node = graph.call_function(target, operands)
        node.meta = {"example_value": example, "nn_module_stack": layer.meta.get("nn_module_stack", {})}
        return node

    def norm(x: fx.Node, number: int) -> fx.Node:
        weight, bias = args[f"norm_weight_{number}"], args[f"norm_bias_{number}"]
        return call(like, F.layer_norm, x, (args["embed_dim"],), weight, bias, args["eps"])

    def attention(x: fx.Node) -> fx.Node:
        pair = call(
            (like, None), multi_head_attention, x, x, x, args["embed_dim"], args["num_heads"],
            args["qkv_weight"], args["qkv_bias"], args["proj_weight"], args["proj_bias"], args["mask"], False, True,
            args["mask_type"],
        )  # fmt: skip
        return call(like, operator.getitem, pair, 0)

    def feed_forward(x: fx.Node) -> fx.Node:
        hidden = like.new_empty((*like.shape[:-1], example_value(args["ffn_weight_1"]).shape[0]))
        h = call(hidden, F.linear, x, args["ffn_weight_1"], args["ffn_bias_1"])
        h = call(hidden, F.gelu if args["use_gelu"] else F.relu, h)
        return call(like, F.linear, h, args["ffn_weight_2"], args["ffn_bias_2"])

    for number, sublayer in enumerate((attention, feed_forward), 1):
        read = norm(x, number) if args["norm_first"] else x
        x = call(like, operator.add, x, sublayer(read))
        x = x if args["norm_first"] else norm(x, number)
    return x


def padding_encoders(model: nn.Module) -> list[nn.TransformerEncoder]:
    """Return the encoders of a model that return zeros for padding."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoder)
        and getattr(module.forward, "__func__", None) in FORWARDS
        and getattr(module, "use_nested_tensor", False)
    ]


def keep_padding_zero(encoder: nn.TransformerEncoder) -> Callable[[], None]:
    """Replace an encoder's forward by one that returns zeros for padding when compiled, too.

    Returns:
        A function that undoes the replacement. An encoder that several fused models share is restored by the last call.
    """

    def undo() -> None:
        USERS[encoder] -= 1
        if not USERS[encoder]:
            vars(encoder).pop("forward", None)

    USERS[encoder] = USERS.get(encoder, 0) + 1
    vars(encoder)["forward"] = types.MethodType(forward, encoder)
    return undo


def forward(
    self: nn.TransformerEncoder, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:  # fmt: skip
    """Run `torch.nn.TransformerEncoder.forward`; when compiled, zero the padded tokens that the eager path zeroes."""
    if not torch.compiler.is_compiling() or src_key_padding_mask is None or not _takes_fast_path(self, src, mask):
        return nn.TransformerEncoder.forward(self, src, mask, src_key_padding_mask, is_causal)
    padding = F._canonical_mask(src_key_padding_mask, "src_key_padding_mask", None, "src_mask", src.dtype)
    assert padding is not None
    x = src
    for layer in self.layers:
        x = layer(x, is_causal=is_causal is True, src_key_padding_mask=padding)
    is_token = padding.logical_not()
    is_zeroed = is_token.logical_not()
    if self.mask_check:  # the path requires that in every row all padding follows all tokens
        is_zeroed = is_zeroed & (is_token[:, 1:] <= is_token[:, :-1]).all()
    x = x.masked_fill(is_zeroed[..., None], 0.0)
    return x if self.norm is None else self.norm(x)


FORWARDS = (nn.TransformerEncoder.forward, forward)  # the latter in a fused encoder, and in a copy of one


def _takes_fast_path(encoder: nn.TransformerEncoder, src: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch's eager encoder takes the fast path for these inputs, whatever the order of the padding."""
    first = encoder.layers[0]
    needs_grad = torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in first.parameters()))
    return (
        torch.backends.mha.get_fastpath_enabled()
        and not first.training
        and src.dim() == 3
        and mask is None
        and not torch.is_autocast_enabled()
        and not needs_grad
    )
