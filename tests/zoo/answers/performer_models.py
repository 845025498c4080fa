"""performer-pytorch."""

from zoo.answer import ANY, NUMBER, Package, Row, group, stream, tokens

SEQUENCE = (
    "reversible.py, SequentialSequence: x = x + f(x, **f_args); x = x + g(x, **g_args). PerformerLM: x = self.norm(x)."
)

performer = group(
    "performer_pytorch:PerformerLM", tokens, num_tokens=99, max_seq_len=16, dim=32, depth=2, heads=4, dim_head=8
)

MODELS = (
    performer("performer", stream("pre_ln", "?f?f"), SEQUENCE + " PreLayerNorm: self.fn(self.norm(x), **kwargs)"),
    performer(
        "performer, scale norm",
        stream("pre_ln", "?f?f", ANY),
        SEQUENCE
        + " PreScaleNorm: n = torch.norm(x, dim=-1, keepdim=True).clamp(min=self.eps); x = x / n * self.g. The last norm is a"
        " LayerNorm",
        use_scalenorm=True,
    ),
    performer(
        "performer, rezero",
        stream("rezero|skipinit|none", "?f?f", ANY, rows=(Row(b=NUMBER),)),
        SEQUENCE
        + " ReZero: return self.fn(x, **kwargs) * self.g, one number for each sublayer. Beside it there is a last norm",
        use_rezero=True,
    ),
    performer(
        "performer, reversible",
        "reversible.py, ReversibleBlock: y1 = x1 + self.f(x2, ...); y2 = x2 + self.g(y1, ...); x = torch.cat([x, x], dim = -1) before them",
        why="two coupled streams: y1 = x1 + f(x2), y2 = x2 + g(y1)",
        reversible=True,
    ),
)

PACKAGE = Package(("performer-pytorch==1.1.4", "local-attention==1.11.2", "axial-positional-embedding==0.3.12", "hyper-connections==0.4.11",
     "CoLT5-attention==0.11.2", "einops==0.8.2", "einx==0.4.3", "frozendict==2.5.1"),
    MODELS,
)  # fmt: skip
