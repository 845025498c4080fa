"""Chains: random models of one stream whose sublayers follow each other, for any rule of rows.py."""

import random
from dataclasses import dataclass, field

import torch
from torch import nn

from support.answers import ANY, Answer, Stream
from support.families import shake
from support.random_models.layouts import Layout, Sizes
from support.random_models.model import RandomModel, Trace
from support.random_models.norms import SpelledNorm, draw_norm
from support.random_models.rows import RULES
from support.random_models.steps import Step, draw_add, propagate
from support.random_models.sublayers import draw_sublayer

VOCAB, SMALL = 31, Sizes(3, 2, 3, 8)


@dataclass
class Options:
    """Choices of a chain.

    Args:
        rule: key of `RULES`.
        sizes: sizes of the input.
        layouts: layout of each layer; the stream changes its layout between layers where they differ.
        letters: kinds of the sublayers of a layer.
        num_layers: number of layers.
        is_plain: sublayers and adds in their most common spelling.
        norm: spelling of the norms and their eps.
        begin: how x_0 begins.
        end: what follows x_L.
        final_norm, embedding_norm: whether the model has these norms.
        structure: which module adds.
        shared: whether all layers are one module.
        constructs: constructs of the model.
    """

    rule: str
    sizes: Sizes
    layouts: list[Layout]
    letters: str
    num_layers: int
    is_plain: bool
    norm: tuple[str, float]
    begin: str = "linear"
    end: str = "norm"
    final_norm: bool = True
    embedding_norm: bool = False
    structure: str = "blocks"
    shared: bool = False
    constructs: set[str] = field(default_factory=set)


BEGINS = (
    "input",
    "linear",
    "embedding",
    "embedding and positions",
    "class token",
    "transposed",
    "expanded",
    "repeated",
    "scaled",
)
ENDS = (
    "norm",
    "norm",
    "head",
    "mean",
    "token",
    "norm of a token",
    "norm of the mean",
    "norm, and another norm for a head",
)
STRUCTURES = ("blocks", "residual modules", "one module", "delayed")


def draw_sizes(rng):
    """Return sizes that are all different, except in some models: as many tokens as features."""
    if rng.random() < 0.1:
        return Sizes(3, 2, 4, 8)
    return rng.choice((Sizes(3, 2, 3, 16), Sizes(2, 1, 5, 12), Sizes(2, 2, 2, 8), Sizes(5, 2, 2, 16)))


def draw_options(rng):
    """Return random choices."""
    sizes = draw_sizes(rng)
    name = rng.choice([*RULES])
    is_plain = rng.random() < 0.4
    layout = rng.choice(("batch", "batch", "batch", "sequence", "channels", "image", "image channels", "flat"))
    letters = rng.choice(("af", "af", "f", "of", "aof", "faf"))
    options = Options(
        name, sizes, [], letters, rng.choice((2, 2, 3)), is_plain, draw_norm(rng, rng.random() < 0.5),
        begin=rng.choice(BEGINS), end=rng.choice(ENDS), structure=rng.choice(STRUCTURES), shared=rng.random() < 0.08,
    )  # fmt: skip
    options.num_layers = options.num_layers if name != "mix_ln" else 3
    rule = RULES[name]
    options.final_norm = rule.final_norm != (rng.random() < 0.15)
    options.embedding_norm = rule.embedding_norm or rng.random() < 0.1
    _resolve(rng, options, layout)
    return options


def _resolve(rng, options, layout):
    """Replace choices that exclude each other, and name the constructs."""
    sizes = options.sizes
    if options.begin == "class token" and layout.startswith("image"):
        options.begin = "linear"
    if options.begin == "class token":  # a mixer over tokens would need its own number of tokens
        sizes = options.sizes = Sizes(sizes.batch, 1, sizes.tokens + 1, sizes.features)
    permutes = rng.random() < 0.3
    options.layouts = [Layout(layout, sizes, permutes)] * options.num_layers
    if layout != "batch" and rng.random() < 0.2 and not options.shared:
        options.layouts[1] = Layout("batch", sizes)
        options.constructs.add("layout changes between layers")
        options.structure = "blocks" if options.structure == "delayed" else options.structure
    if options.begin == "transposed":
        options.constructs.add("x_0 is a transposed input")
    rule = RULES[options.rule]
    is_delayed = options.structure == "delayed"
    simple = options.rule in ("pre_ln", "sandwich", "reordered", "residual_multiplier", "layer_scale")
    if is_delayed and not (simple and options.final_norm and options.end.startswith("norm") and not options.shared):
        options.structure = "blocks"
    if options.shared and options.rule in ("mix_ln", "layernorm_scaling"):
        options.shared = False
    if not options.final_norm and options.end.startswith("norm"):
        options.end = "head"
    if options.end in ("norm of a token", "norm of the mean"):
        options.final_norm = False
    options.constructs |= {
        f"wiring: {options.rule}", f"norm: {options.norm[0]}", f"layout: {layout}", f"start: {options.begin}",
        f"end: {options.end}", f"modules: {options.structure}",
    }  # fmt: skip
    if options.embedding_norm and not rule.embedding_norm:
        options.constructs.add("embedding norm")
    if options.shared:
        options.constructs.add("shared layers")
    if options.sizes.tokens == options.sizes.features:
        options.constructs.add("as many tokens as features")


class Chain(nn.Module):
    """Model of one stream: a beginning, layers of steps, an end."""

    def __init__(self, rng, options):
        super().__init__()
        self.options = options
        sizes, first, last = options.sizes, options.layouts[0], options.layouts[-1]
        d = sizes.features
        width = d if options.begin in ("input", "transposed") else 7
        if options.begin.startswith("embedding"):
            self.embed = nn.Embedding(VOCAB, d)
            self.positions = nn.Embedding(sizes.tokens, d)
        elif width != d:
            self.embed = nn.Linear(width, d)
        if options.begin in ("class token", "expanded", "repeated"):
            self.token = nn.Parameter(
                torch.zeros(1, 1, d) if options.begin == "class token" else torch.zeros(sizes.tokens, d)
            )
        self.first = self.make_norm(first) if options.embedding_norm else None
        plans = RULES[options.rule].make(rng, options.num_layers, len(options.letters))
        makes = [draw_sublayer(rng, letter, options.is_plain) for letter in options.letters]
        adds = [draw_add(rng, plan, first, options.is_plain) for plan in plans[0]]
        layers = [
            Layer(self.make_steps(layer, makes, adds, options.layouts[k]), options) for k, layer in enumerate(plans)
        ]
        layers[0].steps[0].clones = options.begin in ("input", "transposed") and self.first is None
        self.layers = nn.ModuleList([layers[0]] * len(layers) if options.shared else layers)
        options.constructs |= {f"add: {add}" for step in layers[0].steps for add in [step.add]}
        options.constructs |= {f"sublayer: {type(step.f).__name__}" for step in layers[0].steps}
        self.last = self.make_norm(last) if options.final_norm or "norm of" in options.end else None
        self.other = self.make_norm(last) if "another" in options.end else None
        self.head = nn.Linear(d, 5) if options.end in ("head", "mean", "token") or self.other is not None else None

    def make_norm(self, layout):
        spelling, eps = self.options.norm
        return SpelledNorm(spelling, layout, self.options.sizes.features, eps)

    def make_steps(self, plans, makes, adds, layout):
        shared = nn.Parameter(torch.ones(())) if plans[0].is_shared else None
        steps = []
        for plan, make, add in zip(plans, makes, adds, strict=True):
            can_shift = layout.features_last or not add.startswith("residual bias")
            steps.append(Step(plan, make(layout), self.make_norm, add if can_shift else "x + f", shared))
        return steps

    def start(self, x):
        """Return x_0 in the canonical layout, before its norm."""
        match self.options.begin:
            case "input":
                return x
            case "transposed":  # the input is sequence first
                return x.transpose(0, 1)
            case "embedding":
                return self.embed(x)
            case "embedding and positions":
                return self.embed(x) + self.positions(torch.arange(x.shape[1]))
            case "class token":
                return torch.cat((self.token.expand(len(x), -1, -1), self.embed(x)), 1)
            case "expanded":
                return self.token.expand(len(x), -1, -1) + self.embed(x).mean(1, keepdim=True)
            case "repeated":
                return self.token.unsqueeze(0).repeat(len(x), 1, 1) * self.embed(x).mean(1, keepdim=True)
            case "scaled":
                return self.embed(x) * self.options.sizes.features**0.5
        return self.embed(x)

    def forward(self, x):
        layouts = self.options.layouts
        x = layouts[0].apply(self.start(x))
        x = x if self.first is None else self.first(x)
        if self.options.structure == "delayed":
            return self.run_delayed(x)
        for k, layer in enumerate(self.layers):
            x = x if k == 0 else layouts[k - 1].convert(x, layouts[k])
            if self.options.structure == "one module":
                for step in layer.steps:
                    x = step.run(x)
            else:
                x = layer(x)
        return self.finish(x)

    def run_delayed(self, x):
        """Return the output where each write is added just before the next norm."""
        step = None
        pending = x
        for layer in self.layers:
            for after in layer.steps:
                x = x if step is None else step.sum(x, pending)
                step, pending = after, after.branch(x)
        return self.finish(step.sum(x, pending))

    def finish(self, x, by_hand=False):
        """Return the model's output from x_L; by hand, x_L is canonical and norms are computed by their definition."""
        undo, norm = self.options.layouts[-1].undo, nn.Module.__call__
        if by_hand:
            undo, norm = (lambda t: t), SpelledNorm.by_hand
        end = self.options.end
        if end in ("norm of a token", "norm of the mean"):
            x = undo(x)
            x = x[:, 0] if end.endswith("token") else x.mean(1)
            return self.last.by_hand(x) if by_hand else self.last._compute(x)
        aside = None if self.other is None else self.head(undo(norm(self.other, x)).mean(1))
        x = undo(x if self.last is None else norm(self.last, x))
        if aside is not None:
            return torch.cat((x.mean(1), aside), -1)
        x = x.mean(1) if end == "mean" else x[:, 0] if end == "token" else x
        return x if self.head is None or end.startswith("norm") else self.head(x)

    def trace(self, x, without=None):
        """Return the values by hand."""
        x = self.start(x)
        x = x if self.first is None else self.first.by_hand(x)
        start, sites, parts = x, [], [x, torch.zeros_like(x)]
        for k, step in enumerate(step for layer in self.layers for step in layer.steps):
            sites.append(step.by_hand(x, without=k == without))
            x = sites[-1].out
            parts = propagate(step, parts, sites[-1])
        return Trace(start, sites, self.finish(x, by_hand=True), parts)

    def answer(self):
        """Return the answer of the stream."""
        rule = RULES[self.options.rule]
        shared = self.options.shared
        sites = [
            step.answer(f"layers.{0 if shared else n}.steps.{k}")
            for n, layer in enumerate(self.layers) for k, step in enumerate(layer.steps)
        ]  # fmt: skip
        has_free_end = (
            "norm of" in self.options.end
        )  # a norm of a part of x_L, which may count as the final norm or not
        final = self.last.answer("last") if self.last is not None and not has_free_end else None
        return Stream(
            tuple(sites), rule.wiring, rule.reason, self.first and self.first.answer("first"), ANY if has_free_end else final,
            num_layers=self.options.num_layers, per_layer=len(self.options.letters), width=self.options.sizes.features,
        )  # fmt: skip


class Layer(nn.Module):
    """Layer whose steps run in its own forward, or as modules."""

    def __init__(self, steps, options):
        super().__init__()
        self.steps = nn.ModuleList(steps)
        self.structure = options.structure

    def forward(self, x):
        for step in self.steps:
            x = step(x) if self.structure == "residual modules" else step.run(x)
        return x


def make_input(options, generator):
    """Return the input of a chain."""
    sizes = options.sizes
    tokens = sizes.tokens - (options.begin == "class token")
    if options.begin.startswith("embedding"):
        return torch.randint(0, VOCAB, (sizes.batch, tokens), generator=generator)
    width = sizes.features if options.begin in ("input", "transposed") else 7
    shape = (tokens, sizes.batch, width) if options.begin == "transposed" else (sizes.batch, tokens, width)
    return torch.randn(shape, generator=generator)


def build_chain(rng, seed):
    """Return a random chain."""
    options = draw_options(rng)
    model = Chain(rng, options)
    answer = Answer((model.answer(),), constructs=frozenset(options.constructs))
    return RandomModel(seed, model, (make_input(options, torch.Generator().manual_seed(seed)),), answer, Chain.trace)


def make_chain(layouts, begin="linear", letters="af", sizes=SMALL, first=None):
    """Return a pre-LN chain of two layers in the given layouts, in float64; `first` is the first sublayer of each layer."""
    layouts = [Layout(layouts[k % len(layouts)], sizes) for k in range(2)]
    options = Options("pre_ln", sizes, layouts, letters, 2, True, ("nn.LayerNorm", 1e-5), begin=begin)
    torch.manual_seed(0)
    model = Chain(random.Random(0), options)
    for layer, layout in zip(model.layers, layouts, strict=True):
        layer.steps[0].f = first(layout) if first else layer.steps[0].f
    x = make_input(options, torch.Generator().manual_seed(0))
    inputs = (x.double() if x.is_floating_point() else x,)
    return RandomModel(0, shake(model.eval()).double(), inputs, Answer((model.answer(),)), Chain.trace)
