"""Captured graphs of models, and faults of the fused calls in them."""

import copy
import warnings

import torch

from addnorm.fusion import rewrite
from addnorm.fusion.backend import fuse_graph, run_eagerly
from addnorm.fusion.graph import _owner_kind


def capture(model, *args, **kwargs):
    """Return the graphs of a model's call with gradients, before they are fused, and what their inputs depend on."""
    graphs = []

    def keep(graph, _):
        kinds = [_owner_kind(node)[0] for node in graph.graph.nodes if node.op == "placeholder"]
        graphs.append((graph, kinds))
        return run_eagerly(copy.deepcopy(graph))

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(model, backend=keep)(*args, **kwargs)
    return graphs


def fuse_copies(graphs):
    """Fuse copies of graphs with gradients; return the differences of their calls, and the number of calls."""
    fused = [fuse_graph(copy.deepcopy(graph), kinds=kinds) for graph, kinds in graphs]
    count = sum(boundary.is_fused for part in fused for boundary in part.boundaries)
    return [difference for part in fused for difference in part.differences], count


def all_hold(differences):
    return all(difference.holds for difference in differences)


def assert_calls_hold(graphs, number):
    """Check that copies of graphs have so many fused calls, and that all hold."""
    differences, count = fuse_copies(graphs)
    assert count == number
    assert all_hold(differences)


def change_inputs(change, only=None):
    """Return a fault: what a call receives is changed, at one site or at all."""

    def plant(monkeypatch):
        original, sites = rewrite.operation_of, []

        def operation_of(match):
            function, site = original(match), len(sites)
            sites.append(match)

            def faulty(residual, branch, *args, **options):
                return function(*change(residual, branch, *args), **options)

            return function if only not in (None, site) else faulty

        monkeypatch.setattr(rewrite, "operation_of", operation_of)

    return plant


def change_results(change):
    """Return a fault: what a call returns is changed. `change` takes y, the sum or None, and the residual."""

    def plant(monkeypatch):
        original = rewrite.operation_of

        def operation_of(match):
            function = original(match)

            def faulty(residual, branch, *args, **options):
                results = function(residual, branch, *args, **options)
                y, z = results if isinstance(results, tuple) else (results, None)
                y, z = change(y, z, residual, (residual + branch).detach())
                return y if z is None else (y, z)

            return faulty

        monkeypatch.setattr(rewrite, "operation_of", operation_of)

    return plant
