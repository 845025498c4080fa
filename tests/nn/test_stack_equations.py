"""Tests of stacks of rows against the equation of a row in plain PyTorch, to round-off.

tests/wirings/test_catalog.py and test_equation.py check the rows of the published wirings, test_transcriptions.py those with stages.
"""

import itertools

import pytest

from addnorm import Learned, Row, Wiring, wirings
from support.stack_equality import assert_equal_functions, get_norm_function, make_stack
from support.stacks import ALL

ROWS = [wiring for wiring in ALL if wiring.has_rows]
ROWS += [wirings.no_residual(norm=False), wirings.parallel(2), wirings.admin(profiled=False), wirings.mix_ln(1)]
for n_in, n_branch, n_out, ends in itertools.product((False, True), repeat=4):
    row = Row(norm_in=n_in, norm_branch=n_branch, norm_out=n_out, a=0.7, b=-1.3, c=0.6)
    ROWS.append(Wiring(f"{row}, final norm {ends}", row, final_norm=ends))


def equation(stack, x):
    """Return N_final(x_S) of x' = N_out(a x + b N_branch(f(c N_in(x)))); a parallel sublayer reads the x of the one before."""
    wiring, depth = stack.wiring, stack.num_layers

    def normed(x, norm, has_norm):
        return get_norm_function(norm)(x) if has_norm else x

    x = state = read = normed(x, stack.norm_embedding, wiring.embedding_norm)
    for connection, row in zip(stack.connections, wiring.rows(depth), strict=True):
        a, b, c = (
            getattr(connection, name) if isinstance(factor, Learned) else factor
            for name, factor in (("a", row.a), ("b", row.b), ("c", row.c))
        )
        state = state if row.shares else x
        if row.shares != "read":
            read = c * normed(state, connection.norm_in, row.norm_in)
        write = normed(connection.sublayer(read), connection.norm_branch, row.norm_branch)
        x = normed(a * x + b * write, connection.norm_out, row.norm_out)
    return normed(x, stack.norm_final, wiring.ends_in_norm(depth))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(
    "wiring", ROWS, ids=lambda wiring: repr(wiring) if wiring.name in vars(wirings) else wiring.name
)
def test_stack_of_rows_matches_the_equation(wiring, norm):
    stack = make_stack(wiring, norm=norm)
    assert_equal_functions(stack, lambda x: equation(stack, x), wanted=list(stack.parameters()))


def test_comparison_detects_a_small_error():
    stack = make_stack("pre_ln")
    with pytest.raises(AssertionError):
        assert_equal_functions(stack, lambda x: (1 + 1e-10) * stack(x), wanted=list(stack.parameters()))
