"""Models of tables of rtdl_revisiting_models."""

import torch

from zoo.answer import BARE, IN, Package, model, noise, stream


def row():
    return noise(2, 3), torch.tensor([[1, 4], [3, 0]])


MODELS = (
    model(
        "ft transformer",
        "rtdl_revisiting_models:FTTransformer",
        row,
        stream("pre_ln|none", final_norm=None, rows=(BARE, IN, IN, IN)),
        "FTTransformerBackbone: x_identity = x; if 'attention_normalization' in block: x = block['attention_normalization'](x) [not in the"
        " first block]; x = block['attention'](x[:, :1] if i_block + 1 == n_blocks else x, x); x = x_identity + x [the last attention's"
        " one token is added to all tokens]; x = block['ffn_normalization'](x); x = x_identity + x; x[:, 0] is normalized",
        n_cont_features=3,
        cat_cardinalities=[4, 5],
        d_out=2,
        n_blocks=2,
        d_block=32,
        attention_n_heads=4,
        attention_dropout=0.0,
        ffn_d_hidden=64,
        ffn_d_hidden_multiplier=None,
        ffn_dropout=0.0,
        residual_dropout=0.0,
    ),
    model(
        "resnet",
        "rtdl_revisiting_models:ResNet",
        lambda: (noise(4, 6),),
        stream("no_norm|none", "???", None, False),
        "ResNet: for block in self.blocks: x = x + block(x); block = (BatchNorm1d, Linear, ReLU, Linear); output begins with BatchNorm1d:"
        " no norm of a token",
        d_in=6,
        d_out=2,
        n_blocks=3,
        d_block=32,
        d_hidden=64,
        d_hidden_multiplier=None,
        dropout1=0.0,
        dropout2=0.0,
    ),
)

PACKAGE = Package(("rtdl_revisiting_models==0.0.2",), MODELS)
