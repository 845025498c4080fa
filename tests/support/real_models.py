"""Tiny random models of transformers, and each one again as a `ResidualStack` around its own sublayers.

`FAMILIES` says for each model which wiring it has, which modules are its sublayers and norms, and which modules have the
parameters of the stack's coefficients, which `load_transformers` reads.
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


def attention_and_mlp(model):
    """Return the sublayers of a model whose layers have `self_attn` (or `linear_attn`) and `mlp`."""
    sublayers = []
    for layer in model.layers:
        attention = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
        sublayers += [Own(attention, ("hidden_states",)), Own(layer.mlp, ("hidden_states",))]
    return sublayers


@dataclass
class Family:
    """A model of transformers, and how to build it as a stack.

    Attributes:
        wiring: a function of the configuration.
        sources: the modules of a layer that the coefficients of its two connections load.
        head: the module of the model that those of the head load; "" for none.
        norms: the modules of a layer that are the norms of its two connections; none for a stack without norms.
        offset: what the model adds to the weights of those norms.
        constants: options of its configuration beside those of several_streams.py, so that no constant has its default.
        sublayers: a function of the model.
        adapt: a function of the model and the stack, for all else that the stack takes over.
        start: the module whose output is the stack's input; the first layer if it is its input.
        options: of the stack.
    """

    wiring: Callable[[Any], Wiring]
    sources: tuple[str, ...] = ()
    head: str = ""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    offset: float = 0.0
    constants: dict[str, Any] = field(default_factory=dict)
    sublayers: Callable[[Any], list[nn.Module]] = attention_and_mlp
    adapt: Callable[[Any, ResidualStack], None] = lambda model, stack: None
    start: Callable[[Any], nn.Module] = lambda model: model.embed_tokens
    options: dict[str, Any] = field(default_factory=dict)


def by_connection(model, stack, names):
    """Yield each connection with its layer and the name of a module: names are those of the modules of a layer's connections."""
    for i, layer in enumerate(model.layers):
        for k, name in enumerate(names):
            yield stack.connections[2 * i + k], layer, name


def mhc(config, head):
    options = {"iterations": config.hc_sinkhorn_iters, "eps": config.hc_eps, "norm_eps": config.rms_norm_eps}
    return wirings.mhc(config.hc_mult, head, **options)


def inkling_sublayers(model):
    sublayers = []
    for layer in model.layers:
        reads = ("hidden_states", "key_hidden_states", "value_hidden_states")
        reads = reads if hasattr(layer, "q_input_layernorm") else reads[:1]
        sublayers.append(Own(layer.self_attn, reads, then=layer.post_attention_convolution))
        sublayers.append(Own(layer.mlp, ("hidden_states",), then=layer.post_mlp_convolution))
    return sublayers


POST_NORMS = "post_attention_layernorm", "post_feedforward_layernorm"
PRE_NORMS = "input_layernorm", "pre_feedforward_layernorm"


def copy_branch_norms(model, stack):
    for connection, layer, name in by_connection(model, stack, POST_NORMS):
        connection.norm_branch.weight.copy_(getattr(layer, name).weight)


def keep_branch_norms(model, stack):
    for connection, layer, name in by_connection(model, stack, POST_NORMS):
        connection.norm_branch = Own(getattr(layer, name))


def neomme_wiring(config):
    """Return NeoMME's wiring as data: attention reads N(λ0 x + λ1 x0), and both sublayers add to x alone."""
    b, keep = config.residual_multiplier, identity(2)
    pair = (Learned(1.0, name="lambda_x"), Learned(0.0, name="lambda_x0"))

    def stage(place):
        return Stage(2, pair if place.sublayer == 0 else (1, 0), keep, (b, 0), norm_in=True)

    return Wiring("neomme", stage, final_norm=True, embedding_norm=True, embedding=(1.0, 1.0), head=Head(2, (1, 0)))


def copy_lambdas(model, stack):
    for layer, connection in zip(model.layers, stack.connections[::2], strict=True):
        for value, name in zip(layer.lambdas, ("lambda_x", "lambda_x0"), strict=True):
            getattr(connection, name).copy_(value)


def zaya_sublayers(model):
    memory = []  # the router's state, which passes from one layer's experts to the next layer's
    model.layers[0].self_attn.register_forward_pre_hook(lambda *_: memory.clear())
    return [
        sublayer
        for layer in model.layers
        for sublayer in (Own(layer.self_attn, ("hidden_states",)), Own(layer.mlp, (), memory=memory))
    ]


HC = "attn_hc", "ffn_hc"
FAMILIES = {
    "deepseek_v4:DeepseekV4": Family(
        lambda config: mhc(config, "learned"), HC, "hc_head", constants={"hc_eps": 0.02, "hc_sinkhorn_iters": 4},
    ),
    "glm5_next:Glm5NextText": Family(lambda config: mhc(config, "mean"), HC, constants={"hc_eps": 0.02, "hc_sinkhorn_iters": 3}),
    "hy_v4:HYV4": Family(
        lambda config: wirings.independent_hc(config.hc_mult, config.hc_magnitude, config.hc_eps, config.rms_norm_eps),
        HC, "hc_head", constants={"hc_eps": 0.02, "hc_magnitude": 1.5},
    ),
    "qwen4_exp:Qwen4ExpText": Family(
        lambda config: wirings.gated_residual(config.hc_count, config.hc_lowrank, config.rms_norm_eps),
        ("attn_hyper_connection", "mlp_hyper_connection"), "hyper_connection_mixer", norms=(),
    ),
    "inkling2:Inkling2Text": Family(
        lambda config: wirings.attention_residuals(config.n_layers_per_attn_res_block, normed_values=True, reads=(1, 1, 3)),
        ("attention_input", "mlp_input"), "final_input", sublayers=inkling_sublayers,
    ),
    "beam:Beam": Family(lambda config: wirings.depth_scaled(), norms=PRE_NORMS, adapt=copy_branch_norms),
    "muse_spark:MuseSparkText": Family(
        lambda config: wirings.gated_mix(config.residual_gate_temperature),
        ("post_attention_residual_gate", "post_feedforward_residual_gate"), norms=PRE_NORMS, offset=1.0, adapt=keep_branch_norms,
        constants={"residual_gate_temperature": 0.06},  # so small that the clamp of 1 - b^2 binds
    ),
    "neomme:NeoMME": Family(
        neomme_wiring, norms=(), adapt=copy_lambdas, constants={"norm_eps": 0.05}, options={"elementwise_affine": False},
    ),
    "zaya:Zaya": Family(
        lambda config: wirings.residual_scaling(), ("post_attention_residual_scale", "post_mlp_residual_scale"),
        sublayers=zaya_sublayers, start=lambda model: model.layers[0],
    ),
}  # fmt: skip


def make_model(name, dtype):
    """Return a tiny model whose parameters are all far from their initial values."""
    model = build_transformers(name, **FAMILIES[name].constants, rms_norm_eps=0.05)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            size = 0.4 if parameter.dim() == 1 or key.endswith("lambdas") else 0.15
            parameter.add_(torch.randn_like(parameter) * size)
    return model.to(dtype)


def make_stack(name, model):
    """Return the model's stack."""
    family = FAMILIES[name]
    dtype = next(model.parameters()).dtype
    eps = getattr(model.config, "rms_norm_eps", None) or model.config.norm_eps
    stack = ResidualStack(
        family.sublayers(model), model.config.hidden_size, family.wiring(model.config), norm="rms", eps=eps, dtype=dtype,
        **family.options,
    ).eval()  # fmt: skip
    for connection, layer, source in by_connection(model, stack, family.sources):
        if getattr(layer, source) is not None:
            connection.coefficients.load_transformers(getattr(layer, source))
    if family.head:
        stack.head.coefficients.load_transformers(getattr(model, family.head))
    with torch.no_grad():
        for connection, layer, name in by_connection(model, stack, family.norms):
            is_single = hasattr(layer, name)
            names = [name] if is_single else [f"{part}_{name}" for part in "qkv"]
            for norm, other in zip([connection.norm_in] if is_single else connection.norm_in, names, strict=True):
                norm.weight.copy_(family.offset + getattr(layer, other).weight)
        if family.norms:
            stack.norm_final.weight.copy_(model.norm.weight)
        family.adapt(model, stack)
    return stack


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
