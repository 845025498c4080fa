"""reformer-pytorch."""

from zoo.answer import Package, group, tokens

CODE = (
    "reversible.py: x1, x2 = torch.chunk(x, 2, dim=2); y1 = x1 + self.f(x2, ...); y2 = x2 + self.g(y1, ...); torch.cat([y1, y2], dim=2);"
    " reformer_pytorch.py: x = torch.cat([x, x], dim = -1); at the end torch.stack(x.chunk(2, dim=-1)).mean(dim=0)"
)
reformer = group(
    "reformer_pytorch:ReformerLM", tokens, why="two coupled streams: y1 = x1 + f(x2), y2 = x2 + g(y1)", num_tokens=99, dim=32, depth=2,
    max_seq_len=16, heads=4, dim_head=8, bucket_size=4, ff_chunks=1, use_full_attn=True,
)  # fmt: skip

MODELS = (
    reformer("reformer", CODE),
    reformer("reformer, blocks that are not reversed", CODE + " by IrreversibleBlock", reverse_thres=100),
)

PACKAGE = Package(
    ("reformer-pytorch==1.4.4", "local-attention==1.11.2", "axial-positional-embedding==0.3.12", "product-key-memory==0.3.0",
     "hyper-connections==0.4.11", "CoLT5-attention==0.11.2", "einops==0.8.2", "einx==0.4.3", "frozendict==2.5.1"),
    MODELS,
)  # fmt: skip
