"""Which device of a slice stands where in the mesh: the rings first, then what else can be near.

A slice is cut into equal boxes: the devices that differ along one mesh axis only are one of them, in the
order of `Torus.cycle`. Boxes are all it tries: a ring of another outline is not looked for.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringflash.attention.kernels.mosaic.tiles import DEVICE_KINDS
from ringflash.torus import Coordinates, Torus, slice_wraps

# Mesh axes as they lie along an axis of the torus, the innermost first. The ring wants neighbours; where
# those do not close, it loses nothing by leaving them to `tensor`.
NESTINGS = (("context", "tensor", "fsdp", "data"), ("tensor", "context", "fsdp", "data"))


@dataclass(frozen=True)
class Slice:
    """The chips and cores of one slice.

    torus: its chips, and as the last axis the cores of a chip.  devices: by coordinates in it.
    """

    torus: Torus
    devices: dict[Coordinates, Any]

    @property
    def whole(self) -> bool:
        """Whether the devices fill the box."""
        return len(self.devices) == math.prod(self.torus.shape)


@dataclass(frozen=True)
class Part:
    """The devices along one mesh axis: a box of them, of which every `steps`-th is taken."""

    steps: tuple[int, ...]
    torus: Torus

    @property
    def ring(self) -> list[Coordinates]:
        """Where they lie, from the first."""
        return [
            tuple(x * step for x, step in zip(at, self.steps, strict=True))
            for at in self.torus.cycle()
        ]

    @property
    def longest_hop(self) -> int:
        return self.torus.longest_hop(self.torus.cycle())


def has_coordinates(devices: Iterable[Any]) -> bool:
    """Whether these are TPU devices, which know where they lie."""
    return all(
        device.platform == "tpu" and getattr(device, "coords", None) is not None
        for device in devices
    )


def arrange(devices: Sequence[Any], sizes: dict[str, int]) -> np.ndarray:
    """The devices as an array of one dim a mesh axis; `sizes` are its axes in order, with `data` first.

    Each ring along `context` has hops of one link where any cut of the slice into boxes gives it such;
    of those cuts it is the one with the nearest neighbours along `tensor`, then fsdp, then data. Slices
    lie along `data`. Raises ValueError where they cannot.
    """
    slices = [slice_of(group) for group in by_slice(devices)]
    counts = sorted({len(each.devices) for each in slices})
    if len(counts) > 1:
        raise ValueError(f"the slices have {counts} devices: wanted the same number in each")
    if sizes["data"] % len(slices):
        raise ValueError(
            f"the mesh has data={sizes['data']} over {len(slices)} slices: wanted a multiple of"
            f" {len(slices)}, since only `data` may reach from slice to slice"
        )
    share = sizes | {"data": sizes["data"] // len(slices)}
    return np.concatenate([_in_slice(one, share) for one in slices])


def by_slice(devices: Iterable[Any]) -> list[list[Any]]:
    """The devices of each slice, in the order of `slice_index`, which a lone slice may lack."""
    groups: dict[int, list[Any]] = defaultdict(list)
    for device in devices:
        groups[getattr(device, "slice_index", None) or 0].append(device)
    return [groups[index] for index in sorted(groups)]


def slice_of(devices: Sequence[Any]) -> Slice:
    """The box that these devices span, which is taken for the whole slice as to what wraps."""
    at = [(*device.coords, getattr(device, "core_on_chip", 0)) for device in devices]
    lows = [min(xs) for xs in zip(*at, strict=True)]
    shape = tuple(max(xs) - low + 1 for xs, low in zip(zip(*at, strict=True), lows, strict=True))
    generation = DEVICE_KINDS.get(devices[0].device_kind, "")
    wraps = (*slice_wraps(generation, shape[:-1]), False)
    nodes = [tuple(x - low for x, low in zip(xs, lows, strict=True)) for xs in at]
    links = (*(1 for _ in shape[:-1]), 0)
    return Slice(Torus(shape, wraps, links), dict(zip(nodes, devices, strict=True)))


def ring_hops(mesh: Any, axis: str = "context") -> int | None:
    """The most links that one hop of a ring along this mesh axis takes.

    1 is the best that a ring over several chips can have, 0 a ring inside one chip. None where it is not
    known: devices without coordinates, or rings that leave their slice.
    """
    if not has_coordinates(mesh.devices.flat):
        return None
    places: dict[int, tuple[int, Torus, Coordinates]] = {}
    for index, group in enumerate(by_slice(mesh.devices.flat)):
        one = slice_of(group)
        places |= {id(device): (index, one.torus, at) for at, device in one.devices.items()}
    rings = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    longest = 0
    for ring in rings.reshape(-1, rings.shape[-1]):
        indices, tori, ats = zip(*(places[id(device)] for device in ring), strict=True)
        if len(set(indices)) > 1:
            return None
        longest = max(longest, tori[0].longest_hop(ats))
    return longest


def _in_slice(one: Slice, sizes: dict[str, int]) -> np.ndarray:
    shape = tuple(sizes.values())
    if not one.whole:  # no box: in the order in which a ring through all of the slice passes them
        passed = [one.devices[at] for at in one.torus.cycle() if at in one.devices]
        return np.array(passed, dtype=object).reshape(shape)
    parts = min(_cuts(one.torus, sizes), key=_cost)
    rings = [parts[axis].ring for axis in sizes]
    found = np.empty(shape, dtype=object)
    for index in np.ndindex(shape):
        ats = [ring[i] for ring, i in zip(rings, index, strict=True)]
        found[index] = one.devices[tuple(map(sum, zip(*ats, strict=True)))]
    return found


def _cost(parts: dict[str, Part]) -> tuple[int, ...]:
    """What a cut costs, compared from left to right.

    To the ring one link a hop is as good as none: its transfers hide under a kernel. What `tensor` sends
    is waited for, so the cores of a chip are first offered to it, and then to the ring: were they
    another axis's, the rings of two cores would share each link.
    """
    hops = {axis: part.longest_hop for axis, part in parts.items()}
    cores = parts["context"].torus.shape[-1]
    return (max(1, hops["context"]), hops["tensor"], -cores, hops["fsdp"], hops["data"])


def _cuts(torus: Torus, sizes: dict[str, int]) -> Iterator[dict[str, Part]]:
    """Every way to give each mesh axis a factor of each axis of the torus."""
    for nesting in NESTINGS:
        for boxes in _boxes(torus.shape, [sizes[axis] for axis in nesting]):
            yield dict(zip(nesting, _parts(torus, boxes), strict=True))


def _boxes(shape: tuple[int, ...], sizes: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Boxes of these sizes, whose product is `shape`."""
    if not sizes:
        yield []
        return
    divisors = [[d for d in range(1, n + 1) if n % d == 0] for n in shape]
    for box in itertools.product(*divisors):
        if math.prod(box) == sizes[0]:
            rest = tuple(n // d for n, d in zip(shape, box, strict=True))
            yield from ([box, *others] for others in _boxes(rest, sizes[1:]))


def _parts(torus: Torus, boxes: Sequence[tuple[int, ...]]) -> Iterator[Part]:
    """A box keeps the wrap of an axis where it reaches all along it."""
    steps = (1,) * len(torus.shape)
    for box in boxes:
        ends = tuple(step * n for step, n in zip(steps, box, strict=True))
        wraps = tuple(
            wrap and end == whole
            for wrap, end, whole in zip(torus.wraps, ends, torus.shape, strict=True)
        )
        links = tuple(cost * step for cost, step in zip(torus.links, steps, strict=True))
        yield Part(steps, Torus(box, wraps, links))
        steps = ends
