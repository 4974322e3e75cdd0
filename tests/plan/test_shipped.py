"""Every shipped configuration, compiled for the slice that its docstring names: it fits, with room to spare.

The small one in every run of the suite; the large ones, a minute or two of two cores each, with `-m nightly`.
"""

import json
import re
from pathlib import Path

import pytest

from ringflash import cli

CONFIGS = Path(__file__).parents[2] / "configs"
PLAN = re.compile(r"ringflash plan --config=configs/(\w+)\.py --topology=(\S+)")
SPARE = 0.1  # of a device's memory
SMALL = "smollm2_135m_64k"
SHIPPED = dict(
    found.groups()
    for file in sorted(CONFIGS.glob("*.py"))
    if (found := PLAN.search(file.read_text()))
)


def plan(name, capsys, *more):
    """The record of a plan, and the exit code."""
    path = str(CONFIGS / f"{name}.py")
    code = cli.main(["plan", f"--config={path}", f"--topology={SHIPPED[name]}", "--json", *more])
    (record,) = json.loads(capsys.readouterr().out.splitlines()[0])["records"]
    return record, code


def test_all_but_the_quickstart_name_a_slice():
    every = {file.stem for file in CONFIGS.glob("*.py")} - {"base", "quickstart"}
    assert SHIPPED.keys() == every


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == SMALL else pytest.mark.nightly)
        for name in SHIPPED
    ],
)
def test_a_shipped_configuration_fits_its_slice(name, capsys):
    record, code = plan(name, capsys)
    need = record["memory"]["total_bytes"] + record["memory"]["code_bytes"]
    assert code == 0
    assert record["fits"]
    assert need <= (1 - SPARE) * record["hbm_bytes"]
    assert 0.2 < record["time"]["mfu"] < 1


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_number_of_devices(capsys):
    """A million tokens on 128 chips and two million on 256: as many a device, and the same temporaries."""
    found, _ = plan("llama3_8b_1m", capsys)
    more = ("--config.seq_len=2097152", "--config.mesh.context=256", "--topology=v5p:4x8x8")
    wider, code = plan("llama3_8b_1m", capsys, *more)
    assert code == 0
    kept = [record["memory"]["temporary_bytes"] for record in (found, wider)]
    assert kept[1] < 1.05 * kept[0]
