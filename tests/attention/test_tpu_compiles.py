"""The TPU kernel lowers: the conformance suite compiled by the real TPU compiler, on a machine without a TPU.

What lowers depends on shapes, masks and options, and on the matrix units: every case is compiled for v5e
(128 x 128) and for v6e (256 x 256). v4, v5p and 7x have the same units but other memories and tables of
tiles; for them there is a handful: widths, ragged lengths, all tests of tiles, each option. fp32 has its
own products and tile sizes, whatever the mask: a handful everywhere.

About three minutes on one core, half of it the two whole suites.
"""

import pytest

from ringflash.attention.cases import CASES
from ringflash.plan.compiler import in_child
from ringflash.plan.generations import GENERATIONS

SERVED = [case.name for case in CASES if case.bias is None and not case.dropout]
WHOLE = ("v5e", "v6e")
HANDFUL = ["width_64", "width_256", "narrower_values", "length_1001", "packed_window", "softcap"]
FP32 = ["gqa", "width_256", "packed_window"]
CHORES = "attention_chores"
QUIET = "--xla_jf_dump_llo_pass_label_regex=nothing"  # nobody reads the schedules


@pytest.mark.parametrize("generation", GENERATIONS)
def test_cases_lower(generation):
    cases = [[name, "bfloat16"] for name in (SERVED if generation in WHOLE else HANDFUL)]
    cases += [[name, "float32"] for name in FP32]
    asked = {"topology": GENERATIONS[generation].topology, "cases": cases}
    refused = in_child(f"{CHORES}:compile_cases", asked, seconds=600, flags=QUIET)
    assert refused == {}, f"{len(refused)} of {len(cases)} do not lower for {generation}"


@pytest.mark.parametrize("topology", ["v6e:2x4"])
def test_a_ring_lowers(topology):
    """The kernel under shard_map over a whole slice, with hops between: forward and backward."""
    asked = {"topology": topology}
    found = in_child(f"{CHORES}:compile_ring", asked, seconds=300, flags=QUIET)
    assert found.pop("devices") == 8
    assert all(found.values()), f"the program has {found}"
