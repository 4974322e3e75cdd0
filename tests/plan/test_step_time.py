"""A step's time from facts that are written by hand: what is added up, how often, and what is hidden."""

import dataclasses
from dataclasses import replace

import pytest
from tiny import tiny

from ringflash.attention import LAYOUTS
from ringflash.flops import causal_pairs, step_flops
from ringflash.plan import links
from ringflash.plan.forecast import Forecast, Pass, candidates, forecast
from ringflash.plan.generations import GENERATIONS
from ringflash.plan.program import Call, Place, Program, Transfer
from ringflash.plan.reading import collective_seconds
from ringflash.plan.step import StepFacts
from ringflash.plan.step_time import Step, StepTime, along_context, step_time
from ringflash.plan.where import Where

MIB = 2**20
CLOCK = 1.5e9  # of v5e
ENTRY = Place("main")
LOOP = Place("body", ("while",), 3)
OWN = "jit(step)/jvp()/while/body/attention/ring(tpu)/shard_map/ppermute"
UP = tuple((n, (n + 1) % 8) for n in range(8))
SIZES = {
    "seq_len": 32768,
    "model__layers": 3,
    "model__width": 512,
    "model__mlp_width": 1024,
    "model__heads": 8,
    "model__kv_heads": 8,
    "model__head_dim": 128,
}


def made(
    *transfers,
    others=(),
    mesh=(1, 1, 8, 1),
    where="v5e:2x4",
    slices=1,
    strategy="ring",
    hop_links=1,
    **changes,
):
    """A compiled step that does this between devices, and these beside its kernels."""
    axes = dict(zip(("data", "fsdp", "context", "tensor"), mesh, strict=True))
    place = Where(where, slices)
    program = Program(8 * slices, list(transfers), [Call("k", LOOP)], list(others))
    facts = StepFacts(axes, strategy, True, *[0] * 6, (), 0.0, hop_links, program)
    config = tiny("stdlib", **{"global_batch_size": mesh[0] * mesh[1], **SIZES, **changes})
    return Step(config, place, place.generation, facts)


def gather(nbytes=8 * MIB, kind="all-gather", group=8, span=7, place=ENTRY, **more):
    return Transfer("g", kind, nbytes, place, group=group, span=span, **more)


def sent(place=LOOP, pairs=UP, **more):
    return Transfer("p", "collective-permute", MIB, place, pairs, **more)


def test_a_step_is_the_sum_of_its_parts():
    step = made(
        gather(synchronous=True),
        gather(kind="all-reduce", cycles=30_000),
        others=[Call("f", ENTRY, cycles=15_000), Call("c", ENTRY, traffic=MIB)],
    )
    found = step_time(step)
    assert found.attention_seconds == pytest.approx(3 * forecast(step.job, "ring").kernel_seconds)
    assert found.other_seconds == pytest.approx(1e-5 + MIB / 0.82e12)
    assert found.exposed_seconds == sum(one.exposed_seconds for one in found.collectives) > 0
    assert found.total_seconds == pytest.approx(
        found.attention_seconds
        + found.attention_exposed_seconds
        + found.other_seconds
        + found.exposed_seconds
    )
    assert found.tokens == 32768
    assert found.tokens_per_second == pytest.approx(32768 / found.total_seconds)
    assert found.flops == step_flops(step.config.model, 32768, causal_pairs(32768))
    assert (found.devices, found.chips) == (8, 8)


def test_a_ring_that_is_not_hidden_counts_once_a_layer():
    """256 tokens a device: kernels are shorter than hops."""
    step = made(seq_len=2048)
    each = forecast(step.job, "ring").exposed_seconds
    assert step_time(step).attention_exposed_seconds == pytest.approx(3 * each)
    assert each > 0
    far = forecast(made(seq_len=2048, hop_links=3).job, "ring").exposed_seconds
    assert far > 2 * each
    assert made(hop_links=0).job.hop_links == made(hop_links=None).job.hop_links == 1


def test_loops_multiply():
    turns = Place("inner", ("while", "while.1"), 12)
    found = step_time(
        made(
            gather(MIB, place=turns, synchronous=True),
            gather(2 * MIB, synchronous=True),
            others=[Call("f", turns, cycles=1500), Call("c", LOOP, traffic=MIB)],
        )
    )
    assert found.other_seconds == pytest.approx(12 * 1e-6 + 3 * MIB / 0.82e12)
    (one,) = found.collectives
    assert (one.runs, one.bytes) == (13, 14 * MIB)
    assert one.seconds == pytest.approx(14 / 8 * seconds(gather()))


def test_two_cores_share_a_devices_memory():
    found = step_time(made(others=[Call("c", ENTRY, traffic=MIB)], where="v5p:2x2x2"))
    assert found.other_seconds == pytest.approx(MIB / (2 * 1.38e12))
    assert found.peak_flops == 2 * 131_072 * 1.75e9


def test_several_devices_of_a_chip():
    found = step_time(made(mesh=(2, 1, 8, 1), where="tpu7x:2x2x2"))
    assert (found.devices, found.chips) == (16, 8)


def seconds(one, where="v5e:2x4"):
    return collective_seconds(one, "v5e", where)


@pytest.mark.parametrize("kernels", [(), ("k",)])
def test_a_synchronous_one_is_exposed_whole(kernels):
    (found,) = step_time(made(gather(synchronous=True, cycles=10**9, kernels=kernels))).collectives
    assert found.exposed_seconds == found.seconds == pytest.approx(seconds(gather()))


def test_cycles_between_start_and_done_hide_as_long_as_they_take():
    whole = seconds(gather())
    half = int(whole * CLOCK / 2)
    (found,) = step_time(made(gather(cycles=half, place=LOOP))).collectives
    assert found.seconds == pytest.approx(3 * whole)
    assert found.exposed_seconds == pytest.approx(1.5 * whole, rel=1e-3)
    (found,) = step_time(made(gather(cycles=3 * half))).collectives
    assert (found.exposed_seconds, found.seconds) == (0, pytest.approx(whole))


def test_what_one_has_to_spare_hides_no_other():
    (found,) = step_time(made(gather(cycles=10**9), gather())).collectives
    assert found.exposed_seconds == pytest.approx(seconds(gather()))


def test_a_kernel_hides_all():
    (found,) = step_time(made(gather(kernels=("k",)))).collectives
    assert (found.runs, found.exposed_seconds) == (1, 0)


def test_kinds_are_told_apart_the_longest_first():
    found = step_time(made(gather(MIB), gather(kind="all-reduce"), sent(), gather(MIB)))
    assert [(x.kind, x.runs) for x in found.collectives] == [
        *(("all-reduce", 1), ("collective-permute", 3), ("all-gather", 2)),
    ]


def test_attentions_own_are_not_counted_twice():
    """Whether it or what it stands in is named so; what is called alike is another's."""
    inside = replace(LOOP, scope=OWN)
    alike = "jit(step)/jvp()/while/body/attention_norm/mul"
    step = made(sent(scope=OWN), sent(inside), gather(scope=OWN), gather(scope=alike))
    found = step_time(step)
    assert [(one.kind, one.runs) for one in found.collectives] == [("all-gather", 1)]
    without = step_time(made())
    assert found.attention_seconds == without.attention_seconds
    assert found.attention_exposed_seconds == without.attention_exposed_seconds


def test_slices_lie_on_the_outermost_axis():
    """Two slices of eight devices, and a group of every eighth device or of neighbours."""
    across = tuple((n, (n + 8) % 16) for n in range(16))
    step = made(
        gather(group=2, span=8, synchronous=True),
        gather(group=8, span=7, synchronous=True),
        sent(pairs=across),
        sent(pairs=tuple((n, n ^ 1) for n in range(16))),
        mesh=(2, 1, 8, 1),
        slices=2,
    )
    found = {(x.kind, x.over_dcn): x for x in step_time(step).collectives}
    assert len(found) == 4
    assert found["all-gather", True].seconds == pytest.approx(links.dcn_seconds(4 * MIB))
    assert found["all-gather", False].seconds == pytest.approx(seconds(gather()))
    assert found["collective-permute", True].seconds == pytest.approx(3 * links.dcn_seconds(MIB))
    near = 3 * links.hop_seconds("v5e", MIB)
    assert found["collective-permute", False].seconds == pytest.approx(near)
    one_slice = step_time(made(gather(group=2, span=8), mesh=(2, 1, 8, 1), where="v5e:4x4"))
    assert [x.over_dcn for x in one_slice.collectives] == [False]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("all-gather", MIB),  # half of 16 MiB comes from the other slice, by eight devices
        ("all-reduce", 2 * MIB),  # half is reduced there, and comes back
        ("reduce-scatter", 16 * MIB),  # half of 16 times 16 MiB
        ("all-to-all", 8 * MIB),  # each sends half of its own
    ],
)
def test_what_goes_between_slices(kind, wanted):
    step = made(gather(16 * MIB, kind, group=16, span=15), mesh=(2, 1, 8, 1), slices=2)
    (found,) = step_time(step).collectives
    assert found.over_dcn
    assert found.seconds == pytest.approx(links.dcn_seconds(wanted))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("all-reduce", 3 * MIB),  # to four slices: three quarters of it there and back
        ("all-gather", 6 * MIB),  # all of it to three others
        ("reduce-scatter", 1.5 * MIB),
        ("all-to-all", 1.5 * MIB),
    ],
)
def test_what_a_device_hands_to_its_host_is_its_own_part(kind, wanted):
    to_host = gather(2 * MIB, kind, group=8, span=7, dcn=True)
    step = made(to_host, mesh=(4, 1, 8, 1), slices=4)
    (found,) = step_time(step).collectives
    assert found.over_dcn
    assert found.seconds == pytest.approx(links.dcn_seconds(wanted))


@pytest.mark.parametrize(
    ("remat", "forwards"), [("none", 1), ("attention", 1), ("offload", 1), ("full", 2)]
)
def test_full_remat_has_two_forwards(remat, forwards):
    step = made(model__remat=remat, seq_len=2048)
    once = forecast(step.job, "ring")
    found = step_time(step)
    passes = [once.forward] * forwards + [once.backward]
    assert found.attention_seconds == pytest.approx(3 * sum(x.kernel_seconds for x in passes))
    left = 3 * sum(x.exposed_seconds for x in passes)
    assert found.attention_exposed_seconds == pytest.approx(left)
    assert found.flops == step_time(made(seq_len=2048)).flops, "what is computed again is not"


def test_accumulation_multiplies():
    step = made(accumulation=2, global_batch_size=8, mesh=(1, 2, 4, 1))
    assert step.job.rows == 2
    once = forecast(step.job, "ring").kernel_seconds
    assert step_time(step).attention_seconds == pytest.approx(3 * 2 * once)
    whole = step_time(made(global_batch_size=8, mesh=(1, 2, 4, 1)))
    assert step_time(step).attention_seconds == pytest.approx(whole.attention_seconds)
    assert step_time(step).flops == whole.flops


def test_heads_are_shared_out_over_tensor():
    step = made(mesh=(1, 1, 4, 2))
    assert (step.job.heads, step.job.kv_heads, step.job.shards) == (4, 4, 4)


@pytest.mark.parametrize(
    ("mesh", "pairs", "wanted"),
    [
        ((1, 1, 4, 1), [(0, 1), (1, 2), (2, 3), (3, 0)], [(0, 1), (1, 2), (2, 3), (3, 0)]),
        ((1, 1, 2, 2), [(0, 2), (2, 0), (1, 3), (3, 1)], [(0, 1), (1, 0)]),
        ((1, 2, 2, 2), [(n, n ^ 2) for n in range(8)], [(0, 1), (1, 0)]),
        ((2, 1, 4, 1), [(n, n - n % 4 + (n + 3) % 4) for n in range(8)],
         [(0, 3), (1, 0), (2, 1), (3, 2)]),
    ],
)  # fmt: skip
def test_pairs_along_context(mesh, pairs, wanted):
    axes = dict(zip(("data", "fsdp", "context", "tensor"), mesh, strict=True))
    assert along_context(sent(pairs=tuple(pairs)), axes) == tuple(wanted)


def branches(tensor, shards=4):
    """A ring that goes all the way in a branch, or only as far as is needed in another."""
    inner = tensor * shards
    pairs = tuple((n, (n + tensor) % inner) for n in range(inner))
    whole = Place("all", ("while",), shards - 1, (("if", 0),), OWN)
    near = Place("near", ("while.2",), None, (("if", 1),), OWN)
    return sent(whole, pairs), sent(near, pairs), whole, near


@pytest.mark.parametrize("tensor", [1, 2])
def test_of_branches_the_one_that_runs_counts(tensor):
    """A causal mask goes all the way round: what stands in the other branch does not run."""
    first, second, whole, near = branches(tensor)
    others = [Call("f", whole, cycles=1500), Call("g", near, cycles=1500)]
    found = step_time(made(first, second, others=others, mesh=(1, 1, 4, tensor)))
    assert found.other_seconds == pytest.approx(3e-6)
    assert found.collectives == ()


@pytest.mark.parametrize("tensor", [1, 2])
def test_loops_whose_turns_are_open_run_as_far_as_the_mask_needs(tensor):
    """Of four shards two hops up and one down, whatever lies between two neighbours of a ring."""
    places = [Place(name, (f"while.{name}",), None, (), OWN) for name in ("up", "down")]
    pairs = [
        tuple((n, (n + way * tensor) % (4 * tensor)) for n in range(4 * tensor)) for way in (1, -1)
    ]
    ring = [sent(place, way) for place, way in zip(places, pairs, strict=True)]
    for place, runs in zip(places, (2, 1), strict=True):
        step = made(*ring, others=[Call("f", place, cycles=1500)], mesh=(1, 1, 4, tensor))
        assert step_time(step).other_seconds == pytest.approx(runs * 1e-6)


def test_one_device_along_context():
    found = step_time(made(gather(), mesh=(1, 8, 1, 1)))
    assert found.attention_exposed_seconds == 0
    assert found.attention_seconds > 0


@pytest.mark.parametrize("layout", [*LAYOUTS, "balanced"])
def test_layouts(layout):
    """One that depends on the data counts as one that is as even; of any length that it can cut."""
    step = made(attention__layout=layout, seq_len=32768 + 8)
    if layout == "zigzag":
        with pytest.raises(ValueError, match="needs a multiple of 16"):
            step_time(step)
    else:
        assert step_time(step).attention_seconds > 0
    taken = made(attention__layout=layout).job.layout
    assert taken == ("zigzag" if layout == "balanced" else layout)


def test_heads_that_cannot_be_shared_out():
    with pytest.raises(ValueError, match="ulysses over 8 devices"):
        step_time(made(strategy="ulysses", model__heads=4, model__kv_heads=4))


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_matrix_units_are_never_used_by_more_than_all(name, head_dim):
    """With all else at the peak of the matrix units, and nothing between devices."""
    generation = GENERATIONS[name]
    shape = {"v5e": "2x4", "v6e": "2x4"}.get(name, "2x2x2")
    where = f"{generation.topology.partition(':')[0]}:{shape}"
    devices = Where(where).devices
    mesh = (devices // 8, 1, 8, 1)
    step = made(where=where, mesh=mesh, model__head_dim=head_dim)
    linear = step_flops(step.config.model, step_time(step).tokens, 0) / devices
    ideal = linear / (generation.flops_per_cycle * generation.cores)
    for strategy in candidates(8, 8):
        program = Program(8, [], [], [Call("f", ENTRY, cycles=int(ideal) + 1)])
        facts = replace(step.facts, strategy=strategy, program=program)
        assert 0.1 < step_time(replace(step, facts=facts)).mfu < 1


def test_mfu_is_1_where_nothing_but_the_products_takes_time():
    nothing = Forecast("ring", Pass(0.0, 0.0), Pass(0.0, 0.0))
    ideal = StepTime(0.0, 0.0, 2.0, (), nothing, (), 16 * 10**12, 100, 8, 4, 1e12)
    assert ideal.mfu == 1
    assert dataclasses.replace(ideal, other_seconds=4.0).mfu == 0.5
    assert ideal.tokens_per_second == 50
