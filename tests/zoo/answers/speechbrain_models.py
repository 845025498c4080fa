"""Speech models of SpeechBrain."""

from support.families import noise
from zoo.answer import CONFORMER_ROWS, Package, make, model, stream, vectors

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

MODELS = (
    model("encoder, pre-LN", make(FOLDER + "Transformer:TransformerEncoder", **SIZES, d_ffn=64, normalize_before=True), vectors,
          stream("pre_ln"), code=ENCODER),
    model("encoder, post-LN", make(FOLDER + "Transformer:TransformerEncoder", **SIZES, d_ffn=64, normalize_before=False), vectors,
          stream("post_ln"), code=ENCODER),
    model("encoder with convolutions", make(FOLDER + "Transformer:TransformerEncoder", **SIZES, d_ffn=64, normalize_before=True, ffn_type="1dcnn"),
          vectors, stream("pre_ln", "a?a?"), code=ENCODER + " ffn_type='1dcnn': pos_ffn = (Conv1d, ReLU, Conv1d)"),
    model("decoder, pre-LN", make(FOLDER + "Transformer:TransformerDecoder", **SIZES, d_ffn=64, normalize_before=True), two,
          stream("pre_ln", "acf" * 2), code=DECODER),
    model("decoder, post-LN", make(FOLDER + "Transformer:TransformerDecoder", **SIZES, d_ffn=64, normalize_before=False), two,
          stream("post_ln", "acf" * 2), code=DECODER),
    model("conformer", make(FOLDER + "Conformer:ConformerEncoder", **SIZES, d_ffn=64, kernel_size=3, attention_type="regularMHA"), vectors,
          stream(None, "faof" * 2, rows=CONFORMER_ROWS), code=CONFORMER),
    model("branchformer", make(FOLDER + "Branchformer:BranchformerEncoder", **SIZES, kernel_size=3, attention_type="regularMHA",
                                  csgu_linear_units=64), vectors,
          stream("pre_ln|none", "??"),
          code="Branchformer.py, BranchformerEncoderLayer: x1 = self.norm_mhsa(x1); x1, self_attn = self.mha_layer(...); x2 = self.norm_conv(x2);"
               " x2 = self.convolution_branch(x2); x = x + self.dropout(self.merge_proj(torch.cat([x1, x2], dim=-1))): one sublayer that reads"
               " two norms of the stream; output = self.norm(output)"),
)  # fmt: skip

PACKAGE = Package(
    "speechbrain",
    ("speechbrain==1.1.2", "torchaudio==2.11.0", "hyperpyyaml==1.2.3", "ruamel.yaml==0.19.1", "joblib==1.6.0", "scipy==1.17.1",
     "sentencepiece==0.2.3", "requests==2.34.2", "urllib3==2.8.0", "certifi==2026.10.18", "charset-normalizer==3.5.2"),
    MODELS,
    remove=("torchaudio/lib",),
)  # fmt: skip
