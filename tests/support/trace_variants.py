"""A token of small numbers, adversarial tokens, and every variant of the operation that the trace supports."""

import itertools

X, SUBLAYER = (1.0, 2.0, 3.0), (0.5, -1.0, 1.5)
VARIANTS = [
    {"placement": placement, "norm": norm, "variance": variance, "eps_place": eps_place}
    for placement, norm, variance, eps_place in itertools.product(
        ["post", "pre"], ["layer", "rms"], ["biased", "unbiased"], ["inside", "outside"]
    )
    if (norm, variance) != ("rms", "unbiased")
]


ADVERSARIAL = [
    ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    ([-0.0, -0.0, -0.0], [-0.0, 0.0, -0.0]),
    ([0.1] * 7, [0.2] * 7),
    ([5e-324, 0.0, -5e-324], [5e-324, 5e-324, 0.0]),
    ([2.2e-308, 1e-310, -3e-320], [0.0, 1e-308, 0.0]),
    ([1.7e308, 1.7e308, 0.0], [1.7e308, 0.0, 0.0]),
    ([1.7e308, 1.7e308], [-1.7e308, 0.0]),
    ([1e16, 1e16 + 2, 1e16 - 2], [0.0] * 3),
    ([1e154, -1e154, 1e153], [0.0] * 3),
    ([1e-160, -1e-160, 3e-161], [0.0] * 3),
    ([3.0], [4.0]),
    ([1.0, -1.0], [0.0, 0.0]),
    ([1.5, 2.5, 1e5, 99999.5], [0.0] * 4),
    ([float(k) for k in range(16)], [float(-k) for k in range(16)]),
]  # fmt: skip


def adversarial_cases():
    """Yield (x, sublayer, options) of each adversarial token with each variant."""
    for (x, sublayer), variant, eps in itertools.product(ADVERSARIAL, VARIANTS, (1e-5, 0.0)):
        yield x, sublayer, {**variant, "eps": eps}


def name_of(variant):
    return "-".join(variant.values())
