"""Which instructions of scheduled HLO are collectives and which are Pallas kernels, in whatever wrapping."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from ringflash.plan.hlo import Computation, Instruction, Module

COLLECTIVES = (
    "collective-permute",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "all-reduce",
    "reduce-scatter",
    "collective-broadcast",
    "send",
)
PUT = "ringflash_put"  # attention.kernels.mosaic.put
KERNEL = 'custom_call_target="tpu_custom_call"'
PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]+\},?)*)\}")
IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# As a newer compiler writes them: the axes of a mesh, and which of them a group goes over.
MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, *device_ids=\(([\d,]+)\))? *\{([^}]*)\}")
# Between slices the hosts do the work: a device sends them its part, and receives the result.
DCN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')
AXIS = re.compile(r"'(\w+)'=(\d+)")


def collective_of(module: Module, one: Instruction) -> Instruction | None:
    """The instruction itself, or what an async wrapper or a fusion holds; None where it is none."""
    if one.opcode.removesuffix("-start") in COLLECTIVES:
        return one
    if one.opcode not in ("async-start", "fusion"):
        return None
    bodies = [
        module.computations[name] for name in one.called("calls") if name in module.computations
    ]
    inner = (x for body in bodies for x in body.instructions)
    return next((x for x in inner if x.opcode.removesuffix("-start") in COLLECTIVES), None)


def kind_of(one: Instruction) -> str:
    """all-gather for all-gather-start; of a send to another slice, what the hosts do with it."""
    dcn = DCN.search(one.rest)
    return dcn[1].lower().replace("_", "-") if dcn else one.opcode.removesuffix("-start")


def done_of(computation: Computation, at: int) -> int | None:
    """Where the collective started at `at` is done, following updates; None where it is synchronous."""
    names, end = {computation.instructions[at].name}, None
    started = computation.instructions[at]
    if DCN.search(started.rest):
        return received(computation, at)
    if "start" not in started.opcode and "start" not in started.name:
        return None
    for n, one in enumerate(computation.instructions[at + 1 :], at + 1):
        chained = any(word in one.opcode or word in one.name for word in ("done", "update"))
        if chained and names & set(one.operands):
            names.add(one.name)
            end = n
    return end


def received(computation: Computation, at: int) -> int | None:
    """Where what the hosts make of the send at `at` has come back."""
    meeting = MEETING.search(computation.instructions[at].rest)
    asked = {
        one.name
        for one in computation.instructions
        if one.opcode == "recv" and meeting and f'"{meeting[1]}"' in one.rest
    }
    for n, one in enumerate(computation.instructions):
        if n > at and one.opcode == "recv-done" and asked & set(one.operands):
            return n
    return None


def pairs_of(one: Instruction) -> tuple[tuple[int, int], ...]:
    """Of a permute: (source, target)."""
    found = PAIRS.search(one.rest)
    numbers = [int(n) for n in re.findall(r"\d+", found[1])] if found else []
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def held(one: Instruction) -> int:
    """Bytes of the result; of a start, whose result is what goes in and what comes out, of the latter."""
    each = one.results
    if one.opcode in ("collective-permute-start", "send"):
        each = each[:1]
    elif one.opcode == "all-gather-start":
        each = each[len(each) // 2 :]
    return sum(each)


def group_of(one: Instruction, devices: int) -> np.ndarray:
    """The devices that exchange with one another, of the first group."""
    iota, groups, mesh = (form.search(one.rest) for form in (IOTA, GROUPS, MESH))
    if mesh:
        axes = {name: int(size) for name, size in AXIS.findall(mesh[1])}
        return first_along(axes, re.findall(r"\w+", mesh[3]), mesh[2])
    if iota:
        dims = numbers(iota[3])
        turned = np.arange(math.prod(dims)).reshape(dims)
        turned = turned.transpose(numbers(iota[4])) if iota[4] else turned
        return turned.reshape(int(iota[1]), int(iota[2]))[0]
    sets = re.findall(r"\{([\d,]+)\}", groups[1]) if groups else []
    return np.array(numbers(sets[0])) if sets else np.arange(devices)


def first_along(axes: dict[str, int], over: list[str], ids: str | None) -> np.ndarray:
    """The first group over the axes named, of a mesh of these sizes; ids: its devices, in order."""
    sizes = list(axes.values())
    devices = np.array(numbers(ids)) if ids else np.arange(math.prod(sizes))
    where = tuple(slice(None) if name in over else 0 for name in axes)
    return devices.reshape(sizes)[where].reshape(-1)


def numbers(text: str) -> list[int]:
    """Of a comma list."""
    return [int(n) for n in text.split(",")]


def is_kernel(one: Instruction) -> bool:
    """Whether it is a call of a Pallas kernel that computes something."""
    return one.opcode == "custom-call" and KERNEL in one.rest and not is_put(one)


def is_put(one: Instruction) -> bool:
    """Whether it is the Pallas kernel that only puts arrays elsewhere."""
    return one.opcode == "custom-call" and plain(one.name) == PUT


def kernels_in(module: Module, one: Instruction) -> Iterator[str]:
    """The kernels that it is or calls, at any depth."""
    if is_kernel(one):
        yield one.name
    for name in one.called():
        for inner in module.computations[name].instructions if name in module.computations else ():
            yield from kernels_in(module, inner)


def plain(name: str) -> str:
    """ringflash_forward.10.clone as ringflash_forward."""
    return re.sub(r"(\.\d+|\.clone)+$", "", name)
