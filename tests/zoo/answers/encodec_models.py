"""The streaming transformer of encodec."""

from zoo.answer import Package, group, stream, vectors

CODE = (
    "modules/transformer.py, StreamingTransformerEncoderLayer: if self.norm_first: x = x + self._sa_block(self.norm1(x), ...); x = x +"
    " self._ff_block(self.norm2(x)); else: x = self.norm1(x + self._sa_block(x, ...)); x = self.norm2(x + self._ff_block(x)). The keys are the"
    " input and zeros before it. x = self.norm_in(x); x = x + pos_emb, so x_0 is not a norm's output; no norm at the end"
)

encoder = group(
    "encodec.modules.transformer:StreamingTransformerEncoder", vectors, args=(32,), num_heads=4, num_layers=2
)

MODELS = (
    encoder("streaming transformer, pre-LN", stream("pre_ln", final_norm=False), CODE, norm_first=True),
    encoder("streaming transformer, post-LN", stream("post_ln", final_norm=False), CODE, norm_first=False),
)

PACKAGE = Package(("encodec==0.1.1", "torchaudio==2.11.0", "einops==0.8.2"), MODELS, remove=("torchaudio/lib",))
