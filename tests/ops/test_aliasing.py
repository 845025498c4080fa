"""Tests of shared memory between tensors, against the sets of all element addresses."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from addnorm.ops import aliasing
from support.cases import bf16, f32, f64

buffer = torch.zeros(64, dtype=f64)


def views():
    """Draw views of any dtype, sizes, strides (zero too) and offset in the 512 bytes of one buffer."""

    def view(dtype, sizes, strides, offset):
        sizes, strides = sizes[: min(len(sizes), len(strides))], strides[: min(len(sizes), len(strides))]
        return buffer.view(dtype).as_strided(sizes, strides, offset)

    return st.builds(
        view,
        st.sampled_from([f64, f32, bf16]),
        st.lists(st.integers(0, 3), max_size=3),
        st.lists(st.integers(0, 9), max_size=3),
        st.integers(0, 9),
    )


def addresses(t):
    """Return the addresses of all bytes of all elements."""
    begin, size = t.data_ptr(), t.element_size()
    places = itertools.product(*(range(n) for n in t.shape))
    elements = [begin + size * sum(i * s for i, s in zip(at, t.stride(), strict=True)) for at in places]
    return [element + byte for element in elements for byte in range(size)]


@given(views())
def test_overlaps_itself_means_a_repeated_address(t):
    repeated = addresses(t)
    assert aliasing.overlaps_itself(t) == (len(set(repeated)) < len(repeated))


@given(views(), views())
def test_shares_memory_means_a_common_address(a, b):
    if not aliasing.overlaps_itself(a):
        assert aliasing.shares_memory(a, b) == bool(set(addresses(a)) & set(addresses(b)))


@given(views(), views())
def test_is_same_memory_means_equal_addresses(a, b):
    if a.numel() and aliasing.is_same_memory(a, b):
        assert addresses(a) == addresses(b)
        assert a.element_size() == b.element_size()


@pytest.mark.parametrize("t", [torch.zeros(4, 8), torch.zeros(8, 4).t(), torch.zeros(1, 8)])
def test_is_same_memory_for_a_view_of_a_whole_tensor(t):
    """Whatever the stride of a dimension of one."""
    stride = [99 if size == 1 else step for size, step in zip(t.shape, t.stride(), strict=True)]
    assert aliasing.is_same_memory(t, t.as_strided(t.shape, stride))
    assert not aliasing.is_same_memory(t, t.clone())


def test_two_storages_over_the_same_bytes_share_them():
    array = torch.zeros(8).numpy()
    assert aliasing.shares_memory(torch.from_numpy(array), torch.from_numpy(array[4:]))


def test_on_the_meta_device_there_is_no_memory_to_share():
    t = torch.zeros(4, 8, device="meta")
    assert not aliasing.shares_memory(t, t)
    assert not aliasing.overlaps_itself(t[:1].expand(4, 8))


def test_aliasing_ignores_the_default_device():
    t = torch.zeros(8, 8)
    with torch.device("meta"):
        assert aliasing.shares_memory(t[:, :4], t[:, 3:5])
        assert not aliasing.shares_memory(t[:, :4], t[:, 4:])
