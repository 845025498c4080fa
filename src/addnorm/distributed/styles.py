"""Parallel styles of this library's modules, for `torch.distributed.tensor.parallel.parallelize_module`.

Between the modules of a stack the stream is a DTensor: replicated, or sharded on the tokens (sequence parallelism). Inside an
attention or a feed-forward, tensors are ordinary tensors: each process computes its heads or its hidden features.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, parallel
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

from addnorm.distributed.linear import ColumnLinear, PackedColumnLinear, enter_region, to_dtensor
from addnorm.nn.attention import LINEAR, PACKED, CrossAttention, SelfAttention
from addnorm.nn.connection import SublayerConnection
from addnorm.nn.feed_forward import FeedForward
from addnorm.nn.stack import ResidualStack
from addnorm.nn.unmodified import find_modification

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class SequenceParallel(parallel.SequenceParallel):
    """Style of `AddNorm`, `LayerNorm` and `RMSNorm` that computes on shards of the sequence.

    Every tensor among the inputs is handled as `torch.distributed.tensor.parallel.SequenceParallel` handles the first input: an
    ordinary tensor is a shard already, a DTensor is redistributed (a `Partial` DTensor is reduce-scattered). Parameters are
    replicated from the first process. Their gradients are `Partial`: the optimizer, or `full_tensor()`, sums them.

    Args:
        sequence_dim: the dimension of the tokens.
        use_local_output: whether outputs are this process's tensors and not DTensors.

    Example:
        >>> from addnorm.distributed import SequenceParallel
        >>> plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}  # for parallelize_module(model, mesh, plan)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate_parameters(module.modules(), device_mesh, self.src_data_rank)

        def place(x: Any) -> Any:
            if isinstance(x, DTensor):
                return _redistribute(x, self.sequence_sharding)
            if isinstance(x, Tensor):
                return DTensor.from_local(x, device_mesh, self.sequence_sharding, run_check=False)
            return x

        def before(module: nn.Module, args: Arguments, options: Keywords) -> tuple[Arguments, Keywords]:
            return tuple(map(place, args)), {name: place(value) for name, value in options.items()}

        def after(module: nn.Module, args: Arguments, outputs: Any) -> Any:
            if not self.use_local_output:
                return outputs
            return tuple(t.to_local() for t in outputs) if isinstance(outputs, tuple) else outputs.to_local()

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        return module


class StreamStyle(ParallelStyle):
    """Base of the styles of the modules and sublayers of a `ResidualStack`.

    Args:
        sequence_parallel: whether the stream is sharded on the tokens, dimension 1: its shards are gathered before a sublayer,
            and the output is sharded again. Otherwise the stream is replicated.
    """

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.placement: Placement = Shard(1) if sequence_parallel else Replicate()

    def _shard_linears(self, module: nn.Module, names: Iterable[str], mesh: DeviceMesh) -> list[nn.Module]:
        """Replace the projections `names` of a module by projections with sharded output features, and return the new ones.

        Raises:
            ValueError: one of the projections is not an unmodified `torch.nn.Linear`. The module is then unchanged.
        """
        linears: dict[str, Any] = {name: module.get_submodule(name) for name in names}
        for name, linear in linears.items():
            change = (
                find_modification(linear, LINEAR) if type(linear) in LINEAR else f"the class {type(linear).__name__}"
            )
            if change is not None:
                raise ValueError(
                    f"{name} has {change}, expected a torch.nn.Linear as it was made: tensor parallelism replaces it by sharded "
                    "projections; apply it first, and hooks, adapters and parametrizations to its result."
                )
        for name, linear in linears.items():
            if name in PACKED:
                sharded: nn.Module = PackedColumnLinear(linear, PACKED[name], mesh, self.src_data_rank)
            else:
                sharded = ColumnLinear(linear.weight, linear.bias, mesh, self.src_data_rank)
            module.register_module(name, sharded)
        return [module.get_submodule(name) for name in names]

    def _leave(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        """Shard the input features of a module's last projection, and reduce its output to the placement of the stream."""
        style = RowwiseParallel(output_layouts=self.placement, use_local_output=False)
        parallelize_module(linear, mesh, style, src_data_rank=self.src_data_rank)


class StackParallel(StreamStyle):
    """Style of a `ResidualStack` or `SublayerConnection`: the stream is a DTensor, the norms and factors are replicated.

    An ordinary input must be the whole tensor in every process. A DTensor is redistributed. Sublayers have styles of their own.

    Args:
        sequence_parallel: whether the stream is sharded on the tokens, dimension 1; otherwise it is replicated.
        use_local_output: whether the output is an ordinary tensor that every process has whole. Otherwise it is a DTensor with
            the placement of the stream.

    Example:
        >>> from addnorm.distributed import StackParallel
        >>> plan = {"stack": StackParallel(sequence_parallel=True)}  # for parallelize_module(model, mesh, plan)
    """

    def __init__(self, *, sequence_parallel: bool = False, use_local_output: bool = True) -> None:
        super().__init__(sequence_parallel=sequence_parallel)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inside = {id(m) for sublayer in sublayers(module) for m in sublayer.modules()}
        replicate_parameters((m for m in module.modules() if id(m) not in inside), device_mesh, self.src_data_rank)

        def before(module: nn.Module, args: Arguments) -> Arguments:
            x, *others = args
            return _redistribute(to_dtensor(x, device_mesh), (self.placement,)) if isinstance(x, Tensor) else x, *others

        def after(module: nn.Module, args: Arguments, output: Any) -> Any:
            return _redistribute(output, (Replicate(),)).to_local() if self.use_local_output else output

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module


class AttentionParallel(StreamStyle):
    """Style of `SelfAttention` and `CrossAttention`: each process computes some of the heads.

    Each packed projection is replaced by separate projections that can be sharded by heads: the parameters `in_proj.weight` and
    `in_proj.bias` become `in_proj.q.weight` and so on, and `kv_proj.weight` becomes `kv_proj.k.weight` and so on.
    `load_state_dict` accepts the packed parameters as well. A key-value cache has the heads of its process.

    Args:
        sequence_parallel: whether the stream is sharded on the tokens: its shards are gathered before the attention, and its
            output is reduce-scattered. Otherwise the output is all-reduced.

    Raises:
        ValueError: the number of processes does not divide the number of heads; or a projection that is replaced has hooks, or
            is another module than `torch.nn.Linear`.

    Example:
        >>> from addnorm.distributed import AttentionParallel
        >>> plan = {"stack.layers.*.connections.0.sublayer": AttentionParallel()}  # for parallelize_module(model, mesh, plan)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, SelfAttention | CrossAttention)
        n = device_mesh.size()
        if module.nhead % n:
            raise ValueError(
                f"nhead is {module.nhead} and the mesh has {n} processes, expected a number of heads that {n} divides: each "
                "process computes whole heads; use a smaller mesh."
            )
        names = ("in_proj",) if isinstance(module, SelfAttention) else ("kv_proj", "q_proj")
        sharded = self._shard_linears(module, names, device_mesh)
        module.local_nhead = module.nhead // n
        module.first_head = module.local_nhead * device_mesh.get_local_rank()
        for projection in sharded:
            _enter_first(projection, device_mesh)
        self._leave(module.out_proj, device_mesh)
        return module


class FeedForwardParallel(StreamStyle):
    """Style of `FeedForward`: each process computes some of the hidden features.

    Args:
        sequence_parallel: as in `AttentionParallel`.

    Raises:
        ValueError: the number of processes does not divide the hidden width; or a projection that is replaced has hooks, or is
            another module than `torch.nn.Linear`.

    Example:
        >>> from addnorm.distributed import FeedForwardParallel
        >>> plan = {"stack.layers.*.connections.1.sublayer": FeedForwardParallel()}  # for parallelize_module(model, mesh, plan)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, FeedForward)
        n, width = device_mesh.size(), module.up.out_features
        if width % n:
            raise ValueError(
                f"dim_feedforward is {width} and the mesh has {n} processes, expected a width that {n} divides: each process "
                "computes an equal part of it."
            )
        names = ("up",) if module.gate is None else ("up", "gate")
        self._shard_linears(module, names, device_mesh)
        _enter_first(module, device_mesh)
        self._leave(module.down, device_mesh)
        return module


class ReplicatedSublayer(StreamStyle):
    """Style of any other sublayer of a stack: every process computes all of it, with ordinary tensors.

    The parameters are replicated DTensors, as those of the stack are, so that optimizers and `clip_grad_norm_` can take them all
    together. During a call, this process's local tensors take the place of the DTensors in the sublayer's modules.

    Args:
        sequence_parallel: whether the stream is sharded on the tokens: its shards are gathered before the sublayer.

    Example:
        >>> from addnorm.distributed import ReplicatedSublayer
        >>> plan = {"stack.layers.*.connections.1.sublayer": ReplicatedSublayer()}  # for parallelize_module(model, mesh, plan)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate_parameters(module.modules(), device_mesh, self.src_data_rank)
        calls: list[list[tuple[dict[str, Any], str, DTensor]]] = []  # what each running call has to put back

        def before(module: nn.Module, args: Arguments) -> Arguments:
            tables: list[dict[str, Any]] = [owner._parameters for owner in module.modules()]
            calls.append([(t, name, p) for t in tables for name, p in t.items() if isinstance(p, DTensor)])
            for table, name, parameter in calls[-1]:
                table[name] = parameter.to_local()
            x, *others = args
            return _redistribute(to_dtensor(x, device_mesh), (Replicate(),)).to_local(), *others

        def after(module: nn.Module, args: Arguments, output: Any) -> Any:
            for table, name, parameter in calls.pop() if calls else ():
                table[name] = parameter
            if isinstance(output, Tensor):
                return _redistribute(to_dtensor(output, device_mesh), (self.placement,))
            return output

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)
        return module


def sublayers(module: nn.Module) -> list[nn.Module]:
    """Return the sublayers that are modules, in the stacks and connections of a module."""
    found = [getattr(m, "sublayer", None) for m in module.modules() if isinstance(m, SublayerConnection)]
    return [m for m in found if isinstance(m, nn.Module) and not isinstance(m, SublayerConnection | ResidualStack)]


def replicate_parameters(modules: Iterable[nn.Module], mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Replace the modules' own parameters by replicated DTensors. Shared parameters stay shared."""
    replicated: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in modules:
        parameters: Mapping[str, nn.Parameter | None] = dict(module._parameters)
        for name, parameter in parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in replicated:
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=src_data_rank)
                replicated[id(parameter)] = parameter, nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module.register_parameter(name, replicated[id(parameter)][1])


def _redistribute(x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    return x if x.placements == placements else x.redistribute(x.device_mesh, placements)


def _enter_first(module: nn.Module, mesh: DeviceMesh) -> None:
    """Register a hook that passes the whole first input to a module, as an ordinary tensor (`enter_region`)."""
    module.register_forward_pre_hook(lambda module, args: (enter_region(args[0], mesh), *args[1:]))
