"""Times from facts that are written by hand: what is hidden, and what is not."""

import math
from dataclasses import replace

import pytest

from ringflash.attention.kernels.mosaic.tiles import table
from ringflash.plan import links
from ringflash.plan.case import Case, Facts
from ringflash.plan.estimate import cycles, estimate
from ringflash.plan.generations import GENERATIONS
from ringflash.plan.program import Call, Place, Program, Transfer
from ringflash.plan.reading import reading_of

TOKENS = 4096
MIB = 2**20
CASE = Case("v6e", "v6e:2x2", seq_len=32768, heads=8, kv_heads=8)
UP = ((0, 1), (1, 2), (2, 3), (3, 0))
DOWN = ((0, 3), (1, 0), (2, 1), (3, 2))
LOOP = Place("body", ("while",), 3)
FULL_TILE = table()["tiles"]["v6e"]["forward"]["128"]["full"]


def permute(nbytes=MIB, *, pairs=UP, place=LOOP, kernels=("k",)):
    return Transfer("p", "collective-permute", nbytes, place, pairs, kernels=kernels)


def told(*transfers, case=CASE, kernels=None, others=(), devices=4):
    """The forward of a ring of four."""
    runs = [Call("k", LOOP), Call("k", Place("main"))] if kernels is None else kernels
    program = Program(devices, list(transfers), list(runs), list(others))
    return estimate(reading_of(case, Facts(program, devices, 1.0, 0, 0, 0, 0, 1)), "forward")


def test_what_is_shorter_than_its_kernel_is_hidden():
    found = told(permute(), permute(pairs=DOWN))
    assert (found.hops, found.hop_bytes) == (3, 2 * MIB)
    assert (found.hidden, found.transfers) == (6, 6)
    assert found.exposed_seconds == 0
    assert found.hop_seconds == pytest.approx(links.hop_seconds("v6e", MIB))
    assert found.total_seconds == found.kernel_seconds


def test_the_two_directions_go_at_once_and_one_direction_in_turn():
    both = told(permute(), permute(pairs=DOWN)).transfer_seconds
    one = told(permute(), permute()).transfer_seconds
    assert one == pytest.approx(2 * both)


def test_what_is_longer_than_its_kernel_is_exposed_by_the_difference():
    found = told(permute(10_000 * MIB))
    assert (found.hidden, found.transfers) == (3, 3)
    wanted = found.transfer_seconds - 3 * found.hop_kernel_seconds
    assert found.exposed_seconds == pytest.approx(wanted)


def test_a_hop_of_several_calls_hides_under_those_inside():
    """Two calls a hop: a transfer around one of them is under half of the hop's time."""
    calls = [Call("k", LOOP), Call("l", LOOP), Call("k", Place("main")), Call("l", Place("main"))]
    halves = told(permute(10_000 * MIB), kernels=calls)
    assert halves.hops == 3
    wanted = halves.transfer_seconds - 3 * halves.hop_kernel_seconds / 2
    assert halves.exposed_seconds == pytest.approx(wanted)


def test_what_has_no_kernel_inside_is_exposed_whole():
    found = told(permute(kernels=()))
    assert (found.hidden, found.transfers) == (0, 3)
    assert found.exposed_seconds == pytest.approx(3 * links.hop_seconds("v6e", MIB))


def test_a_longer_hop_takes_longer():
    program = Program(4, [permute(kernels=())], [Call("k", LOOP)], [])
    near, far = (Facts(program, 4, 1.0, 0, 0, 0, 0, n) for n in (1, 2))
    times = [estimate(reading_of(CASE, x), "forward").exposed_seconds for x in (near, far)]
    assert times[1] == pytest.approx(2 * times[0])


def test_kernels_take_the_cycles_of_their_tiles():
    """Full attention of 32 x 32 tiles on four devices: 256 tiles a device and head."""
    found = told(permute(), case=replace(CASE, mask="full"))
    cycles_of_all = 256 * 8 * FULL_TILE
    assert found.kernel_seconds == pytest.approx(cycles_of_all / 1.75e9)
    assert found.hop_kernel_seconds == pytest.approx(found.kernel_seconds / 4)


def test_a_hop_lasts_as_long_as_its_slowest_device():
    zigzag = told(permute(), permute(pairs=DOWN))
    contiguous = told(permute(), case=replace(CASE, layout="contiguous"))
    assert contiguous.kernel_seconds > 1.7 * zigzag.kernel_seconds


def test_one_call_with_all_keys_is_one_number():
    gather = Transfer("g", "all-gather", 4 * MIB, Place("main"), group=4, synchronous=True)
    case = replace(CASE, strategy="all_gather", layout="contiguous")
    found = told(gather, case=case, kernels=[Call("k", Place("main"))])
    assert (found.hops, found.hidden, found.transfers) == (1, 0, 1)
    assert found.exposed_seconds == pytest.approx(links.gather_seconds("v6e", 3 * MIB, (2, 2)))
    assert found.hop_kernel_seconds == found.kernel_seconds


def test_ulysses_shares_the_heads_of_the_whole_square():
    exchange = Transfer("x", "all-to-all", 4 * MIB, Place("main"), group=4, synchronous=True)
    case = replace(CASE, strategy="ulysses", mask="full")
    found = told(exchange, case=case, kernels=[Call("k", Place("main"))])
    assert found.kernel_seconds == pytest.approx(1024 * 2 * FULL_TILE / 1.75e9)
    assert found.exposed_seconds == pytest.approx(links.exchange_seconds("v6e", 4 * MIB, (2, 2)))


def test_ulysses_in_a_ring():
    case = replace(CASE, strategy="ulysses:2*ring:2", mask="full")
    found = told(permute(place=replace(LOOP, trips=1)), case=case, kernels=[Call("k", LOOP)])
    assert found.kernel_seconds == pytest.approx(256 * 8 * FULL_TILE / 1.75e9)
    assert found.hop_kernel_seconds == pytest.approx(found.kernel_seconds / 2)


def test_between_slices():
    across = tuple((n, (n + 4) % 8) for n in range(8))
    found = told(permute(pairs=across, kernels=()), case=replace(CASE, slices=2))
    assert found.exposed_seconds == pytest.approx(3 * links.dcn_seconds(MIB))


def test_what_xla_moves_takes_the_rate_of_hbm():
    found = told(permute(), others=[Call("c", LOOP, traffic=10 * MIB)])
    assert found.other_seconds == pytest.approx(3 * 10 * MIB / 1.64e12)


def windowed(near, home=(), window=1000, beside=False):
    """A program that leaves open, until it runs, whether a ring goes all the way."""
    case = replace(
        CASE, topology="v6e:2x4", layout="contiguous", mask=f"window:{window}" if near else "causal"
    )
    shift = [tuple((n, (n + way) % 8) for n in range(8)) for way in (1, -1)]
    whole = Place("split", ("while.1",), 7, (("if", 0),))
    part = [Place(f"near.{n}", (f"while.{n}",), None, (("if", 1),)) for n in (2, 3)]
    transfers = [
        permute(place=whole, pairs=shift[0]),
        *(
            permute(size, place=place, pairs=pairs)
            for place, pairs in zip(part, shift, strict=True)
            for size in (3 * MIB, TOKENS)
        ),
        *(
            permute(place=replace(part[0], loops=(name,)), pairs=shift[1], kernels=())
            for name in home
        ),
    ]
    if beside:
        transfers.append(permute(2 * MIB, place=replace(part[0], loops=(), trips=1)))
    kernels = [
        Call("k", replace(whole, loops=(), trips=1)),
        *(Call("k", place) for place in (whole, *part)),
        Call("k", replace(part[0], loops=(), trips=1)),
    ]
    return told(*transfers, case=case, kernels=kernels, devices=8)


def test_a_ring_that_goes_only_as_far_as_the_mask_needs():
    found = windowed(near=True)
    assert (found.hops, found.transfers, found.hidden) == (1, 2, 2)
    assert found.hop_bytes == 3 * MIB + TOKENS
    far = windowed(near=False)
    assert (far.hops, far.transfers) == (7, 7)
    assert far.hop_bytes == MIB


def test_a_ring_that_goes_nowhere_has_no_hops_whatever_it_sends():
    """A window of one token; one permute stands outside of the loops."""
    found = windowed(near=True, window=1, beside=True)
    assert (found.hops, found.transfers, found.hop_bytes) == (0, 1, 2 * MIB)
    assert found.kernel_seconds == found.hop_kernel_seconds


def test_what_comes_home_goes_as_far_as_it_went_out():
    """One hop up and none down: home is one hop down."""
    found = windowed(near=True, home=("while.4",))
    assert (found.transfers, found.hidden) == (3, 2)


def test_the_two_passes_are_told_apart():
    back = replace(LOOP, scope="jit(f)/transpose(jvp(attention))")
    spans = Transfer("g", "all-gather", 7, back, group=4)  # so few bytes are no hop
    program = Program(4, [permute(), spans], [Call("k", LOOP)], [])
    reading = reading_of(CASE, Facts(program, 4, 1.0, 0, 0, 0, 0, 1))
    assert estimate(reading, "forward").transfers == 3
    assert estimate(reading, "backward").transfers == 0


def test_cycles_of_a_tile():
    assert cycles(replace(CASE, head_dim=100), "forward") == cycles(CASE, "forward")
    assert cycles(CASE, "backward")[0] > cycles(CASE, "forward")[0]
    assert cycles(replace(CASE, who="tokamax"), "forward") == (2858, 2858)
    assert math.isnan(cycles(replace(CASE, who="tokamax", head_dim=64), "forward")[0])
    for name in GENERATIONS:
        assert cycles(replace(CASE, generation=name), "forward")[0] > 1000


def test_what_needs_unknown_cycles_is_not_a_number():
    found = told(permute(), case=replace(CASE, who="tokamax", layout="contiguous", head_dim=64))
    assert (found.hops, found.hidden) == (3, 3)
    assert math.isnan(found.total_seconds)
