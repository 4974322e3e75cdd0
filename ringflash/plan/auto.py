"""`attention.strategy=auto`: what `forecast` finds quickest on a mesh, and the reason in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringflash.attention import LAYOUTS, Mask
from ringflash.plan.forecast import Job, choose, in_words
from ringflash.plan.generations import of_device_kind
from ringflash.ring_order import ring_hops

USUAL = "ring"  # where there are no figures to choose by


@dataclass(frozen=True)
class Choice:
    """A strategy and why it was taken."""

    strategy: str
    why: str


def strategy_for(mesh: Any, mask: Mask, layout: str, **sizes: int) -> Choice:
    """What serves a layer best on this mesh, whose sequence lies along `context`.

    sizes: those of `forecast.Job`, of one device: rows of the batch, heads and kv_heads, head_dim; and
    seq_len, of the whole sequence. A layout that depends on the data counts as zigzag.
    """
    shards, device = mesh.shape["context"], mesh.devices.flat[0]
    if shards == 1:
        return Choice(USUAL, "the sequence lies on one device")
    generation, links = of_device_kind(device.device_kind), ring_hops(mesh)
    if generation is None or links is None:
        return Choice(USUAL, f"no cycles and links are known of {device.device_kind}")
    job = Job(
        generation=generation.name,
        shape=chips_along(mesh),
        shards=shards,
        hop_links=links,
        mask=mask,
        layout=layout if layout in LAYOUTS else "zigzag",
        **sizes,
    )
    served, refused = choose(job)
    return Choice(
        served[0].strategy,
        f"by forecast, a layer forward and backward: {in_words(served, refused)}",
    )


def chips_along(mesh: Any) -> tuple[int, ...]:
    """The box of chips along `context`: over how many coordinates of each axis of the slice it reaches."""
    where = mesh.axis_names.index("context")
    ring = mesh.devices[tuple(slice(None) if n == where else 0 for n in range(mesh.devices.ndim))]
    return tuple(len(set(xs)) for xs in zip(*(device.coords for device in ring), strict=True))
