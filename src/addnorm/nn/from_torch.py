"""Conversion of `torch.nn.TransformerEncoder`, `TransformerDecoder` and `Transformer`, with a copy of their weights.

A module that cannot be represented raises an error; nothing is guessed, and the module itself does not change.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NoReturn, overload

from torch import Tensor, nn

from addnorm.nn.attention import SelfAttention
from addnorm.nn.feed_forward import FeedForward
from addnorm.nn.norm import LayerNorm
from addnorm.nn.transformer import Decoder, Encoder, Transformer
from addnorm.nn.unmodified import find_modification, methods_of

ENCODERS: tuple[type[nn.Module], ...] = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
DECODERS: tuple[type[nn.Module], ...] = (nn.TransformerDecoder, nn.TransformerDecoderLayer)
LINEARS: tuple[type[nn.Module], ...] = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
METHODS = methods_of(
    nn.Transformer, *ENCODERS, *DECODERS, nn.MultiheadAttention, *LINEARS, nn.Dropout, nn.LayerNorm,
    names=("_sa_block", "_mha_block", "_ff_block", "merge_masks"),
)  # fmt: skip


# The attentions of torch's layers. The feed-forward after them is no module. Sublayer k, from 1, has norm<k> and dropout<k>.
ATTENTIONS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.TransformerEncoderLayer: ("self_attn",),
    nn.TransformerDecoderLayer: ("self_attn", "multihead_attn"),
}


@overload
def from_torch(module: nn.Transformer, *, causal: bool = False) -> Transformer: ...
@overload
def from_torch(module: nn.TransformerDecoder | nn.TransformerDecoderLayer, *, causal: bool = False) -> Decoder: ...
@overload
def from_torch(
    module: nn.TransformerEncoder | nn.TransformerEncoderLayer, *, causal: bool = False
) -> Encoder | Decoder: ...
def from_torch(module: nn.Module, *, causal: bool = False) -> Encoder | Decoder | Transformer:
    """Convert a transformer of `torch.nn` into the module of this library that computes the same, with a copy of its parameters.

    norm_first, the final norm, every eps, dropout, activation and bias, batch_first, dtypes, devices, training modes and
    requires_grad are kept. Calls differ in three ways:

    - True in a bool mask means the opposite: pass `~mask` and `key_mask=~key_padding_mask`. Float masks are the same.
    - The input needs a batch dimension: pass `x[None]` if it has none.
    - A `Transformer` hides the source's padding from the decoder too, unless `memory_key_mask` is passed.

    In eval mode without gradients, torch's encoder may return zeros at padded tokens (nested tensors). The converted module
    computes padded tokens as in training.

    Args:
        module: a `Transformer`, `TransformerEncoder` or `TransformerDecoder` of `torch.nn`, or one layer of the last two.
        causal: whether the result, or the decoder of a `Transformer`, is causal by itself, without the causal mask that torch's
            modules need. An encoder becomes a `Decoder` without cross-attention.

    Raises:
        TypeError: another module, or one with parts that are not torch's own (a subclass, a replaced norm, a parametrization).
        ValueError: a setting that this library does not support (bias_k, add_zero_attn, kdim, vdim, layers that differ in wiring
            or width), or one that a copy would lose (hooks, shared parameters).

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> theirs = torch.nn.TransformerEncoder(layer, 2).eval()
        >>> ours = addnorm.nn.from_torch(theirs)
        >>> x = torch.randn(3, 5, 16)
        >>> torch.testing.assert_close(ours(x), theirs(x))
    """
    _check_class("module", module, (nn.Transformer, *ENCODERS, *DECODERS))
    _check_copyable(module)
    if not isinstance(module, nn.Transformer):
        return _blocks("module", module, causal)  # type: ignore[no-any-return]  # the overloads state which one
    _check_class("module.encoder", module.encoder, ENCODERS)
    _check_class("module.decoder", module.decoder, DECODERS)
    encoder = _blocks("module.encoder", module.encoder, causal=False)
    decoder = _blocks("module.decoder", module.decoder, causal)
    first = "module.encoder.layers.0", module.encoder.layers[0]
    _check_equal("module.decoder.layers.0", module.decoder.layers[0], *first, "norm_first")
    _check_equal("module.decoder", decoder, "module.encoder", encoder, "d_model", "batch_first")
    ours = Transformer(1, 1, encoder.d_model, encoder.nhead, wiring=encoder.wiring, device="meta")
    ours.encoder, ours.decoder = encoder, decoder
    ours.training = module.training
    return ours


def _blocks(path: str, theirs: Any, causal: bool) -> Any:
    """Return an encoder or decoder, built on the meta device and filled with copies of the parameters of `theirs`."""
    single = type(theirs) in ATTENTIONS
    layers = {path: theirs} if single else {f"{path}.layers.{i}": layer for i, layer in enumerate(theirs.layers)}
    norm = None if single else theirs.norm
    decodes = isinstance(theirs, DECODERS)
    if not layers:
        _refuse(f"{path}.layers", "is empty", "at least one layer", "there is nothing to convert")
    first_path, first = next(iter(layers.items()))
    for module_path, layer in layers.items():
        _check_layer(module_path, layer, nn.TransformerDecoderLayer if decodes else nn.TransformerEncoderLayer)
        _check_equal(module_path, layer, first_path, first, "norm_first")
        _check_equal(f"{module_path}.linear1", layer.linear1, f"{first_path}.linear1", first.linear1, "out_features")
        for name in ATTENTIONS[type(layer)]:
            of_first = first_path + ".self_attn", first.self_attn
            _check_equal(
                f"{module_path}.{name}", getattr(layer, name), *of_first, "embed_dim", "num_heads", "batch_first"
            )
    attention = first.self_attn
    d_model: int = attention.embed_dim
    wiring = "pre_ln" if first.norm_first else "post_ln"
    arguments = (len(layers), d_model, attention.num_heads, first.linear1.out_features, wiring)
    options: dict[str, Any] = {"final_norm": norm is not None, "batch_first": attention.batch_first, "device": "meta"}
    ours: Encoder | Decoder
    if decodes or causal:
        ours = Decoder(*arguments, cross_attention=decodes, causal=causal, **options)
    else:
        ours = Encoder(*arguments, **options)
    ours.train(theirs.training)
    own_layers: list[Any] = [*ours.stack.layers]
    for own_layer, (module_path, layer) in zip(own_layers, layers.items(), strict=True):
        for k, connection in enumerate(own_layer.connections, 1):
            own_norm = _norm(f"{module_path}.norm{k}", getattr(layer, f"norm{k}"), d_model)
            setattr(connection, "norm_in" if layer.norm_first else "norm_out", own_norm)
            dropout = getattr(layer, f"dropout{k}")
            connection.dropout, connection.training = dropout.p, dropout.training
        *attentions, feed_forward = (connection.sublayer for connection in own_layer.connections)
        for own_attention, name in zip(attentions, ATTENTIONS[type(layer)], strict=True):
            _fill_attention(own_attention, getattr(layer, name))
        _fill_feed_forward(feed_forward, layer)
    if norm is not None:
        ours.stack.norm_final = _norm(f"{path}.norm", norm, d_model)
    return ours


def _fill_attention(ours: Any, theirs: nn.MultiheadAttention) -> None:
    """Copy the parameters of an attention. For cross-attention, split the packed projection into `q_proj` and `kv_proj`."""
    for name, packed in (("weight", theirs.in_proj_weight), ("bias", theirs.in_proj_bias)):
        if isinstance(ours, SelfAttention):
            setattr(ours.in_proj, name, _copied(packed))
        else:
            setattr(ours.q_proj, name, _copied(packed, slice(None, ours.d_model)))
            setattr(ours.kv_proj, name, _copied(packed, slice(ours.d_model, None)))
    _fill(ours.out_proj, theirs.out_proj)
    ours.dropout, ours.training = theirs.dropout, theirs.training


def _fill_feed_forward(ours: FeedForward, layer: Any) -> None:
    _fill(ours.up, layer.linear1)
    _fill(ours.down, layer.linear2)
    ours.dropout, ours.training = layer.dropout.p, layer.dropout.training
    activation = layer.activation
    ours.activation = copy.deepcopy(activation) if isinstance(activation, nn.Module) else activation
    ours.activation_name = None


def _norm(path: str, theirs: Any, d_model: int) -> LayerNorm:
    """Return a `LayerNorm` of this library with copies of the parameters of `theirs`, a norm of torch."""
    _check_class(path, theirs, (nn.LayerNorm, LayerNorm))
    if theirs.normalized_shape != (d_model,):
        _refuse(
            path, f"is over {theirs.normalized_shape}", f"({d_model},), the features", "a stack normalizes each token"
        )
    ours = LayerNorm(d_model, theirs.eps, theirs.elementwise_affine, theirs.bias is not None, device="meta")
    _fill(ours, theirs)
    return ours.train(theirs.training)


def _fill(ours: Any, theirs: Any) -> None:
    ours.weight, ours.bias = _copied(theirs.weight), _copied(theirs.bias)


def _copied(theirs: Tensor | None, rows: slice = slice(None)) -> nn.Parameter | None:
    return None if theirs is None else nn.Parameter(theirs.detach()[rows].clone(), theirs.requires_grad)


def _check_layer(path: str, layer: Any, kind: type[nn.Module]) -> None:
    """Check that a layer has torch's own parts, with settings that this library supports."""
    _check_class(path, layer, (kind,))
    names = ATTENTIONS[kind]
    for name in ("dropout", *(f"dropout{k}" for k in range(1, len(names) + 2))):
        _check_class(f"{path}.{name}", getattr(layer, name), (nn.Dropout,))
    for name in names:
        attention, module_path = getattr(layer, name), f"{path}.{name}"
        _check_class(module_path, attention, (nn.MultiheadAttention,))
        _check_class(f"{module_path}.out_proj", attention.out_proj, LINEARS)
        if attention.bias_k is not None or attention.bias_v is not None:
            _refuse(module_path, "has bias_k and bias_v", "none", "attention here has no keys that are parameters")
        if attention.add_zero_attn:
            _refuse(module_path, "has add_zero_attn=True", "False", "attention here has no key of zeros")
        if attention.in_proj_weight is None:
            widths = f"kdim={attention.kdim} and vdim={attention.vdim}"
            _refuse(
                module_path, f"has {widths}", f"{attention.embed_dim}", "keys and values have the stream's width here"
            )
    for name in ("linear1", "linear2"):
        _check_class(f"{path}.{name}", getattr(layer, name), LINEARS)


def _check_copyable(module: nn.Module) -> None:
    """Check that the module has nothing that a copy would lose: hooks, patched methods, shared parameters."""
    for name, submodule in module.named_modules():
        path = f"module.{name}".rstrip(".")
        change = find_modification(submodule, METHODS)
        if change == "hooks":
            _refuse(path, "has hooks", "none", "they would be lost; remove them, and register them on the result")
        if change is not None:
            _refuse(path, f"has {change}", f"that of {type(submodule).__name__}", "what it computes is not known")
    seen: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = seen.setdefault(id(parameter), name)
        if other != name:
            _refuse(
                f"module.{name}", f"is module.{other} too", "one of its own", "a copy would separate shared weights"
            )


def _check_class(path: str, module: Any, kinds: Sequence[type[nn.Module]]) -> None:
    """Raise a TypeError unless a module's class is exactly one of `kinds`. A subclass may compute something else."""
    if type(module) not in kinds:
        words = " or ".join(dict.fromkeys(f"torch.nn.{kind.__name__}" for kind in kinds))
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        raise TypeError(f"{path} is {name}, expected {words} itself: what another class computes is not known.")


def _check_equal(path: str, module: Any, other_path: str, other: Any, *names: str) -> None:
    for name in names:
        value, expected = getattr(module, name), getattr(other, name)
        if value != expected:
            _refuse(
                path, f"has {name}={value!r}", f"{expected!r} as {other_path} has", "one setting holds for all here"
            )


def _refuse(path: str, finding: str, expected: str, why: str) -> NoReturn:
    raise ValueError(f"{path} {finding}, expected {expected}: {why}.")
