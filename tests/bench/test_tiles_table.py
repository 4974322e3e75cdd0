"""The table of tile sizes holds: each row, through the real compiler, takes the cycles written there.

The common width for all generations; the others for one generation of each size of matrix units, and with
`-m nightly` for all.
"""

from importlib import metadata

import pytest

from ringflash.bench.candidates import DIRECTIONS
from ringflash.bench.kernel_options import WIDTHS, parse
from ringflash.bench.tile_check import again
from ringflash.bench.tile_table import Table
from ringflash.plan.compiler import require
from ringflash.plan.generations import GENERATIONS, topology

COMMON = 128
ONE_OF_EACH = ("v5p", "v6e")


def faults(generation, widths):
    """What is wrong with these rows, a line each."""
    require()
    asked = parse(["--check", f"--head_dim={','.join(map(str, widths))}"])
    rows = again(topology(generation), DIRECTIONS, asked)
    assert len(rows) == len(DIRECTIONS) * len(widths)
    return [line for row in rows for line in row.faults(comparable=True)]


def test_the_compiler_is_the_one_that_the_table_was_made_with():
    assert metadata.version("libtpu") == Table.installed().libtpu


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_common_width(generation):
    assert faults(generation, [COMMON]) == []


@pytest.mark.parametrize(
    "generation",
    [
        pytest.param(one, marks=pytest.mark.slow if one in ONE_OF_EACH else pytest.mark.nightly)
        for one in GENERATIONS
    ],
)
def test_other_widths(generation):
    assert faults(generation, [w for w in WIDTHS if w != COMMON]) == []
