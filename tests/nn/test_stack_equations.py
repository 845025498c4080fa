"""Tests of stacks of rows against the equation of a row in plain PyTorch, to round-off.

tests/wirings/test_catalog.py and test_equation.py check the rows of the published wirings, test_transcriptions.py those with stages.
"""

import itertools

import pytest
import torch

from addnorm import ResidualStack, Row, Wiring, wirings
from addnorm.nn import block
from support.row_equation import run_rows
from support.stacks import ALL
from support.torch_transformers import randomize
from support.transformer_inputs import BATCH, HEADS, D, N, assert_close, compute_gradients, f64

EPS = 1e-2  # large, so that a misplaced norm changes the output
ROWS = [wiring for wiring in ALL if wiring.has_rows]
ROWS += [wirings.no_residual(norm=False), wirings.parallel(2), wirings.admin(profiled=False), wirings.mix_ln(1)]
for n_in, n_branch, n_out, ends in itertools.product((False, True), repeat=4):
    row = Row(norm_in=n_in, norm_branch=n_branch, norm_out=n_out, a=0.7, b=-1.3, c=0.6)
    ROWS.append(Wiring(f"{row}, final norm {ends}", row, final_norm=ends))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("wiring", ROWS, ids=lambda wiring: wiring.name)
def test_stack_of_rows_matches_the_equation(wiring, norm):
    """The output and all gradients, with random norms and factors."""
    sublayers = [f for _ in range(3) for f in block(D, HEADS, causal=True, activation="gelu", bias=False, dtype=f64)]
    stack = randomize(ResidualStack(sublayers, D, wiring, norm=norm, eps=EPS, dtype=f64), size=0.3)
    x = torch.randn(BATCH, N, D, dtype=f64)
    functions = stack, lambda x: run_rows(stack, x, EPS)[-1]
    assert_close(*(compute_gradients(function, stack.parameters(), [x]) for function in functions))
