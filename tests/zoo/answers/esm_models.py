"""Protein language models of fair-esm; they work on (time, batch, d) or (rows, columns, batch, d)."""

from argparse import Namespace

import torch

from zoo.answer import Package, ids, model, stream

ARGS = {
    "layers": 2,
    "embed_dim": 32,
    "ffn_embed_dim": 64,
    "attention_heads": 4,
    "token_dropout": True,
    "max_positions": 64,
}


def esm1(arch, **options):
    import esm

    alphabet = esm.Alphabet.from_architecture("ESM-1b" if arch == "roberta_large" else "protein_bert_base")
    return esm.model.esm1.ProteinBertModel(Namespace(arch=arch, final_bias=True, **ARGS, **options), alphabet)


def msa():
    import esm

    options = {
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "embed_positions_msa": True,
        "max_tokens": 2**14,
    }
    alphabet = esm.Alphabet.from_architecture("msa_transformer")
    return esm.model.msa_transformer.MSATransformer(Namespace(arch="msa_transformer", **ARGS, **options), alphabet)


def tokens():
    return (ids() % 20 + 4,)


def alignments():
    return (torch.stack([ids() % 20 + 4, ids(seed=2) % 20 + 4, ids(seed=3) % 20 + 4], 1),)


LAYER = (
    "modules.py, TransformerLayer: residual = x; x = self.self_attn_layer_norm(x); x, attn = self.self_attn(...); x = residual + x; residual = x;"
    " x = self.final_layer_norm(x); x = gelu(self.fc1(x)); x = self.fc2(x); x = residual + x."
)

MODELS = (
    model(
        "esm 2",
        "esm.model.esm2:ESM2",
        tokens,
        stream("pre_ln"),
        LAYER + " esm2.py: x = x.transpose(0, 1); x = self.emb_layer_norm_after(x)",
        num_layers=2,
        embed_dim=32,
        attention_heads=4,
    ),
    model(
        "esm 1",
        esm1,
        tokens,
        stream("pre_ln", final_norm=False),
        LAYER
        + " ESM1LayerNorm is written out with eps inside the root; esm1.py: x = F.linear(x, self.embed_out): no norm at the end",
        arch="protein_bert_base",
    ),
    model(
        "esm 1b",
        esm1,
        tokens,
        stream("pre_ln", embedding_norm=True),
        LAYER
        + " esm1.py: x = self.emb_layer_norm_before(x); x = x * (1 - padding_mask); at the end x = self.emb_layer_norm_after(x)",
        arch="roberta_large",
        emb_layer_norm_before=True,
    ),
    model(
        "msa transformer",
        msa,
        alignments,
        stream("pre_ln", "aaf" * 2, embedding_norm=True),
        "modules.py, NormalizedResidualBlock: residual = x; x = self.layer_norm(x); outputs = self.layer(x); x = residual + x, around"
        " row_self_attention, column_self_attention and feed_forward_layer. msa_transformer.py: x = self.emb_layer_norm_before(x); x ="
        " x.permute(1, 2, 0, 3); x = self.emb_layer_norm_after(x)",
    ),
)

PACKAGE = Package(("fair-esm==2.0.0",), MODELS)
