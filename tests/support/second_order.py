"""Derivatives of first and second order: with and without `create_graph`, and against differences of first derivatives."""

import torch


def entangle(tensors):
    """Return tensors each of which depends on all before it, as those of a sublayer depend on the streams."""
    results = {}
    total = torch.zeros((), dtype=torch.float64)
    for name, t in tensors.items():
        results[name] = t * (1 + 0.1 * total.sin()).to(t.dtype)
        total = total + results[name].double().sum()
    return results


def flatten_gradients(loss, leaves, **options):
    """Return the gradients of the leaves as one vector in float64, zeros for those that are not used."""
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True, **options)
    return torch.cat([grad.double().flatten() for grad in grads])


def assert_second_order(loss, leaves, tolerance=1e-10):
    """Check the derivatives of a function of leaves in float64.

    Gradients with and without `create_graph` may differ by the order of sums. A product with the Hessian is compared with central
    differences of fourth order of gradients without it: their step of 1e-4 leaves a rounding of about 1e-16 / 1e-4, and 1e-16 times
    the fifth derivative. A function that rounds to float32 has a larger tolerance, and no differences that mean anything.
    """
    plain = flatten_gradients(loss(), leaves)
    gradients = flatten_gradients(loss(), leaves, create_graph=True)
    scale = plain.norm()
    assert (gradients.detach() - plain).norm() <= tolerance * scale, "create_graph changes the gradient"
    direction = [torch.randn_like(t) for t in leaves]
    norm = torch.cat([v.flatten() for v in direction]).norm()
    direction = [10.0 * v / norm for v in direction]
    flat = torch.cat([v.double().flatten() for v in direction])
    product = flatten_gradients(gradients @ flat, leaves)
    if tolerance == 1e-10:
        step, total = 1e-4, torch.zeros_like(product)
        for factor, distance in ((8.0, step), (-8.0, -step), (-1.0, 2 * step), (1.0, -2 * step)):
            total += factor * _gradients_at(loss, leaves, direction, distance)
        difference = (product - total / (12 * step)).norm()
        assert difference <= 1e-6 * product.norm(), f"the Hessian is off by {difference / product.norm():.1g}"


def _gradients_at(loss, leaves, direction, distance):
    with torch.no_grad():
        saved = [t.clone() for t in leaves]
        for t, v in zip(leaves, direction, strict=True):
            t.add_(v, alpha=distance)
    found = flatten_gradients(loss(), leaves)
    with torch.no_grad():
        for t, value in zip(leaves, saved, strict=True):
            t.copy_(value)
    return found
