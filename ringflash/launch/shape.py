"""What a topology is made of where it is rented: hosts, chips a host, and its names at Google Cloud.

The names are those of GKE's node labels and machine types and of gcloud's accelerator types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringflash.exits import ConfigFault
from ringflash.plan.links import shape_of
from ringflash.plan.where import Where

CHIPS = 4  # of one host of a slice, but for those of one chip and of the eight below
BIG_HOST = 8  # chips of v5e and v6e that the TPU VM API gives as one machine; GKE gives two of four
CUBE = 4  # 3D slices grow by cubes of 4 x 4 x 4
SMALL_3D = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# The shape that the TPU VM API gives for a number of chips of v4 or v5p: an accelerator type names none.
USUAL_3D = (
    *SMALL_3D,
    *((4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 12), (8, 8, 16), (8, 16, 16)),
)


@dataclass(frozen=True)
class Names:
    """Of one generation. counted: what an accelerator type counts of a chip, cores or the chip."""

    accelerator: str
    machine: str
    prefix: str
    counted: int = 1
    tpu_vm: bool = True


NAMES = {
    "v4": Names("tpu-v4-podslice", "ct4p-hightpu-4t", "v4", counted=2),
    "v5e": Names("tpu-v5-lite-podslice", "ct5lp-hightpu-4t", "v5litepod"),
    "v5p": Names("tpu-v5p-slice", "ct5p-hightpu-4t", "v5p", counted=2),
    "v6e": Names("tpu-v6e-slice", "ct6e-standard-4t", "v6e"),
    "7x": Names("tpu7x", "tpu7x-standard-4t", "tpu7x", counted=2, tpu_vm=False),
}


@dataclass(frozen=True)
class Shape:
    """Machines of a run: `slices` times `hosts`, with `chips` devices or chips each.

    devices: of all, as JAX counts them.  The names are empty where there is no slice.
    """

    hosts: int
    chips: int
    devices: int
    slices: int = 1
    topology: str = ""  # 4x4x4
    accelerator: str = ""  # GKE's node label cloud.google.com/gke-tpu-accelerator
    machine: str = ""  # its machine type
    accelerator_type: str = ""  # gcloud's, such as v5p-128
    xpk_type: str = ""  # XPK's, by shape: the number alone is of several shapes


def of_nodes(nodes: int, devices: int) -> Shape:
    """Machines that are no slice."""
    return Shape(nodes, devices, nodes * devices)


def of_slice(where: Where, *, tpu_vm: bool = False) -> Shape:
    """Slices, on GKE or as TPU VMs. Raises ConfigFault where nobody rents such a one."""
    assert where.generation is not None
    generation, shape = where.generation.name, shape_of(where.topology)
    names, count = NAMES[generation], math.prod(shape)
    if not rented(shape):
        shapes = FLAT if len(shape) == 2 else SMALL_3D
        known = ", ".join("x".join(map(str, one)) for one in shapes)
        more = "" if len(shape) == 2 else ", and multiples of 4 along each axis"
        raise ConfigFault(f"--topology={where.topology}: no such slice; wanted {known}{more}")
    if tpu_vm and not names.tpu_vm:
        raise ConfigFault(
            f"--topology={where.topology}: {generation} has no TPU VMs: wanted gke or xpk"
        )
    whole = tpu_vm and len(shape) == 2 and count == BIG_HOST
    chips = count if whole else min(count, CHIPS)
    text = "x".join(map(str, shape))
    return Shape(
        hosts=count // chips,
        chips=chips,
        devices=where.devices,
        slices=where.slices,
        topology=text,
        accelerator=names.accelerator,
        machine=names.machine.replace("-4t", f"-{chips}t"),
        accelerator_type=f"{names.prefix}-{count * names.counted}",
        xpk_type=f"{names.prefix}-{text}",
    )


def rented(shape: tuple[int, ...]) -> bool:
    """Whether there are slices of this shape, smallest extent first."""
    if len(shape) == 2:
        return shape in FLAT
    return shape in SMALL_3D or all(extent % CUBE == 0 for extent in shape)


def usual(shape: Shape) -> bool:
    """Whether the accelerator type alone brings this shape."""
    extents = tuple(map(int, shape.topology.split("x")))
    return len(extents) == 2 or extents in USUAL_3D
