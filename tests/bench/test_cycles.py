"""From schedules to cycles: which block is a body, and how often each block runs."""

from dataclasses import replace

import pytest

from ringflash.bench.candidates import Job, Part, Shape, causal_tiles
from ringflash.bench.cycles import bodies_of, cycles, runs_of, whole
from ringflash.plan.generations import GENERATIONS
from ringflash.plan.schedule import UNITS, Block, Schedule

JOB = Job("splash", "forward", Shape(seq_len=8192, heads=4), "v6e")
PART = Part("fwd", 1024, 512, full=56, partial=16, steps=128, starts=8, moved=1024)


def block(start, bundles, loops=(2,), skips=(), **slots):
    counted = dict.fromkeys(UNITS, 0) | slots
    return Block(start, bundles, counted, {u: n / 2 for u, n in counted.items()}, loops, skips)


ONCE = block(0, 10, loops=())
STEP = block(10, 20)
START = block(35, 30, skips=(30,), VSTORE=60)
FULL = block(70, 1000, skips=(65,), MATMUL=1800, VALU=100, SPILL=3, FILL=4)
BESIDE = block(1070, 5, skips=(65,))
PARTIAL = block(1080, 1200, skips=(1076,), MATMUL=1800, VALU=900)
DRAIN = block(2300, 100, skips=(2295,), MATMUL=100)
LAST = block(2400, 40)
TWO = Schedule("fwd.1", (ONCE, STEP, START, FULL, BESIDE, PARTIAL, DRAIN, LAST), 2**20)
ONE = Schedule("fwd.1", (ONCE, STEP, START, PARTIAL, LAST), None)


def test_bodies():
    assert bodies_of(TWO) == ((FULL,), (PARTIAL,))
    assert bodies_of(ONE) == ((PARTIAL,), (PARTIAL,))
    with pytest.raises(ValueError, match=r"fwd\.1: wanted a block with matrix products"):
        bodies_of(Schedule("fwd.1", (ONCE,), None))


def test_a_body_of_two_blocks():
    halves = replace(FULL, bundles=500), replace(FULL, start=600, bundles=400)
    full, _ = bodies_of(Schedule("fwd.1", (*halves, PARTIAL), None))
    assert full == halves
    assert full.bundles == 900


def test_what_follows_in_one_place_is_one_body():
    begin, end = block(2, 400, MATMUL=1000), block(3000, 400, MATMUL=1000)
    assert bodies_of(replace(TWO, blocks=(begin, *TWO.blocks, end))) == ((FULL,), (PARTIAL,))


def test_runs():
    runs = {b.start: runs_of(PART, TWO, b, 4) for b in TWO.blocks}
    assert runs == {0: 1 / 4, 10: 128, 35: 8, 70: 56, 1070: 56, 1080: 16, 2300: 8, 2400: 128}
    assert runs_of(PART, ONE, PARTIAL, 4) == 56 + 16


def test_a_branch_over_the_whole_loop_counts_for_nothing():
    skipping = [replace(b, skips=(5, *b.skips)) for b in TWO.blocks]
    within = Schedule("fwd.1", tuple(skipping), None)
    assert runs_of(PART, within, skipping[1], 4) == 128
    assert runs_of(PART, within, skipping[2], 4) == 8


def test_whole():
    assert whole(PART, ONE, 4) == 10 / 4 + 20 * 128 + 30 * 8 + 1200 * 72 + 40 * 128
    assert whole(replace(PART, cores=2), ONE, 4) == whole(PART, ONE, 4) / 2
    assert whole(replace(PART, runs=lambda schedule, block: 2), ONE, 4) == 2 * ONE.bundles


def test_a_tile():
    found = cycles(JOB, [PART], [TWO], GENERATIONS["v6e"])
    assert (found.full, found.partial) == (2000, 2400)
    assert found.bound == "MATMUL"
    assert found.busy["MATMUL"] == 1800
    assert found.busy["DMA"] == pytest.approx(2 * 1024 * 1.75e9 / 1.64e12)
    assert not {"FILL", "SPILL"} & found.busy.keys()
    assert found.efficiency == pytest.approx(2 * 2 * 1024 * 1024 * 128 / (524_288 * 2000))
    assert found.beside == pytest.approx(found.whole / (56 * 1000 + 16 * 1200) - 1)
    assert found.spills == 7
    assert found.vmem_bytes == 2**20


def test_parts_of_a_tile_add_up():
    alone = cycles(JOB, [PART], [TWO], GENERATIONS["v6e"])
    both = cycles(JOB, [PART, PART], [TWO, ONE], GENERATIONS["v6e"])
    assert both.full == alone.full + 2400
    assert both.whole == alone.whole + whole(PART, ONE, 4)
    assert both.vmem_bytes == 2**20


def test_backward_needs_five_products():
    forward = cycles(JOB, [PART], [TWO], GENERATIONS["v6e"])
    backward = cycles(replace(JOB, direction="backward"), [PART], [TWO], GENERATIONS["v6e"])
    assert backward.efficiency == pytest.approx(2.5 * forward.efficiency)


@pytest.mark.parametrize(
    ("block_q", "block_k", "full", "partial"),
    [(1024, 1024, 28, 8), (512, 1024, 56, 16), (1024, 512, 56, 16), (8192, 8192, 0, 1)],
)
def test_causal_tiles(block_q, block_k, full, partial):
    assert causal_tiles(8192, block_q, block_k) == (full, partial)
