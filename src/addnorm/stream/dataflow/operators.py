"""Table of what each operator of torch does to a value, on which all analyses of the library are based.

An entry of `TABLE` has the names of operators that act alike, and their traits. To add an operator, add its name to one entry.
An operator of aten or of this library without an entry counts as an elementwise function. An operator of another library may do
anything, and counts as mixing, unless its equation is known (registered_ops.py).

Names are those of `operator_name`: aten's, without the underscore of in-place operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from addnorm._util.norms import KINDS
from addnorm.stream.dataflow.wrappers import find_tensors_of

# Name of all operators of this library in an address: calls in place, with out= or with a backward run different operators.
FAMILY = "addnorm::"

UNWRITTEN = {"monitored_barrier_"}  # operators of c10d that write nothing

# view: the output has the numbers of the first input in another shape, memory or dtype: copy (same shape), reshape and squeeze
#     (same order of the numbers), expand (repeated along dimensions), swap (two dimensions)
# cut: the output has some numbers of the first input, in another place; exact: the arguments show which numbers; crop and
#     split: a part of a dimension; select: one index of it; shift: all of it in another order; gather: chosen by a tensor
# join: the output has numbers of several inputs; scatter: the second one's are put, or added, where a tensor of indices says
# guard: the output has the numbers of an input unless they are not finite, too large, or of a padded token
# affine: a sum, a multiple or a dropout of the inputs
# mixing: combines elements of different tokens or features, as every sublayer does: product (of matrices; added: to the first
#     argument), linear, pair (both factors may be activations), attention, convolution, pool, scan, recurrent, embedding
# local: combines neighbouring tokens; combining: keeps the shape, and combines the elements of a dimension, as a softmax does
# 1d, 2d, 3d: the number of the last dimensions that a pool combines; tokens_second: attention over dimension 1, not -2
# comparison: returns whether one input is less than the other
# normalizing: a norm (norm) or a part of a norm; reduction: removes a dimension, or leaves it with size 1; sum: by adding up
# channels_first: dimension 1 of the first input has the features
# shapes: reads no contents of the inputs; overwrites: in place, does not read the tensor that it writes
# random, uniform: draws random numbers; running: updates statistics that the schema does not declare
TABLE = {
    "view _unsafe_view reshape _reshape_alias flatten unflatten view_as": "view reshape",
    "squeeze unsqueeze": "view squeeze",
    "expand expand_as": "view expand",
    "permute movedim": "view",
    "transpose swapaxes t numpy_T": "view swap",
    "_to_copy clone contiguous detach alias lift_fresh to _conj _c10d_functional::wait_tensor": "view copy",
    "copy": "view copy expand overwrites",
    "fill": "overwrites",
    "slice narrow": "cut crop exact",
    "split split_with_sizes unsafe_split chunk tensor_split unsafe_chunk": "cut split exact",
    "select unbind": "cut select exact",
    "constant_pad_nd": "cut crop",
    "index_select": "cut crop gather mixing",
    "gather": "cut gather mixing",
    "index": "cut gather",
    "roll flip": "cut shift mixing",
    "masked_select repeat repeat_interleave pixel_shuffle pixel_unshuffle unfold as_strided diagonal channel_shuffle": "cut",
    "take_along_dim tile im2col": "cut",
    "cat stack": "join exact",
    "index_put _index_put_impl": "join scatter",
    "index_add scatter_add": "scatter",
    "scatter slice_scatter select_scatter masked_scatter index_copy": "join",
    "write_into": "join local",
    "where": "join guard",
    "clamp clamp_min clamp_max nan_to_num masked_fill hardtanh minimum maximum fmin fmax threshold": "guard",
    "add sub mul div addcmul neg": "affine",
    "lt le gt ge": "comparison",
    "mm bmm matmul": "mixing product pair",
    "addmm": "mixing product added",
    "baddbmm": "mixing product pair added",
    "einsum addbmm": "mixing pair",
    "linear mkldnn_linear": "mixing linear",
    "dot mv _grouped_mm _scaled_mm _int_mm tensordot bilinear _trilinear cdist": "mixing",
    "embedding": "mixing embedding",
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention": "mixing attention",
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention": "mixing attention",
    "_scaled_dot_product_attention_math _scaled_dot_product_fused_attention_overrideable": "mixing attention",
    "scaled_dot_product_attention flex_attention": "mixing attention",
    "_flash_attention_forward _efficient_attention_forward _native_multi_head_attention": "mixing attention tokens_second",
    "convolution _convolution mkldnn_convolution conv_depthwise3d": "mixing convolution local channels_first",
    "avg_pool1d": "mixing pool 1d local",
    "avg_pool2d": "mixing pool 2d local",
    "adaptive_avg_pool1d": "pool 1d",
    "_adaptive_avg_pool2d adaptive_avg_pool2d max_pool2d_with_indices": "pool 2d",
    "avg_pool3d max_pool3d_with_indices": "pool 3d",
    "cumsum cumprod logcumsumexp _fft_r2c _fft_c2c _fft_c2r": "mixing scan local",
    "mkldnn_rnn_layer lstm gru": "mixing recurrent local",
    "rnn_tanh rnn_relu": "recurrent",
    "_softmax softmax _safe_softmax _log_softmax": "softmax combining",
    "sort argsort cummax cummin": "combining",
    "sum mean nansum": "reduction sum",
    "amax amin max min logsumexp prod median nanmedian kthvalue mode": "reduction",
    "norm linalg_vector_norm var var_mean std std_mean": "reduction normalizing",
    "rsqrt sqrt": "normalizing",
    " ".join(name for kind in KINDS.values() for name in kind.operators): "normalizing norm",
    "native_batch_norm cudnn_batch_norm miopen_batch_norm": "normalizing norm channels_first running",
    "_batch_norm_impl_index": "running",
    "_native_batch_norm_legit _native_batch_norm_legit_no_training batch_norm": "normalizing norm channels_first",
    "_batch_norm_with_update _batch_norm_no_update": "normalizing norm channels_first",
    "native_group_norm group_norm instance_norm": "normalizing norm channels_first",
    "empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full new_empty_strided": "shapes",
    "zero set sym_size": "shapes",
    "native_dropout": "random",
    "rand": "random uniform",
    "rand_like uniform": "random uniform shapes",
    "randn_like randint_like bernoulli_ normal_ exponential random cauchy geometric log_normal": "random shapes",
    "randn randint randperm bernoulli binomial normal multinomial poisson _standard_gamma _sample_dirichlet": "random",
}  # fmt: skip
TRAITS = {name: frozenset(traits.split()) for names, traits in TABLE.items() for name in names.split()}
OPAQUE = frozenset(("mixing", "opaque"))


def find_traits(name: str) -> frozenset[str]:
    """Return the traits of the operator with this name."""
    other = OPAQUE if "::" in name and not name.startswith(FAMILY) else frozenset[str]()
    return TRAITS.get(name, other)


@cache
def operator_name(func: Any) -> str:
    """Return an operator's name, for operators of torch without the namespace and the underscore of in-place operators.

    `bernoulli_` and `normal_` keep the underscore, since only the out-of-place operators read probabilities and means from a
    tensor.
    """
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten":
        return f"{namespace}::{name}"
    kept: str = name if name in ("bernoulli_", "normal_") else name.rstrip("_")
    return kept


def bind_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by their names in its schema, with the schema's defaults."""
    schema = getattr(func, "_schema", None)  # the steps of a fused operator have none
    declared = schema.arguments if schema is not None else ()
    defaults = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    return {**defaults, **{argument.name: value for argument, value in zip(declared, args, strict=False)}, **kwargs}


def find_written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operator writes in place, by its schema."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "c10d" and name.endswith("_") and name not in UNWRITTEN:  # its schema does not declare it
        return [t for t in pytree.tree_leaves(args[0]) if isinstance(t, Tensor)]
    if not func._schema.is_mutable:
        return []
    bound = bind_arguments(func, args, kwargs)
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for name in names for t in pytree.tree_leaves(bound.get(name)) if isinstance(t, Tensor)]


def list_outputs(func: Any, out: Any, written: Sequence[Tensor]) -> list[Tensor]:
    """Return the new outputs of an operator, and then the tensors `written`, which the operator writes in place."""
    if not written:
        return find_tensors_of(out)
    returns = func._schema.returns
    outs = out if len(returns) > 1 else (out,)
    new = [t for t, declared in zip(outs, returns, strict=False) if declared.alias_info is None]
    return [*(t for t in new if isinstance(t, Tensor)), *written]


def find_first(out: Any) -> Tensor | None:
    """Return the first output of an operator that has floating-point numbers; None for one that writes in place only."""
    return next((t for t in find_tensors_of(out) if t.is_floating_point()), None)


def running_statistics(func: Any, args: Any) -> list[Tensor]:
    """Return the running statistics that a batch norm writes undeclared by its schema; [] for other operators."""
    return [x for x in args[3:5] if isinstance(x, Tensor)] if "running" in find_traits(operator_name(func)) else []
