"""What a compiled program does between devices, read from its scheduled HLO.

A collective is *overlapped* where a Pallas kernel stands between its start and its done, in the same
computation or in one that is called from there; a synchronous one never is. That says where they stand,
not that the kernel lasts as long as the transfer: see `estimate`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ringflash.plan.collectives import (
    DCN,
    collective_of,
    done_of,
    group_of,
    held,
    is_kernel,
    is_put,
    kernels_in,
    kind_of,
    pairs_of,
    plain,
)
from ringflash.plan.hlo import Computation, Instruction, Module, parse
from ringflash.plan.moves import FREE, NAMELESS, codes_of, is_move, traffic
from ringflash.plan.trips import trips_of

PARTITIONS = re.compile(r"num_partitions=(\d+)")


@dataclass(frozen=True)
class Place:
    """Where an instruction stands: how often it runs, and what it depends on.

    trips: the product over the loops around it, None where a loop's is not known before it runs.
    branches: (conditional, which branch), outermost first.  backward: whether it is of the gradient.
    """

    computation: str
    loops: tuple[str, ...] = ()
    trips: int | None = 1
    branches: tuple[tuple[str, int], ...] = ()
    scope: str = ""

    @property
    def backward(self) -> bool:
        """As JAX's name stack says it."""
        return "transpose(" in self.scope or "/backward" in self.scope


@dataclass(frozen=True)
class Transfer:
    """One collective. bytes: what its result holds, or for a permute what is sent; of one execution."""

    name: str
    kind: str
    bytes: int
    place: Place
    pairs: tuple[tuple[int, int], ...] = ()  # of a permute
    group: int = 0  # of any other: how many devices take part
    span: int = 0  # of any other: how far apart in the mesh's order its devices lie, at most
    synchronous: bool = False
    kernels: tuple[str, ...] = ()  # instructions between its start and its done
    cycles: int = 0  # what the compiler estimates for XLA's instructions between the two
    scope: str = ""
    dcn: bool = False  # sent to the host, which exchanges it with those of other slices

    @property
    def overlapped(self) -> bool:
        """Whether a kernel stands between its start and its done."""
        return bool(self.kernels)


@dataclass(frozen=True)
class Call:
    """A Pallas kernel, by its own name, or something that XLA computes on one device, by the instruction's.

    bytes: of its results.  traffic: read from HBM and written to it, at most; of XLA's alone.
    moves: whether it only puts bytes elsewhere.  cycles: as the compiler estimates them; 0: it does not.
    """

    name: str
    place: Place
    bytes: int = 0
    traffic: int = 0
    moves: bool = False
    cycles: int = 0
    scope: str = ""


@dataclass
class Program:
    """Each list is in the order of issue, computation by computation.

    others: what XLA does itself in the way of kernels; what it moves meanwhile (copy-start) is no part of it.
    """

    partitions: int = 1
    transfers: list[Transfer] = field(default_factory=list)
    kernels: list[Call] = field(default_factory=list)
    others: list[Call] = field(default_factory=list)


def read(text: str) -> Program:
    """The facts of a program. Raises ValueError for text that is no scheduled HLO."""
    module = parse(text)
    found = PARTITIONS.search(text.lstrip().split("\n", 1)[0])
    program = Program(int(found[1]) if found else 1)
    for computation, place in reached(module):
        for at, one in enumerate(computation.instructions):
            # Of what XLA made or shared, the name says little: a loop or branch is of its caller's pass,
            # and what has no name is of the pass of what it stands behind.
            if one.scope and computation.name == module.entry and one.opcode not in NAMELESS:
                place = replace(place, scope=one.scope)
            note(program, module, computation, at, place)
    return program


def note(program: Program, module: Module, computation: Computation, at: int, place: Place) -> None:
    """Add what the instruction at `at` is, if it is anything that counts."""
    one = computation.instructions[at]
    inner = collective_of(module, one)
    if inner is not None and "done" not in one.opcode:
        program.transfers.append(
            transfer(module, computation, at, inner, place, program.partitions)
        )
    elif is_kernel(one):
        program.kernels.append(Call(plain(one.name), place, sum(one.results)))
    elif is_put(one):
        size = sum(one.results)
        program.others.append(Call(one.name, place, size, 2 * size, moves=True))
    elif one.opcode not in FREE and not one.opcode.endswith(("-start", "-done", "-update")):
        codes = codes_of(module, one)
        moved = traffic(computation, one, codes)
        program.others.append(
            Call(one.name, place, sum(one.results), moved, is_move(codes), one.cycles, one.scope)
        )


def transfer(
    module: Module,
    computation: Computation,
    at: int,
    inner: Instruction,
    place: Place,
    devices: int,
) -> Transfer:
    """Of the instruction at `at`; `inner` is the collective that it is or calls."""
    end = done_of(computation, at)
    between = computation.instructions[at + 1 : end] if end else []
    pairs = pairs_of(inner)
    group = np.zeros(1, int) if pairs else group_of(inner, devices)
    return Transfer(
        name=computation.instructions[at].name,
        kind=kind_of(inner),
        bytes=held(inner),
        place=place,
        pairs=pairs,
        group=0 if pairs else len(group),
        span=int(group.max() - group.min()),
        synchronous=end is None,
        kernels=tuple(name for x in between for name in kernels_in(module, x)),
        cycles=sum(x.cycles for x in between),
        scope=inner.scope or computation.instructions[at].scope,
        dcn=bool(DCN.search(inner.rest)),
    )


def reached(module: Module) -> Iterator[tuple[Computation, Place]]:
    """Every computation that is run as a sequence of instructions, with where it is run from."""
    waiting = [(module.entry, Place(module.entry))]
    while waiting:
        name, place = waiting.pop(0)
        computation = module.computations[name]
        yield computation, place
        for one in computation.instructions:
            waiting += [(inner, where) for inner, where in below(module, computation, one, place)]


def below(
    module: Module, computation: Computation, one: Instruction, place: Place
) -> Iterator[tuple[str, Place]]:
    """The computations that an instruction runs, and where they then stand."""
    scope, at = one.scope or place.scope, place.branches
    if one.opcode == "while":
        (body,) = one.called("body")
        count = trips_of(module, computation, one)
        trips = None if count is None or place.trips is None else count * place.trips
        yield body, Place(body, (*place.loops, one.name), trips, at, scope)
    elif one.opcode == "conditional":
        names = one.called("branch_computations")
        names = names or one.called("false_computation") + one.called("true_computation")
        for n, name in enumerate(names):
            branches = (*at, (one.name, n))
            yield name, Place(name, place.loops, place.trips, branches, scope)
    elif one.opcode == "call":
        for name in one.called("to_apply", "called_computations", "calls"):
            yield name, Place(name, place.loops, place.trips, at, scope)


def from_json(values: dict[str, Any]) -> Program:
    """The inverse of `dataclasses.asdict`."""

    def place(x: dict[str, Any]) -> Place:
        branches = tuple((name, n) for name, n in x["branches"])
        return Place(**{**x, "loops": tuple(x["loops"]), "branches": branches})

    def transfer(x: dict[str, Any]) -> Transfer:
        fresh = {"place": place(x["place"]), "kernels": tuple(x["kernels"])}
        return Transfer(**{**x, **fresh, "pairs": tuple((a, b) for a, b in x["pairs"])})

    def call(x: dict[str, Any]) -> Call:
        return Call(**{**x, "place": place(x["place"])})

    return Program(
        values["partitions"],
        [transfer(x) for x in values["transfers"]],
        [call(x) for x in values["kernels"]],
        [call(x) for x in values["others"]],
    )
