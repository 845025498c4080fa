"""Tests that each kind of remark and note is made where it is so, and not of a model that only resembles it."""

import re

import pytest
import torch

from addnorm import inspect
from support import remarkable as made
from support.stream_steps import make_steps, noise

ONE = (noise(2, 5, 16),)
WEIGHTS = (*ONE, torch.rand(2, 5, 1, generator=torch.Generator().manual_seed(2)) + 0.5)
MASK = (*ONE, (torch.arange(5) < 3).float().expand(2, 5)[..., None])

# words of the remark or note, a model that has it, one that resembles it
KINDS = {
    "random start": ("its start depends on random numbers in evaluation mode, and two runs differ", (made.random_start, ONE), (made.seeded_start, ONE)),
    "random start without effect": ("random numbers", (made.random_start, ONE), (made.random_start_times_zero, ONE)),
    "random order": ("random numbers", (made.random_start, ONE), (made.shuffled, ONE)),
    "random writes": ("2 of its 4 sublayers draw random numbers in evaluation mode, \\S+#2 first", (made.random_writes, ONE), (made.seeded_writes, ONE)),
    "generator of the model": ("random numbers", (made.random_start_of_own_generator, ONE), (made.start_of_reset_generator, ONE)),
    "dropout": ("^dropout$", (made.dropout, ONE), (made.random_gains, ONE)),
    "random factor": ("the write is multiplied by random numbers", (made.random_gains, ONE), (made.dropout, ONE)),
    "mask": ("the write is masked by token", (made.weighted_writes, MASK), (made.weighted_writes, WEIGHTS)),
    "weights": ("the write is multiplied by a number for each token", (made.weighted_writes, WEIGHTS), (made.weighted_writes, MASK)),
    "missing residual": ("does not add to it", (made.missing_residual, ONE), (made.summed_residual, ONE)),
    "shared weights": ("shared weights: mlps.0 is 4 sublayers", (made.shared, ONE), (made.shared_container, ONE)),
    "recurrence": ("shared weights", (made.recurrence, ONE), (made.unshared_recurrence, ONE)),
    "factor at the end": ("multiplied by a factor before the final norm", (made.scaled_end, ONE), (made.end_times_one, ONE)),
    "swapped factor": ("deepnorm has it on the stream", (made.swapped_deepnorm, ONE), (made.scaled_post_ln, ONE)),
    "embedding norm": ("with a norm of the embedding", (made.embedding_norm, ONE), (made.norm_between_streams, ONE)),
}  # fmt: skip


def list_texts(run, inputs):
    """Return the remarks and notes of a model, whose streams all close."""
    inspection = inspect(make_steps(run), *inputs)
    assert inspection.closes, inspection.unknown
    notes = [note for site in inspection.sites for note in site.notes]
    return [*notes, *(remark for stream in inspection.streams for remark in stream.remarks)]


@pytest.mark.parametrize("kind", KINDS)
def test_remark_is_made_where_it_is_so(kind):
    words, right, near = KINDS[kind]
    assert any(re.search(words, text) for text in list_texts(*right)), list_texts(*right)
    assert not any(re.search(words, text) for text in list_texts(*near)), list_texts(*near)


def test_no_residual_is_missing_where_a_layer_adds_to_the_stream():
    inspection = inspect(make_steps(made.beside), *ONE)
    assert [stream.remarks for stream in inspection.streams] == [()] * 3
