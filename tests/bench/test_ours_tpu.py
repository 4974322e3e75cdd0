"""How often the blocks of our kernel run: counted from tiles, held against what the kernel is told to do."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from ringflash.attention import Causal, Spec, Tokens
from ringflash.attention.kernels.mosaic import agenda
from ringflash.attention.kernels.mosaic.tiles import Tiles
from ringflash.bench import ours_tpu
from ringflash.bench.candidates import Job, Shape
from ringflash.bench.cycles import cycles
from ringflash.bench.ours_runs import counts_of, kinds_of_steps, plan_of
from ringflash.bench.ours_tpu import TPU, of_tiles
from ringflash.plan.generations import GENERATIONS
from ringflash.plan.schedule import UNITS, Block, Schedule

SHAPE = Shape(seq_len=4096, heads=8, kv_heads=2)
SIZES = [
    Tiles(1024, 1024, 512, 8),
    Tiles(512, 1024, 512, 4),
    Tiles(1024, 512, 256, 2),
    Tiles(2048, 1024, 512, 16),
]


def job(direction, tiles, shape=SHAPE):
    return Job("tpu", direction, shape, "v6e", of_tiles(tiles))


def told(one, plan):
    """(streamed tile, tests) of each unit of each step, from the kernel's own lists."""
    spec, T = Spec(Causal()), one.shape.seq_len
    at = Tokens(jnp.arange(T)[None], jnp.zeros((1, T), jnp.int32))
    counts = T // plan.tiles.block_q, T // plan.tiles.block_k
    tests = agenda.tests_of_tiles(spec, agenda.Tests.of(spec), at, at, *counts)
    tests = tests if one.direction == "forward" else tests.swapaxes(1, 2)
    steps = np.asarray(agenda.agenda(tests, plan.held))[0, :, 0]
    length = (steps.shape[1] - agenda.AGENDA_TAIL) // 2
    words = [step[: step[2 * length]] for step in steps]
    return [
        [(int(agenda.unpacked(w)[0]), int(agenda.unpacked(w)[2])) for w in step] for step in words
    ]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("tiles", SIZES)
def test_units_are_those_of_the_agenda(direction, tiles):
    one = job(direction, tiles)
    plan = plan_of(one)
    assert kinds_of_steps(one, plan) == told(one, plan)


def grid(function, arguments):
    """That of the one Pallas kernel in it."""

    def inside(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation.params["grid_mapping"].grid
            else:
                for inner in jaxprs_in_params(equation.params):
                    yield from inside(inner)

    (found,) = inside(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


class Device:
    device_kind = "TPU v6 lite"


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("tiles", SIZES)
def test_steps_are_those_of_the_grid(monkeypatch, direction, tiles):
    one = job(direction, tiles)
    monkeypatch.setattr(ours_tpu, "Mesh", lambda devices, axes: None)
    monkeypatch.setattr(ours_tpu, "NamedSharding", lambda mesh, spec: None)
    steps = np.prod(grid(*TPU.build(one, Device())))
    assert counts_of(one, plan_of(one)).steps * SHAPE.heads == steps


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("tiles", SIZES)
def test_every_unit_is_in_one_turn_of_each_stage(direction, tiles):
    one = job(direction, tiles)
    plan = plan_of(one)
    counts = counts_of(one, plan)
    units = sum(counts.units)
    assert units * tiles.block_q * tiles.block_k >= SHAPE.seq_len**2 / 2
    # In each step the pipeline takes two units to fill, while none is gathered.
    assert sum(counts.main) + 2 * counts.steps == pytest.approx(units)


def block(start, bundles, loops, skips, matmul=0, valu=0):
    slots = dict.fromkeys(UNITS, 0) | {"MATMUL": matmul, "VALU": valu}
    return Block(start, bundles, slots, {u: float(n) for u, n in slots.items()}, loops, skips)


FORWARD = Schedule(
    "ringflash_forward.1",
    (
        block(0, 10, (), ()),
        block(10, 20, (9,), ()),
        block(30, 300, (9, 30), (5,)),  # begin
        block(1700, 1300, (9,), (5, 6), 2000, 30),  # the two turns that fill
        block(4600, 2000, (9,), (5, 6), 2000, 60),
        block(6700, 26, (9, 6700), (5, 6, 11)),  # the main loop: over runs
        block(6730, 50, (9, 6700), (5, 6, 11, 12)),
        block(6800, 1800, (9, 6700, 6800), (5, 6, 11, 13), 3000, 50),  # over the turns of a run
        block(8600, 5, (9, 6700), (5, 6, 11, 13)),
        block(8700, 2400, (9, 6700, 8700), (5, 6, 11, 14), 3000, 70),
        block(11200, 1700, (9,), (5, 6, 15), 1000, 40),  # the two that drain
        block(13000, 700, (9,), (5, 6), 1000, 10),
        block(13800, 400, (9, 13800), (5,)),  # finish
    ),
    2**25,
)


def test_whole_forward():
    one = job("forward", Tiles(1024, 1024, 512, 16), Shape(seq_len=4096, heads=8, kv_heads=2))
    counts = counts_of(one, plan_of(one))
    assert counts.units == (6, 4)
    # One step holds all four heads of a group: 40 units, and the first two are at the diagonal. A run is of
    # one tile of keys, and of its diagonal or of what is below it.
    runs = {b.start: counts(FORWARD, b) * 4 for b in FORWARD.blocks}
    assert runs == {
        **{0: 0.5, 10: 1, 30: 4, 13800: 4},
        **{1700: 1, 4600: 1, 11200: 1, 13000: 1},
        **{6700: 7, 6730: 4, 6800: 24, 8600: 7, 8700: 14},
    }
    found = cycles(one, TPU.parts(one), [FORWARD], GENERATIONS["v6e"])
    assert (found.full, found.partial) == (1800, 2400)
    total = sum(runs[b.start] * b.bundles for b in FORWARD.blocks) / 4
    assert found.whole == pytest.approx(total)
    assert found.beside == pytest.approx(total / (6 * 1800 + 4 * 2400) - 1)


def test_two_cores_share_the_heads():
    shapes = (Shape(), 2), (Shape(heads=4, kv_heads=1), 1)
    for shape, cores in shapes:
        one = replace(job("backward", Tiles(1024, 1024, 256, 4), shape), generation="v5p")
        assert TPU.parts(one)[0].cores == cores
