"""The links between the chips of a slice: a box of chips, some of whose axes wrap around.

Arithmetic on coordinates only: `ring_order` knows the devices that lie there. Rings are constructed, not
searched for: 1,024 chips take milliseconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Coordinates = tuple[int, ...]
CUBE = 4  # chips along an edge of the cubes that optical switches join
POD_EDGE = 16  # chips along an edge of a whole pod of v5e or v6e
OF_CUBES = ("v4", "v5p", "7x")
OF_ONE_POD = ("v5e", "v6e")


def slice_wraps(generation: str, shape: Coordinates) -> tuple[bool, ...]:
    """Which axes of a slice have links from their last chip back to the first.

    v4, v5p and 7x are made of cubes of 4 x 4 x 4 whose faces lead to optical switches: a slice of whole
    cubes is closed along every axis, a smaller one along none.  A pod of v5e or v6e is one torus of
    16 x 16: of a smaller slice an axis is closed where it spans the pod.  So say the public pages
    on v4 and v5p, and the `wrap` of each slice in MaxText's table of them; 7x is taken to be as v5p.
    Any other generation counts as open.  What was asked for as a *twisted* torus has other links
    where it wraps, and the same elsewhere: see `Torus.cycle`.
    """
    if generation in OF_CUBES:
        return (all(extent % CUBE == 0 for extent in shape),) * len(shape)
    return tuple(generation in OF_ONE_POD and extent == POD_EDGE for extent in shape)


@dataclass(frozen=True)
class Torus:
    """A box of nodes with a link between neighbours along each axis.

    shape: nodes along each axis.  wraps: whether an axis also links its last node to its first.
    links: what one step along an axis costs: 1 is a link of the slice; more where only every n-th node
    is taken; 0 where the nodes are the cores of one chip.
    """

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    links: tuple[int, ...]

    @property
    def live(self) -> tuple[int, ...]:
        """The axes along which there is anywhere to go."""
        return tuple(axis for axis, extent in enumerate(self.shape) if extent > 1)

    @property
    def closes(self) -> bool:
        """Whether single steps can pass every node once and return: a Hamiltonian cycle.

        One node or two are a ring as they are. A line of more must wrap. Of two axes or more, an even
        number of nodes always has a cycle; an odd one needs an axis that wraps, because without one
        the nodes are coloured like a chessboard and each step changes the colour.
        """
        if math.prod(self.shape) <= 2:
            return True
        even = math.prod(self.shape) % 2 == 0
        return any(self.wraps[axis] for axis in self.live) or (even and len(self.live) > 1)

    def distance(self, a: Coordinates, b: Coordinates) -> int:
        """Links on the shortest way from one node to another."""
        apart = [abs(x - y) for x, y in zip(a, b, strict=True)]
        steps = [
            min(d, n - d) if wrap else d
            for d, n, wrap in zip(apart, self.shape, self.wraps, strict=True)
        ]
        return sum(s * cost for s, cost in zip(steps, self.links, strict=True))

    def longest_hop(self, ring: Sequence[Coordinates]) -> int:
        """The most links between one node of a ring and the next, the last and the first included."""
        return max(self.distance(a, b) for a, b in zip(ring, [*ring[1:], *ring[:1]], strict=True))

    def cycle(self) -> list[Coordinates]:
        """All nodes in the order of a ring: where `closes`, each chip is one step from the next.

        Otherwise it is the best there is: a line is folded, so that no hop has more than two steps; a grid
        of an odd number of nodes has one hop of two. The cores of a chip stand side by side, unless
        only going out over one and back over the other closes the ring. Links that wrap are used only
        where there is no cycle without them, so that a twisted torus is served as well.
        """
        chips = self._without_cores()
        if chips.closes:
            extents = (n // m for n, m in zip(self.shape, chips.shape, strict=True))
            cores = list(itertools.product(*map(range, extents)))
            return [_add(node, core) for node in chips._single_steps() for core in cores]
        return self._single_steps()

    def _without_cores(self) -> Torus:
        shape = tuple(n if cost else 1 for n, cost in zip(self.shape, self.links, strict=True))
        return Torus(shape, self.wraps, self.links)

    def _single_steps(self) -> list[Coordinates]:
        """The cycle with a core counted as any other node."""
        if len(self.live) <= 1:
            return self._line_closed()
        evens = [axis for axis in self.live if self.shape[axis] % 2 == 0]
        wrapped = [axis for axis in self.live if self.wraps[axis]]
        if wrapped and not evens:
            rest = [axis for axis in self.live if axis != wrapped[0]]
            return _ring(self._snake(rest), self._snake(wrapped[:1]), wraps=True)
        down = evens[0] if evens else min(self.live, key=lambda axis: self.links[axis])
        rest = [axis for axis in self.live if axis != down]
        return _ring(self._snake([down]), self._snake(rest), wraps=False)

    def _line_closed(self) -> list[Coordinates]:
        line = self._snake(self.live)
        return line if self.closes else line[::2] + line[1::2][::-1]

    def _snake(self, axes: Iterable[int]) -> list[Coordinates]:
        """All nodes of the part that these axes span, to and fro: each a step from the next."""
        path: list[Coordinates] = [(0,) * len(self.shape)]
        for axis in axes:
            path = [
                (*node[:axis], at, *node[axis + 1 :])
                for at in range(self.shape[axis])
                for node in (path if at % 2 == 0 else path[::-1])
            ]
        return path


def _ring(
    rows: Sequence[Coordinates], columns: Sequence[Coordinates], *, wraps: bool
) -> list[Coordinates]:
    """A ring through a grid of rows and columns, two or more of each; `wraps`: each row is a circle.

    Down through the rows, to and fro over all columns but the first, and back up the first. That takes
    an even number of rows; of an odd one, the first two are gone through in a way of their own.
    """
    last, height = len(columns) - 1, len(rows)
    if height % 2 == 0:
        head = [(0, column) for column in range(last + 1)]
    elif wraps:
        head = [(1, 0), (0, 0), *((0, column) for column in range(last, 0, -1))]
        head += [(1, column) for column in range(1, last + 1)]
    else:  # ends in the first row: from there it is two steps to the third
        order = [1, 0, 0, 1] * (last // 2) + [1, 0]
        head = [(row, at // 2) for at, row in enumerate(order)]
    first = 1 if height % 2 == 0 else 2
    body = [
        (row, column if (row - first) % 2 else last + 1 - column)
        for row in range(first, height)
        for column in range(1, last + 1)
    ]
    back = [(row, 0) for row in range(height - 1, first - 1, -1)]
    return [_add(rows[row], columns[column]) for row, column in head + body + back]


def _add(a: Coordinates, b: Coordinates) -> Coordinates:
    return tuple(x + y for x, y in zip(a, b, strict=True))
