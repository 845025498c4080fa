"""Whisper in OpenAI's implementation."""

from zoo.answer import Package, ids, model, noise, stream


def whisper():
    from whisper.model import ModelDimensions, Whisper

    return Whisper(ModelDimensions(8, 8, 32, 4, 2, 99, 16, 32, 4, 2))


MODELS = (
    model(
        "whisper",
        whisper,
        lambda: (noise(2, 8, 16), ids(5)),
        stream("pre_ln"),
        stream("pre_ln", "acf" * 2),
        "model.py, ResidualAttentionBlock: x = x + self.attn(self.attn_ln(x), ...)[0]; x = x + self.cross_attn(self.cross_attn_ln(x), xa,"
        " ...)[0]; x = x + self.mlp(self.mlp_ln(x)). AudioEncoder: x = self.ln_post(x). TextDecoder: x = self.ln(x)",
    ),
)

PACKAGE = Package(("openai-whisper==20250625", "tiktoken==0.14.0", "numba==0.68.1", "llvmlite==0.50.0", "more-itertools==11.2.1", "requests==2.34.2",
     "urllib3==2.8.0", "certifi==2026.10.18", "charset-normalizer==3.5.2"),
    MODELS,
)  # fmt: skip
