"""Random models from a grammar that knows the answer.

    random_model(seed)      -> a model, its inputs, and its answer: sites, rows, norms, the name of the wiring

The grammar writes the answer while it builds the model and never reads it from `inspect`. Layouts, norms, sublayers, adds
and rows are in files of their own; chains.py composes models of one stream, constructs.py, tokens.py and gates.py have the
others, claims.py those about which false claims are easy. support/judge.py compares an inspection with the answer, numbers.py the other tools with numbers by hand.
"""

import random

import torch

from support.families import shake
from support.random_models import claims, gates, tokens  # noqa: F401 (they register their constructs)
from support.random_models.chains import build_chain
from support.random_models.constructs import CONSTRUCTS
from support.random_models.graphs import Kit

NAMES = [*CONSTRUCTS]
CHAINS = "chain"


def random_model(seed):
    """Return the model of a seed, in evaluation mode, with random parameters.

    Even seeds are chains; odd seeds go through the other constructs in turn.
    """
    rng = random.Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if seed % 2 == 0:
            result = build_chain(rng, seed)
        else:
            name = NAMES[seed // 2 % len(NAMES)]
            result = CONSTRUCTS[name](Kit(rng, seed, name))
    shake(result.model.eval(), seed)
    return result


def seeds_of(name, count):
    """Return the first seeds of a construct, or of chains."""
    if name == CHAINS:
        return range(0, 2 * count, 2)
    first = 2 * NAMES.index(name) + 1
    return range(first, first + 2 * len(NAMES) * count, 2 * len(NAMES))
