"""Image models of torchvision."""

from functools import partial

from zoo.answer import ANY, VECTOR, Package, Row, image, model, stream


def swin(version):
    from torchvision.models import swin_transformer as swin

    sizes = {
        "patch_size": [4, 4],
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": [4, 4],
        "num_classes": 10,
    }
    parts = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2} if version == "V2" else {}
    return swin.SwinTransformer(**sizes, **parts)


def convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], num_classes=10)


def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [2, 2, 2, 2], num_classes=10)


image32 = partial(image, 32)

MODELS = (
    model(
        "vit",
        "torchvision.models:VisionTransformer",
        image,
        stream("pre_ln"),
        "vision_transformer.py, EncoderBlock: x = self.ln_1(input); x, _ = self.self_attention(x, x, x); x = x + input; y ="
        " self.ln_2(x); y = self.mlp(y); return x + y. Encoder: return self.ln(self.layers(self.dropout(input)))",
        image_size=16,
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=64,
        num_classes=10,
    ),
    model(
        "swin",
        swin,
        image32,
        stream("pre_ln", final_norm=False, embedding_norm=True),
        stream("pre_ln"),
        "swin_transformer.py, SwinTransformerBlock: x = x + self.stochastic_depth(self.attn(self.norm1(x))); x = x + ..."
        " self.mlp(self.norm2(x)). features[0] = (conv, Permute, norm); PatchMerging: x = self.norm(x) [4 C wide]; x ="
        " self.reduction(x). SwinTransformer: x = self.features(x); x = self.norm(x)",
        version="V1",
    ),
    model(
        "swin v2",
        swin,
        image32,
        stream("reordered", final_norm=False, embedding_norm=True),
        stream("reordered", embedding_norm=True),
        "swin_transformer.py, SwinTransformerBlockV2: x = x + self.stochastic_depth(self.norm1(self.attn(x))); x = x + ..."
        " self.norm2(self.mlp(x)). PatchMergingV2: x = self.reduction(x); x = self.norm(x)",
        version="V2",
    ),
    model(
        "convnext",
        convnext,
        image32,
        stream(None, "??", ANY, None, True, rows=(Row(b=VECTOR),)),
        stream(None, "??", ANY, None, rows=(Row(b=VECTOR),)),
        "convnext.py, CNBlock: block = (conv, Permute, norm_layer, Linear, GELU, Linear, Permute); result = self.layer_scale *"
        " self.block(input); result += input; layer_scale has shape (dim, 1, 1): the norm is of the convolution's output",
    ),
    model(
        "resnet",
        resnet,
        image32,
        "resnet.py, BasicBlock: out += identity; out = self.relu(out)",
        why="the sum goes through a ReLU, which no row has: x' = relu(x + f(x))",
    ),
)

PACKAGE = Package(("torchvision==0.29.1",), MODELS)
