"""Scheduled HLO, the compiler's text of a program, taken apart: computations and their instructions in order.

Only what `program` asks for is kept. Nothing is compiled here, and JAX is not needed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

HEADER = re.compile(r"^(ENTRY )?%?([\w.\-<>]+) \(.*\) -> .*\{$")
LINE = re.compile(r"^\s+(ROOT )?%([\w.\-<>]+) = (.*)$")
OPCODE = re.compile(r"\s*([\w-]+)\(")
ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^}]*\})?")
NAME = re.compile(r"%([\w.\-<>]+)")
INDEX = re.compile(r"\bindex=(\d+)")
OPERAND = re.compile(r"%([\w.\-<>]+)(?:#(\d+))?")
SCOPE = re.compile(r'op_name="([^"]*)"')
ONE = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-<>]+)"
)
MANY = re.compile(r"\b(branch_computations|called_computations)=\{([^}]*)\}")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
UNKNOWN = 2**62  # cycles: the compiler writes the largest number where it has no estimate
BYTES = {"pred": 1, "bf16": 2, "token": 0}


@dataclass(frozen=True)
class Instruction:
    """One line. results: the bytes of each array of its result.  in_hbm: likewise, 0 for one elsewhere.

    taken: operands, and of each which element of its tuple, None for all of it.
    inside: what stands between the parentheses: operands, a constant's value.  rest: what follows.
    """

    name: str
    opcode: str
    results: tuple[int, ...]
    in_hbm: tuple[int, ...]
    taken: tuple[tuple[str, int | None], ...]
    inside: str
    rest: str
    root: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        """Names alone."""
        return tuple(name for name, _ in self.taken)

    def hbm(self, element: int | None = None) -> int:
        """Bytes of its result that lie in HBM, or of one element of it."""
        return sum(self.in_hbm) if element is None else self.in_hbm[element]

    @property
    def scope(self) -> str:
        """JAX's name stack, or nothing."""
        found = SCOPE.search(self.rest)
        return found[1] if found else ""

    @property
    def cycles(self) -> int:
        """Of one TensorCore, as the compiler estimates them; 0 where it does not."""
        found = CYCLES.search(self.rest)
        return int(found[1]) if found and int(found[1]) < UNKNOWN else 0

    def called(self, *roles: str) -> list[str]:
        """The computations that it names, in order; with `roles`, those named so."""
        found = [(m[1], [m[2]]) for m in ONE.finditer(self.rest)]
        found += [(m[1], NAME.findall(m[2])) for m in MANY.finditer(self.rest)]
        return [name for role, names in found if not roles or role in roles for name in names]


@dataclass(frozen=True)
class Computation:
    """Its instructions in the order in which they are issued."""

    name: str
    instructions: list[Instruction]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {one.name: one for one in self.instructions}

    @property
    def root(self) -> Instruction:
        """The one whose result is that of the computation."""
        return next(x for x in self.instructions if x.root)


@dataclass(frozen=True)
class Module:
    """All computations by name, and which one is entered."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Raises ValueError for what is not scheduled: there the order of lines means nothing."""
    first = text.lstrip().split("\n", 1)[0]
    if "is_scheduled=true" not in first:
        raise ValueError(f"wanted HLO with is_scheduled=true, found {first[:80]!r}")
    bodies: dict[str, list[str]] = {}
    entry, lines = "", None
    for line in text.splitlines():
        header = HEADER.match(line)
        if header:
            lines = bodies.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line == "}":
            lines = None
        elif lines is not None and (LINE.match(line) or not lines):
            lines.append(line)
        elif lines is not None:  # a kernel's metadata may go over several lines
            lines[-1] += line
    if not entry:
        raise ValueError("wanted HLO with an ENTRY computation, found none")
    return Module({name: computation(name, body) for name, body in bodies.items()}, entry)


def computation(name: str, lines: list[str]) -> Computation:
    """Of its lines, each with all of an instruction."""
    return Computation(name, list(filter(None, map(instruction, lines))))


def instruction(line: str) -> Instruction | None:
    """One line of a computation, or None where there is no instruction in it."""
    found = LINE.match(line)
    if not found:
        return None
    text = found[3]
    kind = balanced(text, 0) if text.startswith("(") else text.index(" ")
    opcode = OPCODE.match(text, kind)
    if not opcode:
        return None
    end = balanced(text, opcode.end() - 1)
    inside = text[opcode.end() : end - 1]
    arrays = list(ARRAY.finditer(text[:kind]))
    return Instruction(
        name=found[2],
        opcode=opcode[1],
        results=tuple(map(size, arrays)),
        in_hbm=tuple(0 if "S(" in (x[3] or "") else size(x) for x in arrays),
        taken=taken_by(opcode[1], inside, text[end:]),
        inside=inside,
        rest=text[end:],
        root=bool(found[1]),
    )


def taken_by(opcode: str, inside: str, rest: str) -> tuple[tuple[str, int | None], ...]:
    """Operands and their elements: a newer compiler writes `%x#1` where an older has an instruction."""
    if opcode == "get-tuple-element":
        (name,), index = NAME.findall(inside), INDEX.search(rest)
        assert index is not None, rest
        return ((name, int(index[1])),)
    return tuple((x[1], int(x[2]) if x[2] else None) for x in OPERAND.finditer(inside))


def balanced(text: str, at: int) -> int:
    """Behind the parenthesis that closes the one at `at`."""
    depth = 0
    for n in range(at, len(text)):
        depth += (text[n] == "(") - (text[n] == ")")
        if not depth:
            return n + 1
    raise ValueError(f"a parenthesis is not closed: {text[at : at + 80]!r}")


def size(array: re.Match[str]) -> int:
    """Bytes of bf16[1,4096,8,256], without what a tiled layout adds."""
    kind, dims = array[1], array[2]
    bits = re.search(r"\d+", kind)
    each = BYTES[kind] if kind in BYTES else int(bits[0]) / 8 if bits else 0
    return int(each * math.prod(int(n) for n in dims.split(",") if n))
