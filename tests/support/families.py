"""Small models of transformer families with random weights, and the residual wiring of each.

    model, args, kwargs = families()["bert"].build()
    families()["bert"].streams          # the answer for every residual stream, in the order in which they run

The expected streams were read in the modelling code of transformers 5.23 and torch 2.13, never taken from names. More families
are in rare_families.py. Letters stand for the kinds of sublayers, see `KINDS`.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from addnorm import Row
from support import answers
from support.answers import ANY, Answer

D, LENGTH = 32, 7


@dataclass(frozen=True)
class Model:
    """Small model with random weights, its inputs and its answer.

    Args:
        name: unique name.
        make: builds the model.
        inputs: new positional arguments, or keyword arguments in a dict.
        answer: its streams, or why no rows describe it.
        code: properties of the code from which the answer was read.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...] | dict[str, Any]]
    answer: Answer
    code: str = ""

    @property
    def streams(self):
        return self.answer.streams

    def build(self, seed=0):
        """Return the model in eval mode, its arguments and its keyword arguments."""
        torch.manual_seed(seed)
        return shake(self.make().eval().float(), seed), *self.arguments()

    def arguments(self):
        """Return new arguments and keyword arguments, the same numbers each time."""
        inputs = self.inputs()
        return ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})


def shake(model, seed=0):
    """Draw every parameter at random: norm scales away from one, biases away from zero, matrices that preserve the variance."""
    generator = torch.Generator().manual_seed(seed)
    seen = set()
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in seen and parameter.is_floating_point():
                    seen.add(id(parameter))
                    low, high, std = _law(module, name, parameter)
                    if std:
                        parameter.normal_(0.0, std, generator=generator)
                    else:
                        parameter.uniform_(low, high, generator=generator)
    return model


def _law(module, name, parameter):
    """Return the bounds of a uniform distribution and 0, or 0, 0 and the standard deviation of a normal distribution."""
    kind = type(module).__name__
    if "Norm" in kind and "bias" not in name:
        return (-0.4, 0.4, 0) if "1P" in kind or not parameter.any() else (0.5, 1.5, 0)  # zeros: it is 1 + w
    if parameter.ndim < 2:
        is_scale = any(word in name.lower() for word in ("lambda", "gamma", "scale", "residual"))
        return (0.3, 0.9, 0) if is_scale else (0, 0, 0.1)
    if isinstance(module, nn.Embedding):
        return 0, 0, 0.5
    fan_in = parameter.shape[0] if kind == "Conv1D" else math.prod(parameter.shape[1:])
    return 0, 0, 1 / math.sqrt(parameter.shape[-1] if parameter.ndim == 3 and not _is_conv(module) else fan_in)


def _is_conv(module):
    return isinstance(module, nn.Conv1d | nn.Conv2d)


# --- inputs: new tensors each time, the same numbers ---------------------------------------------------------------------


def noise(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(length=LENGTH, seed=1):
    """Return token ids without special tokens."""
    return torch.randint(5, 99, (2, length), generator=torch.Generator().manual_seed(seed))


def text():
    return {"input_ids": ids(), "attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}


def padded():
    """Return token ids and a mask in which two tokens of the second row are padding."""
    kwargs = text()
    kwargs["attention_mask"][1, -2:] = 0
    return kwargs


def translation():
    return text() | {"decoder_input_ids": ids(5, seed=2)}


def image(size=16):
    return {"pixel_values": noise(2, 3, size, size)}


def spectrum():
    return {"input_features": noise(2, 8, 16), "decoder_input_ids": ids(5, seed=2)}


def sound():
    return {"input_values": noise(2, 120)}


def vectors():
    return (noise(2, LENGTH, D),)


def two_vectors():
    return noise(2, 5, D, seed=2), noise(2, LENGTH, D)


# --- models --------------------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 99, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
HEADED = GROUPED | {"head_dim": 8}
PAIR = {
    "vocab_size": 99, "d_model": D, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
}  # fmt: skip
T5 = {
    "vocab_size": 99, "d_model": D, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
SWIN = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
    "mlp_ratio": 2.0,
}  # fmt: skip
SOUND = SMALL | {
    "conv_dim": (16, 16), "conv_kernel": (4, 4), "conv_stride": (2, 2), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "num_feat_extract_layers": 2,
}  # fmt: skip
WHISPER = PAIR | {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32}
DEBERTA = SMALL | {
    "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    "norm_rel_ebd": "layer_norm", "share_att_key": True, "type_vocab_size": 0,
}  # fmt: skip


def build_of_transformers(kind, sizes):
    from transformers import AutoConfig, AutoModel

    return AutoModel.from_config(AutoConfig.for_model(kind, **sizes))


def hf(sizes, inputs, name, *streams, kind="", remark="", **more):
    """Return a family of transformers; its name begins with the model type unless `kind` is that type."""
    make = partial(build_of_transformers, kind or re.match(r"[^ ,]+", name)[0], sizes | more)
    return Model(name, make, inputs, Answer(streams), remark)


# Families by their sizes and inputs.
encoder, decoder = partial(hf, SMALL, padded), partial(hf, SMALL, text)
grouped, headed = partial(hf, GROUPED, text), partial(hf, HEADED, text)
translator, t5 = partial(hf, PAIR, translation), partial(hf, T5, translation)
vision, speech = partial(hf, VISION, image), partial(hf, SOUND, sound)


def alike(make, names, *streams):
    """Return families with the same sizes, inputs and streams, named by their model types."""
    return [make(name, *streams) for name in names]


def torch_stack(kind, norm_first, final_norm):
    layer = getattr(nn, f"Transformer{kind}Layer")(D, 4, 64, batch_first=True, norm_first=norm_first)
    nested = {"enable_nested_tensor": False} if kind == "Encoder" else {}
    return getattr(nn, f"Transformer{kind}")(layer, 2, norm=nn.LayerNorm(D) if final_norm else None, **nested)


FAST_PATH = "eval without gradients runs each layer as one fused operator: torch._transformer_encoder_layer_fwd"


def torch_family(kind, norm_first, final_norm):
    which = "pre_ln" if norm_first else "post_ln"
    letters, inputs, remark = {
        "Encoder": ("af", vectors, FAST_PATH), "Decoder": ("acf", two_vectors, ""),
    }[kind]  # fmt: skip
    return Model(
        f"torch {kind} {which}{' with final norm' if final_norm else ''}",
        partial(torch_stack, kind, norm_first, final_norm), inputs,
        Answer((stream(which, ln, 1e-5, letters * 2, final_norm=final_norm, remark=remark),)),
    )  # fmt: skip


def torch_transformer(norm_first):
    encoder = torch_stack("Encoder", norm_first, True)  # nn.Transformer's own encoder would warn about nested tensors
    return nn.Transformer(D, 4, 2, 2, 64, custom_encoder=encoder, batch_first=True, norm_first=norm_first)


def torch_pair(norm_first):
    which = "pre_ln" if norm_first else "post_ln"
    streams = (
        stream(which, ln, 1e-5, final_norm=True, remark=FAST_PATH),
        stream(which, ln, 1e-5, ACF, final_norm=True),
    )
    make = partial(torch_transformer, norm_first)
    return Model(f"torch Transformer {which}", make, two_vectors, Answer(streams), "final norms stand with post-LN too")


# --- short constructors of the expected streams ----------------------------------------------------------------------------


rms, ln = "rms", "layer"
AF, AAFF, ACF = "af", "af" * 2, "acf" * 2


def stream(
    wiring, norm, eps, letters = AAFF, options = None,
    final_norm = False, embedding_norm = False, rows = None, width = D,
    shared = 0, remark = "",
):  # fmt: skip
    """Return a stream whose facts were all read in the code; `rows` are those that differ from the wiring's."""
    facts = {
        "eps": ANY if eps is None else eps,
        "options": options or {},
        "width": width,
        "shared": shared,
        "remark": remark,
    }
    return answers.stream(wiring, letters, norm, final_norm, embedding_norm, rows or {}, **facts)


post = partial(stream, "post_ln")
bert = partial(stream, "post_ln", embedding_norm=True)
pre = partial(stream, "pre_ln", final_norm=True)
bloom = partial(stream, "pre_ln", final_norm=True, embedding_norm=True)
sandwich = partial(stream, "sandwich", final_norm=True)
reordered = partial(stream, "reordered", final_norm=True)
layer_scale = partial(stream, "layer_scale", final_norm=True)
parallel = partial(stream, "parallel", options={"norms": 1}, final_norm=True)
parallel_two = partial(stream, "parallel", options={"norms": 2}, final_norm=True)
granite = stream("residual_multiplier", rms, 1e-6, options={"multiplier": 0.22}, final_norm=True)
NOTHING = {0: Row()}  # the first sublayer has no norm


def both(wiring, eps, kind=ln):
    """Return an encoder and a decoder of one wiring."""
    return wiring(kind, eps), wiring(kind, eps, ACF)


MASK = "after its embedding norm the stream is multiplied by the attention mask"
FLAT = "from its feed-forward's norm to the add each layer works on (tokens, d) instead of (batch, length, d)"
CONV = "sublayer 0 is the convolution of positions, x + conv(x), before the layers"

FAMILIES = (
    *alike(encoder, ("bert", "roberta"), bert(ln, 1e-12)),
    *alike(grouped, ("llama", "mistral"), pre(rms, 1e-6)),
    decoder("gpt2", pre(ln, 1e-5)),
    vision("vit", pre(ln, 1e-12)),
    translator("bart", *both(bert, 1e-5)),
    encoder("albert", post(ln, 1e-12, AF * 3, shared=1), num_hidden_layers=3, embedding_size=16,
       remark="the embeddings' norm is 16 wide and a projection follows it: no norm of the stream"),
    decoder("openai-gpt", post(ln, 1e-5)),
    decoder("gptj", parallel(ln, 1e-5, remark="added as (a + f) + x"), rotary_dim=4),
    decoder("bloom", bloom(ln, 1e-5, remark="the adds stand inside the sublayers' modules")),
    headed("gemma2", sandwich(rms, 1e-6, remark="weights as 1 + w"), query_pre_attn_scalar=8),
    grouped("olmo2", reordered(rms, 1e-5, remark="norms of queries as wide as the stream")),
    grouped("granite", granite,
       residual_multiplier=0.22, embedding_multiplier=12.0, attention_multiplier=0.125),
    t5("t5", *both(pre, 1e-6, rms), remark="the adds stand inside the sublayers' modules"),
    hf(WHISPER, spectrum, "whisper", *both(pre, 1e-5)),
    *(torch_family(kind, first, final) for kind in ("Encoder", "Decoder") for first in (False, True) for final in (False, True)),
    torch_pair(norm_first=False), torch_pair(norm_first=True),
    encoder("distilbert", bert(ln, 1e-12), hidden_dim=64),
    hf(DEBERTA, padded, "deberta-v2", bert(ln, 1e-7, remark=MASK),
       remark="the table of relative positions, as wide as the stream, is normalized too"),
    decoder("gpt_neox parallel", parallel_two(ln, 1e-5, remark="added as (f + a) + x"),
       use_parallel_residual=True),
    decoder("gpt_neox sequential", pre(ln, 1e-5), use_parallel_residual=False),
    decoder("mpt", pre(ln, 1e-5, remark="no biases; the feed-forward's module adds")),
    decoder("opt pre", pre(ln, 1e-5, remark=FLAT), ffn_dim=64, word_embed_proj_dim=D),
    decoder("opt post", post(ln, 1e-5, remark=FLAT), ffn_dim=64, word_embed_proj_dim=16,
       do_layer_norm_before=False, remark="projections 16 -> 32 before the layers and 32 -> 16 after them, as in OPT-350m"),
    decoder("falcon 7B", parallel(ln, 1e-5, remark="f += a in place, then x + f")),
    decoder("falcon 40B", parallel_two(ln, 1e-5, remark="f += a in place, then x + f"),
       new_decoder_architecture=True, num_kv_heads=2),
    decoder("falcon RW", pre(ln, 1e-5),
       alibi=True, multi_query=False, parallel_attn=False, bias=True),
    decoder("phi", parallel(ln, 1e-5, remark="added as (a + f) + x")),
    grouped("cohere", parallel(ln, 1e-5, remark="added as (x + a) + f; no biases")),
    headed("qwen3", pre(rms, 1e-6, remark="norms of queries and keys")),
    headed("gemma3", sandwich(rms, 1e-6, remark="weights as 1 + w; norms of queries and keys"),
       kind="gemma3_text", query_pre_attn_scalar=8),
    headed("glm4", sandwich(rms, 1.5625e-7)),
    encoder("modernbert", bloom(ln, 1e-5, AF * 3, rows=NOTHING,
       remark="the first attention reads the embedding norm's output, which is the stream"),
       num_hidden_layers=3, cls_token_id=3, sep_token_id=4),
    vision("dinov2", layer_scale(ln, 1e-6), mlp_ratio=2),
    hf(SWIN, partial(image, 32), "swinv2",
       stream("reordered", ln, 1e-5, embedding_norm=True, width=16),
       reordered(ln, 1e-5, embedding_norm=True,
                 remark="the patch merging ends in a norm: (gather, project, norm)")),
    speech("wav2vec2 post", post(ln, 1e-5, "oafaf", remark=CONV), do_stable_layer_norm=False),
    speech("wav2vec2 stable", pre(ln, 1e-5, "oafaf", rows=NOTHING, remark=CONV + ", without norm"),
       do_stable_layer_norm=True, feat_extract_norm="layer"),
)  # fmt: skip


def table(families):
    """Return families by name; names must differ."""
    families = list(families)
    by_name = {family.name: family for family in families}
    assert len(by_name) == len(families)
    return by_name


def families():
    return table(FAMILIES)
