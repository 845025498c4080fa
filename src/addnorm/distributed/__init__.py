"""Tensor and sequence parallelism for the modules of this library, with PyTorch's DTensor.

`linear.py` has projections whose output features are sharded, `styles.py` the parallel styles of single modules, `plan.py` the
plan of a whole model. The functions of `addnorm.functional` accept DTensors without this package: their rules are in
`ops/sharding.py`. Importing this package imports `torch.distributed.tensor`; `import addnorm` does not.
"""

from addnorm.distributed.plan import parallelize, split_projections, tensor_parallel_plan
from addnorm.distributed.styles import (
    AttentionParallel,
    FeedForwardParallel,
    ReplicatedSublayer,
    SequenceParallel,
    StackParallel,
)

__all__ = [
    "AttentionParallel", "FeedForwardParallel", "ReplicatedSublayer", "SequenceParallel", "StackParallel", "parallelize",
    "split_projections", "tensor_parallel_plan",
]  # fmt: skip
