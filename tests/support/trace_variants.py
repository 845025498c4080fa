"""A token of small numbers, and every variant of the operation that the trace supports."""

import itertools

X, SUBLAYER = (1.0, 2.0, 3.0), (0.5, -1.0, 1.5)
VARIANTS = [
    {"placement": placement, "norm": norm, "variance": variance, "eps_place": eps_place}
    for placement, norm, variance, eps_place in itertools.product(
        ["post", "pre"], ["layer", "rms"], ["biased", "unbiased"], ["inside", "outside"]
    )
    if (norm, variance) != ("rms", "unbiased")
]


def name_of(variant):
    return "-".join(variant.values())
