"""Facts of scheduled HLO, from programs written by hand."""

import dataclasses
import json
import re

import pytest
from programs import BACK, KERNEL, PART, RING, entered

from ringflash.plan import program
from ringflash.plan.collectives import group_of
from ringflash.plan.hlo import parse
from ringflash.plan.program import read

X = "f32[8,128]{1,0:T(8,128)}"
PARAMETER = f"%x = {X} parameter(0)"
TRUE = f"""%yes (a: f32[8,128]) -> f32[8,128] {{
  %a = {X} parameter(0)
  ROOT %k.1 = {X} custom-call(%a), {KERNEL}
}}"""
FALSE = f"""%no (b: f32[8,128]) -> f32[8,128] {{
  ROOT %b = {X} parameter(0)
}}"""
WRAPPED = f"""%wrapped (a: f32[8,128]) -> f32[8,128] {{
  %a = {X} parameter(0)
  ROOT %t = {X} all-to-all(%a), replica_groups=[1,8]<=[8]
}}"""


@pytest.fixture(scope="module")
def ring():
    return read(RING)


def test_transfers_in_a_loop_around_a_kernel(ring):
    up, down = (x for x in ring.transfers if x.place.loops)
    assert up.pairs == ((0, 1), (1, 2), (2, 3), (3, 0))
    assert down.pairs == ((0, 3), (1, 0), (2, 1), (3, 2))
    for one in (up, down):
        assert (one.kind, one.bytes, one.place.trips) == ("collective-permute", 8 * 128 * 2, 3)
        assert one.kernels == ("ringflash_forward.10",)
        assert one.overlapped
        assert not one.synchronous


def test_a_transfer_without_a_kernel_inside(ring):
    (home,) = (x for x in ring.transfers if not x.place.loops)
    assert home.name == "collective-permute-start.3"
    assert not home.overlapped
    assert not home.synchronous
    assert home.place.trips == 1


def test_passes_by_the_name_stack(ring):
    assert [x.place.backward for x in ring.transfers] == [True, False, False]
    assert [x.place.backward for x in ring.kernels] == [False]


def test_kernels_by_name(ring):
    (kernel,) = ring.kernels
    assert (kernel.name, kernel.place.computation) == ("ringflash_forward", "body")
    assert kernel.bytes == 2 * 8 * 128 * 2


def test_what_xla_does_itself(ring):
    found = {x.name: (x.bytes, x.traffic, x.place.trips, x.moves) for x in ring.others}
    assert found == {
        "start.1": (4, 8, 1, True),
        "pad_maximum_fusion": (2048, 3 * 2048, 1, True),
        "add_fusion": (2048, 2 * 2048, 1, False),
        "copy.5": (2048, 2 * 2048, 3, True),
    }


def test_traffic():
    near, part = "f32[8,128]{1,0:T(8,128)S(1)}", "f32[1,128]{1,0:T(1,128)}"
    text = entered(
        PARAMETER,
        f"%to_vmem = {near} copy(%x)",
        f"%within = {near} negate(%to_vmem)",
        f"%slice = {part} slice(%x), slice={{[0:1], [0:128]}}",
        f"ROOT %put = {X} dynamic-update-slice(%x, %slice)",
    )
    assert [one.traffic for one in read(text).others] == [4096, 0, 2 * 512, 2 * 512]


def test_json_and_back(ring):
    assert program.from_json(json.loads(json.dumps(dataclasses.asdict(ring)))) == ring


def test_a_loop_bounded_by_what_is_computed_has_no_known_turns():
    text = RING.replace("constant(3)", "add(%at.1, %at.1)")
    assert {x.place.trips for x in read(text).transfers} == {None, 1}


def test_a_limit_that_comes_in_with_the_state_and_turns_that_xla_knows():
    text = RING.replace(
        "%limit = s32[]{:T(128)} constant(3)",
        "%limit = s32[]{:T(128)} get-tuple-element(%state.1), index=0",
    )
    assert {x.place.trips for x in read(text).transfers} == {0, 1}
    known = 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    assert {x.place.trips for x in read(RING.replace("body=%body", known)).transfers} == {5, 1}


def test_elements_of_tuples_are_taken_without_an_instruction_in_a_newer_compilers_text():
    """As JAX 0.12 writes it: `%state#1` in place of a get-tuple-element."""
    taken = re.findall(r"\n  %([\w.]+) = .* get-tuple-element\(%([\w.]+)\), index=(\d+)", RING)
    assert [x[1:] for x in taken] == [
        ("state", "0"),
        ("state", "1"),
        ("state", "2"),
        ("state.1", "0"),
        ("while.1", "1"),
    ]
    text = re.sub(r"\n  %\S+ = .* get-tuple-element\(.*", "", RING)
    for name, of, n in taken:
        text = re.sub(rf"%{re.escape(name)}\b(?!\.)", f"%{of}#{n}", text)
    assert "get-tuple-element" not in text
    assert "compare(%state.1#0, %limit)" in text
    assert read(text) == read(RING)


def test_turns_are_counted_from_the_start_and_only_while_less():
    later = RING.replace(
        "%start = s32[]{:T(128)} constant(0)", "%start = s32[]{:T(128)} constant(1)"
    )
    assert {x.place.trips for x in read(later).transfers} == {2, 1}
    down = RING.replace("direction=LT", "direction=GT")
    assert {x.place.trips for x in read(down).transfers} == {None, 1}


def test_an_attribute_over_several_lines():
    text = entered(
        PARAMETER,
        f"%k.1 = {X} custom-call(%x), {KERNEL}, frontend_attributes={{kernel_metadata={{",
        f"ROOT %c = {X} copy(%k.1)",
    ).replace("metadata={\n", f'metadata={{\n"a": "b"\n}}}}, {BACK}\n')
    (kernel,) = read(text).kernels
    assert kernel.place.backward


def test_a_kernel_behind_the_done_is_not_inside():
    text = entered(
        PARAMETER,
        f"%s = ({X}, {X}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{{{0,1}}}}",
        f"%d = {X} collective-permute-done(%s)",
        f"%k.1 = {X} custom-call(%d), {KERNEL}",
        f"ROOT %c = {X} add(%d, %k.1)",
    )
    assert read(text).transfers[0].kernels == ()


def test_a_sum_that_joins_nothing_is_no_move():
    text = RING.replace("ROOT %twice", f"%b.1 = {PART} copy(%a.1)\n  ROOT %twice")
    (one,) = (x for x in read(text).others if x.name == "add_fusion")
    assert not one.moves


def test_a_kernel_in_a_branch_between_start_and_done():
    text = entered(
        PARAMETER,
        "%p = s32[] constant(1)",
        f"%s = ({X}, {X}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{{{0,1}}}}",
        f"%c = {X} conditional(%p, %x, %x), branch_computations={{%no, %yes}}",
        f"ROOT %d = {X} collective-permute-done(%s)",
        before=f"{TRUE}\n\n{FALSE}",
    )
    found = read(text)
    assert found.transfers[0].kernels == ("k.1",)
    assert [x.place.branches for x in found.kernels] == [(("c", 1),)]


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all", "all-reduce", "reduce-scatter"])
@pytest.mark.parametrize(
    ("groups", "size"),
    [("{{0,1,2,3},{4,5,6,7}}", 4), ("[2,4]<=[8]", 4), ("{}", 8), ("{{0,1,2,3,4,5,6,7}}", 8)],
)
def test_synchronous_collectives(kind, groups, size):
    text = entered(PARAMETER, f"ROOT %c = {X} {kind}(%x), channel_id=1, replica_groups={groups}")
    (one,) = read(text).transfers
    assert (one.kind, one.group, one.bytes, one.synchronous) == (kind, size, 4096, True)
    assert not one.overlapped


MESH = "mesh['axis_0'=2,'axis_1'=4]"
TURNED = f"{MESH}, device_ids=(0,2,4,6,1,3,5,7)"


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", [0, 1, 2, 3]),
        ("{{1,5},{0,4},{2,6},{3,7}}", [1, 5]),
        ("[2,4]<=[8]", [0, 1, 2, 3]),
        ("[8,1]<=[8]", [0]),
        ("[4,2]<=[2,4]T(1,0)", [0, 4]),
        ("[2,4]<=[2,2,2]T(1,0,2)", [0, 1, 4, 5]),
        (f"{MESH} {{'axis_1'}}", [0, 1, 2, 3]),
        (f"{MESH} {{'axis_0'}}", [0, 4]),
        (f"{MESH} {{'axis_0','axis_1'}}", [0, 1, 2, 3, 4, 5, 6, 7]),
        (f"{TURNED} {{'axis_1'}}", [0, 2, 4, 6]),
        (f"{TURNED} {{'axis_0'}}", [0, 1]),
        ("{}", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_first_group_and_how_far_apart_it_lies(groups, wanted):
    line = f"ROOT %c = {X} all-gather(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}"
    text = entered(PARAMETER, line)
    assert list(group_of(parse(text).computations["main"].root, 8)) == wanted
    (one,) = read(text).transfers
    assert (one.group, one.span) == (len(wanted), max(wanted) - min(wanted))


def test_a_permute_has_pairs_and_no_group(ring):
    assert {(x.group, x.span) for x in ring.transfers} == {(0, 0)}


def with_cycles(cycles):
    """As the compiler writes its estimate."""
    return f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}","is_mask":false}}}}'


def test_cycles_of_an_instruction():
    """The largest number stands where there is no estimate."""
    text = entered(
        PARAMETER,
        f"%a = {X} negate(%x), {with_cycles(1234)}",
        f"%b = {X} negate(%a), {with_cycles(2**63 - 1)}",
        f"ROOT %c = {X} negate(%b)",
    )
    assert [x.cycles for x in parse(text).computations["main"].instructions] == [0, 1234, 0, 0]
    assert [x.cycles for x in read(text).others] == [1234, 0, 0]


def test_cycles_between_start_and_done():
    text = entered(
        PARAMETER,
        f"%a = {X} negate(%x), {with_cycles(1)}",
        f"%s = ({X}, {X}) all-gather-start(%a), replica_groups={{{{0,1,2,3,4,5,6,7}}}}",
        f"%b = {X} negate(%x), {with_cycles(20)}",
        f"%c = {X} negate(%b), {with_cycles(300)}",
        f"%u = {X} negate(%c), {with_cycles(2**63 - 1)}",
        f"%d = {X} all-gather-done(%s)",
        f"%e = {X} negate(%c), {with_cycles(4000)}",
        f"ROOT %g = {X} all-reduce(%e), replica_groups={{}}",
    )
    gather, reduce = read(text).transfers
    assert (gather.cycles, gather.synchronous, gather.overlapped) == (320, False, False)
    assert (reduce.cycles, reduce.synchronous) == (0, True)


def test_scopes_are_told():
    text = entered(
        PARAMETER,
        f"%a = {X} negate(%x), {BACK}",
        f"ROOT %c = {X} all-gather(%a), replica_groups={{}}, {BACK}",
    )
    found = read(text)
    assert [x.scope for x in (*found.others, *found.transfers)] == [
        "jit(f)/transpose(jvp(attention))/ppermute"
    ] * 2


def test_an_all_gather_in_two_parts():
    wide = "f32[64,128]{1,0}"
    text = entered(
        PARAMETER,
        f"%s = ({X}, {wide}) all-gather-start(%x), replica_groups={{{{0,1,2,3,4,5,6,7}}}}",
        f"%k.1 = {X} custom-call(%x), {KERNEL}",
        f"ROOT %d = {wide} all-gather-done(%s)",
    )
    (one,) = read(text).transfers
    assert (one.kind, one.bytes, one.kernels) == ("all-gather", 8 * 4096, ("k.1",))


def test_a_collective_in_a_wrapper_and_its_update():
    text = entered(
        PARAMETER,
        f"%s = (({X}), {X}, u32[]) async-start(%x), calls=%wrapped",
        f"%u = (({X}), {X}, u32[]) async-update(%s)",
        f"%k.1 = {X} custom-call(%x), {KERNEL}",
        f"ROOT %d = {X} async-done(%u)",
        before=WRAPPED,
    )
    (one,) = read(text).transfers
    assert (one.name, one.kind, one.group, one.kernels) == ("s", "all-to-all", 8, ("k.1",))
    fused = entered(
        PARAMETER, f"ROOT %f = {X} fusion(%x), kind=kCustom, calls=%wrapped", before=WRAPPED
    )
    (one,) = read(fused).transfers
    assert (one.name, one.kind, one.synchronous) == ("f", "all-to-all", True)


def test_what_goes_to_another_slice_goes_by_the_host():
    """Two exchanges at once: each is done where its own result has come back."""

    def end(name, kind, at, meeting):
        named = f'_xla_host_transfer_rendezvous="{meeting}_0",_xla_megascale_transfer_type="{kind}"'
        return f"%{name} = ({X}, u32[], token[]) {at}, is_host_transfer=true, frontend_attributes={{{named}}}"

    text = entered(
        PARAMETER,
        "%t = token[] after-all()",
        end("s1", "ALL_REDUCE", "send(%x, %t)", "one"),
        end("s2", "ALL_GATHER", "send(%x, %t)", "two"),
        end("r1", "ALL_REDUCE", "recv(%t)", "one"),
        end("r2", "ALL_GATHER", "recv(%t)", "two"),
        f"%b = {X} negate(%x), {with_cycles(20)}",
        f"%d1 = ({X}, token[]) recv-done(%r1), is_host_transfer=true",
        f"%c = {X} negate(%x), {with_cycles(300)}",
        f"%k.1 = {X} custom-call(%x), {KERNEL}",
        f"ROOT %d2 = ({X}, token[]) recv-done(%r2), is_host_transfer=true",
    )
    found = read(text)
    reduced, gathered = found.transfers
    assert (reduced.kind, reduced.bytes, reduced.dcn, reduced.synchronous) == (
        "all-reduce",
        4096,
        True,
        False,
    )
    assert (reduced.cycles, reduced.kernels) == (20, ())
    assert (gathered.kind, gathered.cycles, gathered.kernels) == ("all-gather", 320, ("k.1",))
    assert [one.name for one in found.others] == ["b", "c"]


def test_no_schedule_no_facts():
    with pytest.raises(ValueError, match="wanted HLO with is_scheduled=true, found 'HloModule"):
        read(RING.replace("is_scheduled=true, ", ""))
    with pytest.raises(ValueError, match="ENTRY"):
        read(RING.replace("ENTRY ", ""))


def test_sizes_of_arrays():
    (one,) = (
        parse(entered("ROOT %a = (bf16[3,5]{1,0}, pred[7], s4[8], f8e4m3fn[2], f32[]) tuple()"))
        .computations["main"]
        .instructions
    )
    assert one.results == (30, 7, 4, 2, 4)
