"""Models of the table in docs/routes.md: an operation, its formula in plain PyTorch, and how it is split and sharded.

Each model maps one tensor to one tensor. The gradient of the first parameters, an embedding, contains that of the residual.
Norms and biases have random values, since ones and zeros would hide errors in them.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp

import addnorm
from addnorm.distributed import SequenceParallel, parallelize
from addnorm.stream.models.load import load
from support.stream_steps import noise

D, HEADS, LAYERS, BATCH, TOKENS = 16, 4, 2, 4, 6


class Block(nn.Module):
    """A feed-forward and the Add & Norm after it."""

    def __init__(self):
        super().__init__()
        self.sublayer = nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D))
        self.norm = addnorm.AddNorm(D)

    def forward(self, x):
        return self.norm(x, self.sublayer(x))


class Model(nn.Module):
    """An embedding and a body that maps vectors to vectors."""

    def __init__(self, body):
        super().__init__()
        self.embedding, self.body = nn.Linear(D, D), body

    def forward(self, x):
        return self.body(self.embedding(x))


class Operation:
    """A kind of model of the table.

    Each has `make_body()`, the part of its model after the embedding; `plain(model, x)`, the output of the formula in plain PyTorch
    with the model's parameters; `layers(model)`, the layers as users shard and checkpoint them; `sublayers(model)`, the modules
    between the Add & Norms; and `shard(model, mesh, sequence=...)`, which applies tensor parallelism, and with `sequence` sequence
    parallelism.
    """

    title = ""
    is_fused = False  # by `addnorm.fuse`
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)

    def build(self, dtype):
        """Return a new model, the same in each call."""
        torch.manual_seed(3)
        model = Model(self.make_body())
        for p in model.parameters():
            nn.init.normal_(p, std=0.4)
        return model.to(dtype)

    def build_unfused(self, dtype):
        """Return the model for `plain`, whose calls need no fusing."""
        return self.build(dtype)

    def inputs(self, dtype):
        """Return inputs, the same in each call."""
        return noise(BATCH, TOKENS, D, seed=8).to(dtype)

    def reentrant_units(self, model):
        """Return modules that a reentrant checkpoint accepts: their inputs and outputs are tensors."""
        return self.layers(model)

    def compile(self, dtype):
        """Return a new model and its call in Inductor."""
        model = self.build(dtype)
        return model, torch.compile(model, fullgraph=True)

    def export(self, model, x, *, strict=False):
        """Return the program of the model."""
        return torch.export.export(model, (x,), strict=strict)

    def traceable(self, model, x):
        """Return the module that `torch.jit.trace` accepts."""
        return model

    def make_stage(self, model, half, rank):
        """Return a pipeline's stage, and prefixes of its parameters' names with those of the model."""
        paths = {module: name for name, module in model.named_modules()}
        pipe = pipeline(model, mb_args=(half,), split_spec={paths[self.layers(model)[1]]: SplitPoint.BEGINNING})
        return pipe.get_stage_module(rank), {}


class AddNorm(Operation):
    """`addnorm.AddNorm` after feed-forwards."""

    title = "`AddNorm` module"

    def make_body(self):
        return nn.Sequential(*(Block() for _ in range(LAYERS)))

    def plain(self, model, x):
        x = model.embedding(x)
        for block in model.body:
            x = norm(block.norm, x + block.sublayer(x))
        return x

    def layers(self, model):
        return [*model.body]

    def sublayers(self, model):
        return [block.sublayer for block in model.body]

    def shard(self, model, mesh, *, sequence):
        up = tp.ColwiseParallel(input_layouts=Shard(1) if sequence else None)
        down = tp.RowwiseParallel(output_layouts=Shard(1), use_local_output=False) if sequence else tp.RowwiseParallel()
        for block in model.body:
            plan = {"sublayer.0": up, "sublayer.2": down}
            tp.parallelize_module(block, mesh, plan | {"norm": SequenceParallel()} if sequence else plan)
        if sequence:
            tokens_alone = tp.PrepareModuleInputOutput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_input=False,
                output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),),
            )  # fmt: skip
            tp.parallelize_module(model.body, mesh, tokens_alone)


class Stack(Operation):
    """An encoder of one wiring."""

    def __init__(self, wiring):
        self.wiring = wiring
        self.title = {"pre_ln": "pre-LN stack", "post_ln": "post-LN stack"}[wiring]

    def make_body(self):
        return addnorm.nn.Encoder(LAYERS, D, HEADS, wiring=self.wiring)

    def plain(self, model, x):
        x, stack = model.embedding(x), model.body.stack
        for connection in stack.connections:
            if self.wiring == "pre_ln":
                x = x + connection.sublayer(norm(connection.norm_in, x))
            else:
                x = norm(connection.norm_out, x + connection.sublayer(x))
        return norm(stack.norm_final, x) if self.wiring == "pre_ln" else x

    def layers(self, model):
        return [*model.body.stack.layers]

    def sublayers(self, model):
        return [connection.sublayer for connection in model.body.stack.connections]

    def reentrant_units(self, model):
        return [model.body]

    def shard(self, model, mesh, *, sequence):
        parallelize(model, mesh, sequence_parallel=sequence)


class MiniLM(Operation):
    """Two layers of a trained model of transformers after `addnorm.fuse`, with padded sentences."""

    title = "fused MiniLM"
    is_fused = True
    dtypes = (torch.float32,)  # that of its weights

    def build(self, dtype):
        model = self.build_unfused(dtype)
        addnorm.fuse(model, self.inputs(dtype), benchmark=False)
        return model

    def build_unfused(self, dtype):
        return TextModel(load_minilm(dtype).model)

    def compile(self, dtype):
        model = self.build_unfused(dtype)
        addnorm.fuse(model, self.inputs(dtype), compile=True, benchmark=False)
        return model, model

    def export(self, model, x, *, strict=False):
        return addnorm.export_fused(model, (x,), strict=strict)

    def traceable(self, model, x):
        return self.export(model, x).module()  # `torch.jit.trace` refuses a call that Dynamo has compiled

    def inputs(self, dtype):
        return load_minilm(dtype).kwargs["input_ids"]

    def plain(self, model, x):
        return model._call_impl(x)  # without what `fuse` has set

    def layers(self, model):
        return [*model.bert.encoder.layer]

    def sublayers(self, model):
        return [
            module
            for layer in self.layers(model)
            for module in (layer.attention.self, layer.attention.output.dense, layer.intermediate, layer.output.dense)
        ]

    def make_stage(self, model, half, rank):
        """Return a stage that is made by hand, and fused: an exported stage has no layers of the model to fuse."""
        addnorm.unfuse(model)
        with torch.no_grad():
            inputs = (half,) if rank == 0 else (model.bert.embeddings(half), half)
        layers = self.layers(model)
        del model.bert.encoder.layer[1 - rank]
        names = {"bert.encoder.layer.0.": f"bert.encoder.layer.{layers.index(self.layers(model)[0])}."}
        if rank == 1:
            model.bert.embeddings = Embedded()
        addnorm.fuse(model, *inputs, benchmark=False)
        return model, names

    def shard(self, model, mesh, *, sequence):
        shards = {"output_layouts": Shard(1), "use_local_output": False} if sequence else {}
        gather = tp.PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=False
        )
        whole = tp.PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))
        for layer in self.layers(model):
            plan = {f"attention.self.{name}": tp.ColwiseParallel() for name in ("query", "key", "value")}
            plan["intermediate.dense"] = tp.ColwiseParallel(input_layouts=Shard(1) if sequence else None)
            plan["attention.output.dense"] = plan["output.dense"] = tp.RowwiseParallel(**shards)
            if sequence:
                plan["attention.self"] = gather
                plan["attention.output.LayerNorm"] = plan["output.LayerNorm"] = tp.SequenceParallel()
            tp.parallelize_module(layer, mesh, plan)
        if sequence:
            split = tp.PrepareModuleOutput(
                output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),), use_local_output=False
            )
            tp.parallelize_module(model, mesh, {"bert.embeddings": split})
            tp.parallelize_module(self.layers(model)[-1], mesh, {"output": whole})


class TextModel(nn.Module):
    """BERT as a function of token numbers; 0 is padding."""

    def __init__(self, bert):
        super().__init__()
        self.bert = bert
        self.bert.pooler = None  # has no Add & Norm, and its output is not used
        del self.bert.encoder.layer[LAYERS:]

    def forward(self, x, ids=None):
        """Return the output for token numbers; the second stage of a pipeline is called with vectors and the numbers."""
        mask = ((x if ids is None else ids) != 0).long()
        name = "input_ids" if ids is None else "inputs_embeds"
        return self.bert(attention_mask=mask, **{name: x}).last_hidden_state


class Embedded(nn.Module):
    """Embeddings of vectors: the vectors."""

    def forward(self, inputs_embeds, **others):
        return inputs_embeds


def load_minilm(dtype):
    """Return the trained model and sentences of 12 tokens or fewer."""
    return load("minilm", batch=BATCH, tokens=12, dtype=str(dtype).removeprefix("torch."))


def norm(module, x):
    """Return a LayerNorm in plain PyTorch with the parameters of a module."""
    return F.layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)


OPERATIONS = {"AddNorm": AddNorm(), "pre-LN": Stack("pre_ln"), "post-LN": Stack("post_ln"), "MiniLM": MiniLM()}
