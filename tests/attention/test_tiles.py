"""The rules by which the TPU kernel takes its tile sizes, and what the committed table holds."""

from dataclasses import replace

import pytest

from ringflash.attention.kernels.mosaic import backward_call, forward_call, tiles
from ringflash.attention.kernels.mosaic.tiles import (
    LANES,
    VMEM_MIB,
    Tiles,
    best,
    even,
    fitted,
    generation_of,
    table,
    vmem_bytes,
)
from ringflash.plan.generations import GENERATIONS

ROOM = 1 << 20
ROWS = [
    (generation, direction, int(width))
    for generation, directions in table()["tiles"].items()
    for direction, rows in directions.items()
    for width in rows
]


@pytest.mark.parametrize("block", [128, 512, 1024])
@pytest.mark.parametrize("length", [1, 128, 129, 500, 512, 513, 1300, 8192])
def test_even(length, block):
    """Whole lanes, as few tiles as `block` allows, and no smaller size would do with so many."""
    size = even(length, block)
    count = -(-length // block)
    assert size % LANES == 0
    assert LANES <= size <= block
    assert size * count >= length
    assert (size - LANES) * count < length


@pytest.mark.parametrize(
    ("length", "block", "size"), [(1, 512, 128), (513, 512, 384), (1000, 512, 512)]
)
def test_even_by_hand(length, block, size):
    assert even(length, block) == size


def test_what_fits_stays():
    wanted = Tiles(512, 256, 128, 4, keys_down=False, turned=False)
    assert fitted(wanted, 4096, 4096, ROOM, lambda t: 0) == wanted


def test_short_sequences_take_even_tiles():
    found = fitted(Tiles(512, 512, 128, 4), 600, 40, ROOM, lambda t: 0)
    assert found == Tiles(384, 128, 128, 4)


def test_what_does_not_fit_is_made_smaller():
    """First what a step holds, then the larger side; of the rest nothing changes."""
    seen = []

    def need(t):
        seen.append((t.held, t.block_q, t.block_k))
        return ROOM if t.block_q * t.block_k > 128 * 128 else 0

    found = fitted(Tiles(512, 256, 64, 3, turned=False), 4096, 4096, ROOM, need)
    assert seen == [
        (3, 512, 256),
        (2, 512, 256),
        (1, 512, 256),
        (1, 256, 256),
        (1, 128, 256),
        (1, 128, 128),
    ]
    assert found == Tiles(128, 128, 64, 1, turned=False)


def test_smaller_than_a_lane_there_is_nothing():
    """The compiler then says what is too much."""
    found = fitted(Tiles(1024, 1024, 64, 8), 4096, 4096, ROOM, lambda t: 2 * ROOM)
    assert found == Tiles(128, 128, 64, 1)


def test_a_share_of_the_room_is_the_compilers():
    just = int(ROOM * tiles.SHARE)
    assert fitted(Tiles(512, 512, 64, 2), 512, 512, ROOM, lambda t: just).held == 2
    assert fitted(Tiles(512, 512, 64, 2), 512, 512, ROOM, lambda t: just + 1).held == 1


def test_generations():
    """Each name that a device gives itself; an unknown one takes what has the least VMEM."""
    for generation in GENERATIONS.values():
        for kind in generation.device_kinds:
            assert generation_of(kind) == generation.name
        assert VMEM_MIB[generation.name] == generation.vmem_mib
        assert vmem_bytes(generation.name) < generation.vmem_mib << 20
    assert vmem_bytes(generation_of("TPU v99")) == min(map(vmem_bytes, VMEM_MIB))


@pytest.mark.parametrize(
    ("width", "row"), [(8, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256), (512, 256)]
)
def test_a_width_takes_the_row_of_the_next_wider_one(monkeypatch, width, row):
    def entry(size):
        return {"tiles": {"block_q": size, "block_k": 2 * size, "chunk": 64, "held": 1}, "x": 0}

    rows = {str(size): entry(size) for size in (256, 64, 128)}
    made = {"tiles": {"v0": {"forward": rows, "backward": {"64": entry(1)}}}}
    monkeypatch.setattr(tiles, "table", lambda: made)
    assert best("v0", "forward", width) == Tiles(row, 2 * row, 64, 1)
    assert best("v0", "backward", width) == Tiles(1, 2, 64, 1)


def test_the_table_has_every_generation():
    assert {row[:2] for row in ROWS} == {
        (name, direction) for name in GENERATIONS for direction in ("forward", "backward")
    }


@pytest.mark.parametrize(("generation", "direction", "width"), ROWS)
def test_a_row_of_the_table_is_what_is_used(generation, direction, width):
    """In bf16 and with a carry the measured units fit; only of how many a step holds there may be fewer."""

    def need(t):
        if direction == "forward":
            return forward_call.vmem(t, width, width, 2, carried=True)
        return backward_call.vmem(t, width, width, 2, given=False)

    wanted = best(generation, direction, width)
    found = fitted(wanted, 8192, 8192, vmem_bytes(generation), need)
    assert found == replace(wanted, held=found.held)
