"""Block stacks of xlstm."""

from zoo.answer import Package, group, noise, stream


def stack(slstm):
    import xlstm

    mlstm = xlstm.mLSTMBlockConfig(
        mlstm=xlstm.mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=4)
    )
    other = None
    if slstm:
        layer = xlstm.sLSTMLayerConfig(
            backend="vanilla", num_heads=4, conv1d_kernel_size=4, bias_init="powerlaw_blockdependent"
        )
        other = xlstm.sLSTMBlockConfig(slstm=layer, feedforward=xlstm.FeedForwardConfig(proj_factor=1.3, act_fn="gelu"))
    config = xlstm.xLSTMBlockStackConfig(
        mlstm_block=mlstm,
        slstm_block=other,
        context_length=8,
        num_blocks=3,
        embedding_dim=32,
        slstm_at=[1] if slstm else [],
    )
    return xlstm.xLSTMBlockStack(config)


CODE = (
    "blocks/xlstm_block.py: x = x + self.xlstm(self.xlstm_norm(x)); if self.ffn is not None: x = x + self.ffn(self.ffn_norm(x))."
    " xlstm_block_stack.py: x = self.post_blocks_norm(x). components/ln.py: F.layer_norm(input, weight=1.0 + self.weight, bias=None)"
)

blocks = group(stack, lambda: (noise(2, 8, 32),))

MODELS = (
    blocks("mlstm", stream("pre_ln", "???"), CODE, slstm=False),
    blocks("mlstm and slstm", stream("pre_ln", "??f?"), CODE, slstm=True),
)

PACKAGE = Package(("xlstm==2.0.6",), MODELS)
