"""Schedules, read from a small dump written by hand."""

import dataclasses
import json

import dumps
import pytest

from ringflash.plan import schedule


@pytest.fixture
def found(tmp_path):
    dumps.write(tmp_path)
    (one,) = schedule.read(tmp_path, "fwd")
    return one


def test_blocks_are_cut_by_control_flow_alone(found):
    assert found.kernel == "fwd.1"
    assert [(b.start, b.bundles) for b in found.blocks] == [
        (0, 2),
        (2, 6),
        (8, 3),
        (11, 6),
        (17, 6),
        (23, 6),
        (29, 3),
    ]
    assert found.bundles == dumps.LENGTH


def test_loops_and_branches_over_a_block(found):
    assert [b.loops for b in found.blocks] == [(), *[(2,)] * 5, ()]
    assert [b.skips for b in found.blocks] == [(), (), (3,), (), (12,), (), ()]


def test_units(found):
    body = found.blocks[4]
    assert found.matrix_blocks() == [body]
    assert body.slots["MATMUL"] == 12
    assert body.busy["MATMUL"] == 6
    assert body.busy["VALU"] == 6
    assert body.busy["SPILL"] == 3
    assert body.spills == 6 + 6
    assert body.bound == "MATMUL"
    assert found.blocks[2].bound == "VSTORE"


def test_vmem_ends_where_the_last_allocation_in_vmem_does(found):
    assert found.vmem_bytes == 0x80000 + 4096


def test_no_offset_no_vmem():
    assert (
        schedule.vmem_of("  #allocation5 [shape = 'u8[8]', space=vmem, size = 0x8, scoped]") is None
    )


def test_json_and_back(found):
    assert schedule.from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def test_kernels_by_name_in_the_order_compiled(tmp_path):
    for stamp, kernel in ((300, "bwd.1"), (200, "fwd.2"), (100, "fwd.1")):
        dumps.write(tmp_path, kernel=kernel, stamp=stamp)
    assert [s.kernel for s in schedule.read(tmp_path, "fwd")] == ["fwd.1", "fwd.2"]
    assert schedule.read(tmp_path, "dkv") == []


def test_units_of_an_older_compiler():
    text = (
        "== CAPACTIY:\nMXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU\n"
    )
    text += "    2     3     4     5     6     7     8     9     10     11\n== UTILIZATION:\n"
    capacity, rows = schedule.slots_of(text + "1 2 3 4 5 6 7 8 9 10\n" * 2)
    assert capacity == [2, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert rows == [[1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10]] * 2


def test_another_form_of_dump_is_told(tmp_path):
    with pytest.raises(ValueError, match="wanted the units MATMUL, MATPUSH"):
        schedule.slots_of("== CAPACITY:\nMATMUL, VALU\n 2 4\n== UTILIZATION:\n0 0\n")
    dumps.write(tmp_path)
    (tmp_path / "179-fwd.1-65-packed-bundles-post-ra.txt").unlink()
    with pytest.raises(ValueError, match=r"wanted one 179-fwd.1-N-packed-bundles-post-ra.txt"):
        schedule.read(tmp_path, "fwd")
