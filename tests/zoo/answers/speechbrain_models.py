"""Speech models of SpeechBrain."""

from zoo.answer import CONFORMER_ROWS, Package, group, model, noise, stream, vectors

FOLDER = "speechbrain.lobes.models.transformer."
SIZES = {"num_layers": 2, "d_model": 32, "nhead": 4}


def two():
    return noise(2, 7, 32), noise(2, 5, 32, seed=2)


ENCODER = (
    "Transformer.py, TransformerEncoderLayer: if self.normalize_before: src1 = self.norm1(src); output, self_attn = self.self_att(src1, ...);"
    " src = src + self.dropout1(output); if not self.normalize_before: src = self.norm1(src); the same with pos_ffn and norm2."
    " TransformerEncoder: output = self.norm(output), in both cases."
)
DECODER = "Transformer.py, TransformerDecoderLayer: self_attn, multihead_attn and pos_ffn in the same way; output = self.norm(output)."
CONFORMER = (
    "Conformer.py, ConformerEncoderLayer: x = x + 0.5 * self.ffn_module1(x); skip = x; x = self.norm1(x); x, self_attn = self.mha_layer(...);"
    " x = x + skip; x = x + self.convolution_module(x, ...); x = self.norm2(x + 0.5 * self.ffn_module2(x)). ConformerEncoder: output ="
    " self.norm(output)"
)

encoder = group(FOLDER + "Transformer:TransformerEncoder", vectors, **SIZES, d_ffn=64)
decoder = group(FOLDER + "Transformer:TransformerDecoder", two, **SIZES, d_ffn=64)

MODELS = (
    encoder("encoder, pre-LN", stream("pre_ln"), ENCODER, normalize_before=True),
    encoder("encoder, post-LN", stream("post_ln"), ENCODER, normalize_before=False),
    encoder(
        "encoder with convolutions",
        stream("pre_ln", "a?a?"),
        ENCODER + " ffn_type='1dcnn': pos_ffn = (Conv1d, ReLU, Conv1d)",
        normalize_before=True,
        ffn_type="1dcnn",
    ),
    decoder("decoder, pre-LN", stream("pre_ln", "acf" * 2), DECODER, normalize_before=True),
    decoder("decoder, post-LN", stream("post_ln", "acf" * 2), DECODER, normalize_before=False),
    model(
        "conformer",
        FOLDER + "Conformer:ConformerEncoder",
        vectors,
        stream(None, "faof" * 2, rows=CONFORMER_ROWS),
        CONFORMER,
        **SIZES,
        d_ffn=64,
        kernel_size=3,
        attention_type="regularMHA",
    ),
    model(
        "branchformer",
        FOLDER + "Branchformer:BranchformerEncoder",
        vectors,
        stream("pre_ln|none", "??"),
        "Branchformer.py, BranchformerEncoderLayer: x1 = self.norm_mhsa(x1); x1, self_attn = self.mha_layer(...); x2 = self.norm_conv(x2);"
        " x2 = self.convolution_branch(x2); x = x + self.dropout(self.merge_proj(torch.cat([x1, x2], dim=-1))): one sublayer that reads"
        " two norms of the stream; output = self.norm(output)",
        **SIZES,
        kernel_size=3,
        attention_type="regularMHA",
        csgu_linear_units=64,
    ),
)

PACKAGE = Package(("speechbrain==1.1.2", "torchaudio==2.11.0", "hyperpyyaml==1.2.3", "ruamel.yaml==0.19.1", "joblib==1.6.0", "scipy==1.17.1",
     "sentencepiece==0.2.3", "requests==2.34.2", "urllib3==2.8.0", "certifi==2026.10.18", "charset-normalizer==3.5.2"),
    MODELS,
    remove=("torchaudio/lib",),
)  # fmt: skip
