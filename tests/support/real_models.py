"""Tiny random models of transformers, and each one again as a `ResidualStack` around its own sublayers.

`FAMILIES` says for each model which wiring it has, which modules are its sublayers and norms, and which of its parameters are the
stack's coefficients. The mapping of parameters is written down here a second time: `load_transformers` must agree with it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from addnorm import Learned, ResidualStack, Wiring, wirings
from addnorm.wirings import Head, Stage, identity
from support.several_streams import build_transformers


class Float64(TorchFunctionMode):
    """Compute in float64 where a model asks for float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


class Own(nn.Module):
    """A module of the model in the stack: called as the model called it, with the stack's reads for its inputs.

    `inputs` are the names of the keyword arguments that are reads; without a name the read is the first argument. A module that
    returns a tuple returns its output first, and `then` is called with it. `memory` is a list that passes the second output of a
    call to the next one, as the second argument.
    """

    def __init__(self, module, inputs=(), memory=None, then=None):
        super().__init__()
        self.module, self.inputs, self.memory, self.then = module, inputs, memory, then
        self.args, self.kwargs = (), {}
        module.register_forward_pre_hook(self._record, with_kwargs=True)
        if then is not None:
            then.register_forward_pre_hook(self._record_then, with_kwargs=True)

    def _record(self, module, args, kwargs):
        if not self.__dict__.get("is_replay"):
            self.args, self.kwargs = args, kwargs

    def _record_then(self, module, args, kwargs):
        if not self.__dict__.get("is_replay"):
            self.then_kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}

    def forward(self, *reads):
        args, kwargs = list(self.args), dict(self.kwargs)
        if self.inputs and self.inputs[0] in kwargs:
            kwargs.update(zip(self.inputs, reads, strict=True))
        else:
            (args[0],) = reads
        if self.memory is not None:
            args[1] = self.memory[-1] if self.memory else None
        self.is_replay = True
        with Float64() if reads[0].dtype is torch.float64 else nullcontext():
            output = self.module(*args, **kwargs)
            if self.memory is not None:
                self.memory.append(output[1])
            output = output[0] if isinstance(output, tuple) else output
            output = output if self.then is None else self.then(output, **self.then_kwargs)
        self.is_replay = False
        return output


class OwnNorm(nn.Module):
    """A norm of the model in the place of one of the stack's."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        with Float64() if x.dtype is torch.float64 else nullcontext():
            return self.module(x)


@dataclass
class Family:
    """A model of transformers, and how to build it as a stack.

    Attributes:
        constants: options of its configuration beside those of several_streams.py, so that no constant has its default.
        wiring: a function of the configuration.
        sublayers: a function of the model.
        fill: a function of the model and the stack: replace norms, call `load_transformers`, and return the parameters of the
            stack as functions of the model's.
        start: the module whose output is the stack's input; the first layer if it is its input.
        options: of the stack.
    """

    wiring: Callable[[Any], Wiring]
    sublayers: Callable[[Any], list[nn.Module]]
    fill: Callable[[Any, ResidualStack], dict[str, torch.Tensor]]
    constants: dict[str, Any] = field(default_factory=dict)
    start: Callable[[Any], nn.Module] = lambda model: model.embed_tokens
    options: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {}


def attention_and_mlp(model):
    """Return the sublayers of a model whose layers have `self_attn` (or `linear_attn`) and `mlp`."""
    sublayers = []
    for layer in model.layers:
        attention = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
        sublayers += [Own(attention, ("hidden_states",)), Own(layer.mlp, ("hidden_states",))]
    return sublayers


def by_connection(model, *names):
    """Yield the number of each connection and its layer's module: names are those of the modules of a layer's connections."""
    for i, layer in enumerate(model.layers):
        for k, name in enumerate(names):
            yield 2 * i + k, getattr(layer, name)


def at(i):
    """Return the prefix of connection i, None for the head."""
    return "head." if i is None else f"layers.{i // 2}.connections.{i % 2}."


def norm_weights(model, stack, second="post_attention_layernorm", offset=0.0):
    """Return the weights of norm_in of each connection and of the final norm, by their names in the stack."""
    norms = by_connection(model, "input_layernorm", second)
    named = {f"{at(i)}norm_in.weight": offset + norm.weight for i, norm in norms}
    return named | {"norm_final.weight": model.norm.weight}


def load(stack, i, source):
    """Let the coefficient module of connection i load a module of the model, and return the prefix of its parameters."""
    connection = stack.head if i is None else stack.connections[i]
    connection.coefficients.load_transformers(source)
    return f"{at(i)}coefficients."


def projected(prefix, project, bias, scale):
    return {f"{prefix}project": project, f"{prefix}bias": bias, f"{prefix}scale": scale}


def turned(rows, n):
    """Return rows of coefficients in the order of A: the mixing matrix of DeepSeek's code applies transposed."""
    if len(rows) == 2 * n:  # without a mixing matrix
        return rows
    return torch.cat((rows[: 2 * n], rows[2 * n :].unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1)))


def mhc(config, head):
    options = {"iterations": config.hc_sinkhorn_iters, "eps": config.hc_eps, "norm_eps": config.rms_norm_eps}
    return wirings.mhc(config.hc_mult, head, **options)


def fill_mhc(model, stack):
    named, head = norm_weights(model, stack), model.hc_head
    for i, source in by_connection(model, "attn_hc", "ffn_hc"):
        fn, base = (turned(t, source.hc_mult) for t in (source.fn, source.base))
        named |= projected(load(stack, i, source), fn, base, source.scale)
    if list(head.parameters()):
        named |= projected(load(stack, None, head), head.hc_fn, head.hc_base, head.hc_scale)
    return named


def fill_gated(model, stack):
    named, sources = {}, by_connection(model, "attn_hyper_connection", "mlp_hyper_connection")
    for i, source in ((None, model.hyper_connection_mixer), *sources):
        prefix = load(stack, i, source)
        named[f"{prefix}weight"] = (1 + source.hc_norm.weight).unflatten(0, (source.hc_count, -1))
        named[f"{prefix}down"], named[f"{prefix}up"] = (
            source.input_mix_weight_down.weight,
            source.input_mix_weight_up.weight,
        )
        if i is not None:
            named[f"{prefix}project_inject"] = source.block_inject_weight.weight
    return named


FAMILIES["deepseek_v4:DeepseekV4"] = Family(
    lambda config: mhc(config, "learned"), attention_and_mlp, fill_mhc, {"hc_eps": 0.02, "hc_sinkhorn_iters": 4},
)  # fmt: skip
FAMILIES["glm5_next:Glm5NextText"] = Family(
    lambda config: mhc(config, "mean"), attention_and_mlp, fill_mhc, {"hc_eps": 0.02, "hc_sinkhorn_iters": 3},
)  # fmt: skip
FAMILIES["hy_v4:HYV4"] = Family(
    lambda config: wirings.independent_hc(config.hc_mult, config.hc_magnitude, config.hc_eps, config.rms_norm_eps),
    attention_and_mlp, fill_mhc, {"hc_eps": 0.02, "hc_magnitude": 1.5},
)  # fmt: skip
FAMILIES["qwen4_exp:Qwen4ExpText"] = Family(
    lambda config: wirings.gated_residual(config.hc_count, config.hc_lowrank, config.rms_norm_eps), attention_and_mlp, fill_gated,
)  # fmt: skip


def inkling_sublayers(model):
    sublayers = []
    for layer in model.layers:
        reads = ("hidden_states", "key_hidden_states", "value_hidden_states")
        reads = reads if hasattr(layer, "q_input_layernorm") else reads[:1]
        sublayers.append(Own(layer.self_attn, reads, then=layer.post_attention_convolution))
        sublayers.append(Own(layer.mlp, ("hidden_states",), then=layer.post_mlp_convolution))
    return sublayers


def fill_inkling(model, stack):
    named = {
        "norm_final.weight": model.norm.weight,
        f"{load(stack, None, model.final_input)}query": model.final_input.query[None],
    }
    for i, layer in enumerate(model.layers):
        if hasattr(layer, "q_input_layernorm"):
            for k, name in enumerate("qkv"):
                named[f"{at(2 * i)}norm_in.{k}.weight"] = getattr(layer, f"{name}_input_layernorm").weight
        else:
            named[f"{at(2 * i)}norm_in.weight"] = layer.input_layernorm.weight
        named[f"{at(2 * i + 1)}norm_in.weight"] = layer.post_attention_layernorm.weight
    for i, source in by_connection(model, "attention_input", "mlp_input"):
        if source is not None:
            named[f"{load(stack, i, source)}query"] = source.query.reshape(-1, source.query.shape[-1])
    return named


FAMILIES["inkling2:Inkling2Text"] = Family(
    lambda config: wirings.attention_residuals(config.n_layers_per_attn_res_block, normed_values=True, reads=(1, 1, 3)),
    inkling_sublayers, fill_inkling,
)  # fmt: skip


POST_NORMS = "post_attention_layernorm", "post_feedforward_layernorm"


def fill_beam(model, stack):
    named = norm_weights(model, stack, "pre_feedforward_layernorm")
    for i, norm in by_connection(model, *POST_NORMS):
        named[f"{at(i)}norm_branch.weight"] = norm.weight
    return named


FAMILIES["beam:Beam"] = Family(
    lambda config: wirings.depth_scaled(), attention_and_mlp, fill_beam,
)  # fmt: skip


def fill_muse(model, stack):
    named = norm_weights(model, stack, "pre_feedforward_layernorm", offset=1.0)
    for i, norm in by_connection(model, *POST_NORMS):
        stack.connections[i].norm_branch = OwnNorm(norm)
    for i, source in by_connection(model, "post_attention_residual_gate", "post_feedforward_residual_gate"):
        named[f"{load(stack, i, source)}gate"] = source.gate
    return named


FAMILIES["muse_spark:MuseSparkText"] = Family(
    lambda config: wirings.gated_mix(config.residual_gate_temperature), attention_and_mlp, fill_muse,
    {"residual_gate_temperature": 0.06},  # so small that the clamp of 1 - b^2 binds
)  # fmt: skip


def neomme_wiring(config):
    """Return NeoMME's wiring as data: attention reads N(λ0 x + λ1 x0), and both sublayers add to x alone."""
    b, keep = config.residual_multiplier, identity(2)
    pair = (Learned(1.0, name="lambda_x"), Learned(0.0, name="lambda_x0"))

    def stage(place):
        return Stage(2, pair if place.sublayer == 0 else (1, 0), keep, (b, 0), norm_in=True)

    return Wiring("neomme", stage, final_norm=True, embedding_norm=True, embedding=(1.0, 1.0), head=Head(2, (1, 0)))


def fill_neomme(model, stack):
    named = {}
    for i, layer in enumerate(model.layers):
        for k, name in enumerate(("lambda_x", "lambda_x0")):
            with torch.no_grad():
                getattr(stack.connections[2 * i], name).copy_(layer.lambdas[k])
            named[f"{at(2 * i)}{name}"] = layer.lambdas[k]
    return named


FAMILIES["neomme:NeoMME"] = Family(
    neomme_wiring, attention_and_mlp, fill_neomme, {"norm_eps": 0.05}, options={"elementwise_affine": False},
)  # fmt: skip


def zaya_sublayers(model):
    memory = []  # the router's state, which passes from one layer's experts to the next layer's
    model.layers[0].self_attn.register_forward_pre_hook(lambda *_: memory.clear())
    return [
        sublayer
        for layer in model.layers
        for sublayer in (Own(layer.self_attn, ("hidden_states",)), Own(layer.mlp, (), memory=memory))
    ]


def fill_zaya(model, stack):
    named = norm_weights(model, stack)
    for i, source in by_connection(model, "post_attention_residual_scale", "post_mlp_residual_scale"):
        prefix = load(stack, i, source)
        named |= {f"{prefix}residual_{part}": getattr(source, f"residual_{part}") for part in ("scale", "bias")}
        named |= {f"{prefix}branch_{part}": getattr(source, f"hidden_states_{part}") for part in ("scale", "bias")}
    return named


FAMILIES["zaya:Zaya"] = Family(
    lambda config: wirings.residual_scaling(), zaya_sublayers, fill_zaya, start=lambda model: model.layers[0],
)  # fmt: skip


def make_model(name, dtype):
    """Return a tiny model whose parameters are all far from their initial values."""
    model = build_transformers(name, **FAMILIES[name].constants, rms_norm_eps=0.05)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            size = 0.4 if parameter.dim() == 1 or key.endswith("lambdas") else 0.15
            parameter.add_(torch.randn_like(parameter) * size)
    return model.to(dtype)


def make_stack(name, model):
    """Return the model's stack, and the stack's parameters as functions of the model's."""
    family = FAMILIES[name]
    dtype = next(model.parameters()).dtype
    eps = getattr(model.config, "rms_norm_eps", None) or model.config.norm_eps
    stack = ResidualStack(
        family.sublayers(model), model.config.hidden_size, family.wiring(model.config), norm="rms", eps=eps, dtype=dtype,
        **family.options,
    ).eval()  # fmt: skip
    named = family.fill(model, stack)
    with torch.no_grad():
        for key, value in named.items():
            if ".norm_" in f".{key}":
                stack.get_parameter(key).copy_(value)
    return stack, named


def run_model(name, model, tokens):
    """Return the model's output, and the input of its first layer."""
    start, inputs = FAMILIES[name].start(model), []
    if start in [*model.layers]:
        hook = start.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    else:
        hook = start.register_forward_hook(lambda module, args, output: inputs.append(output))
    with Float64() if next(model.parameters()).dtype is torch.float64 else nullcontext():
        output = model(tokens, **({} if name.startswith("neomme") else {"use_cache": False})).last_hidden_state
    hook.remove()
    return output, inputs[0]
