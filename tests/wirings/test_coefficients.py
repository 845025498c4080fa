"""Modules that compute coefficients: their formulas, and the functions that they give before training."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from addnorm import ResidualStack, wirings
from addnorm.wirings import Place, coefficients
from support import stream_formulas
from support.equality import assert_same
from support.stream_stacks import WIRINGS, Branch, branches
from support.torch_transformers import randomize

D, N = 5, 3


def test_sources_are_divided_with_the_eps_of_the_module():
    module = randomize(coefficients.SourceAttention(D, N, 1, Place(1, 0, 3, 2), eps=0.5), 1.0).double()
    sources = torch.randn(N, 7, D, dtype=torch.float64).unbind()
    expected = stream_formulas.attend_over_depth(sources, module.query[0], module.weight, 0.5)
    assert_close(sum(p * x for p, x in zip(module(sources).collapse[0], sources, strict=True)), expected)
    assert_close(module.read(sources)[0], expected)


@pytest.mark.parametrize(("eps", "a"), [(None, 1e-3**0.5), (0.04, 0.2)])
def test_gated_mix_keeps_a_share_of_the_stream(eps, a):
    module = coefficients.GatedMix(D, 1, 1, Place(1, 0, 3, 2), **({} if eps is None else {"eps": eps}))
    torch.nn.init.constant_(module.gate, 3.0)  # b is so near to 1 that 1 - b^2 is below eps
    assert_close(module.compute(()).mix[0][0], torch.full((D,), a))


CONSTANTS = {  # options of a wiring that the modules of its sublayers have, and its head where it has such an attribute
    "mhc": {"iterations": 7, "eps": 1e-3, "norm_eps": 1e-4},
    "independent_hc": {"magnitude": 1.5, "eps": 1e-3, "norm_eps": 1e-4},
    "gated_residual": {"rank": 5, "eps": 1e-3},
    "gated_mix": {"temperature": 0.7},
    "hyper_connections": {"dynamic": False},
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_options_of_a_wiring_reach_sublayers_and_head(name):
    stack = ResidualStack([nn.Linear(D, D)] * 2, D, getattr(wirings, name)(**CONSTANTS[name]))
    modules = [m for m in stack.modules() if isinstance(m, coefficients.base.CoefficientModule)]
    assert len(modules) == 2 + (name in ("mhc", "independent_hc", "gated_residual"))
    assert {key: getattr(modules[0], key) for key in CONSTANTS[name]} == CONSTANTS[name]
    for module in modules:
        assert {key: vars(module)[key] for key in CONSTANTS[name] if key in vars(module)}.items() <= CONSTANTS[
            name
        ].items()


DECAYS = {  # parameters that weight decay is for: the projections that move the coefficients, as in hyper-connections' paper
    "hyper_connections": {"project_collapse", "project_mix", "project_inject"},
    "mhc": {"project"},
    "mhc_with_mean": {"project"},
    "single_pass_mhc": {"project"},
    "independent_hc": {"project"},
    "gated_residual": {"down", "up", "project_inject"},
    "muddformer": {"up", "down"},
    "muddformer_three_reads": {"up", "down"},
}


@pytest.mark.parametrize("name", WIRINGS)
def test_only_projections_and_sublayers_decay(name):
    model = nn.Sequential(nn.Linear(8, 8), ResidualStack(branches(name), 8, WIRINGS[name]))
    decays = {key for key, _ in model.named_parameters()} - model[1].wiring.no_decay(model)
    others = {key for key in decays if ".sublayer." in key or key.startswith("0.")}
    assert {key.rpartition(".")[2] for key in decays - others} == DECAYS.get(name, set())
    assert len(others) == 2 + 2 * len(model[1].connections)


@pytest.mark.parametrize("per_layer", [1, 2, 3])
@pytest.mark.parametrize("kind", [coefficients.HyperConnection, coefficients.ManifoldConnection])
def test_sublayer_k_reads_stream_k_mod_n_at_first(kind, per_layer):
    streams = torch.eye(N).unsqueeze(-1).expand(N, N, D)  # stream k is 1 in token k, and 0 in the others
    for k in range(4 * per_layer):
        module = kind(D, N, 1, Place(*divmod(k, per_layer), 4, per_layer))
        collapse = module(streams).collapse
        assert (collapse.expand(N, N).argmax(-1) == k % N).all()


def make_pair(wiring, reads=1, **options):
    """Return two float64 stacks around the same sublayers, with the same random norms.

    With `reads` the first sublayer of each layer has so many inputs; in the second stack they are equal.
    """
    own = [Branch(reads if i % 2 == 0 else 1) for i in range(8)]
    stack = ResidualStack(own, 8, wiring, **options).double()
    plain = ResidualStack([lambda x, f=f: f(*[x] * f.reads) for f in own], 8, "pre_ln", **options).double()
    with torch.no_grad():
        for connection, like in zip(stack.connections, plain.connections, strict=True):
            norms = connection.norm_in if isinstance(connection.norm_in, nn.ModuleList) else [connection.norm_in]
            randomize(like.norm_in, 0.3)
            for norm in norms:
                norm.load_state_dict(like.norm_in.state_dict())
    return stack, plain


PRE_LN = {
    # The output is the norm of the streams' sum, n times pre-LN's stream.
    "static_hyper_connections": (wirings.hyper_connections(3, dynamic=False), {"eps": 0.0}),
    "dynamic_hyper_connections": (wirings.hyper_connections(4), {"eps": 0.0}),
    "one_stream": (wirings.hyper_connections(1), {}),
    # The rows of A sum to 1 without its eps, all streams stay equal, and the norm removes the sum of c.
    "mhc": (wirings.mhc(3, eps=0.0), {"eps": 0.0}),
    "mhc_with_mean": (wirings.mhc(4, head="mean", eps=0.0), {"eps": 0.0}),
    "single_pass_mhc": (wirings.mhc(3, single_pass=True, eps=0.0), {"eps": 0.0}),
    # A zero query reads the mean of the sources, and the norm removes the factor.
    "attention_residuals": (wirings.attention_residuals(), {"eps": 0.0}),
    "attention_residuals_by_block": (wirings.attention_residuals(2), {"eps": 0.0}),
    "denseformer": (wirings.denseformer(), {}),
    "denseformer_with_dilation": (wirings.denseformer(dilation=2, period=3), {}),
    "muddformer": (wirings.muddformer(), {}),
    "muddformer_with_three_reads": (wirings.muddformer(reads=3), {"reads": 3}),
}


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("name", PRE_LN)
def test_wiring_begins_as_pre_ln(name, norm):
    wiring, options = PRE_LN[name]
    stack, plain = make_pair(wiring, norm=norm, **options)
    if name in ("mhc", "mhc_with_mean", "single_pass_mhc"):
        with torch.no_grad():
            for connection in stack.connections:  # whatever c and A are
                c = connection.coefficients
                c.bias[: c.n].normal_()
                c.bias[2 * c.n :].normal_()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    assert_close(stack(x), plain(x), rtol=1e-9, atol=1e-10)


NORMED = {"weighted": False, "normed_values": True, "scaled": True}
SOURCES = {  # the module, its options, and the constants of a source but for the eps of its norm, 1e-2
    "manifold": (coefficients.ManifoldConnection, {"iterations": 3, "eps": 1e-3, "norm_eps": 1e-2},
                 {"hc_mult": N, "hc_sinkhorn_iters": 3, "hc_eps": 1e-3}),
    "independent": (coefficients.IndependentConnection, {"eps": 1e-3, "norm_eps": 1e-2},
                    {"hc_mult": N, "hc_post_magnitude": 2.0, "hc_eps": 1e-3}),
    "sigmoid_read": (coefficients.SigmoidRead, {"norm_eps": 1e-2}, {"hc_mult": N, "eps": 1e-6}),
    "gated_mix": (coefficients.GatedMix, {}, {"temperature": 0.3, "eps": 1e-3}),
    "attention_of_normed": (coefficients.SourceAttention, NORMED | {"eps": 1e-2}, {}),
}  # fmt: skip
THEIRS = {
    "project": ("fn", "hc_fn"),
    "bias": ("base", "hc_base"),
    "scale": ("scale", "hc_scale"),
    "gate": ("gate",),
    "query": ("query",),
}


@pytest.mark.parametrize("name", SOURCES)
def test_load_refuses_a_source_with_other_constants(name):
    kind, options, constants = SOURCES[name]
    module = kind(D, N, 1, Place(1, 0, 3, 2), **options)
    own = {theirs: p for key, p in module.named_parameters() for theirs in THEIRS[key]}

    def source(changed=None):
        norm = SimpleNamespace(eps=1e-2 * (1 + (changed == "norm")))
        values = {key: value * (1 + (key == changed)) for key, value in constants.items()}
        return SimpleNamespace(**own, **values, input_norm=norm, norm=norm)

    module.load_transformers(source())
    before = [p.clone() for p in module.parameters()]
    for changed in [*constants, *["norm"] * (name != "gated_mix")]:
        with pytest.raises(
            ValueError, match=r"^\w+ is .*, expected .* as in the source: build the wiring with that \w+\.$"
        ):
            module.load_transformers(source(changed))
    assert_same([*module.parameters()], before)


def test_load_says_which_module_has_no_counterpart():
    module = coefficients.HyperConnection(D, N, 1, Place(0, 0, 1, 2))
    with pytest.raises(NotImplementedError, match=r"^HyperConnection has no counterpart in transformers\.$"):
        module.load_transformers(module)
