"""Models of tables of tab-transformer-pytorch."""

import torch

from support.families import noise
from zoo.answer import Package, make, model, refuse, stream

SIZES = {"categories": (5, 4, 3), "num_continuous": 3, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}


def row():
    return torch.tensor([[1, 2, 0], [4, 0, 2]]), noise(2, 3)


CODE = "Transformer: x, post_softmax_attn = attn(x); x = ff(x), each init_hyper_conn(dim = dim, branch = ...)"
WHY = "several streams, mixed by weights that depend on the data"

MODELS = (
    model("tab transformer, one stream", make("tab_transformer_pytorch:TabTransformer", **SIZES, num_residual_streams=1), row, stream("pre_ln", final_norm=False),
          code="tab_transformer_pytorch.py, " + CODE + " with PreNorm; with one stream a plain residual; the output is flattened"),
    model("ft transformer, one stream", make("tab_transformer_pytorch:FTTransformer", **SIZES, num_residual_streams=1), row, stream("pre_ln", final_norm=None),
          code="ft_transformer.py, " + CODE + "; the branches begin with a LayerNorm; to_logits (LayerNorm, ReLU, Linear) reads x[:, 0]"),
    refuse("tab transformer, hyper-connections", make("tab_transformer_pytorch:TabTransformer", **SIZES, num_residual_streams=2), row, WHY, "tab_transformer_pytorch.py, " + CODE),
    refuse("ft transformer, hyper-connections", make("tab_transformer_pytorch:FTTransformer", **SIZES, num_residual_streams=2), row, WHY, "ft_transformer.py, " + CODE),
)  # fmt: skip

PACKAGE = Package(
    "tab-transformer-pytorch",
    ("tab-transformer-pytorch==0.4.1", "hyper-connections==0.4.11", "einops==0.8.2", "einx==0.4.3", "frozendict==2.5.1",
     "torch-einops-utils==0.2.0"),
    MODELS,
)  # fmt: skip
