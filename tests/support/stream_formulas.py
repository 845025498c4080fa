"""Residual wirings of several streams, transcribed from their papers and codes.

Each function takes the state that enters the first sublayer, the sublayers and norms as callables, and the parameters as plain tensors in
the paper's shapes and orientation. It returns the output of the stack. Nothing is shared with the library: agreement is evidence.
"""

import torch


def rms(u, eps):
    """Return u divided by its root mean square over the last dimension."""
    return u / (u.square().mean(-1, keepdim=True) + eps).sqrt()


def static_hyper_connections(streams, sublayers, norms, final_norm, sites):
    """Hyper-connections, arXiv 2409.19606 eqs 1 and 2: h = A_m^T H, H' = B^T f(h) + A_r^T H; the output sums the streams."""
    n = len(streams)
    for f, norm, (b, a_m, a_r) in zip(sublayers, norms, sites, strict=True):
        read = sum(a_m[j] * streams[j] for j in range(n))
        write = f(norm(read))
        streams = [b[k] * write + sum(a_r[j, k] * streams[j] for j in range(n)) for k in range(n)]
    return final_norm(sum(streams))


def dynamic_hyper_connections(streams, sublayers, norms, final_norm, sites):
    """Hyper-connections, eqs 10 to 13: a_m, a_r and b gain s * tanh(norm(h_j) W) for the stream j that they weigh.

    A site has b, a_m, a_r, w_b (d,), w_m (d,), w_r (d, n), s_a, s_b, and norm, the norm of each stream over its features.
    """
    n = len(streams)
    for f, norm, site in zip(sublayers, norms, sites, strict=True):
        normed = [site["norm"](h) for h in streams]
        b = [site["s_b"] * torch.tanh(normed[k] @ site["w_b"]) + site["b"][k] for k in range(n)]
        a_m = [site["s_a"] * torch.tanh(normed[j] @ site["w_m"]) + site["a_m"][j] for j in range(n)]
        a_r = [site["s_a"] * torch.tanh(normed[j] @ site["w_r"]) + site["a_r"][j] for j in range(n)]
        write = f(norm(sum(a_m[j][..., None] * streams[j] for j in range(n))))
        streams = [b[k][..., None] * write + sum(a_r[j][..., k, None] * streams[j] for j in range(n)) for k in range(n)]
    return final_norm(sum(streams))


def manifold_coefficients(streams, site, *, eps, hc_eps, iterations):
    """Coefficients c, b, M of mHC (arXiv 2512.24880 eqs 7 to 9) in the order of DeepSeek's code. M applies transposed.

    A site has fn (n (n + 2), n d), base (n (n + 2),) and scale (3,); rows are pre, post, comb.
    """
    n = len(streams)
    flat = torch.cat(streams, dim=-1)
    mixes = rms(flat, eps) @ site["fn"].T
    pre, post, comb = mixes[..., :n], mixes[..., n : 2 * n], mixes[..., 2 * n :]
    base, scale = site["base"], site["scale"]
    c = torch.sigmoid(scale[0] * pre + base[:n]) + hc_eps
    b = 2 * torch.sigmoid(scale[1] * post + base[n : 2 * n])
    m = (scale[2] * comb + base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + hc_eps
    m = m / (m.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + hc_eps)
        m = m / (m.sum(-2, keepdim=True) + hc_eps)
    return c, b, m


def single_pass_mhc(streams, sublayers, norms, final_norm, sites, *, eps, hc_eps, iterations):
    """Single-pass mHC, DeepSeek-V4.1: a site reads with c of the previous site; the first reads stream 0, the last c collapses."""
    n = len(streams)
    c = [1.0] + [0.0] * (n - 1)
    for f, norm, site in zip(sublayers, norms, sites, strict=True):
        read = sum(c[j] * streams[j] for j in range(n))
        following, b, m = manifold_coefficients(streams, site, eps=eps, hc_eps=hc_eps, iterations=iterations)
        write = f(norm(read))
        streams = [b[..., k, None] * write + sum(m[..., j, k, None] * streams[j] for j in range(n)) for k in range(n)]
        c = [following[..., j, None] for j in range(n)]
    return final_norm(sum(c[j] * streams[j] for j in range(n)))


def attend_over_depth(sources, query, key_weight, eps):
    """Attention over sources: sum_i p_i v_i, p = softmax_i(query . (key_weight * rms(v_i)))."""
    scores = [(rms(v, eps) * key_weight) @ query for v in sources]
    largest = torch.stack(scores).amax(0).detach()
    weights = [(score - largest).exp() for score in scores]
    total = sum(weights)
    return sum((weight / total)[..., None] * v for weight, v in zip(weights, sources, strict=True))


def attention_residuals(x, sublayers, norms, final_norm, reads, *, eps):
    """Full attention residuals, arXiv 2603.15031: each write is a source; nothing is added. The last read is the output's."""
    sources = [x]
    for f, norm, (query, key_weight) in zip(sublayers, norms, reads[:-1], strict=True):
        sources.append(f(norm(attend_over_depth(sources, query, key_weight, eps))))
    return final_norm(attend_over_depth(sources, *reads[-1], eps))


def block_attention_residuals(x, sublayers, norms, final_norm, reads, *, eps, block_size):
    """Block attention residuals; `block_size` counts sublayers. A boundary reads first and then closes the block."""
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
        dynamic = torch.nn.functional.gelu(rms(outputs[-1], eps) @ w1) @ w2
        weights = dynamic.unflatten(-1, (ways, len(outputs))) + a
        mixed = [sum(weights[..., way, j, None] * output for j, output in enumerate(outputs)) for way in range(ways)]
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
