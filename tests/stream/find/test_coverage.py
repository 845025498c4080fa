"""Tests that every step on a stream's path is in a row or in `unknown`: no add, norm, gate or join is passed over in silence."""

import pytest
import torch
from torch.nn import functional as F

from addnorm import inspect
from addnorm.stream.find.adds import PARTIAL
from addnorm.stream.find.reasons import BESIDE
from support.random_models.norms import mean
from support.stream_steps import (
    D,
    X,
    fused_tokens,
    inspect_steps,
    make_steps,
    noise,
    normalize,
    repeat,
    run_layers,
    stacked_sublayers,
)

# Norms whose weight is outside of torch's norm.


def norm_image(m, k, x):
    return m.norms[k](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


channel_scale = repeat(lambda m, k, x: x + m.gammas[k].view(-1, 1, 1) * m.convolutions[k](norm_image(m, k, x)), count=3)


# Streams that are cut and joined.


def summed_streams(m, x, other):
    """Add the end of another stream to the end of one, before its norm."""
    for k in range(3):
        x = x + m.branch(k, x)
        other = other + m.branch(k + 3, other)
    return m.last(x + other)


def partly_normed(m, x, other):
    """Normalize and write some tokens, and double the others, as XCiT's class attention."""
    x = torch.cat([m.norms[0](x[:, :1]), x[:, 1:]], 1)
    x = x + torch.cat([m.mlps[0](x[:, :1]), x[:, 1:]], 1)
    return m.last(x)


# Other norms.


# Add positions before the norm of each sublayer.
norm_of_a_sum = repeat(lambda m, k, x: m.others[k](x + m.branch(k, x + m.shifts[:5])), count=3)


def bare_token_mixers(m, x):
    """Multiply the transposed stream by a matrix, between feed-forward sublayers; no layer has a norm."""
    x = m.gates[0](x)
    for k in range(2):
        x = x + torch.relu(x.mT @ m.gammas[:5, :5]).mT
        x = x + m.mlps[k](x)
    return x


def normed_token_mixers(m, x):
    """Norm the transposed output of a product over the tokens, by hand."""
    for _ in range(3):
        y = (torch.relu(x.mT) @ m.gammas[:5, :5]).mT
        x = x + (y * y.square().mean(-1, keepdim=True).add(1e-6).rsqrt()) * m.gammas[5]
    return x


# Multiply the norm by a constant after the channels came first again.
scaled_reads_of_channels = repeat(lambda m, k, x: x + m.convolutions[k](norm_image(m, k, x) * 0.5), count=3)


# Scale the output's norm, which has no weight, where it is added.
scaled_branch_norms = repeat(lambda m, k, x: x + m.gammas[k].view(-1) * m.bare(m.branch(k, x)))


def sums_of_normed_sublayers(m, x):
    """Add a sum of two sublayers with norms of their own."""
    for k in range(2):
        x = m.outer(lambda x, k=k: sum([m.branch(j, x) for j in (2 * k, 2 * k + 1)]), x) + x
    return x


def add_orthogonal(x, y):
    """Add the part of an output that is orthogonal to the stream."""
    u = F.normalize(x, dim=-1)
    return x + (y - (y * u).sum(-1, keepdim=True) * u)


orthogonal_updates = repeat(lambda m, k, x: add_orthogonal(x, m.branch(k, x)))
# Read through the same kind of norm as the projection.
orthogonal_updates_of_one_norm = repeat(
    lambda m, k, x: add_orthogonal(x, m.mlps[k](F.normalize(x, dim=-1) * m.gammas[k]))
)


def norms_of_channels(m, x):
    """Normalize the channels of an image by their variance and mean, as NesT."""

    def norm(k, x):
        var, mean = x.var(1, unbiased=False, keepdim=True), x.mean(1, keepdim=True)
        return (x - mean) / (var + 1e-5).sqrt() * m.gammas[k].view(-1, 1, 1) + m.shifts[k].view(-1, 1, 1)

    for k in range(3):
        x = x + m.convolutions[k](norm(k, x))
    return norm(3, x)


# Others.


def stale_reads(m, x):
    """Read the state before the last one."""
    before = x
    for k in range(4):
        before, x = x, x + m.branch(k, before)
    return m.last(x)


# Add the output of one sublayer to a projection of the stream.
projected_shortcut = repeat(lambda m, k, x: (m.gates[0](x) if k == 2 else x) + m.branch(k, x), end=normalize)


def attention_over_depth(m, x):
    """Read a mean of all outputs before, with weights computed from them."""
    outputs = [x]
    for k in range(4):
        states = torch.stack(outputs)
        weights = (states * m.gammas[k]).sum(-1, keepdim=True).softmax(0)
        outputs.append(m.mlps[k](m.norms[k]((weights * states).sum(0))))
    return m.last(sum(outputs))


# Average the stream and the output.
means_of_pairs = repeat(lambda m, k, x: torch.stack([x, m.branch(k, x)]).mean(0), count=3, end=normalize)


# Add the mean of the outputs to each token.
means_of_tokens = repeat(lambda m, k, x: x + m.branch(k, x).mean(1, keepdim=True), count=3, end=normalize)


def unused_norm(m, x):
    """Normalize the end of the stream and return its mean without the norm."""
    x = run_layers(m, x, last=3)
    m.last(x)
    return x.mean(1)


def first_state_again(m, x):
    """Add x_0 to half of the stream between the layers."""
    first = x
    for k in range(3):
        x = 0.5 * x + 0.3 * first if k else x
        x = x + m.branch(k, x)
    return m.last(x)


def scaled_ends(m, x):
    x = run_layers(m, 2 * m.others[0](x), last=3)
    order = x[..., :1].argsort(1).expand_as(x)
    return m.last(m.others[1](x.gather(1, order)))


def dropout_of_the_stream(m, x):
    for k in range(3):
        x = F.dropout(x, 0.2, m.training) if k else x
        x = x + m.branch(k, x)
    return m.last(x)


def widened(m, x):
    """Add the batch to learned queries with the first write: x (tokens, d) + f(N(x)) (batch, tokens, d)."""
    h = m.shifts[:5]
    h = h + m.gates[0](m.norms[0](h)) * mean(x)
    return m.last(run_layers(m, h, 1))


def smeared(m, x):
    """Average neighbouring tokens between two layers."""
    x = run_layers(m, x, last=2)
    return m.last(run_layers(m, 0.5 * x + 0.5 * x.roll(1, 1), 2, 3))


def residual_of_every_other_norm(m, k, x):
    y = m.norms[k](x)
    return (y if k % 2 else x) + m.mlps[k](y)


def turned(m, x):
    """Add in place through a view."""
    x = x.clone()
    view = x.transpose(1, 2)
    for k in range(4):
        view += m.branch(k, x).transpose(1, 2)
    return x


def dense(m, x):
    states = [x]
    for k in range(4):
        states.append(m.branch(k, torch.stack(states).sum(0)))
    return torch.stack(states).sum(0)


def projected(m, x, axis=-1):
    """Multiply the output of an einsum, whose memory has the features first, by a matrix; or mix tokens."""
    weight = torch.eye(x.shape[axis]).roll(1, 0) * 0.5 * m.norms[0].weight[0]
    for k in range(4):
        x = torch.einsum("bnd,hd->bnd", x, m.norms[k].weight[None].expand(4, -1) * 0.25) if axis == -1 else x
        x = (x @ weight if axis == -1 else (x.transpose(1, 2) @ weight).transpose(1, 2)) + m.branch(k, x)
    return x


def take_imaginary_part(m, k, x):
    """Pass the stream through a complex number between sublayers."""
    x = torch.complex(torch.zeros_like(x), x).imag if k else x
    return x + m.branch(k, x)


def gated_by_the_sum(m, k, x):
    """Gate a read by the sum before its norm."""
    z = m.norms[k](x)
    return z + m.mlps[k](z * m.gates[k](x).sigmoid())


def partial_sums(m, k, x):
    mask = (torch.arange(x.shape[1]) < 3).view(1, -1, 1).expand_as(x)
    return x.masked_scatter(mask, (x + m.branch(k, x))[mask])


ONE = ()  # the usual input
IMAGE = (noise(2, D, 5, 4),)
PAIR = (noise(2, 6, D), noise(2, 5, D, seed=1))

# The kinds of the sublayers, by their first letters, where a name alone does not show them.
KINDS = {
    "token mixers without norms": "ofof", "means of pairs": "fff", "means of tokens": "ooo",
}  # fmt: skip
# forward, name, equations without the values of learned factors, and inputs if they are not ONE
PRE_LN, BOTH_NORMS = "x' = x + f(N(x))", "x' = N(x + f(N(x)))"
UNDERSTOOD = {
    "scale of channels": (channel_scale, "layer_scale", ["x' = x + b ⊙ f(N(x))"] * 3, *IMAGE),
    "sublayers in a stack": (stacked_sublayers, "parallel", [PRE_LN] * 4),
    "token mixers without norms": (bare_token_mixers, "no_norm", ["x' = x + f(x)"] * 4),
    "norm of a token mixer": (normed_token_mixers, "reordered", ["x' = x + N(f(x))"] * 3),
    "constant after channels": (scaled_reads_of_channels, "unknown", ["x' = x + f(0.5 N(x))"] * 3, *IMAGE),
    "scale of a branch norm": (scaled_branch_norms, "unknown", ["x' = x + b ⊙ N(f(N(x)))"] * 4),
    "sum of normed sublayers": (sums_of_normed_sublayers, "parallel", [PRE_LN] * 4),
    "first state again": (first_state_again, "pre_ln", [PRE_LN, *["x' = 0.5 x + 0.3 skip", PRE_LN] * 2]),
    "means of pairs": (means_of_pairs, "unknown", ["x' = 0.5 x + 0.5 f(N(x))"] * 3),
    "means of tokens": (means_of_tokens, "pre_ln", [PRE_LN] * 3),
    "residual of every other norm": (
        repeat(residual_of_every_other_norm, end=normalize), "unknown", [BOTH_NORMS, "x' = x + f(x)"] * 2,
    ),
    "bits as integers": (
        repeat(lambda m, k, x: x.view(torch.int32).view(torch.float32) + m.branch(k, x)), "pre_ln", [PRE_LN] * 4,
    ),
    "in place through a view": (turned, "pre_ln", [PRE_LN] * 4),
    "from .data": (repeat(lambda m, k, x: x.data + m.branch(k, x)), "pre_ln", [PRE_LN] * 4),
    "vmap": (repeat(lambda m, k, x: torch.vmap(lambda y: y + m.branch(k, y))(x)), "pre_ln", [PRE_LN] * 4),
}  # fmt: skip


def list_equations(stream):
    return [site.equation.partition(", ")[0].strip() for site in stream.sites]


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_inspect_finds_rows_of_unusual_steps(name):
    run, wiring, equations, *inputs = UNDERSTOOD[name]
    inspection = inspect_steps(run, *inputs)
    assert inspection.unknown == ()
    assert inspection.closes
    assert inspection.wiring == wiring
    assert [list_equations(stream) for stream in inspection.streams] == [equations]
    assert name not in KINDS or "".join(site.kind[0] for site in inspection.sites) == KINDS[name]
    assert {site.parallel for site in inspection.sites} == {2 if wiring == "parallel" else 1}
    assert not any("chosen" in remark for stream in inspection.streams for remark in stream.remarks)


# forward, inputs, and words of a reason; the streams that may keep a name
REFUSED = {
    "tokens computed from two streams": (fused_tokens, PAIR, "tokens of the stream are replaced", 1, 5),
    "tokens normed": (partly_normed, PAIR, ""),
    "norm of a sum": (norm_of_a_sum, ONE, "a norm reads the stream after other steps"),
    "orthogonal update": (orthogonal_updates, ONE, "through norms of different kinds"),
    "orthogonal update, one norm": (orthogonal_updates_of_one_norm, ONE, "multiplied by a norm of the stream"),
    "stale reads": (stale_reads, ONE, "computed from an earlier state of the stream"),
    "projected shortcut": (projected_shortcut, ONE, "begins with a sum of two functions of another stream"),
    "attention over depth": (attention_over_depth, ONE, "reads the output of another one"),
    "norms of channels": (norms_of_channels, IMAGE, "a norm that is written out over another dimension"),
    "matrix on the features": (projected, ONE, "a matrix over its last dimension"),
    "matrix on the tokens": (
        lambda m, x: projected(m, x, axis=1), ONE, "it mixes states, tokens or parts of the features",
    ),
    "reads of the sum before its norm": (repeat(gated_by_the_sum, end=normalize), ONE, BESIDE),
    "add that widens a parameter": (widened, ONE, "the stream begins with a residual sum that is not understood"),
    "dense connections": (dense, ONE, "a sum of three or more values", 5),
    "imaginary": (repeat(take_imaginary_part, end=normalize), ONE, ""),
    "sums that masked_scatter keeps in part": (repeat(partial_sums, end=normalize), ONE, PARTIAL),
    "relu after the add, no norms": (repeat(lambda m, k, x: F.relu(x + m.mlps[k](x))), ONE, "a single add"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_inspect_refuses_steps_in_no_row(name):
    run, inputs, reason, *named_tokens = REFUSED[name]
    inspection = inspect_steps(run, *inputs)
    assert any(reason in unknown.reason for unknown in inspection.unknown), inspection.unknown
    assert not inspection.closes
    named = [stream for stream in inspection.streams if stream.wiring is not None]
    assert {stream.chain.adds[0].x.shape[1] for stream in named} == {*named_tokens}


@pytest.mark.parametrize(
    ("run", "remark"),
    [
        (first_state_again, "between sublayers the stream is multiplied by a factor, and an earlier state is added"),
        (unused_norm, "without the final norm of this wiring"),
    ],
)
def test_inspect_remarks_on_unusual_streams(run, remark):
    assert inspect_steps(run).streams[0].remarks == (remark,)


def test_inspect_remarks_on_both_ends():
    """The embedding's norm is doubled, and two norms follow the stream; its tokens are sorted before."""
    stream = inspect_steps(scaled_ends).streams[0]
    assert (stream.embedding_norm.path, stream.final_norm.path) == ("others.0", "last")
    assert {"the norm of the embedding is multiplied by a factor", "2 final norms, one after the other"} <= {
        *stream.remarks
    }


def test_inspect_notes_dropout_of_the_stream():
    inspection = inspect(make_steps(dropout_of_the_stream).train(), X)
    assert [site.notes for site in inspection.sites] == [("dropout of the stream",)] * 2 + [()]


def test_inspect_calls_moved_tokens_no_feed_forward():
    inspection = inspect_steps(smeared)
    assert [site.kind[0] for site in inspection.sites] == ["f", "f", "o", "f"]
    assert inspection.wiring == "unknown"


def test_inspect_gives_one_reason_for_norms_of_channels():
    assert len(inspect_steps(norms_of_channels, *IMAGE).unknown) == 1


def test_inspect_finds_sum_of_two_streams():
    inspection = inspect_steps(summed_streams, X, noise(2, 5, D, seed=1))
    pre_ln = [PRE_LN] * 3
    assert sorted(map(list_equations, inspection.streams), key=len) == [pre_ln, [*pre_ln, "x' = x + injection"]]


BIASED = {
    "a loss": lambda m, x: (m.last(x), (x - m.shifts[0]).square().mean()),
    "the scale of the output": lambda m, x: x * mean((x - m.shifts[0]).square()) ** -0.5,
}


@pytest.mark.parametrize("case", BIASED)
def test_statistics_of_a_shifted_end_are_no_sublayer(case):
    run = repeat(lambda m, k, x: x + m.branch(k, x), end=BIASED[case])
    (stream,) = inspect_steps(run).streams
    assert [site.role for site in stream.sites] == ["branch"] * 4
    assert (stream.wiring.name, stream.final_norm is not None) == ("pre_ln", "loss" in case)


def test_a_norm_by_a_negative_power_is_a_norm():
    def step(m, k, x):
        return x + m.mlps[k](x * (m.gammas[k, 0] * mean((x - m.shifts[k]).square()) ** -0.5))

    (stream,) = inspect_steps(repeat(step)).streams
    assert (stream.wiring, stream.remarks) == (
        None,
        ("the norms are inside the sublayers, or normalize over batches or groups",),
    )
