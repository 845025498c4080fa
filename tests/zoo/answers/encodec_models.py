"""The streaming transformer of encodec."""

from zoo.answer import Package, make, model, stream, vectors

TRANSFORMER = ("encodec.modules.transformer:StreamingTransformerEncoder", 32)
SIZES = {"num_heads": 4, "num_layers": 2}

CODE = (
    "modules/transformer.py, StreamingTransformerEncoderLayer: if self.norm_first: x = x + self._sa_block(self.norm1(x), ...); x = x +"
    " self._ff_block(self.norm2(x)); else: x = self.norm1(x + self._sa_block(x, ...)); x = self.norm2(x + self._ff_block(x)). The keys are the"
    " input and zeros before it. x = self.norm_in(x); x = x + pos_emb, so x_0 is not a norm's output; no norm at the end"
)

MODELS = (
    model("streaming transformer, pre-LN", make(*TRANSFORMER, **SIZES, norm_first=True), vectors,
          stream("pre_ln", final_norm=False), code=CODE),
    model("streaming transformer, post-LN", make(*TRANSFORMER, **SIZES, norm_first=False), vectors,
          stream("post_ln", final_norm=False), code=CODE),
)  # fmt: skip

PACKAGE = Package(
    "encodec", ("encodec==0.1.1", "torchaudio==2.11.0", "einops==0.8.2"), MODELS, remove=("torchaudio/lib",)
)
