"""The ring that the real TPU compiler makes: what its users are promised of it, with the heads of Llama 3 8B.

Each test compiles in one child; half a minute on one core.
"""

import pytest

from ringflash.plan.attention import compiled
from ringflash.plan.case import Case, Facts
from ringflash.plan.estimate import PASSES, estimate
from ringflash.plan.reading import reading_of

pytestmark = pytest.mark.slow
LARGE = "v6e:8x8"
DEVICES = {"v6e:2x4": 8, LARGE: 64}
TEN_MILLION = 10 * 2**20
HBM_BYTES = 31.25 * 2**30  # what the compiler leaves of a v6e's 32 GiB


def facts_of(*cases: Case) -> list[Facts]:
    told = compiled(cases)
    assert [each for each in told if isinstance(each, str)] == []
    return told


def test_transfers_stand_under_kernels_and_the_program_does_not_grow_up_to_ten_million_tokens():
    cases = [Case("v6e", slice_, seq_len=TEN_MILLION * n // 64) for slice_, n in DEVICES.items()]
    small, large = facts_of(*cases)
    for facts, devices in zip((small, large), DEVICES.values(), strict=True):
        transfers = facts.program.transfers
        assert {x.kind for x in transfers} == {"collective-permute"}
        assert [x.name for x in transfers if not x.overlapped] == []
        # Per parcel K, V and tokens go N - 1 times in each pass, dk and dv N times in the backward.
        runs = dict.fromkeys((False, True), 0)
        for x in transfers:
            runs[x.place.backward] += x.place.trips
        assert runs == {False: 6 * (devices - 1), True: 6 * (devices - 1) + 4 * devices}
        assert facts.hop_links == 1
    assert large.code_bytes < 1.1 * small.code_bytes
    assert large.compile_seconds < 1.5 * small.compile_seconds
    assert large.temp_bytes < 1.01 * small.temp_bytes
    assert large.argument_bytes + large.output_bytes + large.temp_bytes < 0.9 * HBM_BYTES


def test_a_window_takes_two_hops():
    case = Case("v6e", LARGE, seq_len=2**20, mask="window:4096", layout="contiguous")
    (facts,) = facts_of(case)
    assert facts.shards == 64
    for name in PASSES:
        assert estimate(reading_of(case, facts), name).hops <= 2
