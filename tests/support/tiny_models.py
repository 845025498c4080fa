"""`Tiny` as the tests of hostile models run it: what it is called with, and what `inspect` must find in it."""

import torch

from support.families import shake
from support.traps_parts import D, Tiny, pre

IDS = torch.randint(0, 99, (2, 7), generator=torch.Generator().manual_seed(0))
AFAF = ["attention", "feed-forward"] * 2


def x(*shape):
    return torch.randn(shape or (2, 7, D), generator=torch.Generator().manual_seed(0))


def tiny(step=pre, **options):
    return shake(Tiny(step, **{"final_norm": True} | options))


def kinds(found):
    return [site.kind for site in found.sites if site.role != "skip"]


def judge_tiny(found, wiring="pre_ln", limit=1e-5):
    assert found.wiring == wiring
    assert kinds(found) == AFAF
    assert found.unknown == ()
    assert found.closes
    assert found.closure <= limit
