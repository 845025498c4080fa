"""The models of benchmarks: MiniLM with its trained weights, and decoders of the sizes of a small language model.

A decoder has random weights, whose values change no time: eight layers of 512 features with the norms and the residual wiring of
its family, written out in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pydoc_data.topics import topics
from typing import Any

import torch
from stacks import PAST
from torch import Tensor, nn

from addnorm.bench.case import Call, Case
from addnorm.stream.models.load import LoadedModel, load

MINILM, STREAMS = "minilm", "hy_v4"
DECODERS = ("llama", "qwen3", "gemma3_text")
NAMES = {
    MINILM: "MiniLM", "llama": "Llama-like", "qwen3": "Qwen-like", "gemma3_text": "Gemma-like",
    STREAMS: "HY-V4-like, 4 streams",
}  # fmt: skip
TEXT = "pydoc_data.topics"
SIZES = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 1408, "vocab_size": 4096, "sliding_window": 2048,
}  # fmt: skip
# Options of a decoder with latent attention, without experts, whose routing breaks the graph.
LATENT = {
    "mlp_layer_types": ["dense"] * 8, "q_lora_rank": 256, "kv_lora_rank": 128, "v_head_dim": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "index_topk": 256, "index_head_dim": 32, "index_n_heads": 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip


def load_model(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model in evaluation mode, and its keyword arguments of the size of a case."""
    if case.model == MINILM:
        loaded = load_minilm(case, case.dtype)
        return loaded.model, dict(loaded.kwargs)
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = AutoConfig.for_model(case.model, **SIZES | (LATENT if case.model == STREAMS else {}))
    model = AutoModel.from_config(config).to(getattr(torch, case.dtype)).eval()  # type: ignore[no-untyped-call]  # transformers does not type it
    tokens = torch.randint(SIZES["vocab_size"], (case.batch, PAST + case.tokens))
    if case.job != "decode":
        return model, {"input_ids": tokens[:, : case.tokens], "use_cache": False}
    with torch.no_grad():
        cache = model(input_ids=tokens[:, :PAST], use_cache=True).past_key_values
    return model, {"input_ids": tokens[:, PAST:], "past_key_values": cache, "use_cache": True}


def load_minilm(case: Case, dtype: str | None = None) -> LoadedModel:
    """Return MiniLM with passages of Python's own documentation that fill the tokens of a case."""
    words = " ".join(topics.values()).split()
    length = 2 * case.tokens
    passages = [" ".join(words[k * length : (k + 1) * length]) for k in range(case.batch)]
    loaded = load(MINILM, texts=passages, tokens=case.tokens, dtype=dtype)
    shape = tuple(loaded.kwargs["input_ids"].shape)
    if shape != (case.batch, case.tokens):
        raise ValueError(f"the text gave {shape}, expected {(case.batch, case.tokens)}: use longer passages.")
    return loaded


def inference_step(model: nn.Module, kwargs: Mapping[str, Any]) -> Call:
    """Return a forward without gradients. A cache has the same length at each call."""
    cache = kwargs.get("past_key_values")

    def infer() -> Tensor:
        with torch.no_grad():
            y: Tensor = model(**kwargs).last_hidden_state
        if cache is not None:
            cache.crop(-kwargs["input_ids"].shape[1])
        return y

    return infer


def training_step(model: nn.Module, kwargs: Mapping[str, Any]) -> Call:
    """Return a training step without optimizer: a forward, and the backward of a fixed random probe's loss into `.grad`."""
    like = next(model.parameters())
    probe = torch.randn(like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like.dtype)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = (model(**kwargs).last_hidden_state @ probe).square().mean()
        loss.backward()
        return loss

    return step
