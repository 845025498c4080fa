"""The equation of a row in plain PyTorch, for stacks of rows."""

import torch.nn.functional as F
from torch import nn

from addnorm import Learned


def run_rows(stack, x, eps):
    """Return every state, the writes, the sums before the norms on them, and the output; `eps` is that of all norms.

    x' = N_out(a x + b N_branch(f(c N_in(x)))), and the output is N_final(x_S). A parallel sublayer reads the x of the one before.
    """
    wiring, depth = stack.wiring, stack.num_layers

    def normed(x, norm, has_norm):
        if not has_norm:
            return x
        if isinstance(norm, nn.RMSNorm):
            return F.rms_norm(x, x.shape[-1:], norm.weight, eps)
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, eps)

    x = state = read = normed(x, stack.norm_embedding, wiring.embedding_norm)
    states, writes, sums = [x], [], []
    for connection, row in zip(stack.connections, wiring.rows(depth), strict=True):
        a, b, c = (
            getattr(connection, name) if isinstance(factor, Learned) else factor
            for name, factor in (("a", row.a), ("b", row.b), ("c", row.c))
        )
        state = state if row.shares else x
        if row.shares != "read":
            read = c * normed(state, connection.norm_in, row.norm_in)
        writes.append(b * normed(connection.sublayer(read), connection.norm_branch, row.norm_branch))
        sums.append(a * x + writes[-1])
        x = normed(sums[-1], connection.norm_out, row.norm_out)
        states.append(x)
    return states, writes, sums, normed(x, stack.norm_final, wiring.ends_in_norm(depth))
