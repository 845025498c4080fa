"""performer-pytorch."""

from addnorm import Row
from zoo.answer import ANY, NUMBER, Package, make, model, refuse, stream, tokens

PERFORMER = "performer_pytorch:PerformerLM"
SIZES = {"num_tokens": 99, "max_seq_len": 16, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
SEQUENCE = (
    "reversible.py, SequentialSequence: x = x + f(x, **f_args); x = x + g(x, **g_args). PerformerLM: x = self.norm(x)."
)

MODELS = (
    model("performer", make(PERFORMER, **SIZES), tokens, stream("pre_ln", "?f?f"), code=SEQUENCE + " PreLayerNorm: self.fn(self.norm(x), **kwargs)"),
    model("performer, scale norm", make(PERFORMER, **SIZES, use_scalenorm=True), tokens, stream("pre_ln", "?f?f", ANY),
          code=SEQUENCE + " PreScaleNorm: n = torch.norm(x, dim=-1, keepdim=True).clamp(min=self.eps); x = x / n * self.g. The last norm is a"
                          " LayerNorm"),
    model("performer, rezero", make(PERFORMER, **SIZES, use_rezero=True), tokens,
          stream("rezero|skipinit|none", "?f?f", ANY, rows=(Row(b=NUMBER),)),
          code=SEQUENCE + " ReZero: return self.fn(x, **kwargs) * self.g, one number for each sublayer. Beside it there is a last norm"),
    refuse("performer, reversible", make(PERFORMER, **SIZES, reversible=True), tokens, "two coupled streams: y1 = x1 + f(x2), y2 = x2 + g(y1)",
           "reversible.py, ReversibleBlock: y1 = x1 + self.f(x2, ...); y2 = x2 + self.g(y1, ...); x = torch.cat([x, x], dim = -1) before them"),
)  # fmt: skip

PACKAGE = Package(
    "performer-pytorch",
    ("performer-pytorch==1.1.4", "local-attention==1.11.2", "axial-positional-embedding==0.3.12", "hyper-connections==0.4.11",
     "CoLT5-attention==0.11.2", "einops==0.8.2", "einx==0.4.3", "frozendict==2.5.1"),
    MODELS,
)  # fmt: skip
