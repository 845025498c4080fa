"""Routes that record a block's operators, each as a function `(block, x)` that returns what to call with other inputs."""

import torch
from functorch.compile import aot_module, make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


class Nothing(TorchDispatchMode):
    """Dispatch mode that only runs what it sees."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def under_a_mode(block, x):
    def call(x):
        with Nothing():
            return block(x)

    return call


def aot(block, x):
    # A copy of the graph's code runs; the parameters stay the block's.
    return aot_module(block, fw_compiler=lambda graph, _: make_boxed_func(graph))


def joint_graph(block, x):
    """Record a function that returns the loss's gradients, and return a call that stores them."""
    parameters = dict(block.named_parameters())

    def gradients(values, x):
        out = torch.func.functional_call(block, values, (x,))
        return out, torch.autograd.grad(out.square().sum(), list(values.values()), allow_unused=True)

    graph = make_fx(gradients)(parameters, x)

    def call(x):
        out, grads = graph(parameters, x)
        for parameter, grad in zip(parameters.values(), grads, strict=True):
            parameter.grad = grad
        return out

    return call


ROUTES = {
    "export": lambda block, x: torch.export.export(block, (x,)).module(),
    "export, strict": lambda block, x: torch.export.export(block, (x,), strict=True).module(),
    "export, decomposed": lambda block, x: torch.export.export(block, (x,)).run_decompositions({}).module(),
    "jit.trace": lambda block, x: torch.jit.trace(block, (x,), check_trace=False),
    "aot_module": aot,
    "joint graph": joint_graph,
    "compile": lambda block, x: torch.compile(block, backend="aot_eager", fullgraph=True),
    "dispatch mode": under_a_mode,
    "checkpoint": lambda block, x: lambda x: checkpoint(block, x, use_reentrant=False),
}


def assert_gradients_survive(route, make_block, x, x2):
    """Check that a recorded block has the outputs and the parameters' gradients of an eager one, to the bit, for other inputs."""
    eager, block = make_block(), make_block()
    eager(x2).square().sum().backward()
    captured = ROUTES[route](block, x)
    out = captured(x2)
    if route != "joint graph":
        out.square().sum().backward()
    assert out.equal(eager(x2))
    module = captured if route.startswith("export") else block
    actual, expected = (dict(m.named_parameters()) for m in (module, eager))
    assert [name for name in expected if expected[name].grad is not None]
    for name, parameter in expected.items():
        grad = actual[name].grad if name in actual else None  # a strict export drops unused parameters
        assert (grad is None) == (parameter.grad is None), name
        assert grad is None or torch.equal(grad, parameter.grad), name
