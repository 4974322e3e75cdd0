"""The table of tile sizes holds: its rows, through the real compiler, take the cycles written there.

The common width for every generation; of the others, each for one generation of either size of matrix units
(`ringflash bench kernel --check` compiles all rows).
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
OTHERS = {"v5e": 64, "v5p": 256, "v6e": 64, "7x": 256}


def faults(generation, widths):
    """What is wrong with these rows, a line each."""
    require()
    asked = parse(["--check", f"--head_dim={','.join(map(str, widths))}"])
    rows = again(topology(generation), DIRECTIONS, asked)
    assert len(rows) == len(DIRECTIONS) * len(widths)
    return [line for row in rows for line in row.faults(comparable=True)]


def test_the_compiler_is_the_one_that_the_table_was_made_with():
    assert metadata.version("libtpu") == Table.installed().libtpu


@pytest.mark.parametrize("generation", GENERATIONS)
def test_common_width(generation):
    assert faults(generation, [COMMON]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("generation", "width"), OTHERS.items())
def test_other_widths(generation, width):
    assert {COMMON, *OTHERS.values()} == {*WIDTHS}
    assert faults(generation, [width]) == []
