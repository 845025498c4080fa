"""Tests that several streams are measured on the device of the run, by a mode that refuses what torch would refuse on a GPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import addnorm
from addnorm import wirings
from addnorm.stream.dataflow import memory
from support.families import shake
from support.stacks import encoder
from support.stream_steps import X

COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class OtherDevice(TorchDispatchMode):
    """Mode in which some tensors, and all that is computed from them, are on another device than new tensors."""

    def __init__(self, *tensors):
        super().__init__()
        self.storages = {}  # kept alive, so that no address is used twice
        self.add(tensors)

    def add(self, tensors):
        storages = [tensor.untyped_storage() for tensor in tree_leaves(tensors) if isinstance(tensor, torch.Tensor)]
        self.storages |= {storage._cdata: storage for storage in storages}

    def has(self, tensor):
        return tensor.untyped_storage()._cdata in self.storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()]
        places = {self.has(tensor) for tensor in tensors}
        if len(places) > 1 and func not in COPIES:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        out = func(*args, **(kwargs or {}))
        if places == {True}:
            self.add(out)
        return out


def move_to_cpu(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


@pytest.mark.parametrize(
    "wiring", [wirings.mhc(n=2, iterations=1), wirings.denseformer(), wirings.gated_mix()], ids=lambda w: w.name
)
def test_matrices_are_measured_on_the_device_of_the_run(wiring, monkeypatch):
    model = shake(encoder(wiring))
    device = OtherDevice(X, *model.parameters(), *model.buffers())
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "cpu", move_to_cpu)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, *args, **options: to(move_to_cpu(t) if "cpu" in args[:1] else t, *args, **options)
    )
    view_storage = memory._view_storage  # of a copy, which has the device of the tensor

    def view_copy(storage, like):
        copy = view_storage(storage, like)
        device.add([copy] if device.has(like) else [])
        return copy

    monkeypatch.setattr(memory, "_view_storage", view_copy)
    with device:
        found = addnorm.inspect(model, X)
        shares = addnorm.decompose(model, X).mean_shares()
        rows = addnorm.stream.measure_streams(found.program)
    assert (found.wiring, len(rows), found.program.expansion_closes) == (wiring.name, len(found.program.sites), True)
    assert abs(sum(shares.values()) - 1) < 1e-5
