"""Transformers of any wiring: the sublayers of a block, encoder, decoder, and encoder-decoder.

    block        self-attention, cross-attention in a decoder, feed-forward
    Encoder      num_layers blocks in a ResidualStack
    Decoder      the same, causal, with cross-attention (or without: a language model)
    Transformer  an encoder whose output is the decoder's memory

Inputs and outputs are vectors: embeddings, positions and the projection to a vocabulary are left to the caller. `block`, the
constructors and `Transformer.forward` have a parameter for each option and each mask, as in `torch.nn.Transformer`.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from addnorm._util.arguments import check_choice, check_int
from addnorm._util.norms import KINDS, Norm
from addnorm.nn.attention import CrossAttention, SelfAttention, refuse_shape
from addnorm.nn.cache import KeyValueCache
from addnorm.nn.feed_forward import Activation, FeedForward
from addnorm.nn.masks import merge_masks
from addnorm.nn.norm import Device, Dtype
from addnorm.nn.stack import ResidualStack
from addnorm.wirings.spec import Stage, Wiring, as_wiring


def block(
    d_model: int,
    nhead: int,
    dim_feedforward: int | None = None,
    *,
    cross_attention: bool = False,
    causal: bool = False,
    activation: Activation = "relu",
    bias: bool = True,
    dropout: float = 0.0,
    attention_dropout: float | None = None,
    device: Device = None,
    dtype: Dtype = None,
) -> list[nn.Module]:
    """Return the sublayers of one block for a `ResidualStack`: self-attention, optional cross-attention, feed-forward.

    Args:
        d_model: the number of features.
        nhead: the number of heads, which divides d_model.
        dim_feedforward: the hidden width of the feed-forward sublayer; None means the default of `FeedForward`.
        cross_attention: whether there is attention to a memory.
        causal: whether self-attention is causal.
        activation: activation of the feed-forward: "relu", "gelu", "swiglu", or a function. A module is copied for each block.
        bias: whether projections have biases.
        dropout: dropout probability inside the feed-forward and of the attention weights.
        attention_dropout: dropout probability of the attention weights, if it differs from `dropout`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Example:
        >>> sublayers = [sublayer for _ in range(4) for sublayer in addnorm.nn.block(16, 2, causal=True)]
        >>> stack = addnorm.ResidualStack(sublayers, 16, "pre_ln")
    """
    shared: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
    attention_options = {"dropout": dropout if attention_dropout is None else attention_dropout, **shared}
    activation = copy.deepcopy(activation) if isinstance(activation, nn.Module) else activation
    return [
        SelfAttention(d_model, nhead, causal=causal, **attention_options),
        *([CrossAttention(d_model, nhead, **attention_options)] if cross_attention else []),
        FeedForward(d_model, dim_feedforward, activation, dropout=dropout, **shared),
    ]


class _Blocks(nn.Module):
    """Common base of `Encoder` and `Decoder`: blocks in a `ResidualStack`. `help` shows the signature as that of `Decoder`."""

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        nhead: int,
        dim_feedforward: int | None = None,
        wiring: Wiring | Stage | str = "pre_ln",
        *,
        cross_attention: bool = True,
        causal: bool = True,
        activation: Activation = "relu",
        norm: Norm = "layer",
        eps: float | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        stochastic_depth: float = 0.0,
        checkpoint: bool | int = False,
        residual_dtype: Dtype = None,
        final_norm: bool | None = None,
        batch_first: bool = True,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        check_int("num_layers", num_layers, 1)
        check_choice("norm", norm, KINDS)
        self.d_model, self.nhead = d_model, nhead
        self.causal, self.cross_attention = causal, cross_attention
        self.batch_first = batch_first
        blocks = [
            block(d_model, nhead, dim_feedforward, cross_attention=cross_attention, causal=causal, activation=activation,
                  bias=bias, dropout=dropout, attention_dropout=attention_dropout, device=device, dtype=dtype)
            for _ in range(num_layers)
        ]  # fmt: skip
        self.stack = ResidualStack(
            [sublayer for layer in blocks for sublayer in layer], d_model, wiring,
            sublayers_per_layer=3 if cross_attention else 2, norm=norm, eps=eps,
            bias=bias if KINDS[norm].has_bias else None, dropout=dropout, stochastic_depth=stochastic_depth,
            checkpoint=checkpoint, residual_dtype=residual_dtype, final_norm=final_norm, device=device, dtype=dtype,
        )  # fmt: skip
        if self.wiring.profile is None:
            self.wiring.init_(self)

    @property
    def wiring(self) -> Wiring:
        """The wiring of the stack."""
        return self.stack.wiring

    def _run(
        self,
        x: Tensor,
        mask: Tensor | None,
        key_mask: Tensor | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        memory_key_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return the stack's output. The masks are merged once for all layers."""
        for name, t in (("x", x), ("memory", memory)):
            if (t is not None or name == "x") and (not isinstance(t, Tensor) or t.dim() != 3):
                refuse_shape(name, t, self.d_model)
        if not self.batch_first:
            x, memory = x.transpose(0, 1), None if memory is None else memory.transpose(0, 1)
        context: dict[str, Any] = {}
        if mask is not None or key_mask is not None or cache is not None:
            n_keys = x.shape[1] + (0 if cache is None else self._cached_length(cache))
            context["mask"] = merge_masks(x, n_keys, self.nhead, mask, key_mask, self.causal)
        if memory is not None and (memory_mask is not None or memory_key_mask is not None):
            masks = merge_masks(x, memory.shape[1], self.nhead, memory_mask, memory_key_mask, name="memory_mask")
            named: dict[str, Any] = {"memory_mask": masks}
        else:  # masks of a cached memory: each attention merges them
            named = {"memory_mask": memory_mask, "memory_key_mask": memory_key_mask}
        named |= {"memory": memory, "cache": cache}
        context |= {name: value for name, value in named.items() if value is not None}
        y: Tensor = self.stack(x, **context) if cache is None else self._extend(x, cache, context)
        return y if self.batch_first else y.transpose(0, 1)

    def _cached_length(self, cache: KeyValueCache) -> int:
        """Return the number of tokens that are cached for this stack."""
        first: Any = self.stack.connections[0]
        length = cache.length_of(first.sublayer)
        if cache.length and not length:
            raise ValueError(
                f"cache has {cache.length} tokens of another stack and none of this one, expected a cache of its own: make one "
                "KeyValueCache() for each decoder (and copy it by copy.deepcopy)."
            )
        return length

    def _extend(self, x: Tensor, cache: KeyValueCache, context: dict[str, Any]) -> Tensor:
        """Call the stack with a cache. A call that fails leaves the cache unchanged."""
        before = cache.state()
        try:
            return self.stack(x, **context)  # type: ignore[no-any-return]  # torch does not type a module's call
        except BaseException:
            cache.restore(before)
            raise


class Encoder(_Blocks):
    r"""Blocks of self-attention and feed-forward with a residual wiring, from `(batch, tokens, d_model)` to the same shape.

        x_{2l-1} = wiring(x_{2l-2}, SelfAttention)        x_{2l} = wiring(x_{2l-1}, FeedForward)        y = N_final(x_{2L})

    Embeddings and positions are left to the caller. `wiring.init_(encoder)` draws the weights by the wiring's rule; for a wiring
    that measures data (admin), call it yourself with an input.

    Args:
        num_layers: the number of blocks, L.
        d_model: the number of features of the stream.
        nhead: the number of heads, which divides d_model.
        dim_feedforward: the hidden width of the feed-forward sublayers; None means the default of `FeedForward`.
        wiring: a `Wiring`, a `Row`, or a name such as "post_ln" or "pre_ln".
        activation: "relu", "gelu", "swiglu", or a function; a module is copied for each layer.
        norm: "layer" or "rms".
        eps: epsilon of the norms; None means the default of `torch.nn.LayerNorm` or `torch.nn.RMSNorm`.
        bias: whether projections and LayerNorms have biases.
        dropout: dropout probability of each sublayer's output, inside the feed-forward, and of the attention weights.
        attention_dropout: dropout probability of the attention weights, if it differs from `dropout`.
        stochastic_depth: as in `ResidualStack`.
        checkpoint: as in `ResidualStack`.
        residual_dtype: as in `ResidualStack`.
        final_norm: as in `ResidualStack`.
        batch_first: if False, inputs and outputs are `(tokens, batch, d_model)`, and the output is a transposed view. Masks have
            the batch first in both cases.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        stack: the `ResidualStack` of the sublayers that `block` returns.

    Raises:
        ValueError, TypeError: a wrong option or input; the message has its name.

    Source: Vaswani et al. 2017, arXiv 1706.03762; `wiring.source`.

    Example:
        >>> encoder = addnorm.nn.Encoder(6, 64, 8, wiring="pre_ln", norm="rms", activation="swiglu")
        >>> encoder(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        nhead: int,
        dim_feedforward: int | None = None,
        wiring: Wiring | Stage | str = "pre_ln",
        *,
        activation: Activation = "relu",
        norm: Norm = "layer",
        eps: float | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        stochastic_depth: float = 0.0,
        checkpoint: bool | int = False,
        residual_dtype: Dtype = None,
        final_norm: bool | None = None,
        batch_first: bool = True,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(
            num_layers, d_model, nhead, dim_feedforward, wiring, causal=False, cross_attention=False,
            activation=activation, norm=norm, eps=eps, bias=bias, dropout=dropout, attention_dropout=attention_dropout,
            stochastic_depth=stochastic_depth, checkpoint=checkpoint, residual_dtype=residual_dtype, final_norm=final_norm,
            batch_first=batch_first, device=device, dtype=dtype,
        )  # fmt: skip

    def forward(self, x: Tensor, mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        """Return the output, in the shape and dtype of x.

        Args:
            x: `(batch, tokens, d_model)`.
            mask: as in `SelfAttention`: `(tokens, tokens)`, or one for each sample (and head); bool, True where the query may
                attend to the key, or float, added to the scores.
            key_mask: `(batch, tokens)`: the tokens to attend to, such as all tokens but padding.
        """
        return self._run(x, mask, key_mask)


class Decoder(_Blocks):
    r"""Blocks of causal self-attention, attention to a memory, and feed-forward with a residual wiring.

    With `cross_attention=False` it is the stack of a language model. All other arguments, the initialization and the errors are
    those of `Encoder`.

    Args:
        cross_attention: whether the blocks attend to a memory.
        causal: whether a token attends only to itself and earlier tokens.

    Example:
        >>> decoder = addnorm.nn.Decoder(2, 32, 4, wiring=addnorm.wirings.deepnorm("decoder-only"))
        >>> decoder(torch.randn(2, 5, 32), memory=torch.randn(2, 9, 32)).shape
        torch.Size([2, 5, 32])
    """

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        memory_key_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return the output, in the shape and dtype of x.

        Args:
            x: `(batch, tokens, d_model)`; with a cache, the new tokens only.
            memory: `(batch, memory tokens, d_model)`, the output of an encoder; None if it is in the cache.
            mask: as in `Encoder`, in addition to causality.
            key_mask: `(batch, tokens)`; with a cache, one entry for every token so far.
            memory_mask: `(tokens, memory tokens)`, or one for each sample (and head).
            memory_key_mask: `(batch, memory tokens)`: the tokens of the memory to attend to.
            cache: a `KeyValueCache` for incremental decoding. A call that fails leaves it unchanged.
        """
        if memory is not None and not self.cross_attention:
            raise TypeError(
                "memory is given to a decoder that has cross_attention=False, expected none: build it with attention to a memory."
            )
        return self._run(x, mask, key_mask, memory, memory_mask, memory_key_mask, cache)


class Transformer(nn.Module):
    r"""An `Encoder`, and a `Decoder` whose memory is the encoder's output.

    The two stacks use `wiring.paired(num_encoder_layers, num_decoder_layers)`: DeepNorm, for instance, has other constants in an
    encoder-decoder. All other arguments, the initialization and the errors are those of `Encoder`.

    Attributes:
        encoder, decoder: for inference call them separately: `memory = encoder(source)`, `decoder(token, memory, cache=cache)`.

    Source: Vaswani et al. 2017, arXiv 1706.03762.

    Example:
        >>> transformer = addnorm.nn.Transformer(6, 6, 32, 4, wiring="post_ln")
        >>> transformer(torch.randn(2, 9, 32), torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        num_encoder_layers: int,
        num_decoder_layers: int,
        d_model: int,
        nhead: int,
        dim_feedforward: int | None = None,
        wiring: Wiring | Stage | str = "pre_ln",
        *,
        activation: Activation = "relu",
        norm: Norm = "layer",
        eps: float | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        stochastic_depth: float = 0.0,
        checkpoint: bool | int = False,
        residual_dtype: Dtype = None,
        final_norm: bool | None = None,
        batch_first: bool = True,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "activation": activation, "norm": norm, "eps": eps, "bias": bias, "dropout": dropout,
            "attention_dropout": attention_dropout, "stochastic_depth": stochastic_depth, "checkpoint": checkpoint,
            "residual_dtype": residual_dtype, "final_norm": final_norm, "batch_first": batch_first, "device": device,
            "dtype": dtype,
        }  # fmt: skip
        self.wiring = as_wiring(wiring)
        encoder_wiring, decoder_wiring = self.wiring.paired(num_encoder_layers, num_decoder_layers)
        self.encoder = Encoder(num_encoder_layers, d_model, nhead, dim_feedforward, encoder_wiring, **options)
        self.decoder = Decoder(num_decoder_layers, d_model, nhead, dim_feedforward, decoder_wiring, **options)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        source_key_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        target_key_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        memory_key_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the decoder's output, in the shape and dtype of `target`.

        Args:
            source: `(batch, source tokens, d_model)`.
            target: `(batch, target tokens, d_model)`.
            source_mask: `mask` of the encoder.
            source_key_mask: `key_mask` of the encoder.
            target_mask: `mask` of the decoder, in addition to causality.
            target_key_mask: `key_mask` of the decoder.
            memory_mask: `memory_mask` of the decoder.
            memory_key_mask: `memory_key_mask` of the decoder; None means `source_key_mask`, so that padding is hidden from both.
                (`torch.nn.Transformer` attends to the padding by default.)
        """
        memory = self.encoder(source, source_mask, source_key_mask)
        memory_padding = source_key_mask if memory_key_mask is None else memory_key_mask
        return self.decoder(target, memory, target_mask, target_key_mask, memory_mask, memory_padding)  # type: ignore[no-any-return]  # torch does not type a module's call
