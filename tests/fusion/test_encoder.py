"""Tests of fusing torch.nn.TransformerEncoder in inference: its fast path is expanded, and padding stays zero."""

import copy
import pickle

import pytest
import torch
from torch import nn

import addnorm
from support.fused_model import D, fuse
from support.graph_capture import capture_graphs, relative_difference, run_both
from support.pairwise import product
from support.stream_steps import noise

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of nested tensors in torch
X = noise(3, 5, D)
PADDING = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
CAUSAL = torch.triu(torch.full((5, 5), float("-inf")), 1)


def encoder(norm_first=False, activation="relu", norm=False, layers=1, **options):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True, norm_first=norm_first, activation=activation)
    model = nn.TransformerEncoder(layer, layers, nn.LayerNorm(D) if norm else None, **options).eval()
    for p in model.parameters():
        nn.init.uniform_(p, -0.4, 0.4) if p.dim() > 1 else nn.init.uniform_(p, 0.5, 1.0)
    return model


MASKS = {"none": {}, "causal": {"mask": CAUSAL, "is_causal": True}, "padding": {"src_key_padding_mask": PADDING}}


@pytest.mark.parametrize(("norm_first", "activation", "mask"), product((False, True), ("relu", "gelu"), tuple(MASKS)))
def test_fast_path_is_expanded_and_fused(norm_first, activation, mask):
    model = encoder(norm_first, activation, layers=2, enable_nested_tensor=False)
    before, after, capture = run_both(model, X, **MASKS[mask])
    assert capture.reasons == [None] * (3 if norm_first else 4)
    assert "_transformer_encoder_layer_fwd" not in capture.code
    assert relative_difference(before, after) < 1e-6
    # With gradients torch does not take its fast path.
    assert relative_difference(model(X, **MASKS[mask]), after) < 1e-5


@pytest.mark.parametrize("norm", [False, True])
def test_padding_is_zero_exactly_where_torch_zeroes_it(norm):
    model = encoder(norm=norm)
    scattered = PADDING.flip(1)  # padding first: torch does not take the fast path
    with torch.no_grad():
        before = {k: model(X, src_key_padding_mask=mask) for k, mask in enumerate((PADDING, scattered, None))}
    assert norm or not before[0][PADDING].any()
    assert before[1][scattered].any()
    fusion = fuse(model, X, src_key_padding_mask=PADDING)
    assert len(fusion.fused) == 2  # the final norm reads zeroed tokens, not a sum
    with torch.no_grad():
        for k, mask in enumerate((PADDING, scattered, None)):
            after = model(X, src_key_padding_mask=mask)
            assert relative_difference(before[k], after) < 1e-6
            assert not norm or k == 2 or relative_difference(before[k][mask], after[mask]) < 1e-6
    with_gradients = model(X, src_key_padding_mask=PADDING)
    addnorm.unfuse(model)
    assert relative_difference(model(X, src_key_padding_mask=PADDING), with_gradients) < 1e-6
    with torch.no_grad():
        assert model(X, src_key_padding_mask=PADDING).equal(before[0])


def test_training_with_float_masks_is_unchanged():
    model = encoder()
    fuse(model, X, src_key_padding_mask=PADDING)
    model.train()
    floats = torch.zeros(PADDING.shape).masked_fill(PADDING, float("-inf"))
    torch.manual_seed(0)
    after = model(X, src_key_padding_mask=floats)
    addnorm.unfuse(model)
    torch.manual_seed(0)
    assert relative_difference(model(X, src_key_padding_mask=floats), after) < 1e-6


def test_fast_path_has_one_graph_for_all_batches():
    model = encoder(enable_nested_tensor=False)
    capture = capture_graphs(model, dynamic=True)
    with torch.no_grad():
        for rows in (2, 5, 9):
            x = torch.randn(rows, 7, D)
            assert relative_difference(model(x), capture.compiled(x)) < 1e-6
    assert len(capture.graphs) == 1
    assert capture.reasons == [None] * 2


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.n = encoder(), nn.LayerNorm(D)

    def forward(self, x, padding):
        return self.n(x + self.inner(x, src_key_padding_mask=padding))


@pytest.mark.parametrize("first", ["inner", pytest.param("outer", marks=pytest.mark.slow)])
def test_model_and_part_are_unfused_in_any_order(first):
    model = Outer().eval()
    with torch.no_grad():
        before = model(X, PADDING)
        fuse(model.inner, X, src_key_padding_mask=PADDING)
        fuse(model, X, PADDING)
        order = [model.inner, model] if first == "inner" else [model, model.inner]
        for module in order:
            addnorm.unfuse(module)
            assert relative_difference(before, model(X, PADDING)) < 1e-6
        assert model(X, PADDING).equal(before)
    assert "forward" not in vars(model.inner)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, pytest.param(lambda model: pickle.loads(pickle.dumps(model)), marks=pytest.mark.slow)]
)
def test_copy_of_a_fused_encoder_can_be_fused(again):
    model = encoder()
    with torch.no_grad():
        before = model(X, src_key_padding_mask=PADDING)
        fuse(model, X)
        other = again(model)
        assert other(X, src_key_padding_mask=PADDING).equal(before)
        fuse(other, X)
        assert relative_difference(before, other(X, src_key_padding_mask=PADDING)) < 1e-6
        addnorm.unfuse(other)
        assert "forward" not in vars(other)
        assert relative_difference(before, model(X, src_key_padding_mask=PADDING)) < 1e-6
