"""The TPU generations that can be compiled for, and what one TensorCore of each can do at most.

Public figures of the makers, but for `hbm_gib`, which the compiler names when it finds no room; those of the
slice (links, chips) are not here.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from ringflash.attention.kernels.mosaic.tiles import DEVICE_KINDS, VMEM_MIB
from ringflash.exits import ConfigFault


@dataclass(frozen=True)
class Generation:
    """One kind of TPU. Rates are those of one TensorCore."""

    name: str
    topology: str  # the smallest slice that the compiler knows, in its own words
    cores: int  # TensorCores of one device as compiled here; on hardware v4 may join two too
    flops_per_cycle: int  # bf16, by the matrix units
    clock_ghz: float
    hbm_tb_per_s: float
    hbm_gib: float  # what the compiler lets a program have, of one device as compiled here

    @property
    def device_kinds(self) -> tuple[str, ...]:
        """As `jax.Device.device_kind` has them."""
        return tuple(kind for kind, name in DEVICE_KINDS.items() if name == self.name)

    @property
    def vmem_mib(self) -> int:
        """MiB of VMEM."""
        return VMEM_MIB[self.name]

    @property
    def peak_flops(self) -> float:
        """A second, bf16, of a device as compiled here."""
        return self.flops_per_cycle * self.cores * self.clock_ghz * 1e9

    @property
    def hbm_bytes_per_cycle(self) -> float:
        """What one TensorCore can move from or to HBM in a cycle."""
        return self.hbm_tb_per_s * 1e3 / self.clock_ghz


GENERATIONS = {
    each.name: each
    for each in (
        Generation("v4", "v4:2x2x1", 1, 131_072, 1.05, 0.61, 15.25),
        Generation("v5e", "v5e:2x2", 1, 131_072, 1.5, 0.82, 15.75),
        Generation("v5p", "v5p:2x2x1", 2, 131_072, 1.75, 1.38, 95.73),
        Generation("v6e", "v6e:2x2", 1, 524_288, 1.75, 1.64, 31.24),
        Generation("7x", "tpu7x:2x2x1", 1, 524_288, 2.2, 3.69, 94.74),
    )
}


@dataclass(frozen=True)
class Topology:
    """A slice to compile for: `name` is what the compiler is asked for."""

    generation: Generation
    name: str


def topology(text: str) -> Topology:
    """`v5p:2x2x1`, `tpu7x:2x2x1`, or `v5p` alone for the smallest slice. Raises ConfigFault."""
    known = f"known: {', '.join(GENERATIONS)}, alone or with a shape such as v5p:2x2x1"
    name, colon, shape = text.partition(":")
    short = name.removeprefix("tpu")
    generation = GENERATIONS.get(short)
    if generation is None:
        near = difflib.get_close_matches(short, GENERATIONS, n=1)
        meant = f": did you mean {near[0]}?" if near else ""
        raise ConfigFault(f"{name!r} is no TPU generation{meant}; {known}")
    if not colon:
        return Topology(generation, generation.topology)
    smallest = generation.topology.partition(":")[2]
    axes = smallest.count("x") + 1
    if not re.fullmatch("x".join([r"[1-9]\d*"] * axes), shape, re.ASCII):
        raise ConfigFault(
            f"{text!r}: the shape of a {generation.name} slice is {axes} numbers such as {smallest},"
            f" found {shape or 'nothing'}"
        )
    return Topology(generation, f"{generation.topology.partition(':')[0]}:{shape}")


def of_device_kind(device_kind: str) -> Generation | None:
    """The generation whose devices call themselves so, or None."""
    return GENERATIONS.get(DEVICE_KINDS.get(device_kind, ""))
