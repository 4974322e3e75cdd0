"""The TPU kernel lowers: the conformance suite compiled by the real TPU compiler, on a machine without a TPU.

What lowers depends on shapes, masks and options, and on the matrix units: every case is compiled for one
generation whose units are 128 x 128 and for one whose units are 256 x 256, dealt in turn; and a handful for
all, since memories and tables of tiles differ: ragged lengths, all tests of tiles, each option, fp32, which
has its own products and tile sizes. All rows of the tables are compiled in `bench/test_tiles_table.py`.
"""

import pytest

from ringflash.attention.cases import CASES
from ringflash.plan.compiler import in_child
from ringflash.plan.generations import GENERATIONS

SERVED = [case.name for case in CASES if case.bias is None and not case.dropout]
SIZES_OF_UNITS = [["v4", "v5e", "v5p"], ["v6e", "7x"]]
HANDFUL = [
    ["narrower_values", "bfloat16"],
    ["packed_window", "bfloat16"],
    ["softcap", "bfloat16"],
    ["packed_window", "float32"],
]
MORE = [
    ["length_1001", "bfloat16"],
    ["width_256", "float32"],
]  # for all, but on one JAX in `.ci/run`
CHORES = "attention_chores"
QUIET = "--xla_jf_dump_llo_pass_label_regex=nothing"  # nobody reads the schedules


def lower(generation, cases):
    asked = {"topology": GENERATIONS[generation].topology, "cases": cases}
    refused = in_child(f"{CHORES}:compile_cases", asked, seconds=600, flags=QUIET)
    assert refused == {}, f"{len(refused)} of {len(cases)} do not lower for {generation}"


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_handful_lowers(generation):
    lower(generation, HANDFUL)


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_cases_lower(generation):
    """The share of this generation; what is for all is not dealt."""
    dealt = [[name, "bfloat16"] for name in SERVED]
    rest = [each for each in dealt if each not in HANDFUL + MORE]
    shares = {g: rest[n :: len(same)] for same in SIZES_OF_UNITS for n, g in enumerate(same)}
    assert shares.keys() == GENERATIONS.keys()
    lower(generation, shares[generation] + MORE)


@pytest.mark.parametrize("topology", ["v6e:2x4"])
def test_a_ring_lowers(topology):
    """The kernel under shard_map over a whole slice, with hops between: forward and backward."""
    asked = {"topology": topology}
    found = in_child(f"{CHORES}:compile_ring", asked, seconds=300, flags=QUIET)
    assert found.pop("devices") == 8
    assert all(found.values()), f"the program has {found}"
