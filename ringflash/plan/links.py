"""What lies between devices: the links of each TPU generation, and how long bytes take over them.

Rates are the makers' public figures, one way; times count bytes alone, no start-up and no contention beyond
what is said here, so they are the least that a transfer takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from ringflash.torus import slice_wraps

DCN_GB_PER_S = 6.25  # one way a chip: 50 Gbit/s, assumed for every generation


@dataclass(frozen=True)
class Links:
    """The inter-chip links (ICI) of one chip. assumed: the maker tells no rate for one link."""

    gb_per_s: float  # one way, of one link
    per_chip: int
    devices: int = 1  # of a chip, as compiled here: they share its links
    assumed: bool = False

    @property
    def bytes_per_s(self) -> float:
        """One way over one link."""
        return self.gb_per_s * 1e9


LINKS = {
    "v4": Links(50, 6, devices=2, assumed=True),
    "v5e": Links(50, 4),
    "v5p": Links(100, 6),
    "v6e": Links(100, 4),
    "7x": Links(100, 6, devices=2),
}


def hop_seconds(generation: str, sent: float, links: int = 1) -> float:
    """One hop of a ring in one direction: every device sends so many bytes at once, over so many links.

    A hop over several links shares each of them with the hops of as many neighbours. 0 links, from core
    to core of one chip, are taken as one: they are no bottleneck, and not all hops of a ring are such.
    """
    return sent * max(1, links) / LINKS[generation].bytes_per_s


def gather_seconds(generation: str, received: float, shape: tuple[int, ...]) -> float:
    """Every device receives so many bytes of all others, or sends as many to a reduction.

    As long as a chip in a corner takes, over all of its links; the devices of a chip share them.
    """
    found, wraps = LINKS[generation], slice_wraps(generation, shape)
    ways = sum(1 + wrap for n, wrap in zip(shape, wraps, strict=True) if n > 1)
    return received * found.devices / (max(1, ways) * found.bytes_per_s)


def exchange_seconds(generation: str, held: float, shape: tuple[int, ...]) -> float:
    """An all-to-all of all devices, each of which holds so many bytes: as long as its busiest axis takes.

    Along an axis of n chips a byte passes n/4 links on average where it wraps around, else (n^2 - 1) / 3n;
    it may take either way.
    """
    found, wraps = LINKS[generation], slice_wraps(generation, shape)
    longest = Fraction(0)
    for n, wrap in zip(shape, wraps, strict=True):
        if n > 1:
            apart = Fraction(n, 4) if wrap else Fraction(n * n - 1, 3 * n)
            links = Fraction(2) if wrap else Fraction(2 * (n - 1), n)  # of a chip, both ways
            longest = max(longest, apart / links)
    return held * found.devices * float(longest) / found.bytes_per_s


def dcn_seconds(sent: float) -> float:
    """Every device sends so many bytes to another slice."""
    return sent / (DCN_GB_PER_S * 1e9)


def shape_of(topology: str) -> tuple[int, ...]:
    """v5p:4x4x8 as (4, 4, 8): chips."""
    return tuple(int(n) for n in topology.partition(":")[2].split("x"))


def chips(topology: str) -> int:
    """Of one slice."""
    return math.prod(shape_of(topology))
