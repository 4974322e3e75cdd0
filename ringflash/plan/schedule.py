"""The final instruction schedule of a Pallas kernel, read from what the TPU compiler dumps.

Cycles are counted in bundles after register allocation and before the delay converter: later dumps
drop the empty bundles and so undercount. A bundle is one cycle; what it waits for at run time (DMA,
semaphores) is not in the schedule. Only text is read here; nothing is compiled.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNITS = (
    "MATMUL",
    "MATPUSH",
    "XLU",
    "VALU",
    "VPOP",
    "EUP",
    "VLOAD",
    "FILL",
    "VSTORE",
    "SPILL",
    "SALU",
)
PARTS_OF_OTHERS = ("FILL", "SPILL")  # counted in VLOAD and VSTORE too
DELAY_SLOTS = 4  # bundles after a branch that run whether it is taken or not

UTILIZATION = "-pre-delay_hlo-static-per-bundle-utilization.txt"
BUNDLES = "-packed-bundles-post-ra.txt"
ALLOCATIONS = "-post-bundle-packing-post-ra.txt"
# For libtpu: dump no more than what is read here, which is a small part of all.
ONLY = "--xla_jf_dump_llo_pass_label_regex=.*(pre-delay|-post-ra).*"
BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:")
BRANCH = re.compile(r"sbr\.\w+ .*?target bundleno = (\d+)")
VMEM = re.compile(r"space=vmem, size = (0x[0-9a-f]+|\d+)(?:, offset = (0x[0-9a-f]+|\d+))?")


@dataclass(frozen=True)
class Block:
    """A run of bundles that control enters at the top and leaves at the bottom."""

    start: int
    bundles: int
    slots: dict[str, int]  # instructions issued, by unit
    busy: dict[
        str, float
    ]  # slots over how many the unit takes in a cycle: cycles it needs at least
    loops: tuple[
        int, ...
    ]  # where the loops begin that it stands in; the outermost is that over the grid
    skips: tuple[int, ...]  # the bundles of the branches that may jump over it, outermost first

    @property
    def bound(self) -> str:
        """The unit that is busy longest."""
        return max((u for u in UNITS if u not in PARTS_OF_OTHERS), key=lambda u: self.busy[u])

    @property
    def spills(self) -> int:
        """Vector registers stored to VMEM for want of room, and loaded back."""
        return self.slots["SPILL"] + self.slots["FILL"]


@dataclass(frozen=True)
class Schedule:
    """One kernel. `vmem_bytes` is None where the dump does not say."""

    kernel: str
    blocks: tuple[Block, ...]
    vmem_bytes: int | None

    @property
    def bundles(self) -> int:
        """The length of its code."""
        return sum(block.bundles for block in self.blocks)

    def matrix_blocks(self) -> list[Block]:
        """The blocks that issue matrix products, in order."""
        return [block for block in self.blocks if block.slots["MATMUL"]]


def from_json(values: dict[str, Any]) -> Schedule:
    """The inverse of `dataclasses.asdict`."""
    places = ("loops", "skips")
    blocks = (Block(**{**b, **{name: tuple(b[name]) for name in places}}) for b in values["blocks"])
    return Schedule(**{**values, "blocks": tuple(blocks)})


def read(dump: Path, name: str) -> list[Schedule]:
    """The schedules of the kernels whose name contains `name`, in the order they were compiled."""
    files = sorted(dump.glob(f"*{UTILIZATION}"))
    found = [file for file in files if name in kernel_of(file)]
    return [schedule(file) for file in found]


def kernel_of(file: Path) -> str:
    """1796070-splash_mha_fwd.1-68-pre-delay_....txt is of splash_mha_fwd.1."""
    return re.sub(r"^\d+-|-\d+$", "", file.name.removesuffix(UTILIZATION))


def schedule(utilization: Path) -> Schedule:
    """Of the kernel with this file; those that belong to it lie beside it."""
    stem = re.sub(r"-\d+$", "", utilization.name.removesuffix(UTILIZATION))
    capacity, rows = slots_of(utilization.read_text())
    branches = branches_of(beside(utilization, stem, BUNDLES).read_text())
    blocks = cut(rows, capacity, branches)
    vmem = vmem_of(beside(utilization, stem, ALLOCATIONS).read_text())
    return Schedule(kernel_of(utilization), tuple(blocks), vmem)


def beside(file: Path, stem: str, ending: str) -> Path:
    """The one dump of the same kernel with this ending: STEM-65-packed-bundles-post-ra.txt."""
    wanted = re.compile(re.escape(stem) + r"-\d+" + re.escape(ending))
    found = [f for f in file.parent.iterdir() if wanted.fullmatch(f.name)]
    if len(found) != 1:
        raise ValueError(f"{file.name}: wanted one {stem}-N{ending} beside it, found {len(found)}")
    return found[0]


def slots_of(text: str) -> tuple[list[int], list[list[int]]]:
    """The capacity of each unit, and of each bundle the slots that it fills, both as in UNITS.

    An older libtpu (0.0.42) counts MATMUL and MATPUSH as one, MXU: here that is MATMUL.
    """
    head, mark, body = text.partition("== UTILIZATION:")
    lines = head.strip().split("\n")
    names = [name.strip().split(":")[-1] for name in lines[max(0, len(lines) - 2)].split(",")]
    names = ["MATMUL" if name == "MXU" else name for name in names]
    if not mark or {*UNITS} - {*names} - {"MATPUSH"}:
        raise ValueError(f"utilization: wanted the units {', '.join(UNITS)}, found {head!r}")
    at = [names.index(unit) if unit in names else None for unit in UNITS]

    def ordered(line: str, absent: int) -> list[int]:
        numbers = line.split()
        return [absent if n is None else int(numbers[n]) for n in at]

    return ordered(lines[-1], 1), [ordered(line, 0) for line in body.strip().split("\n")]


def branches_of(text: str) -> list[tuple[int, int]]:
    """(bundle of the branch, bundle that it jumps to), in order."""
    found, at = [], 0
    for line in text.splitlines():
        number = BUNDLE.match(line)
        if number:
            at = int(number[1], 16)
        found += [(at, int(target)) for target in BRANCH.findall(line)]
    return found


def cut(
    rows: Sequence[Sequence[int]], capacity: Sequence[int], branches: Sequence[tuple[int, int]]
) -> list[Block]:
    """Basic blocks: cut where a branch lands and where its delay slots end."""
    after = [at + 1 + DELAY_SLOTS for at, _ in branches]
    places = {0, len(rows), *after, *(target for _, target in branches)}
    cuts = sorted(at for at in places if at <= len(rows))
    jumps = list(zip(branches, after, strict=True))
    blocks = []
    for start, end in itertools.pairwise(cuts):
        slots = [sum(column) for column in zip(*rows[start:end], strict=True)]
        loops = {to for (at, to), last in jumps if to <= at and to <= start and end <= last}
        skips = [at for (at, to), first in jumps if first <= start and end <= to]
        busy = [n / most for n, most in zip(slots, capacity, strict=True)]
        by_unit = dict(zip(UNITS, slots, strict=True)), dict(zip(UNITS, busy, strict=True))
        blocks.append(Block(start, end - start, *by_unit, tuple(sorted(loops)), tuple(skips)))
    return blocks


def vmem_of(text: str) -> int | None:
    """Where the last of the kernel's own allocations ends; None where none has an offset."""
    ends = [int(at, 0) + int(size, 0) for size, at in VMEM.findall(text) if at]
    return max(ends, default=None)
