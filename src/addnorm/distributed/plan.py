"""Plan of a model: the parallel style of each stack, attention and feed-forward in it."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from addnorm.distributed.styles import (
    AttentionParallel,
    FeedForwardParallel,
    ReplicatedSublayer,
    StackParallel,
    sublayers,
)
from addnorm.nn.attention import PACKED, CrossAttention, SelfAttention
from addnorm.nn.connection import SublayerConnection
from addnorm.nn.feed_forward import FeedForward
from addnorm.nn.stack import ResidualStack
from addnorm.nn.unmodified import find_modification, methods_of

STYLES: dict[type[nn.Module], type[AttentionParallel | FeedForwardParallel]] = {
    SelfAttention: AttentionParallel,
    CrossAttention: AttentionParallel,
    FeedForward: FeedForwardParallel,
}
METHODS = methods_of(*STYLES, names=("_attend", "_project_apart", "_project_memory"))


def tensor_parallel_plan(
    model: nn.Module, *, sequence_parallel: bool = False, use_local_output: bool = True
) -> dict[str, ParallelStyle]:
    """Return a plan for `torch.distributed.tensor.parallel.parallelize_module`: the style of each module by its name.

    The plan covers the stacks of a model: `Encoder`, `Decoder`, `Transformer`, `ResidualStack`. Attention is sharded by heads,
    the feed-forward by hidden features. Every process computes any other sublayer whole, also an attention or feed-forward that
    is a subclass or has a replaced method. Modules that are not in a stack have no entry: add those of an embedding and a head.

    Args:
        model: the model, or one of its parts.
        sequence_parallel: whether the residual stream, with its norms and adds, is sharded on the tokens; otherwise it is
            replicated.
        use_local_output: whether the output of a stack is an ordinary tensor that every process has whole. Otherwise it is a
            DTensor with the placement of the stream.

    Example:
        >>> from addnorm.distributed import tensor_parallel_plan
        >>> list(tensor_parallel_plan(addnorm.nn.Encoder(1, 16, 2)))
        ['stack', 'stack.layers.0.connections.0.sublayer', 'stack.layers.0.connections.1.sublayer']
    """
    plan: dict[str, ParallelStyle] = {}
    names = {id(module): name for name, module in model.named_modules()}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, ResidualStack | SublayerConnection) or id(module) in inside:
            continue
        inside |= {id(part) for part in module.modules()}
        plan[name] = StackParallel(sequence_parallel=sequence_parallel, use_local_output=use_local_output)
        for sublayer in sublayers(module):
            plan[names[id(sublayer)]] = _style(sublayer)(sequence_parallel=sequence_parallel)
    return plan


def _style(sublayer: nn.Module) -> type[AttentionParallel | FeedForwardParallel | ReplicatedSublayer]:
    """Return the style of a sublayer. A subclass, or a sublayer with a replaced method, has the style `ReplicatedSublayer`."""
    style = STYLES.get(type(sublayer), ReplicatedSublayer)
    return style if find_modification(sublayer, METHODS) in (None, "hooks") else ReplicatedSublayer


def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = False, use_local_output: bool = True
) -> nn.Module:
    """Apply `tensor_parallel_plan` to a model, in place, and return the model.

    Afterwards the model is called as before, with whole inputs and outputs in every process. Outputs and gradients equal those of
    one process up to round-off. Apply it before `fully_shard` and before the optimizer is made.

    Args:
        model: the model. Its parameters are those of the first process of the mesh.
        mesh: a mesh of one dimension, such as `mesh["tp"]`.
        sequence_parallel: as in `tensor_parallel_plan`.
        use_local_output: as in `tensor_parallel_plan`.

    A stack draws the seeds of its dropout once for all processes of the mesh. Dropout inside a sublayer draws from the generator
    of each process.

    Raises:
        ValueError: the number of processes does not divide the number of heads or the hidden width.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))  # doctest: +SKIP
        >>> model = addnorm.distributed.parallelize(model, mesh["tp"], sequence_parallel=True)  # doctest: +SKIP
    """
    plan = tensor_parallel_plan(model, sequence_parallel=sequence_parallel, use_local_output=use_local_output)
    for name, style in plan.items():
        parallelize_module(model.get_submodule(name), mesh, style)
    return model


def split_projections(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a plain model with the names that the model has under `tensor_parallel_plan`.

    The parts of packed projections, such as `in_proj.q.weight`, are views of the model's parameters. So
    `torch.distributed.checkpoint.load` of the result fills the model from a checkpoint of a parallel model. On rank 0 it is what
    `set_model_state_dict` broadcasts to a parallel model.

    Example:
        >>> from addnorm.distributed import split_projections
        >>> state = split_projections(addnorm.nn.Encoder(1, 8, 2, bias=False))
        >>> [name.removeprefix("stack.layers.0.connections.0.sublayer.") for name in state][:4]
        ['in_proj.q.weight', 'in_proj.k.weight', 'in_proj.v.weight', 'out_proj.weight']
    """
    plan = tensor_parallel_plan(model)
    split = {
        f"{sublayer}.{packed}": names
        for sublayer, style in plan.items()
        for packed, names in PACKED.items()
        if isinstance(style, AttentionParallel)
    }
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        owner, _, kind = name.rpartition(".")
        if owner in split:
            state |= {
                f"{owner}.{part}.{kind}": t
                for part, t in zip(split[owner], value.chunk(len(split[owner])), strict=True)
            }
        else:
            state[name] = value
    return state
