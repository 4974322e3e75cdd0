"""What lies in the memory of a device, from the compiler's own assignment of buffers.

`slots` reads the assignment: a slot is a place that several values share, one after another. `largest` picks
those that make up most of it, no two of them in the same place, with the operation and the line that made
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(?:, color (\d+))?(.*)$")
PARAMETER = re.compile(r", parameter (\d+), shape \|([^|]*)\|")
VALUE = re.compile(r"^ value: <\d+ ([^\s{@]+)(\S*) @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
DEFINED = re.compile(r"^\s+(?:ROOT )?%([\w.\-<>]+) = .*$", re.MULTILINE)
OP = re.compile(r'op_name="([^"]*)"')
FRAME = re.compile(r"stack_frame_id=(\d+)")
HBM = 0  # the color of the device's own memory
# What a computation of its own, such as SparseCore's, is given lies where its caller has it.
ELSEWHERE = "thread-local"
SMALL = 2**20  # bytes: what is smaller is not told one by one
OURS = "/ringflash/"


@dataclass
class Slot:
    """Bytes at a place in one allocation, and the names of the values that lie there in turn."""

    allocation: int
    offset: int
    size: int
    shape: str
    values: list[str] = field(default_factory=list)
    parameter: int | None = None
    color: int = HBM


@dataclass(frozen=True)
class Buffer:
    """A slot for a person: what shape, made by which operation, at which line of ours."""

    bytes: int
    shape: str
    op: str
    line: str


def slots(text: str) -> list[Slot]:
    """Every place of the assignment that holds `SMALL` bytes or more."""
    found: dict[tuple[int, int, int], Slot] = {}
    at, color, parameter, here = -1, HBM, None, True
    for line in text.splitlines():
        head = ALLOCATION.match(line)
        if head:
            given = PARAMETER.search(line)
            at, color = at + 1, int(head[2] or HBM)
            parameter = int(given[1]) if given else None
            here = ELSEWHERE not in head[3]
            continue
        value = VALUE.match(line)
        if not here or not value or int(value[3]) < SMALL:
            continue
        size, offset = int(value[3]), int(value[4])
        fresh = Slot(at, offset, size, plain(value[5]), [], parameter, color)
        found.setdefault((at, offset, size), fresh).values.append(value[1])
    return list(found.values())


def plain(shape: str) -> str:
    """bf16[4,8]{1,0:T(8,128)} as bf16[4,8]."""
    return re.sub(r"\{[^}]*\}", "", shape)


def apart(found: Sequence[Slot]) -> list[Slot]:
    """The largest first, leaving out what lies where a larger one lies at another time."""
    taken: list[Slot] = []
    for one in sorted(found, key=lambda slot: -slot.size):
        clash = (
            one.allocation == other.allocation
            and one.offset < other.offset + other.size
            and other.offset < one.offset + one.size
            for other in taken
        )
        if not any(clash):
            taken.append(one)
    return taken


class Origins:
    """Of the values of a program by name: the operation that made them, and the line."""

    def __init__(self, text: str) -> None:
        self.defined = {found[1]: found[0] for found in DEFINED.finditer(text)}
        self.files = dict(_table(text, "FileNames", r'(\d+) "(.*)"'))
        self.places = dict(
            _table(text, "FileLocations", r"(\d+) \{file_name_id=(\d+).*? line=(\d+)")
        )
        self.frames = dict(
            _table(
                text, "StackFrames", r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
            )
        )

    def of(self, names: Sequence[str]) -> tuple[str, str]:
        """Operation and line of the value that says most: one made at a line of ours, if there is any."""
        told = [self._one(self.defined[name]) for name in names if name in self.defined]
        return max(told, key=lambda each: (bool(each[1]), len(each[0])), default=("", ""))

    def _one(self, line: str) -> tuple[str, str]:
        op, frame = OP.search(line), FRAME.search(line)
        return (op[1] if op else "", self._line(frame[1]) if frame else "")

    def _line(self, frame: str) -> str:
        """The innermost line of ours on the stack, or nothing."""
        while frame in self.frames:
            place, parent = self.frames[frame]
            file, number = self.places.get(place, ("", ""))
            name = self.files.get(file, ("",))[0]
            if OURS in name:
                return f"ringflash/{name.rpartition(OURS)[2]}:{number}"
            above = str(int(parent or 0) - 1)  # they are written from one on
            if above == frame:
                break
            frame = above
        return ""


def _table(text: str, title: str, form: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The numbered lines below a title of the program's text, by number."""
    begin = text.find(f"\n{title}\n")
    if begin < 0:
        return
    block = text[begin + len(title) + 2 :].split("\n\n", 1)[0]
    for line in block.splitlines():
        found = re.match(form, line)
        if found:
            yield found[1], found.groups()[1:]


def largest(
    found: Sequence[Slot], origins: Origins, parameters: Mapping[int, str], count: int = 10
) -> list[Buffer]:
    """The `count` largest; parameters: of the program's, by number, their names."""
    told = []
    for one in [slot for slot in apart(found) if slot.color == HBM][:count]:
        op, line = origins.of(one.values)
        if one.parameter is not None:
            op, line = parameters.get(one.parameter, f"argument {one.parameter}"), ""
        told.append(Buffer(one.size, one.shape, op, line))
    return told


def total_of(text: str) -> int:
    """Bytes of HBM that the assignment takes, which the compiler writes of what does not fit too.

    As `memory_analysis` counts them: without constants, which are few bytes.
    """
    found = [head for head in map(ALLOCATION.match, text.splitlines()) if head]
    if not found:
        raise ValueError("wanted an assignment of buffers from the compiler, found none")
    return sum(
        int(size)
        for size, color, kind in (head.groups() for head in found)
        if int(color or HBM) == HBM and ELSEWHERE not in kind and ", constant:" not in kind
    )
