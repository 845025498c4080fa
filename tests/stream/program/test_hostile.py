"""Tests of models that look like several streams, or whose code is unusual: a wrong claim is worse than none."""

import importlib
import threading

import pytest
import torch
from torch import nn

import addnorm
from addnorm.stream.dataflow import registered_ops
from support import several_streams
from support.families import shake
from support.random_models import random_model, seeds_of
from support.several_streams import MHC, build_transformers, make_mhc
from support.stacks import encoder
from support.stream_steps import X, fused_tokens, inspect_steps, make_steps

D = 16


def test_gates_and_written_tokens_are_no_program():
    """A gate after a norm is no part of f, and tokens that are written apart are no streams."""
    cases = [random_model(seed) for seed in seeds_of("condition: gate of a sandwich", 2)]
    gates = [addnorm.inspect(case.model, *case.inputs) for case in cases]
    assert [found.wiring for found in gates] == ["unknown"] * 2
    for found in (*gates, inspect_steps(fused_tokens, X, X)):
        assert (found.program, found.unnamed, found.closes) == (None, None, False)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("other", ["mhc", "pre_ln"])
def test_program_of_a_part_of_the_model_is_not_its_wiring(other, before):
    second = make_mhc() if other == "mhc" else encoder("pre_ln")
    parts = [make_mhc(), nn.Linear(D, D), second]
    model = nn.Sequential(*(parts[::-1] if before else parts)).eval()
    found = addnorm.inspect(model, X)
    assert found.program is None
    assert not found.closes
    reason = found.unknown[0].reason
    assert other == "pre_ln" or "4 sublayers of mhc close, but" in reason
    assert other == "pre_ln" or reason.endswith("elsewhere: inspect each part of the model by itself")
    assert not addnorm.verify(model, X, wiring=MHC)


def test_read_of_a_state_and_the_embedding_is_no_row():
    """Within the first block the state is one stream whose sublayers also read the embedding, in one norm with it."""
    model = shake(build_transformers("inkling2:Inkling2Text", n_layers_per_attn_res_block=8))
    ids = torch.randint(4, 64, (2, 12))
    found = addnorm.inspect(model, input_ids=ids, use_cache=False)
    assert (found.wiring, found.closes, found.program.sizes) == ("attention_residuals", True, [1] + 12 * [2])
    assert not addnorm.verify(model, input_ids=ids, use_cache=False, wiring="pre_ln")


@pytest.mark.parametrize("trained", [False, True])
def test_coefficients_before_training_prove_no_formula(trained):
    """Where they are the same for all tokens, another formula may have them: the text says so."""
    model = encoder("mhc")
    text = " ".join(str(addnorm.inspect(shake(model) if trained else model, X)).split())
    assert ("another formula may give them" in text) != trained


@pytest.mark.parametrize("wiring", ["mhc", "independent_hc", "gated_residual", "gated_mix", "reversible", "ngpt"])
@pytest.mark.parametrize("shape", [(1, 5), (1, 1)])
def test_batch_of_one_has_all_sublayers(wiring, shape):
    model, x = shake(encoder(wiring)), torch.randn(*shape, D)
    found = addnorm.inspect(model, x)
    assert (found.wiring, len(found.program.sites)) == (wiring, 4)
    assert addnorm.verify(model, x, wiring=wiring).agrees


@pytest.mark.parametrize(
    ("fault", "words"), [("", "agrees"), ("transposed", "is transposed"), ("turned write", "in the opposite order")]
)
def test_streams_may_be_as_many_as_features(fault, words, monkeypatch):
    monkeypatch.setattr(several_streams, "N", 6)
    monkeypatch.setattr(several_streams, "D", 6)
    found = addnorm.verify(make_mhc(faults=fault), torch.randn(2, 5, 6), wiring=addnorm.wirings.mhc(6, iterations=6))
    assert found.inspection.program.sizes == 5 * [6]
    assert found.agrees == (not fault)
    assert words in str(found).replace("\n", " ")


def change_branches(change):
    """Return mHC by hand, whose branch `change` computes from the module and what it reads."""
    model = make_mhc()
    for site in model.sites:
        site.branch = lambda read, site=site: change(site, read)
    return model


def test_factor_of_what_a_sublayer_reads_is_a_difference():
    model = change_branches(lambda site, read: site.down(site.up(0.5 * site.norm(read)).relu()))
    assert addnorm.inspect(model, X).wiring != "mhc"
    found = addnorm.verify(model, X, wiring=MHC)
    assert [str(one) for one in found.deviations] == [
        "the factor of what the sublayer reads is 0.5, expected 1: in all 4"
    ]


@pytest.mark.parametrize("form", ["product", "sum"])
def test_rows_of_mixed_blocks_are_not_the_whole_model(form):
    def run(m, x):
        """Run hyper-connections around blocks with residuals of their own, which are post-LN; [A b] multiplies [X; w]."""
        streams = x.unsqueeze(-2).repeat(1, 1, 3, 1)
        for k, (read, write) in enumerate(zip(reads, writes, strict=True)):
            r = read @ streams
            for j in (2 * k, 2 * k + 1):
                r = m.norms[j](r + m.mlps[j](r))
            joined = torch.cat([streams, r.unsqueeze(-2)], -2)
            streams = write @ joined if form == "product" else (write[..., None] * joined.unsqueeze(-3)).sum(-2)
        return streams.sum(-2)

    model = make_steps(run)
    reads, writes = (nn.ParameterList(torch.randn(size) for _ in range(2)) for size in ((3,), (3, 4)))
    model.reads, model.writes = reads, writes
    found = addnorm.inspect(model, X)
    assert not found.closes
    assert "parts of a model of several streams" in str(found.unknown[-1].reason)
    assert not addnorm.verify(model, X, wiring="post_ln").agrees


def compile_model(model):
    return torch.compile(model, backend="eager")


def replace_forward(model):
    forward = model.forward
    model.forward = lambda x: (
        1.0 * forward(x)
    )  # as torch.compile(model.forward): a copy of the model calls the original
    return model


def hold_lock(model):
    model.lock = threading.Lock()  # it cannot be copied
    return model


def to_buffers(model):
    for module in [*model.modules()]:
        for name in {"phi", "alpha", "beta"} & {*module._parameters}:
            module.register_buffer(name, module._parameters.pop(name).detach())
    return model


def make_untrained(fault):
    """Return an mHC all of whose streams stay copies of each other."""
    model = make_mhc(faults=fault)
    for site in model.sites:
        site.phi.data.zero_()
        site.beta.data.zero_()
    return model


@pytest.mark.parametrize("wrap", [compile_model, replace_forward, hold_lock, to_buffers])
def test_error_before_training_is_found_in_changed_models(wrap):
    found = [addnorm.verify(wrap(make_untrained(fault)), X, wiring=MHC) for fault in ("", "transposed")]
    assert found[0].agrees, str(found[0])
    assert [one.found for one in found[1].deviations] == ["transposed"]


def test_error_before_training_is_found_where_numbers_overflow(monkeypatch):
    monkeypatch.setattr(importlib.import_module("addnorm.stream.verify"), "SHARES", (1e30, 1.0))
    found = addnorm.verify(make_untrained("transposed"), X, wiring=MHC)
    assert [one.found for one in found.deviations] == ["transposed"]


def test_dropout_of_an_output_belongs_to_the_sublayer():
    model = change_branches(lambda site, read: nn.functional.dropout(site.down(site.up(site.norm(read)).relu()), 0.3))
    assert addnorm.verify(model, X, wiring=MHC).agrees
    model = encoder("gated_mix", dropout=0.3).train()
    found = addnorm.verify(model, X, wiring="gated_mix")
    assert not found
    assert found.unproven[0].reason.endswith("call model.eval() before")


def test_verify_and_inspect_leave_generator_and_parameters():
    model = make_mhc()
    before = {name: (tensor.detach().clone(), tensor._version) for name, tensor in model.named_parameters()}
    state = torch.get_rng_state()
    addnorm.inspect(model, X)
    addnorm.verify(model, X, wiring=MHC)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, before[name][0]), name
        assert tensor._version == before[name][1], name


@torch.library.custom_op("addnorm_test::mix_streams", mutates_args=())
def mix_streams(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return a @ x + b.unsqueeze(-1) * w.unsqueeze(-2)


@pytest.mark.parametrize("product", ["...ij,...jd->...id", None])
def test_registered_write_of_all_streams_is_analyzed(product, monkeypatch):
    def equation(x, a, b, w):
        mixed = a @ x if product is None else torch.einsum(product, a, x)
        return mixed + b.unsqueeze(-1) * w.unsqueeze(-2)

    model = make_mhc().requires_grad_(False)
    model.write = torch.ops.addnorm_test.mix_streams
    unknown = addnorm.inspect(model, X).unknown
    assert any('register_operator("addnorm_test::mix_streams"' in part.reason for part in unknown)
    monkeypatch.setattr(registered_ops, "EQUATIONS", {**registered_ops.EQUATIONS})
    addnorm.stream.register_operator("addnorm_test::mix_streams", equation)
    for fault in ("", "transposed"):
        model = make_mhc(faults=fault).requires_grad_(False)
        model.write = torch.ops.addnorm_test.mix_streams
        assert addnorm.verify(model, X, wiring=MHC).agrees == (not fault)


def test_outputs_without_a_finite_number_are_the_first_reason():
    model = encoder("mhc")
    found = addnorm.inspect(model, torch.full_like(X, torch.nan))
    assert not found.closes
    assert "no number of its output is finite" in found.unknown[0].reason
    assert not addnorm.inspect(model, X).unknown


@pytest.mark.parametrize(
    ("module", "function", "build"),
    [
        ("layout.dimensions", "list_carried", lambda: encoder("denseformer", 8)),
        ("find.unexplained", "_list_sources", lambda: make_mhc("tuple")),
    ],
)
def test_sums_of_many_states_are_followed_once(module, function, build, monkeypatch):
    module, calls = importlib.import_module(f"addnorm.stream.{module}"), []
    follow = getattr(module, function)
    monkeypatch.setattr(module, function, lambda value: calls.append(value) or follow(value))
    found = addnorm.inspect(build(), X)
    assert found.closes
    assert len(calls) <= 6 * len({*calls})  # each path apart: at least 20 times, and twice as often with each layer
