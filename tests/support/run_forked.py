"""Program that forks after its threads have computed, and calls the operation in the child.

tests/functional/test_fork.py runs it:
run_forked.py OPERATION HOW [OPERATION HOW ...]      prints for each pair whether the child's bits are the parent's
"""

import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset

import addnorm

SHAPE = (2048, 768)
generator = torch.Generator().manual_seed(0)
x, branch = torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)
weight = torch.randn(768, generator=generator)


def with_backward(row=slice(None)):
    residual, gamma = x[row].clone().requires_grad_(), weight.clone().requires_grad_()
    y = addnorm.add_layer_norm(residual, branch[row], gamma)
    y.backward(branch[row])
    return torch.cat([y.detach().flatten(), residual.grad.flatten(), gamma.grad])


def streams():
    x4 = x.view(512, 4, 768).clone().requires_grad_()
    project = torch.linspace(-1, 1, 24 * 4 * 768).view(24, 4 * 768).requires_grad_()
    gates = addnorm.StreamGates("manifold", project, torch.ones(3), torch.zeros(24))
    step = addnorm.add_norm_streams(x4, branch[:512], inject=torch.ones(4), gates=gates)
    (step.read * branch[:512]).sum().backward()
    return torch.cat([step.read.detach().flatten(), x4.grad.flatten(), project.grad.flatten()])


OPERATIONS = {
    "with backward": with_backward,
    "streams": streams,
    "one row": lambda: with_backward(slice(5, 6)),
}


class Calls(Dataset):
    """Dataset whose items are results of the operation, computed by a worker."""

    def __init__(self, operation):
        self.operation = operation

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.operation()


def main(name, how):
    torch.set_num_threads(2)
    operation = OPERATIONS[name]
    expected = operation()
    if how == "DataLoader":
        items = list(DataLoader(Calls(operation), batch_size=None, num_workers=2, multiprocessing_context="fork"))
        print("same" if len(items) == 4 and all(item.equal(expected) for item in items) else "other")
    else:
        pid = os.fork()
        if pid == 0:
            if "one thread" in how:
                torch.set_num_threads(1)
            os._exit(0 if operation().equal(expected) else 3)
        print({0: "same", 3: "other"}[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])])
    # The parent's threads still exist.
    print("same" if operation().equal(expected) else "other")


if __name__ == "__main__":
    for pair in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(*pair)
