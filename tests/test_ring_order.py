from types import SimpleNamespace

import numpy as np
import pytest
from fake_devices import FakeDevice, fake_slice
from hypothesis import given
from hypothesis import strategies as st

from ringflash.ring_order import arrange, ring_hops, slice_of

AXES = ("data", "fsdp", "context", "tensor")


def arranged(devices, *sizes):
    """What `ring_hops` looks at of a mesh."""
    placed = arrange(devices, dict(zip(AXES, sizes, strict=True)))
    assert placed.shape == sizes
    assert set(placed.flat) == set(devices)
    return SimpleNamespace(devices=placed, axis_names=AXES)


def hops(mesh):
    return [ring_hops(mesh, axis) for axis in AXES]


@pytest.mark.parametrize(
    ("kind", "shape", "cores"),
    [
        ("TPU v5 lite", (4, 4, 1), 1),
        ("TPU v6 lite", (2, 4, 1), 1),
        ("TPU v6 lite", (16, 16, 1), 1),
        ("TPU v5", (2, 2, 1), 1),
        ("TPU v5", (2, 2, 2), 1),
        ("TPU v5", (4, 4, 4), 1),
        ("TPU v5", (8, 8, 16), 1),
        ("TPU v4", (2, 2, 1), 2),
        ("TPU7x", (2, 2, 1), 2),
        ("TPU7x", (4, 4, 4), 2),
    ],
)
@pytest.mark.parametrize("slices", [1, 2])
def test_a_ring_over_a_slice_has_hops_of_one_link(kind, shape, cores, slices):
    devices = fake_slice(shape, kind=kind, cores=cores, slices=slices)
    mesh = arranged(devices, slices, 1, len(devices) // slices, 1)
    assert ring_hops(mesh) == 1


# Hops of data, fsdp, context and tensor.
@pytest.mark.parametrize(
    ("shape", "sizes", "wanted"),
    [
        ((4, 4, 4), (1, 1, 16, 4), [0, 0, 1, 1]),  # planes, and lines across that wrap
        ((4, 4, 4), (1, 1, 4, 16), [0, 0, 1, 1]),
        ((4, 4, 4), (1, 4, 4, 4), [0, 1, 1, 1]),
        ((8, 8, 16), (1, 16, 16, 4), [0, 2, 1, 1]),
        ((2, 2, 2), (1, 1, 4, 2), [0, 0, 1, 1]),
        ((2, 2, 2), (2, 2, 2, 1), [1, 1, 1, 0]),
        ((2, 4, 1), (1, 1, 4, 2), [0, 0, 1, 2]),  # a square each: the partner is in the other one
        ((1, 4, 1), (1, 1, 4, 1), [0, 0, 2, 0]),  # there is none
    ],
)
def test_the_ring_is_first_then_tensor(shape, sizes, wanted):
    assert hops(arranged(fake_slice(shape), *sizes)) == wanted


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((1, 1, 64, 2), [0, 0, 1, 0]),  # the cores of a chip are a pair of `tensor`
        ((1, 32, 2, 2), [0, 2, 1, 0]),
        ((1, 4, 8, 4), [0, 1, 1, 1]),
        ((1, 1, 2, 64), [0, 0, 0, 1]),  # but not where 64 chips are nearer to one another
        ((1, 64, 2, 1), [0, 1, 0, 0]),
    ],
)
def test_who_has_the_cores(sizes, wanted):
    assert hops(arranged(fake_slice((4, 4, 4), kind="TPU7x", cores=2), *sizes)) == wanted


def test_the_ring_has_the_cores_before_fsdp():
    """Else two rings share each link."""
    mesh = arranged(fake_slice((2, 2, 1), kind="TPU7x", cores=2), 1, 2, 4, 1)
    for ring in mesh.devices[0, :, :, 0]:
        assert len({device.coords for device in ring}) == 2


@given(
    st.tuples(*[st.sampled_from([1, 2, 3, 4, 6])] * 3),
    st.sampled_from([1, 2]),
    st.data(),
)
def test_a_ring_is_single_links_wherever_a_box_has_such(shape, cores, data):
    """v6e, where nothing here wraps: an even box with two axes or more, or a pair, has a cycle."""
    devices = fake_slice(shape, kind="TPU v6 lite", cores=cores)
    size = data.draw(
        st.sampled_from([n for n in range(1, len(devices) + 1) if len(devices) % n == 0])
    )
    mesh = arranged(devices, 1, len(devices) // size, size, 1)
    boxes = [box for box in np.ndindex(*(n + 1 for n in (*shape, cores))) if np.prod(box) == size]
    fitting = [b for b in boxes if all(n % d == 0 for n, d in zip((*shape, cores), b, strict=True))]
    closing = [b for b in fitting if size % 2 == 0 and sum(n > 1 for n in b) > 1]
    assert ring_hops(mesh) == 2 or closing or size <= 2
    assert ring_hops(mesh) <= 1 or not (closing or size <= 2)


def test_rings_that_wrap_need_all_of_the_axis():
    line = fake_slice((1, 16, 1), kind="TPU v6 lite")
    assert hops(arranged(line, 1, 1, 16, 1)) == [0, 0, 1, 0]
    # Two links in any case; over every second chip, and then tensor has neighbours.
    assert hops(arranged(line, 1, 1, 8, 2)) == [0, 0, 2, 1]


def test_slices_lie_along_data():
    mesh = arranged(fake_slice((2, 2, 1), slices=3)[::-1], 6, 1, 2, 1)
    rows = [{device.slice_index for device in row.flat} for row in mesh.devices]
    assert rows == [{0}, {0}, {1}, {1}, {2}, {2}]
    assert hops(mesh) == [None, 0, 1, 0]


def test_data_must_be_a_multiple_of_the_slices():
    with pytest.raises(ValueError, match="data=2 over 4 slices: wanted a multiple of 4"):
        arranged(fake_slice((2, 2, 1), slices=4), 2, 1, 8, 1)


def test_slices_must_be_of_one_size():
    with pytest.raises(ValueError, match=r"have \[2, 4\] devices: wanted the same"):
        arranged(fake_slice((2, 2, 1), slices=2)[:6], 2, 1, 3, 1)


def test_devices_that_fill_no_box_keep_near():
    devices = [device for device in fake_slice((3, 3, 1)) if device.coords != (1, 1, 0)]
    assert ring_hops(arranged(devices, 1, 1, 8, 1)) == 2


def test_part_of_a_slice_begins_anywhere():
    part = [device for device in fake_slice((4, 4, 1)) if device.coords[1] > 1]
    assert slice_of(part).torus.shape == (4, 2, 1, 1)
    assert ring_hops(arranged(part, 1, 1, 8, 1)) == 1


def test_hops_of_the_order_of_ids():
    """What it is for."""
    devices = np.array(fake_slice((4, 4, 4)), dtype=object).reshape(1, 1, 64, 1)
    assert ring_hops(SimpleNamespace(devices=devices, axis_names=AXES)) == 3


@pytest.mark.parametrize("device", [FakeDevice((0, 0, 0), platform="cpu"), FakeDevice(None)])
def test_hops_are_not_known_without_coordinates(device):
    devices = np.array([device], dtype=object).reshape(1, 1, 1, 1)
    assert ring_hops(SimpleNamespace(devices=devices, axis_names=AXES)) is None
