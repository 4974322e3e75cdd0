"""What lies in memory, from an assignment of buffers written by hand."""

import pytest

from ringflash.plan.memory import Buffer, Origins, Slot, apart, largest, slots, total_of

MIB = 2**20
SHAPE = "f32[4,256,4096]"  # 16 MiB
WIDE = f"{SHAPE}{{2,1,0:T(8,128)}}"
# A parameter that is an output too; what SparseCore is given; a constant; a place for temporaries that three
# values share in turn, one of them a tuple's element; VMEM; the host's.
ASSIGNMENT = f"""BufferAssignment:
allocation 0: size {16 * MIB}, page 0, parameter 1, shape |{SHAPE}| at ShapeIndex {{}}, maybe-live-out:
 value: <1022 param.13 @0> (size={16 * MIB},offset=0): {WIDE}
 value: <7 new.1 @0> (size={16 * MIB},offset=0): {WIDE}
allocation 1: size {2 * MIB}, page 0, parameter 40, shape |s32[524288]| at ShapeIndex {{}}:
 value: <1004 param.12 @0> (size={2 * MIB},offset=0): s32[524288]{{0:T(1024)}}
allocation 2: size {112 * MIB}, page 0, thread-local:
 value: <818 param_0.358 @0> (size={112 * MIB},offset=0): bf16[1,4096,14336]{{1,2,0:T(16,128)(2,1)}}
allocation 3: size 512, page 0, constant:
 value: <979 constant.72.clone @0> (size=512,offset=0): s32[]{{:T(128)}}
allocation 4: size {20 * MIB}, page 0, preallocated-temp:
 value: <11 fusion.1 @0> (size={8 * MIB},offset={MIB}): bf16[4,1048576]{{1,0:T(8,128)(2,1)}}
 value: <12 while.3{{2}} @0> (size={8 * MIB},offset={MIB}): bf16[4,1048576]{{1,0:T(8,128)(2,1)}}
 value: <13 copy.2 @0> (size={4 * MIB},offset={7 * MIB}): f32[1048576]{{0:T(1024)}}
 value: <14 fusion.2 @0> (size={3 * MIB},offset={12 * MIB}): (f32[786432]{{0:T(1024)}}, s32[]{{:T(128)}})
 value: <15 small.1 @0> (size={MIB - 1},offset={16 * MIB}): s8[1048575]{{0}}
allocation 5: size {18 * MIB}, color 1, page 0, preallocated-temp:
 value: <16 near.1 @0> (size={18 * MIB},offset=0): f32[4718592]{{0:T(1024)S(1)}}
allocation 6: size {64 * MIB}, color 5, page 0, preallocated-temp:
 value: <17 far.1 @0> (size={64 * MIB},offset=0): f32[16777216]{{0:T(1024)S(5)}}

Total bytes used: 0
"""
PROGRAM = """HloModule jit_step, is_scheduled=true

FileNames
1 "/site-packages/jax/_src/numpy.py"
2 "/home/user/ringflash/model/layers.py"
3 "/home/user/ringflash/train.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=5 end_line=5 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=70 end_line=70 column=1 end_column=2}
3 {file_name_id=3 function_name_id=1 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=3 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=1 parent_frame_id=3}
4 {file_location_id=1 parent_frame_id=1}
5 {file_location_id=1 parent_frame_id=6}

ENTRY %main (x: f32[8]) -> f32[8] {
  %fusion.1 = f32[8] fusion(%x), metadata={op_name="jit(step)/mlp/dot_general" stack_frame_id=3}
  %outer = f32[8] add(%x, %x), metadata={op_name="jit(step)/a" stack_frame_id=1}
  %copy.2 = f32[8] copy(%x), metadata={op_name="jit(step)/of_jax_alone" stack_frame_id=4}
  %round = f32[8] copy(%x), metadata={op_name="jit(step)/b" stack_frame_id=5}
  ROOT %fusion.2 = f32[8] fusion(%x)
}
"""


def test_slots():
    found = {(x.allocation, x.offset): x for x in slots(ASSIGNMENT)}
    whole, given, shared, late, pair, near, far = found.values()
    assert whole == Slot(0, 0, 16 * MIB, "f32[4,256,4096]", ["param.13", "new.1"], 1)
    assert (given.parameter, given.values) == (40, ["param.12"])
    assert shared == Slot(4, MIB, 8 * MIB, "bf16[4,1048576]", ["fusion.1", "while.3"])
    assert (late.offset, late.values) == (7 * MIB, ["copy.2"])
    assert pair.shape == "(f32[786432], s32[])"
    assert [x.color for x in (near, far)] == [1, 5]


def test_what_lies_in_one_place_at_two_times_is_told_once_and_the_larger_wins():
    found = apart(slots(ASSIGNMENT))
    assert [x.size for x in found] == [64 * MIB, 18 * MIB, 16 * MIB, 8 * MIB, 3 * MIB, 2 * MIB]
    assert "copy.2" not in {name for x in found for name in x.values}


@pytest.mark.parametrize(
    ("offset", "size", "taken"), [(0, 4, True), (0, 5, False), (11, 2, False), (12, 2, True)]
)
def test_neighbours_do_not_overlap(offset, size, taken):
    one, other = Slot(0, 4, 8, ""), Slot(0, offset, size, "")
    assert (other in apart([one, other])) == taken
    assert apart([one, Slot(1, offset, size, "")])[1:]


def test_no_two_that_are_chosen_overlap():
    crowd = [Slot(n % 2, 7 * n % 40, 1 + 5 * n % 13, "") for n in range(60)]
    found = apart(crowd)
    for place in range(2):
        bytes_of = [{*range(x.offset, x.offset + x.size)} for x in found if x.allocation == place]
        assert sum(map(len, bytes_of)) == len(set.union(*bytes_of))
    for one in crowd:
        over = [
            x for x in found
            if x.allocation == one.allocation
            and max(x.offset, one.offset) < min(x.offset + x.size, one.offset + one.size)
        ]  # fmt: skip
        assert one in found or max(x.size for x in over) >= one.size


def test_origins_are_the_innermost_line_of_ours():
    origins = Origins(PROGRAM)
    assert origins.of(["fusion.1"]) == ("jit(step)/mlp/dot_general", "ringflash/model/layers.py:70")
    assert origins.of(["outer"]) == ("jit(step)/a", "ringflash/train.py:9")


def test_of_several_values_the_one_with_a_line_of_ours_speaks():
    origins = Origins(PROGRAM)
    assert origins.of(["copy.2", "outer"]) == ("jit(step)/a", "ringflash/train.py:9")
    assert origins.of(["outer", "fusion.1"])[0] == "jit(step)/mlp/dot_general"


def test_origins_that_are_not_known():
    origins = Origins(PROGRAM)
    assert origins.of(["copy.2"]) == ("jit(step)/of_jax_alone", "")
    assert origins.of(["round"]) == ("jit(step)/b", "")
    assert origins.of(["fusion.2"]) == ("", "")
    assert origins.of(["param.13"]) == ("", "")
    assert origins.of([]) == ("", "")
    assert Origins("ENTRY %main () -> f32[] {\n  ROOT %a = f32[] constant(0)\n}").of(["a"]) == (
        "",
        "",
    )


def test_the_largest_by_name():
    """Parameters by theirs; neither VMEM nor what is on the host, nor what lies elsewhere."""
    found = largest(slots(ASSIGNMENT), Origins(PROGRAM), {1: "params.blocks.mlp.gate_DF"})
    assert found == [
        Buffer(16 * MIB, "f32[4,256,4096]", "params.blocks.mlp.gate_DF", ""),
        Buffer(
            8 * MIB, "bf16[4,1048576]", "jit(step)/mlp/dot_general", "ringflash/model/layers.py:70"
        ),
        Buffer(3 * MIB, "(f32[786432], s32[])", "", ""),
        Buffer(2 * MIB, "s32[524288]", "argument 40", ""),
    ]
    assert len(largest(slots(ASSIGNMENT), Origins(PROGRAM), {}, count=2)) == 2


def test_the_total_is_of_hbm_alone():
    assert total_of(ASSIGNMENT) == (16 + 2 + 20) * MIB


def test_no_assignment_no_total():
    with pytest.raises(
        ValueError, match="wanted an assignment of buffers from the compiler, found none"
    ):
        total_of("Memory Space: default (color=0)\nTotal bytes: 5\n")
