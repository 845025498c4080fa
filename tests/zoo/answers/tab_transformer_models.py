"""Models of tables of tab-transformer-pytorch."""

import torch

from zoo.answer import Package, group, noise, stream


def row():
    return torch.tensor([[1, 2, 0], [4, 0, 2]]), noise(2, 3)


CODE = "Transformer: x, post_softmax_attn = attn(x); x = ff(x), each init_hyper_conn(dim = dim, branch = ...)"
WHY = "several streams, mixed by weights that depend on the data"

tables = group(
    "tab_transformer_pytorch:", row, categories=(5, 4, 3), num_continuous=3, dim=32, depth=2, heads=4, dim_head=8
)

MODELS = (
    tables(
        "tab transformer, one stream",
        stream("pre_ln", final_norm=False),
        "tab_transformer_pytorch.py, "
        + CODE
        + " with PreNorm; with one stream a plain residual; the output is flattened",
        of="TabTransformer",
        num_residual_streams=1,
    ),
    tables(
        "ft transformer, one stream",
        stream("pre_ln", final_norm=None),
        "ft_transformer.py, "
        + CODE
        + "; the branches begin with a LayerNorm; to_logits (LayerNorm, ReLU, Linear) reads x[:, 0]",
        of="FTTransformer",
        num_residual_streams=1,
    ),
    tables(
        "tab transformer, hyper-connections",
        "tab_transformer_pytorch.py, " + CODE,
        of="TabTransformer",
        why=WHY,
        num_residual_streams=2,
    ),
    tables(
        "ft transformer, hyper-connections",
        "ft_transformer.py, " + CODE,
        of="FTTransformer",
        why=WHY,
        num_residual_streams=2,
    ),
)

PACKAGE = Package(("tab-transformer-pytorch==0.4.1", "hyper-connections==0.4.11", "einops==0.8.2", "einx==0.4.3", "frozendict==2.5.1",
     "torch-einops-utils==0.2.0"),
    MODELS,
)  # fmt: skip
