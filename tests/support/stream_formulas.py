"""Residual wirings of several streams, transcribed from their papers and codes.

Each function takes the state that enters the first sublayer, the sublayers and norms as callables, and the parameters as plain tensors in
the paper's shapes and orientation, or as attributes of a site. It returns the output of the stack. Nothing is computed by the library:
agreement is evidence.
"""

import torch
import torch.nn.functional as F

from support.several_streams import sinkhorn


def rms(u, eps):
    """Return u divided by its root mean square over the last dimension."""
    return u / (u.square().mean(-1, keepdim=True) + eps).sqrt()


def mix(weights, streams):
    """Return the sum of streams with weights `(..., n)`."""
    return sum(weights[..., j, None] * stream for j, stream in enumerate(streams))


def static_hyper_connections(streams, sublayers, norms, final_norm, sites):
    """Hyper-connections, arXiv 2409.19606 eqs 1 and 2: h = A_m^T H, H' = B^T f(h) + A_r^T H; the output sums the streams.

    A site has B as inject, A_m as collapse and A_r^T as mix.
    """
    n = len(streams)
    for f, norm, site in zip(sublayers, norms, sites, strict=True):
        write = f(norm(sum(site.collapse[j] * streams[j] for j in range(n))))
        streams = [
            site.inject[k] * write + sum(site.mix[k, j] * streams[j] for j in range(n)) for k in range(n)
        ]  # fmt: skip
    return final_norm(sum(streams))


def dynamic_hyper_connections(streams, sublayers, norms, final_norm, sites):
    """Hyper-connections, eqs 10 to 13: a_m, a_r and b gain s * tanh(norm(h_j) W) for the stream j that they weigh."""
    n = len(streams)
    for f, norm, site in zip(sublayers, norms, sites, strict=True):
        normed = [F.layer_norm(h, h.shape[-1:], site.norm_weight, site.norm_bias, 1e-5) for h in streams]
        b = [site.scale_inject * torch.tanh(normed[k] @ site.project_inject) + site.inject[k] for k in range(n)]
        a_m = [site.scale_mix * torch.tanh(normed[j] @ site.project_collapse) + site.collapse[j] for j in range(n)]
        a_r = [site.scale_mix * torch.tanh(normed[j] @ site.project_mix.T) + site.mix[:, j] for j in range(n)]
        write = f(norm(sum(a_m[j][..., None] * streams[j] for j in range(n))))
        streams = [b[k][..., None] * write + sum(a_r[j][..., k, None] * streams[j] for j in range(n)) for k in range(n)]
    return final_norm(sum(streams))


def single_pass_mhc(streams, sublayers, norms, final_norm, sites, *, eps, hc_eps, iterations):
    """Single-pass mHC, DeepSeek-V4.1: a site reads with c of the previous site; the first reads stream 0, the last c collapses.

    Its coefficients are those of mHC, arXiv 2512.24880 eqs 7 to 9. Rows of a site's parameters are those of c, b and A.
    """
    n = len(streams)
    c = torch.eye(n)[0]
    for f, norm, site in zip(sublayers, norms, sites, strict=True):
        of_rows = site.scale.repeat_interleave(torch.tensor([n, n, n * n]))
        logits = of_rows * (rms(torch.cat(streams, dim=-1), eps) @ site.project.T) + site.bias
        b = 2 * torch.sigmoid(logits[..., n : 2 * n])
        a = sinkhorn(logits[..., 2 * n :].unflatten(-1, (n, n)), iterations, hc_eps)
        write = f(norm(mix(c, streams)))
        streams = [b[..., k, None] * write + mix(a[..., k, :], streams) for k in range(n)]
        c = torch.sigmoid(logits[..., :n]) + hc_eps
    return final_norm(mix(c, streams))


def attend_over_depth(sources, query, key_weight, eps):
    """Attention over sources: sum_i p_i v_i, p = softmax_i(query . (key_weight * rms(v_i)))."""
    weights = torch.stack([(rms(v, eps) * key_weight) @ query for v in sources]).softmax(0)
    return sum(weight[..., None] * v for weight, v in zip(weights, sources, strict=True))


def block_attention_residuals(x, sublayers, norms, final_norm, reads, *, eps, block_size):
    """Block attention residuals, arXiv 2603.15031; `block_size` counts sublayers. A boundary reads first and then closes the block.

    With blocks of one sublayer each write is a source, and nothing is added. The last read is the output's.
    """
    blocks, partial = [], x
    for site, (f, norm, read) in enumerate(zip(sublayers, norms, reads[:-1], strict=True)):
        h = attend_over_depth([*blocks, partial], *read, eps)
        if site % block_size == 0:
            blocks.append(partial)
            partial = None
        write = f(norm(h))
        partial = write if partial is None else partial + write
    return final_norm(attend_over_depth([*blocks, partial], *reads[-1], eps))


def denseformer(x, layers, final_norm, weights, *, dilation, period):
    """DenseFormer, arXiv 2402.02622 (DWAModules): after block m, if period divides m, the next block reads a weighted sum.

    `layers` are functions from the block's input to its output, residual adds included. `weights[m]` has one number for each j = m mod
    dilation, ..., m of the outputs X_j (X_0 is the embedding), oldest first.
    """
    outputs = [x]
    for m, layer in enumerate(layers, start=1):
        x = layer(x)
        outputs.append(x)
        if m % period == 0:
            chosen = [outputs[j] for j in range(m + 1) if j % dilation == m % dilation]
            x = sum(weight * output for weight, output in zip(weights[m], chosen, strict=True))
    return final_norm(x)


def muddformer(x, blocks, final_norm, reads, *, eps):
    """MUDDFormer, arXiv 2502.12170: after block i, q, k, v and r inputs are weighted sums of all outputs, by the newest.

    A block is (attention, q_norm, k_norm, v_norm, feed_forward, norm). `reads[i]` is (w1 (d, K), w2 (K, C (i + 2)), a (C, i + 2)) with
    C = 4 ways, and C = 1 after the last block.
    """
    outputs = [x]
    q = k = v = r = x
    for i, (attention, q_norm, k_norm, v_norm, feed_forward, norm) in enumerate(blocks):
        middle = attention(q_norm(q), k_norm(k), v_norm(v)) + r
        outputs.append(feed_forward(norm(middle)) + middle)
        w1, w2, a = reads[i]
        ways = a.shape[0]
        dynamic = F.gelu(rms(outputs[-1], eps) @ w1) @ w2
        weights = dynamic.unflatten(-1, (ways, len(outputs))) + a
        mixed = [mix(weights[..., way, :], outputs) for way in range(ways)]
        if ways == 4:
            q, k, v, r = mixed
    return final_norm(mixed[0])


def nanochat(x, blocks, final_norm, lambdas, x0_lambdas, backout):
    """nanochat's gpt.py: x = lambda_i x + mu_i x0 before each block; the output subtracts `backout` times the middle state.

    A block is (attention, norm, feed_forward, norm).
    """
    x0 = x
    for i, (attention, norm1, feed_forward, norm2) in enumerate(blocks):
        x = lambdas[i] * x + x0_lambdas[i] * x0
        x = x + attention(norm1(x))
        x = x + feed_forward(norm2(x))
        if i == len(blocks) // 2:
            middle = x
    return final_norm(x - backout * middle)


def reversible(streams, sublayers, norms):
    """Reformer's reversible residual: y1 = x1 + f(norm(x2)), y2 = x2 + g(norm(y1)). Returns both streams."""
    first, second = streams
    for site in range(0, len(sublayers), 2):
        first = first + sublayers[site](norms[site](second))
        second = second + sublayers[site + 1](norms[site + 1](first))
    return first, second


def unit(u):
    """Return u divided by its Euclidean length over the last dimension."""
    return u / u.square().sum(-1, keepdim=True).sqrt()


def ngpt(x, sublayers, stored, *, alpha_init):
    """nGPT, arXiv 2410.01131: h = unit(h + alpha (unit(f(h)) - h)), alpha = |stored * alpha_init / (1 / sqrt(d))|."""
    for f, s in zip(sublayers, stored, strict=True):
        alpha = (s * alpha_init * x.shape[-1] ** 0.5).abs()
        x = unit(x + alpha * (unit(f(x)) - x))
    return x


def siamese_norm(streams, sublayers, y_norms, x_norms, final_norm, factors):
    """SiameseNorm, arXiv 2602.08064: w = f(X + LN(Y)), X' = LN(X + s w), Y' = Y + w; the output is X + LN(Y)."""
    first, second = streams
    for site, f in enumerate(sublayers):
        write = f(first + y_norms[site](second))
        first, second = x_norms[site](first + factors[site] * write), second + write
    return first + final_norm(second)


def bottom_to_top(x, sublayers, norms, per_layer):
    """B2T connection, arXiv 2206.00330: post-LN whose last add of a layer also adds the layer's input."""
    state, layer_input = x, x
    for site, (f, norm) in enumerate(zip(sublayers, norms, strict=True)):
        is_last = site % per_layer == per_layer - 1
        state = norm(state + f(state) + (layer_input if is_last else 0.0))
        layer_input = state if is_last else layer_input
    return state
