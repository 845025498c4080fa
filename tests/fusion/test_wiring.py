"""Tests of the structural part of the proof: changes of a graph outside of its fused calls are found."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import addnorm
from addnorm.fusion import backend as module
from addnorm.fusion import pattern, rewrite
from support.call_faults import all_hold, assert_calls_hold, capture, change_results, fuse_copies
from support.changed_models import Function
from support.fused_model import QUIET, D, Model, X, fuse
from support.graph_capture import FunctionModel
from support.stream_steps import noise

pytestmark = QUIET


class Mixed(nn.Module):
    """Model with dropout, a buffer that is written, autocast, no-grad mode, and a sum with several readers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.f, self.g = nn.Linear(D, D), nn.Linear(D, D)
        self.m, self.n = nn.LayerNorm(D), nn.LayerNorm(D)
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x):
        f = F.dropout(self.f(x), 0.1)
        with torch.autocast("cpu", torch.bfloat16):
            d = self.g(x)
        with torch.no_grad():
            e = self.g(x).sum()
        h = x + f
        a = self.m(h)
        self.mean.add_(x.mean((0, 1)).detach())
        b, c = F.dropout(self.g(a), 0.1), F.dropout(h, 0.2)
        return self.n(h + b) + c + d.float() * e + h.detach().sin()


def dropouts(graph):
    return [node for node in graph.nodes if node.target is F.dropout]


def remove_write(graph, match, replaced):
    graph.erase_node(next(node for node in graph.nodes if node.target == "add_"))


def remove_dropout(graph, match, replaced):
    node = dropouts(graph)[0]
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def change_probability(graph, match, replaced):
    node = dropouts(graph)[0]
    node.args = (node.args[0], 0.11, *node.args[2:])


def exchange_dropouts(graph, match, replaced):
    first, second = dropouts(graph)[1:]
    first.prepend(second)


def insert_write(graph, match, replaced):
    node = dropouts(graph)[0]
    with graph.inserting_after(node):
        graph.call_method("mul_", (node, 1.001)).meta["example_value"] = node.meta["example_value"]


def read_y(graph, match, replaced):
    reader = next(node for node in graph.nodes if node.target == "sin").args[0]
    reader.args = (replaced[match.y[0]],)


def move_call(into):
    def change(graph, match, replaced):
        place = next(node for node in graph.nodes if getattr(node.target, "__name__", "") == into)
        call = next(node for node in graph.nodes if node.target is addnorm.add_layer_norm)
        readers = [node for node in graph.nodes if call in node.all_input_nodes]
        for node in (call, *readers):
            place.append(node)
            place = node

    return change


CHANGES = {
    "missing node add_": remove_write, "missing node f": remove_dropout,
    "arguments of f": change_probability, "place of": exchange_dropouts, "new node mul": insert_write,
    "arguments of detach": read_y, "contexts of add_layer_norm": move_call("_enter_autocast"),
    "contexts of getitem": move_call("_set_grad_enabled"),
}  # fmt: skip


@pytest.fixture(scope="module")
def graphs():
    """Return the graphs of a model whose calls hold."""
    captured = capture(Mixed(), X)
    assert_calls_hold(captured, 2)
    return captured


@pytest.mark.parametrize("name", CHANGES)
def test_change_outside_of_a_call_is_found(monkeypatch, graphs, name):
    original, calls = rewrite.insert_fused_call, []

    def insert(graph, match, replaced):
        original(graph, match, replaced)
        if not calls:
            CHANGES[name](graph, match, replaced)
        calls.append(match)

    monkeypatch.setattr(module, "insert_fused_call", insert)
    failed = [difference.name for difference in fuse_copies(graphs)[0] if not difference.holds]
    assert any(failure.startswith(name) for failure in failed), failed


def test_random_weight_moved_before_a_dropout_is_found(monkeypatch):
    def forward(m, x):
        h = x + m.f(x)
        a = F.dropout(h, 0.1)
        return F.layer_norm(h, (D,), F.dropout(m.weight, 0.5)) + a

    monkeypatch.setattr(pattern, "_check_late_parameters", lambda *_: None)
    differences, _ = fuse_copies(capture(FunctionModel(forward), X))
    assert [one.name.partition(" ")[0] for one in differences if not one.holds] == ["place"]


def test_fault_of_inputs_with_other_strides_is_found(monkeypatch):
    def forward(m, x):
        h = torch.cat([x, x], 1)[:, ::2]
        return m.norm(h + m.f(h))

    change_results(lambda y, z, x, s: (y if x.is_contiguous() else y * 1.01, z))(monkeypatch)
    differences, _ = fuse_copies(capture(FunctionModel(forward), X))
    assert not all_hold(differences)


@pytest.mark.filterwarnings("ignore")
def test_fault_in_graphs_captured_after_the_proof_raises(monkeypatch):
    """`fuse` calls the model again, to see whether its graphs are used again; a graph that this captures is proven, too."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.calls = Model(), 0

        def forward(self, x):
            self.calls += 1
            return self.model(x) + float(self.calls > 2)

    started, is_reused = [], module.ModelBackend.is_reused
    monkeypatch.setattr(module.ModelBackend, "is_reused", lambda *args: started.append(args) or is_reused(*args))
    change_results(lambda y, z, x, s: (y * 1.01 if started else y, z))(monkeypatch)
    with pytest.raises(addnorm.VerificationError):
        fuse(Counting(), X)


def test_add_inside_a_fused_norm_is_not_fused():
    """For one row of features, the bias of a norm has the shape of a residual."""

    def forward(m, x):
        z = x + m.f(x)
        centered = z - z.mean(-1, keepdim=True)
        return m.norm(centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5) * m.weight + m.bias)

    assert_calls_hold(capture(FunctionModel(forward), X[0, 0]), 1)


@pytest.mark.parametrize("is_late", [True, False])
def test_casting_is_known_from_one_row_of_few_features(is_late):
    def forward(m, x):
        z = x + x.sin()
        y = z.float() * torch.rsqrt(z.float().square().mean(-1, keepdim=True) + 1e-6)
        return y.to(z.dtype) * m.w if is_late else (y * m.w.float()).to(z.dtype)

    x = noise(5).bfloat16()
    assert_calls_hold(capture(Function(forward, 5).bfloat16(), x), 1)
