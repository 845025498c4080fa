"""Helpers that run calls in place and with out=, and return their results."""

import torch
from torch.utils._pytree import tree_map

import addnorm
from support.cases import FUNCTIONS

IN_PLACE = {"layer": addnorm.add_layer_norm_, "rms": addnorm.add_rms_norm_, "none": addnorm.add_residual_}


def in_place(call, tensors=None):
    """Run the call in place, on copies of its tensors by default, and return the new residual and branch."""
    tensors = tree_map(torch.clone, call.tensors) if tensors is None else tensors
    eps = {} if call.norm == "none" else {"eps": call.eps}
    returned = IN_PLACE[call.norm](**tensors, **call.options, **eps)
    assert returned is tensors["residual" if call.norm == "none" else "branch"]
    for name, t in tensors.items():
        if name != "residual" and (name != "branch" or call.norm == "none"):
            torch.testing.assert_close(
                t, call.tensors[name], rtol=0, atol=0, equal_nan=True, msg=f"{name} must not change"
            )
    return {"z": tensors["residual"]} if call.norm == "none" else {"y": tensors["branch"], "z": tensors["residual"]}


def into(call, out):
    """Run the call with out= and return its result."""
    arguments = call.tensors | call.options
    if call.norm == "none":
        return addnorm.add_residual(**arguments, out=out)
    return FUNCTIONS[call.norm](**arguments, eps=call.eps, return_residual=isinstance(out, tuple), out=out)


def nan(like):
    """Return a NaN-filled tensor, in which an element that is not written is visible."""
    return torch.full_like(like, float("nan"), memory_format=torch.contiguous_format)
