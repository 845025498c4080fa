"""The conformer package."""

from zoo.answer import CONFORMER_ROWS, Package, group, stream, vectors

ANSWER = stream(None, "faof" * 2, final_norm=False, rows=CONFORMER_ROWS)

CODE = (
    "conformer.py, ConformerBlock: self.ff1 = Scale(0.5, PreNorm(dim, self.ff1)); x = self.ff1(x) + x; x = self.attn(x, mask = mask) + x; x ="
    " self.conv(x) + x [begins with a LayerNorm]; x = self.ff2(x) + x; x = self.post_norm(x)"
)

conformer = group("conformer:Conformer", vectors, dim=32, depth=2, dim_head=8, heads=4, conv_kernel_size=3)

MODELS = (
    conformer("conformer", ANSWER, CODE),
    conformer("conformer, causal", ANSWER, CODE, conv_causal=True),
)

PACKAGE = Package(("conformer==0.3.2", "einops==0.8.2"), MODELS)
