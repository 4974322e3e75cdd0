"""One small ring, compiled by the real TPU compiler for a slice that is not there: the facts of it."""

import pytest

from ringflash.plan.attention import compiled
from ringflash.plan.case import Case
from ringflash.plan.estimate import PASSES, estimate
from ringflash.plan.reading import reading_of

CASE = Case("v6e", "v6e:2x4", seq_len=8192, heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def found():
    refused = Case("v6e", "v6e:2x4", strategy="ulysses", seq_len=8192, heads=2, kv_heads=1)
    return compiled([CASE, refused])


@pytest.fixture(scope="module")
def facts(found):
    assert not isinstance(found[0], str), found[0]
    return found[0]


def test_a_kernel_is_called_once_a_block_and_twice_for_that_at_home(facts):
    runs = {}
    for one in facts.program.kernels:
        runs[one.name] = runs.get(one.name, 0) + one.place.trips
    assert runs == {"ringflash_forward": 8, "ringflash_backward": 8 + 1}
    assert len(facts.program.kernels) == 2 + 3  # so often its code is there


def test_keys_and_values_go_round_in_both_passes(facts):
    in_loops = [x for x in facts.program.transfers if x.place.loops]
    assert facts.program.partitions == 8
    assert {x.kind for x in in_loops} == {"collective-permute"}
    assert {x.place.trips for x in in_loops} == {
        7,
        6,
        2,
    }  # in the backward the last two bring dk, dv home
    assert {x.place.backward for x in in_loops} == {False, True}


def test_sizes(facts):
    assert facts.argument_bytes >= 1024 * 128 * 2 * (2 + 1 + 1 + 2)
    assert facts.temp_bytes > 0
    assert facts.code_bytes > 100_000
    assert facts.compile_seconds > 0
    assert facts.hop_links == 1


def test_what_follows(facts):
    reading = reading_of(CASE, facts)
    assert reading.load.busiest == 1
    for name in PASSES:
        told = estimate(reading, name)
        assert told.hops == 7
        assert told.hidden >= 7
        assert 0 < told.total_seconds < 0.01


def test_what_cannot_be_traced_says_why(found):
    assert found[1].startswith(
        "ValueError: ulysses over 8 devices needs query heads in a multiple of 8"
    )
