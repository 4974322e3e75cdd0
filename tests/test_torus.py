"""The laws of a ring through a torus, over every small box and the shapes of real slices."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringflash.torus import Torus, slice_wraps

SLICES = [(16, 16, 1), (8, 16, 1), (2, 4, 1), (2, 2, 1), (4, 4, 4), (2, 4, 4), (8, 8, 16)]


def torus(shape, wraps=None, cores=1):
    wraps = wraps or (False,) * len(shape)
    return Torus((*shape, cores), (*wraps, False), (1,) * len(shape) + (0,))


def hops(box, ring):
    return [box.distance(a, b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]


def neighbours(box, node):
    """By the definition of a link, not by `distance`; a core to another of its chip is a step too."""
    for axis, (extent, wrap) in enumerate(zip(box.shape, box.wraps, strict=True)):
        for to in (node[axis] - 1, node[axis] + 1):
            if wrap or 0 <= to < extent:
                yield (*node[:axis], to % extent, *node[axis + 1 :])


def has_cycle(box):
    """Whether there is a Hamiltonian cycle: by trying all paths from the first node."""
    size, start = math.prod(box.shape), (0,) * len(box.shape)
    seen = {start}

    def extends(node):
        if len(seen) == size:
            return size <= 2 or start in neighbours(box, node)
        for to in neighbours(box, node):
            if to not in seen:
                seen.add(to)
                if extends(to):
                    return True
                seen.discard(to)
        return False

    return extends(start)


boxes = st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=3)


@given(boxes, st.integers(1, 2))
def test_a_ring_passes_each_node_once_in_single_steps_where_it_closes(axes, cores):
    shape, wraps = zip(*axes, strict=True)
    box = torus(shape, wraps, cores)
    ring = box.cycle()
    assert sorted(ring) == sorted(itertools.product(*map(range, box.shape)))
    chips = [node[:-1] for node in ring]
    steps = [pair for pair in itertools.pairwise([*chips, chips[0]]) if pair[0] != pair[1]]
    if box.closes:
        grid = Torus(shape, wraps, (1,) * len(shape))
        assert all(b in neighbours(grid, a) for a, b in steps)
        assert box.longest_hop(ring) <= 1
    else:
        assert box.longest_hop(ring) == 2


def test_it_closes_where_there_is_a_cycle_and_nowhere_else():
    shapes = [s for n in (1, 2, 3) for s in itertools.product(range(1, 6), repeat=n)]
    small = [shape for shape in shapes if math.prod(shape) <= 15]
    for shape in small:
        for wraps in itertools.product((False, True), repeat=len(shape)):
            box = torus(shape, wraps)
            assert box.closes == has_cycle(box), box


@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (3, 7), (3, 3, 3), (1, 5, 3), (5, 3, 7)])
def test_an_odd_grid_has_one_hop_of_two(shape):
    box = torus(shape)
    assert not box.closes
    assert Counter(hops(box, box.cycle())) == {1: math.prod(shape) - 1, 2: 1}


def test_a_line_is_folded():
    box = torus((7,))
    assert [node[0] for node in box.cycle()] == [0, 2, 4, 6, 5, 3, 1]


@pytest.mark.parametrize("shape", SLICES)
def test_a_slice_needs_no_link_that_wraps(shape):
    """A twisted torus has those elsewhere."""
    whole, box = torus(shape, (True,) * 3), torus(shape)
    assert whole.cycle() == box.cycle()
    assert set(hops(box, box.cycle())) == {1}


@pytest.mark.parametrize("shape", SLICES)
def test_cores_stand_side_by_side(shape):
    box = torus(shape, cores=2)
    assert hops(box, box.cycle()) == [0, 1] * math.prod(shape)


@pytest.mark.parametrize("shape", [(5,), (3, 3), (1, 1, 4)])
def test_cores_close_what_chips_do_not(shape):
    assert not torus(shape).closes
    box = torus(shape, cores=2)
    assert box.longest_hop(box.cycle()) == 1


@given(boxes)
def test_distance_is_the_shortest_way(axes):
    shape, wraps = zip(*axes, strict=True)
    box = torus(shape, wraps)
    start = tuple(extent // 3 for extent in box.shape)
    found, edge = {start: 0}, [start]
    while edge:
        reached = {to: found[node] + 1 for node in edge for to in neighbours(box, node)}
        edge = [to for to in reached if to not in found]
        found = reached | found
    assert found == {node: box.distance(start, node) for node in found}
    assert len(found) == math.prod(box.shape)


def test_every_second_node_is_two_links_away():
    box = Torus((4, 4), (False, False), (2, 1))
    assert box.distance((0, 0), (2, 3)) == 7
    assert set(hops(box, box.cycle())) == {1, 2}


def test_the_hop_of_two_is_where_a_step_is_cheapest():
    box = Torus((3, 3), (False, False), (2, 1))
    assert box.longest_hop(box.cycle()) == 2


@pytest.mark.parametrize(
    ("generation", "shape", "wanted"),
    [
        ("v5p", (2, 2, 1), ()),
        ("v5p", (2, 4, 4), ()),
        ("v5p", (4, 4, 4), (0, 1, 2)),
        ("v4", (4, 4, 12), (0, 1, 2)),
        ("7x", (8, 8, 16), (0, 1, 2)),
        ("v5e", (8, 8, 1), ()),
        ("v5e", (8, 16, 1), (1,)),
        ("v6e", (16, 16, 1), (0, 1)),
        ("", (4, 4, 4), ()),
        ("", (16, 16, 1), ()),
    ],
)
def test_which_axes_of_a_slice_wrap(generation, shape, wanted):
    assert slice_wraps(generation, shape) == tuple(axis in wanted for axis in range(3))
