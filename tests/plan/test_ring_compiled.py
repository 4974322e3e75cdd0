"""The ring that the real TPU compiler makes: what its users are promised of it, with the heads of Llama 3 8B.

Each test compiles in one child; one to two minutes on one core.
"""

import pytest

from ringflash.plan.attention import compiled
from ringflash.plan.case import Case, Facts
from ringflash.plan.estimate import PASSES, estimate
from ringflash.plan.reading import reading_of

pytestmark = pytest.mark.slow
DEVICES = {"v6e:2x4": 8, "v6e:8x8": 64}
MILLION = 2**20
V5P_BYTES = 95 * 2**30


def facts_of(*cases: Case) -> list[Facts]:
    told = compiled(cases)
    assert [each for each in told if isinstance(each, str)] == []
    return told


def test_transfers_stand_under_kernels_and_the_program_does_not_grow():
    cases = [Case("v6e", topology, seq_len=8192 * n) for topology, n in DEVICES.items()]
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


def test_ten_million_tokens_fit_on_64_chips_and_a_window_takes_two_hops():
    where = {"generation": "v5p", "topology": "v5p:4x4x4"}
    cases = [
        Case(**where, seq_len=10 * MILLION),
        Case(**where, seq_len=MILLION, mask="window:4096", layout="contiguous"),
    ]
    whole, window = facts_of(*cases)
    assert whole.argument_bytes + whole.output_bytes + whole.temp_bytes < 0.9 * V5P_BYTES
    assert [x.name for x in whole.program.transfers if not x.overlapped] == []
    for name in PASSES:
        assert estimate(reading_of(cases[1], window), name).hops <= 2
