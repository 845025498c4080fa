"""Kit for random models that are no plain chain: their modules, their answers, and a module that runs a function."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from support.answers import Answer, Stream
from support.random_models.chains import draw_sizes
from support.random_models.layouts import Layout
from support.random_models.model import RandomModel, Trace
from support.random_models.norms import SpelledNorm, draw_norm
from support.random_models.rows import Plan
from support.random_models.steps import Step, draw_add
from support.random_models.sublayers import Attention, draw_sublayer

PRE, POST = Plan(norm_in=True), Plan(norm_out=True)


class Graph(nn.Module):
    """Model that runs a function of itself and its inputs."""

    def __init__(self, run, **modules):
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs, **options):
        return self.run(self, *inputs, **options)


class CrossAttention(Attention):
    """Attention to a memory."""

    kind = "cross-attention"

    def forward(self, x, memory):
        return self.core(x, memory)

    def by_hand(self, x, memory):
        return self.core(x, memory)


class Kit:
    """Random parts of one model with the same norms and sizes.

    Args:
        rng: the random numbers.
        seed: the seed.
        name: the construct.
    """

    def __init__(self, rng, seed, name):
        self.rng, self.seed, self.name = rng, seed, name
        self.sizes = draw_sizes(rng)
        self.layout = Layout("batch", self.sizes)
        self.spelling, self.eps = draw_norm(rng, is_plain=True)
        self.num_layers = rng.choice((2, 2, 3))
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def d(self):
        return self.sizes.features

    def norm(self, layout=None):
        """Return a norm of the stream."""
        return SpelledNorm(self.spelling, layout or self.layout, self.d, self.eps)

    def sublayer(self, letter):
        """Return a sublayer whose kind does not depend on the number of tokens: "a", "c" (cross-attention), "f" or "o"."""
        if letter == "c":
            return CrossAttention(self.layout)
        return draw_sublayer(self.rng, letter, is_plain=True)(self.layout)

    def step(self, letter, plan=PRE, is_plain=True):
        """Return a step."""
        add = draw_add(self.rng, plan, self.layout, is_plain)
        return Step(plan, self.sublayer(letter), self.norm, add)

    def layers(self, letters="af", plan=PRE, is_plain=True, num_layers=0):
        """Return layers of steps."""
        return nn.ModuleList(
            nn.ModuleList(self.step(letter, plan, is_plain) for letter in letters)
            for _ in range(num_layers or self.num_layers)
        )

    def parts(self):
        """Return pre-LN layers and a norm."""
        return self.layers(), self.norm()

    def noise(self, *shape):
        """Return random numbers."""
        return torch.randn(shape, generator=self.generator)

    def input(self, tokens=0):
        """Return a stream (B, T, D)."""
        return self.noise(self.sizes.batch, tokens or self.sizes.tokens, self.d)

    def linears(self, count=6, inputs=0):
        return nn.ModuleList(nn.Linear(inputs or self.d, self.d) for _ in range(count))

    # --- answers ---------------------------------------------------------------------------------------------------------

    def sites(self, layers, where="layers", **changes):
        """Return the answers of the steps of layers that are at a path."""
        return [
            replace(step.answer(f"{where}.{n}.{k}"), **changes)
            for n, layer in enumerate(layers) for k, step in enumerate(layer)
        ]  # fmt: skip

    def stream(
        self, sites, wiring = "pre_ln", reason = "", final = None,
        path = "last", per_layer = 2, **facts,
    ):  # fmt: skip
        """Return the answer of a stream."""
        layers = {"num_layers": -(-len(sites) // per_layer), "per_layer": per_layer}
        facts = {"final_norm": final and final.answer(path), "width": self.d} | layers | facts
        return Stream(tuple(sites), wiring, reason, **facts)

    # --- models ----------------------------------------------------------------------------------------------------------

    def build(
        self, model, inputs, *streams, trace = None, **facts
    ):  # fmt: skip
        """Return the model with its answer."""
        answer = Answer(streams, constructs=frozenset({self.name}), **facts)
        return RandomModel(self.seed, model, tuple(inputs), answer, trace)

    def loop(
        self, layers, step = None, *, by_hand = False,
        begin = None, change = None,
        inputs = (), stream = None,
        facts = None, **modules,
    ):  # fmt: skip
        """Return a model of one stream whose steps follow each other, pre-LN unless its answer says something else.

        Args:
            layers: the steps.
            step: function `(model, k, part, x, *inputs)` that runs part k; by default `part.run(x)`.
            by_hand: True if the steps by hand are `part.by_hand(x)`, or a function of the same arguments as `step` whose write
                is added; False if there are no values by hand.
            begin: function `(model, *inputs)` that returns the first state and the other inputs.
            change: function `(model, n, x, *inputs)` of the stream before layer n.
            inputs: the inputs, by default one stream.
            stream: the answer; there is none by default if `facts` have a reason.
            facts: other facts of the answer.
            modules: other modules, in their order; `last` is the final norm.
        """
        per_layer, facts = len(layers[0]), facts or {}

        def parts(model):
            for k, part in enumerate(flatten(model.layers)):
                changes = change is not None and k % per_layer == 0
                yield k, part, partial(change, model, k // per_layer) if changes else lambda x, *_: x

        def run(model, *inputs):
            x, *others = begin(model, *inputs) if begin else inputs
            for k, part, enter in parts(model):
                x = enter(x, *others)
                x = step(model, k, part, x, *others) if step else part.run(x)
            return model.last(x) if "last" in modules else x

        def trace(model, *inputs, without=None):
            x, *others = begin(model, *inputs) if begin else inputs
            start, sites = x, []
            for k, part, enter in parts(model):
                x = enter(x, *others)
                if callable(by_hand):
                    site = by_hand(model, k, part, x, *others)
                    site.out = x + (0.0 if k == without else site.write)
                else:
                    site = part.by_hand(x, without=k == without)
                sites.append(site)
                x = site.out
            return Trace(start, sites, model.last.by_hand(x))

        if stream is None and "reason" not in facts:
            stream = self.stream(self.sites(layers), final=modules.get("last"), per_layer=per_layer)
        model = Graph(run, layers=layers, **modules)
        streams = [] if stream is None else [stream]
        return self.build(model, inputs or [self.input()], *streams, trace=trace if by_hand else None, **facts)

    def several(self, run, *parts, inputs=(), **modules):
        """Return a model of several streams, each with the path of its layers, its wiring, and the path of its final norm."""
        streams = [
            self.stream(
                self.sites(modules[path], path),
                wiring,
                final=modules.get(end),
                path=end,
                per_layer=len(modules[path][0]),
            )
            for path, wiring, end in parts
        ]
        inputs = inputs or [self.input(), self.input(self.sizes.tokens + 1)]
        return self.build(Graph(run, **modules), inputs, *streams)


def flatten(layers):
    """Return the steps of all layers."""
    return [step for layer in layers for step in layer]


def through(steps, x):
    """Return the stream after steps."""
    for step in steps:
        x = step.run(x)
    return x
