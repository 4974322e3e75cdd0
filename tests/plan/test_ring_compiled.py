"""The ring that the real TPU compiler makes: what its users are promised of it, with the heads of Llama 3 8B.

Each test compiles in one child; one to three minutes on one core.
"""

import pytest

from ringflash.plan.attention import compiled
from ringflash.plan.case import Case, Facts
from ringflash.plan.estimate import PASSES, estimate
from ringflash.plan.reading import reading_of

pytestmark = pytest.mark.slow
SLICES = (("v6e:2x4", "v6e:16x16"), ("v5p:2x2x2", "v5p:8x8x16"))
DEVICES = {"v6e:2x4": 8, "v6e:16x16": 256, "v5p:2x2x2": 8, "v5p:8x8x16": 1024}
MILLION = 2**20
V5P_BYTES = 95 * 2**30


def facts_of(*cases: Case) -> list[Facts]:
    told = compiled(cases)
    assert [each for each in told if isinstance(each, str)] == []
    return told


@pytest.mark.parametrize("slices", SLICES, ids=lambda slices: slices[0][:3])
def test_transfers_stand_under_kernels_and_the_program_does_not_grow(slices):
    cases = [Case(where[:3], where, seq_len=8192 * DEVICES[where]) for where in slices]
    small, large = facts_of(*cases)
    for facts, case in zip((small, large), cases, strict=True):
        devices, transfers = DEVICES[case.topology], facts.program.transfers
        assert {x.kind for x in transfers} == {"collective-permute"}
        assert [x.name for x in transfers if not x.overlapped] == []
        # Per parcel K, V and tokens go N - 1 times in each pass, dk and dv N times in the backward.
        runs = dict.fromkeys((False, True), 0)
        for x in transfers:
            runs[x.place.backward] += x.place.trips
        assert runs == {False: 6 * (devices - 1), True: 6 * (devices - 1) + 4 * devices}
        assert facts.hop_links == 1
        assert facts.temp_bytes < most_temporaries(case, devices)
    assert large.code_bytes < 1.1 * small.code_bytes
    assert large.compile_seconds < 1.5 * small.compile_seconds
    assert large.temp_bytes < 1.01 * small.temp_bytes


def most_temporaries(case: Case, devices: int) -> int:
    """Bytes on each device: what the contract needs, and what may be on its way.

    Sums of out and dq in fp32 and dout as the kernel reads it; of K and V two blocks; of dk and dv, in fp32,
    two on their way and the one that is being made.
    """
    tokens, width = case.seq_len // devices, case.head_dim
    rows = tokens * width * case.heads * (4 + 4 + 2)
    blocks = 2 * tokens * width * case.kv_heads * (2 * 2 + 3 * 4)
    return rows + blocks


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
