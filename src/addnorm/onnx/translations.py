"""Translation of the operators to ONNX, in the form that the caller chooses.

Each function here is called by torch's exporter with symbolic values for the tensors and records ONNX nodes. Dtypes and ranks
are known, values and dynamic sizes are not.
"""

from collections.abc import Callable
from typing import Any, Literal

from addnorm._util.arguments import check_choice
from addnorm._util.norms import BY_CODE, KINDS
from addnorm._util.optional import require
from addnorm.ops.options import CASTINGS, NORMS
from addnorm.ops.schema import OVERLOADS, ForwardArguments, kernels_of, overload_of

Form = Literal["standard", "skip", "plain"]
#: The forms of an Add & Norm in ONNX. `onnx.export(model, inputs, "model.onnx", form=onnx.FORMS[1])`.
FORMS: tuple[Form, ...] = ("standard", "skip", "plain")
NORM_OPSET = max(kind.onnx[1] for kind in KINDS.values() if kind.onnx)  # the first opset with all norms of ONNX
PURPOSE = "export to ONNX"
DROPOUT = "call model.eval() before the export, since ONNX programs have no dropout of this library"
TRANSLATED = ("add_norm", "add_norm_stream", "add_norm_forward")
DEFAULTS = ForwardArguments._field_defaults


def translations(form: Form = "standard", *, opset_version: int = NORM_OPSET) -> dict[Any, Callable[..., Any]]:
    """Return the table that `torch.onnx.export(..., dynamo=True, custom_translation_table=...)` takes.

        z = residual_scale * residual + row_scale * layer_scale * (branch + branch_bias)
        y = norm(z) * (weight + weight_offset) + bias

    Forms:

    - "standard": `Add`, then `LayerNormalization` (since opset 17) or `RMSNormalization` (since opset 23; before, the
      operators of "plain"). Any runtime can run them, and most have a kernel.
    - "skip": `SkipLayerNormalization` and `SkipSimplifiedLayerNormalization` of the domain com.microsoft, which add and
      normalize in one node, where the tensors have two or three dimensions and one dtype and the options of the add are at
      most `branch_bias`. Elsewhere as "standard". For onnxruntime only.
    - "plain": elementary operators in float32 (float64 if an input is), with the steps of `addnorm.decompositions`: centred
      variance, z rounded once, y rounded once. This form is the slowest, and depends least on a runtime's kernels.

    In the first two forms the runtime's kernel decides how a float16 norm is rounded. Where dtypes differ, `weight_offset` is
    not 0, or `casting` rounds earlier, the norm's node computes in float32 between casts, so that each option keeps its meaning.

    Args:
        form: "standard", "skip" or "plain".
        opset_version: the opset of the file, as passed to `torch.onnx.export`: from 18 on.

    Returns:
        A mapping from operator overloads to functions. It covers the forward operators that an exported program contains, but
        those of `add_norm_streams`: run `addnorm.decompositions()` first. An operator that draws a dropout mask raises
        ValueError.

    Raises:
        ImportError: onnxscript is not installed; the message has the command that installs it.
        ValueError: `form` has another value; or, from a function of the table, ONNX has no such norm.

    Example:
        >>> import addnorm.onnx
        >>> len(addnorm.onnx.translations("skip"))  # doctest: +SKIP
        6
    """
    check_choice("form", form, FORMS)
    require("onnxscript", PURPOSE)

    def add_norm_forward(a: Any) -> Any:
        if a.outputs > 2:
            raise ValueError("outputs is 3, expected 1 or 2: the statistics for a backward have no translation.")
        call = _Translation(form, opset_version, a)
        return *call.outputs(with_z=a.outputs > 1), call.placeholder()

    functions = kernels_of("add_norm_forward", add_norm_forward, OVERLOADS["add_norm_forward"])
    return {overload_of(op): function for op, function in functions}


class _Translation:
    """One call of `add_norm_forward` as ONNX nodes."""

    def __init__(self, form: Form, opset_version: int, arguments: Any) -> None:
        import onnx_ir
        import onnxscript

        self.ir, self.a, self.form = onnx_ir, arguments, form
        self.op: Any = onnxscript.values.Opset("", opset_version)
        self.types = onnx_ir.DataType
        self.kind = KINDS.get(BY_CODE.get(arguments.norm, ""))  # type: ignore[call-overload]
        self.names: Any = self.kind and self.kind.onnx
        self.has_node = self.names is not None and opset_version >= self.names[1]
        if self.kind is not None and self.names is None:
            raise ValueError(
                f"the norm is {self.kind.title}, expected one that ONNX has: run addnorm.decompositions() first."
            )
        if arguments.dropout_p:
            raise ValueError(f"dropout_p is {arguments.dropout_p}, expected 0: {DROPOUT}.")
        stream, branch = arguments.residual.dtype, arguments.branch
        self.z_type = (
            stream if branch is None or arguments.residual_dtype is None else self.types(arguments.residual_dtype)
        )
        branch_type = stream if branch is None else branch.dtype
        self.y_type = branch_type if arguments.out_dtype is None else self.types(arguments.out_dtype)
        # The dtype of the arithmetic of the add, and of the norm.
        self.add_type = self._arithmetic(stream, branch_type, self.z_type)
        self.norm_type = self._arithmetic(self.z_type)
        factors = ("residual_factor", "residual_scale", "row_scale", "branch_factor", "layer_scale")
        has_factor = any(getattr(arguments, name) != DEFAULTS[name] for name in factors)
        self.is_plain_add = branch_type == stream == self.z_type and not has_factor

    def outputs(self, with_z: bool = False) -> tuple[Any, Any]:
        """Record the nodes of the call and return y and z. An output that does not exist or is not requested is a placeholder."""
        a = self.a
        if a.norm == NORMS["none"]:
            return self.placeholder(), self._add()
        if self._fits_skip():
            y, z = self._skip()
        else:
            z = a.residual if a.branch is None else self._add()
            y = self._normalize(z)
        return y, z if with_z and a.branch is not None else self.placeholder()

    def placeholder(self) -> Any:
        """Return an empty float32 tensor, in place of an output."""
        return self.op.Constant(value=self.ir.tensor([], dtype=self.types.FLOAT))

    def _add(self) -> Any:
        a, op, acc = self.a, self.op, self.add_type
        if self.is_plain_add and a.branch_bias is None:
            return op.Add(a.residual, a.branch)
        write = self._cast(a.branch, acc)
        if a.branch_bias is not None:
            write = op.Add(write, self._cast(a.branch_bias, acc))
        write = self._scale(write, a.layer_scale, a.branch_factor)
        if a.row_scale is not None:
            rows = op.Unsqueeze(self._cast(a.row_scale, acc), [-1])
            write = op.Mul(write, rows)
        stream = self._scale(self._cast(a.residual, acc), a.residual_scale, a.residual_factor)
        return self._cast(op.Add(stream, write), self.z_type, acc)

    def _scale(self, value: Any, tensor: Any, factor: float) -> Any:
        if tensor is not None:
            return self.op.Mul(value, self._cast(tensor, self.add_type))
        return value if factor == 1.0 else self.op.Mul(value, self._number(factor, self.add_type))

    def _fits_skip(self) -> bool:
        a = self.a
        return (
            self.form == "skip"
            and a.branch is not None
            and self.is_plain_add
            and self._fits_node()
            and len(a.residual.shape) in (2, 3)
            and (a.branch_bias is None or a.branch_bias.dtype == self.z_type)
        )

    def _skip(self) -> tuple[Any, Any]:
        import onnx
        import onnxscript

        a = self.a
        inputs = {"input": a.residual, "skip": a.branch, "gamma": self._weight(self.z_type)}
        inputs |= ({"beta": a.bias} if self.kind.has_bias else {}) | {"bias": a.branch_bias}
        define = onnx.defs.OpSchema
        outputs = ("output", "mean", "inv_std_var", "input_skip_bias_sum")
        option = define.FormalParameterOption
        schema = define(
            self.names[2], "com.microsoft", 1,
            inputs=[
                define.FormalParameter(name, "T", param_option=option.Single if place < 3 else option.Optional)
                for place, name in enumerate(inputs)
            ],
            outputs=[define.FormalParameter(name, "T") for name in outputs],
            type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
            attributes=[define.Attribute("epsilon", define.AttrType.FLOAT, required=False)],
        )  # fmt: skip
        results = onnxscript.evaluator.default().eval(schema, [*inputs.values()], {"epsilon": a.eps})  # type: ignore[attr-defined]  # a submodule
        for unused in results[1:3]:
            unused.name = ""
        return results[0], results[3]

    def _fits_node(self) -> bool:
        """Return whether ONNX's node of the norm can compute the call in the dtype of z, without casts."""
        a = self.a
        rounds_early = a.casting != CASTINGS["float32"] and self.norm_type != self.z_type
        return (
            self.y_type == self.z_type
            and self.z_type != self.types.DOUBLE
            and all(t is None or t.dtype == self.z_type for t in (a.weight, a.bias))
            and not a.weight_offset
            and not rounds_early
            and (self.kind.has_bias or a.bias is None)
            and (a.weight is not None or self._has_static_width())
        )

    def _normalize(self, z: Any) -> Any:
        a, op, acc = self.a, self.op, self.norm_type
        has_node = self.has_node and self.form != "plain" and acc != self.types.DOUBLE
        if has_node and self._fits_node():
            return self._norm_node(z, self._weight(self.z_type), a.bias)
        wide = self._cast(z, acc, self.z_type)
        x_hat = (
            self._norm_node(wide, self._ones(acc), None) if has_node and self._has_static_width() else self._x_hat(wide)
        )
        early = {CASTINGS["llama"]: self.z_type, CASTINGS["t5"]: acc if a.weight is None else a.weight.dtype}.get(
            a.casting, acc
        )
        y = self._cast(self._cast(x_hat, early, acc), acc, early)
        if a.weight is not None:
            y = op.Mul(y, self._weight(acc))
        if a.bias is not None:
            y = op.Add(y, self._cast(a.bias, acc))
        return self._cast(y, self.y_type, acc)

    def _norm_node(self, z: Any, weight: Any, bias: Any) -> Any:
        inputs = (z, weight, bias) if self.kind.has_bias else (z, weight)
        results = getattr(self.op, self.names[0])(*inputs, axis=-1, epsilon=self.a.eps)
        return results[0] if isinstance(results, list | tuple) else results

    def _x_hat(self, z: Any) -> Any:
        """Record the nodes of (z - mean) / sqrt(variance + eps), in elementary operators, and return the result."""
        op = self.op
        if self.kind.is_centred:
            mean = self._mean(z)
            mean = op.Add(mean, self._mean(op.Sub(z, mean)))  # the mean of a constant row is then exact
            z = op.Sub(z, mean)
        variance = op.Add(self._mean(op.Mul(z, z)), self._number(self.a.eps, self.norm_type))
        return op.Div(z, op.Sqrt(variance))

    def _mean(self, value: Any) -> Any:
        return self.op.ReduceMean(value, [-1], keepdims=1)

    def _weight(self, dtype: Any) -> Any:
        """Return weight + weight_offset in `dtype`, or ones without a weight."""
        if self.a.weight is None:
            return self._ones(dtype)
        weight = self._cast(self.a.weight, dtype)
        return self.op.Add(weight, self._number(self.a.weight_offset, dtype)) if self.a.weight_offset else weight

    def _ones(self, dtype: Any) -> Any:
        ones = self.ir.tensor([1.0] * self.a.residual.shape[-1], dtype=dtype)
        return self.op.Constant(value=ones)

    def _number(self, value: float, dtype: Any) -> Any:
        return self.op.Constant(value=self.ir.tensor(value, dtype=dtype))

    def _cast(self, value: Any, dtype: Any, source: Any = None) -> Any:
        return value if (source or value.dtype) == dtype else self.op.Cast(value, to=dtype.value)

    def _arithmetic(self, *dtypes: Any) -> Any:
        return self.types.DOUBLE if self.types.DOUBLE in dtypes else self.types.FLOAT

    def _has_static_width(self) -> bool:
        return isinstance(self.a.residual.shape[-1], int)
