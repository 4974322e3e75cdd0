"""The ring that the real TPU compiler makes, for 8 and for 64 devices: what its users are promised of it.

One test, so that each program is compiled once: about a minute and a half on one core.
"""

import pytest

from ringflash.plan.attention import compiled
from ringflash.plan.case import Case

DEVICES = {"v6e:2x4": 8, "v6e:8x8": 64}


@pytest.mark.slow
def test_transfers_stand_under_kernels_and_the_program_does_not_grow():
    cases = [
        Case("v6e", topology, seq_len=8192 * devices, heads=4, kv_heads=2)
        for topology, devices in DEVICES.items()
    ]
    small, large = compiled(cases)
    assert not isinstance(small, str), small
    assert not isinstance(large, str), large
    for facts, devices in zip((small, large), DEVICES.values(), strict=True):
        transfers = facts.program.transfers
        assert {x.kind for x in transfers} == {"collective-permute"}
        assert [x.name for x in transfers if not x.overlapped] == []
        # Per parcel K, V and tokens go N - 1 times in each pass, dk and dv N times in the backward.
        hops = dict.fromkeys((False, True), 0)
        for x in transfers:
            hops[x.place.backward] += x.place.trips
        assert hops == {False: 6 * (devices - 1), True: 6 * (devices - 1) + 4 * devices}
        assert facts.hop_links == 1
    assert large.code_bytes < 1.1 * small.code_bytes
    assert large.compile_seconds < 1.5 * small.compile_seconds
    assert large.temp_bytes < 1.01 * small.temp_bytes
