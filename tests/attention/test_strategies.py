"""Strategies and their compositions on 2, 3, 4 and 8 devices against the reference in fp64 on one.

How it covers: a *program* is a strategy, a number of devices, a kernel and a spec, and is compiled once.
Every program runs every layout and every packing of its spec, which are data. CORE strategies meet every
spec; of the others, each meets one mask that lets the ring stop early and one that does not, in turn. The
reference kernel serves in all of these; `chunked`, with tiles smaller than a shard, in one program for each
way to nest.
"""

from functools import cache

import jax
import numpy as np
import pytest
from expected import attended, check, jitted, over, results, truth
from jax.sharding import AxisType

from ringflash.attention import (
    KERNELS,
    LAYOUTS,
    Causal,
    Chunked,
    Full,
    Prefix,
    Tokens,
    Window,
    differentiable,
    make_strategy,
)
from ringflash.attention.cases import Case, inputs, tokens
from ringflash.attention.strategies.sharded import sharded
from ringflash.attention.tile import alibi

CORE = [("ring", 8), ("ulysses:2*ring:4", 8)]
OTHERS = [
    ("all_gather", 8),
    ("ulysses", 4),
    ("ring", 2),
    ("ring", 3),
    ("ring", 4),
    ("all_gather", 3),
    ("ulysses", 2),
    ("ulysses", 8),
    ("ring:2*ring:4", 8),
    ("ring:2*ulysses:2", 4),
    ("all_gather:2*ring:2", 4),
    ("ulysses:2*all_gather:2", 4),
    ("ring:2*all_gather:2*ulysses:2", 8),
]
SPECS = {
    "causal": Case("causal", N=8, softcap=3.0, sinks=True),
    "packed": Case("packed", N=8, documents=(96,)),
    "window": Case("window", N=8, K=4, mask=Causal() & Window(10)),
    "cross": Case("cross", N=8, K=1, T=48, S=96, mask=Full(), value_width=24),
    "prefix": Case("prefix", N=8, K=4, mask=Prefix(30)),
    "everything": Case(
        "everything",
        N=8,
        K=4,
        value_width=24,
        mask=Causal() & Window(40) & Chunked(64),
        scale=0.3,
        softcap=5.0,
        bias=alibi(8),
        dropout=0.2,
        sinks=True,
        documents=(29, 3, 40, 11),
    ),
}
# One over all shards, some over several, all within one, padding within and at the end, nothing else.
PACKINGS = [(96,), (40, 37, 11), (5, 7, 3, 9, 6, 11, 8, 4, 12, 10, 2, 1), (29, 1, 40), ()]
PROGRAMS = [(s, n, spec) for s, n in CORE for spec in SPECS]
for local in (True, False):
    KIND = [name for name, case in SPECS.items() if case.spec.mask.local is local]
    PROGRAMS += [(*other, KIND[i % len(KIND)]) for i, other in enumerate(OTHERS)]
TILED = [
    ("ring", 8, "everything"),
    ("ring", 3, "packed"),
    ("all_gather", 4, "packed"),
    ("ulysses", 4, "causal"),
    ("ulysses:2*ring:4", 8, "causal"),
    ("ring:2*ring:2", 4, "cross"),
]


@cache
def packings(spec):
    """Inputs of a spec, one for each packing of its documents, and what is wanted of them."""
    case = SPECS[spec]
    every = [inputs(case)]
    if case.documents is not None:
        for documents in PACKINGS:
            at = tokens(case.B, case.T, documents)
            q_at = every[0].q_at._replace(positions_BT=at.positions_BT, segment_ids_BT=at[1])
            every.append(every[0]._replace(q_at=q_at, k_at=at))
    return [(x, truth(case.spec, x)) for x in every]


def laid_out(x, q_order, k_order):
    """The inputs with their rows in another order."""
    return x._replace(
        q_BTNH=x.q_BTNH[:, q_order],
        k_BSKH=x.k_BSKH[:, k_order],
        v_BSKH=x.v_BSKH[:, k_order],
        dout_BTNH=x.dout_BTNH[:, q_order],
        dlse_BNT=x.dlse_BNT[..., q_order],
        q_at=x.q_at._replace(**{f: getattr(x.q_at, f)[:, q_order] for f in Tokens._fields[:2]}),
        k_at=Tokens(*(a[:, k_order] for a in x.k_at[:2])),
    )


def put_back(found, q_order, k_order):
    """Results in the order of `inputs`."""
    q_back, k_back = np.argsort(q_order), np.argsort(k_order)
    found = {name: None if a is None else np.asarray(a) for name, a in found.items()}
    for name, back in (("out", q_back), ("dq", q_back), ("dk", k_back), ("dv", k_back)):
        found[name] = found[name][:, back]
    return {**found, "lse": found["lse"][..., q_back]}


def agree(spelling, devices, kernel, spec):
    run = jitted(over(spelling, devices, kernel))
    for n, (x, wanted) in enumerate(packings(spec)):
        for layout, order in LAYOUTS.items():
            orders = order(x.q_BTNH.shape[1], devices), order(x.k_BSKH.shape[1], devices)
            found = put_back(run(*laid_out(x, *orders)), *orders)
            check(found, wanted, about=f"packing {n}, {layout}:")


@pytest.mark.slow
@pytest.mark.parametrize(("spelling", "devices", "spec"), PROGRAMS)
def test_with_the_reference(spelling, devices, spec):
    agree(spelling, devices, KERNELS["reference"](SPECS[spec].spec), spec)


@pytest.mark.slow
@pytest.mark.parametrize(("spelling", "devices", "spec"), TILED)
def test_with_tiles(spelling, devices, spec):
    agree(spelling, devices, KERNELS["chunked"](SPECS[spec].spec, block_q=4, block_k=5), spec)


@pytest.mark.parametrize(
    ("spelling", "devices", "length"),
    [
        ("ring", 2, 1001),
        ("ring", 3, 1000),
        ("ring:2*ring:4", 8, 97),
        ("ulysses", 4, 7),
        ("all_gather", 8, 1),
    ],
)
def test_lengths_that_do_not_divide(spelling, devices, length):
    """The padding is ours; with fewer tokens than devices, some hold nothing else."""
    case = Case("", B=1, T=length, N=4, K=2)
    x = inputs(case)
    check(results(attended(case, devices, strategy=spelling), x), truth(case.spec, x))


def test_two_axes_of_a_mesh_are_one_ring():
    """The time axis may be a tuple of mesh axes, and a composition may lie over it."""
    mesh = jax.make_mesh((2, 4), ("outer", "inner"), axis_types=(AxisType.Auto,) * 2)
    x, wanted = packings("window")[0]
    both = ("outer", "inner")
    for spelling in ("ring", "ulysses:2*ring:4"):
        kernel = make_strategy(spelling)(KERNELS["reference"](SPECS["window"].spec), both)
        placed = sharded(kernel, mesh, batch=None, time=both, heads=None)
        check(results(differentiable(placed), x), wanted, about=spelling)


@pytest.mark.parametrize(
    ("N", "K", "devices", "multiple"), [(4, 2, 8, 8), (6, 2, 4, 4), (5, 5, 2, 10)]
)
def test_ulysses_says_which_heads_it_needs(N, K, devices, multiple):
    case = Case("", N=N, K=K)
    kernel = KERNELS["reference"](case.spec)
    said = f"over {devices} devices needs query heads in a multiple of {multiple} .*{K}.* found {N}"
    with pytest.raises(ValueError, match=said):
        results(over("ulysses", devices, kernel), inputs(case))


@pytest.mark.parametrize(
    ("N", "K", "devices", "copies"), [(32, 2, 4, 2), (6, 2, 3, 3), (8, 8, 4, 1), (8, 4, 2, 1)]
)
def test_ulysses_sends_a_key_head_no_oftener_than_it_is_needed(N, K, devices, copies):
    """Seen at the kernel: its query heads, and its key/value heads."""
    seen = []
    case = Case("", N=N, K=K)
    kernel = KERNELS["reference"](case.spec)

    def forward(q, k, *rest):
        seen.append((q.shape[2], k.shape[2]))
        return kernel.forward(q, k, *rest)

    spy = kernel.__class__("spy", kernel.spec, forward, kernel.backward)
    x = inputs(case)
    check(results(over("ulysses", devices, spy), x), truth(case.spec, x))
    assert seen == [(N // devices, K * copies // devices)]


def test_everything_is_covered():
    """The programs above: each strategy with masks of both kinds, each spec with at least five."""
    for pair in CORE + OTHERS:
        local = {SPECS[spec].spec.mask.local for s, n, spec in PROGRAMS if (s, n) == pair}
        assert local == {True, False}, pair
    for spec in SPECS:
        assert sum(program[2] == spec for program in PROGRAMS) >= 5
