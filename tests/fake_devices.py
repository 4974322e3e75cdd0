"""Devices of slices that are not there, with what the order of a mesh is made from."""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class FakeDevice:
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0
    device_kind: str = "TPU v5"
    platform: str = "tpu"


def fake_slice(shape, *, kind="TPU v5", cores=1, slices=1):
    """In the order in which TPU devices are numbered: the first axis is the fastest, cores before it."""
    ranges = (range(slices), *map(range, reversed(shape)), range(cores))
    return [FakeDevice((x, y, z), core, n, kind) for n, z, y, x, core in itertools.product(*ranges)]
