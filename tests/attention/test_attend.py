"""`attend` as callers use it: meshes of every kind, remat, their own shard_map; and what it refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expected import attended, check, mesh_of, results, truth
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.attention import (
    KERNELS,
    Axes,
    Causal,
    Kernel,
    Tokens,
    Window,
    attend,
    differentiable,
    empty_partial,
    make_strategy,
)
from ringflash.attention.cases import Case, inputs
from ringflash.attention.strategies.ring import ring
from ringflash.attention.tile import alibi

CASE = Case("", T=32, N=8, K=4)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh(shape, names, kind=AUTO):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def call(**options):
    def attention(q, k, v, q_at, k_at, sinks):
        return attend(q, k, v, at=q_at, k_at=k_at, sinks_N=sinks, return_lse=True, **options)

    return attention


# ---- where the mesh comes from ----


def test_without_a_mesh():
    """Keys of another length than the queries count from 0 too."""
    case = Case("", T=24, S=40)
    x = inputs(case)
    check(results(lambda *x: attend(*x[:3], return_lse=True), x), truth(case.spec, x))
    packed = Case("", T=32, documents=(20, 9))
    x = inputs(packed)
    check(results(attended(packed, 1), x), truth(packed.spec, x))


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_under_set_mesh(kernel):
    x = inputs(CASE)
    with jax.set_mesh(mesh((2, 2, 2), ("data", "context", "tensor"))):
        check(results(call(kernel=kernel), x), truth(CASE.spec, x))


@pytest.mark.parametrize("placed", [True, False], ids=["placed", "replicated"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_explicit_axes(strategy, placed):
    """Arrays that lie as attention wants them, and ones that lie elsewhere."""
    x = inputs(CASE)
    here = mesh((2, 4), ("data", "context"), EXPLICIT)
    with jax.set_mesh(here):
        wide, rows = P("data", "context"), P("data", None, "context")
        where = x._replace(**dict.fromkeys(x._fields, wide if placed else P()))
        where = where._replace(dout_BTNH=wide, dlse_BNT=rows, sinks_N=P())
        given = [
            jax.tree.map(lambda a, p=p: jax.device_put(jnp.asarray(a), NamedSharding(here, p)), a)
            for a, p in zip(x, where, strict=True)
        ]
        found = results(call(strategy=strategy, kernel="reference"), type(x)(*given))
        check(found, truth(CASE.spec, x))
        out = jax.eval_shape(call(strategy=strategy), *given[:3], *given[6:], None)[0]
        assert out.sharding.spec == P("data", "context", None, None)


def test_explicit_axes_and_a_length_that_does_not_divide():
    case = Case("", T=30)
    x = inputs(case)
    with jax.set_mesh(mesh((4,), ("context",), EXPLICIT)):
        run = partial(attend, return_lse=True, kernel="reference")
        check(results(lambda *x: run(*x[:3]), x), truth(case.spec, x))


def test_every_kind_of_axis_at_once():
    """Batch, time and heads sharded; bias, dropout and sinks by head give what one device gives."""
    x = inputs(Case("", T=32, N=8, K=4, sinks=True, documents=(20, 9)))
    options = {
        "mask": Causal() & Window(20),
        "bias": alibi(8),
        "dropout": 0.3,
        "dropout_key": jax.random.key(1),
        "kernel": "reference",
    }
    wanted = results(call(**options), x)
    for names in (("data", "context", "tensor"), ("fsdp", "tensor", "context")):
        found = results(call(mesh=mesh((2, 2, 2), names), **options), x)
        check(found, wanted, about=str(names))
    without = results(call(**{**options, "dropout_key": None}), x)
    assert np.abs(without["out"] - wanted["out"]).max() > 0.1


def test_other_names_of_axes():
    x = inputs(CASE)
    axes = Axes(batch=("b",), time=("s1", "s2"), heads=())
    here = mesh((2, 2, 2), ("b", "s1", "s2"))
    found = results(call(mesh=here, axes=axes, kernel="reference"), x)
    check(found, truth(CASE.spec, x))


def test_a_strategy_may_be_a_function():
    x = inputs(CASE)
    seen = []

    def mine(kernel, axis):
        seen.append((kernel.name, axis))
        return ring(kernel, axis)

    check(results(call(strategy=mine, mesh=mesh_of(4), kernel="reference"), x), truth(CASE.spec, x))
    assert seen == [("reference", "context")]


@pytest.mark.parametrize("given", [True, False], ids=["mesh=", "set_mesh"])
def test_each_device_holds_its_share(given):
    """Of batch, time and heads, and of what bias and dropout go by."""
    seen = []

    def forward(q, k, v, q_at, k_at, carry=None):
        seen.extend(jax.tree.map(jnp.shape, (q, k, q_at, k_at)))
        return empty_partial(q, v.shape[3])

    def mine(kernel, axis):
        del axis
        return Kernel("spy", kernel.spec, forward, kernel.backward)

    here = mesh((2, 2, 2), ("data", "context", "tensor"))
    run = partial(attend, strategy=mine, bias=alibi(8), dropout=0.1, dropout_key=jax.random.key(0))
    x = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs(CASE)[:3]]
    if given:
        jax.eval_shape(partial(run, mesh=here), *x)
    else:
        with jax.set_mesh(here):
            jax.eval_shape(run, *x)
    rows = (1, 16)
    wanted = [(1, 16, 4, 16), (1, 16, 2, 16), Tokens(rows, rows, (4,), (1,)), Tokens(rows, rows)]
    assert seen == wanted


@pytest.mark.parametrize(
    ("kernel", "vma"), [("reference", True), ("chunked", False), ("chunked", True)]
)
@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(9)], ids=["split", "near"])
def test_inside_the_callers_own_shard_map(kernel, vma, mask):
    """With sinks that are the same on every device: their gradient is summed over the devices."""
    case = Case("", T=32, mask=mask, sinks=True)
    x = inputs(case)
    attention = differentiable(ring(KERNELS[kernel](case.spec), "context"))
    wide, rows = P(None, "context"), P(None, None, "context")
    specs = (wide, wide, wide, Tokens(wide, wide), Tokens(wide, wide), P())

    def whole(*x):
        return jax.shard_map(
            attention, mesh=mesh_of(4), in_specs=specs, out_specs=(wide, rows), check_vma=vma
        )(*x)

    check(results(whole, x), truth(case.spec, x))


# ---- remat ----


def test_remat_that_saves_out_and_lse_does_not_run_the_ring_again():
    """As many transfers as without remat, and fewer than with it: in the program that XLA is given, which may
    see for itself that a part is there twice."""
    x = tuple(jnp.asarray(a) for a in inputs(CASE)[:3])

    def layer(x):
        return (attend(*x, mesh=mesh_of(4), kernel="reference") ** 2).sum()

    def transfers(f):
        return jax.jit(jax.value_and_grad(f)).lower(x).as_text().count("collective_permute")

    saved = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    plain = transfers(layer)
    assert transfers(jax.checkpoint(layer, policy=saved)) == plain > 0
    assert transfers(jax.checkpoint(layer)) > plain


# ---- a document is alone ----


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses:2*ring:2"])
def test_documents_do_not_leak(strategy):
    """One document is changed: no other may move by one bit, nor send a gradient there."""
    case = Case("", B=1, T=64, K=4, mask=Causal(), documents=(20, 13, 25))
    x = inputs(case)
    attention = jax.jit(attended(case, 4, strategy=strategy))
    row = np.arange(64)[:, None, None]
    middle = (row >= 20) & (row < 33)
    moved = [np.where(middle, a + 1.0, a).astype(np.float32) for a in x[:3]]
    before = np.asarray(attention(*x[:3], x.q_at, x.k_at, None)[0])
    after = np.asarray(attention(*moved, x.q_at, x.k_at, None)[0])
    others = ~middle[:, 0, 0]
    np.testing.assert_array_equal(before[:, others], after[:, others])
    assert (before[:, ~others] != after[:, ~others]).any()

    quiet = x._replace(
        dout_BTNH=np.where(middle, x.dout_BTNH, 0.0).astype(np.float32),
        dlse_BNT=np.where(others, 0.0, x.dlse_BNT).astype(np.float32),
    )
    found = results(attended(case, 4, strategy=strategy), quiet)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(found[name][:, others], 0)


# ---- what it refuses ----


def zeros(*shape):
    return jnp.zeros(shape)


GOOD = zeros(2, 8, 4, 16)


@pytest.mark.parametrize(
    ("q", "k", "v", "said"),
    [
        (
            zeros(2, 8, 16),
            GOOD,
            GOOD,
            r"must be \[batch, time, heads, head_dim\]; found q \(2, 8, 16\)",
        ),
        (GOOD, GOOD, zeros(2, 9, 4, 16), r"k and v must agree .* v \(2, 9, 4, 16\)"),
        (GOOD, zeros(3, 8, 4, 16), zeros(3, 8, 4, 16), r"q and k must agree in batch and head_dim"),
        (GOOD, zeros(2, 8, 4, 8), GOOD, r"q and k must agree .* k \(2, 8, 4, 8\)"),
        (
            GOOD,
            zeros(2, 8, 3, 16),
            zeros(2, 8, 3, 16),
            r"query heads must be a multiple of key/value",
        ),
    ],
)
def test_shapes_that_do_not_fit(q, k, v, said):
    with pytest.raises(ValueError, match=said):
        attend(q, k, v)


def test_tokens_that_do_not_fit():
    at = Tokens(jnp.zeros((2, 7), jnp.int32), jnp.zeros((2, 7), jnp.int32))
    with pytest.raises(ValueError, match=r"at.positions_BT must be \(2, 8\), found \(2, 7\)"):
        attend(GOOD, GOOD, GOOD, at=at)
    at = Tokens(jnp.zeros((2, 8), jnp.int32), jnp.zeros((2, 8), jnp.int32))
    longer = zeros(2, 9, 4, 16)
    with pytest.raises(ValueError, match="differ in length: give k_at beside at"):
        attend(GOOD, longer, longer, at=at)
    with pytest.raises(ValueError, match=r"at.segment_ids_BT must be \(2, 8\), found \(2,\)"):
        attend(GOOD, GOOD, GOOD, at=at._replace(segment_ids_BT=jnp.zeros(2, jnp.int32)))


def test_a_batch_or_heads_that_do_not_divide():
    with pytest.raises(
        ValueError, match=r"batch 2 must divide over mesh axes .*data.* of 4 devices"
    ):
        attend(GOOD, GOOD, GOOD, mesh=mesh((4, 2), ("data", "context")))
    few = zeros(2, 8, 1, 16)
    with pytest.raises(ValueError, match=r"key/value heads 1 must divide .*tensor.* of 2 devices"):
        attend(GOOD, few, few, mesh=mesh((4, 2), ("x", "tensor")))


def test_an_axis_of_the_mesh_holds_one_dim():
    axes = Axes(batch=("context",), time=("context",))
    with pytest.raises(ValueError, match="a mesh axis may hold one dim only"):
        attend(GOOD, GOOD, GOOD, mesh=mesh_of(2), axes=axes)


def test_a_composition_must_make_up_the_devices():
    with pytest.raises(ValueError, match=r"'ulysses:2\*ring:4' is over 2 \* 4 devices, found 4"):
        attend(GOOD, GOOD, GOOD, mesh=mesh_of(4), strategy="ulysses:2*ring:4")


def test_options_out_of_range():
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\), found 1.0"):
        attend(GOOD, GOOD, GOOD, dropout=1.0, dropout_key=jax.random.key(0))
    with pytest.raises(ValueError, match="softcap must be above 0 and finite, found 0"):
        attend(GOOD, GOOD, GOOD, softcap=0.0)
    with pytest.raises(ValueError, match="softcap must be above 0 and finite, found inf"):
        attend(GOOD, GOOD, GOOD, softcap=float("inf"))
    with pytest.raises(ValueError, match="scale must be finite, found nan"):
        attend(GOOD, GOOD, GOOD, scale=float("nan"))


# ---- names ----


def test_names_that_are_unknown():
    with pytest.raises(ValueError, match="attention kernel 'flash' is unknown; known: auto, "):
        attend(GOOD, GOOD, GOOD, kernel="flash")
    with pytest.raises(
        ValueError, match="strategy 'rong' is unknown; known: ring, all_gather, ulysses"
    ):
        attend(GOOD, GOOD, GOOD, strategy="rong", mesh=mesh_of(2))


@pytest.mark.parametrize(
    ("spelling", "said"),
    [
        ("ring:x", "'ring:x': wanted ring:DEVICES"),
        ("ring:0", "'ring:0': wanted ring:DEVICES"),
        ("ring:", "'ring:': wanted ring:DEVICES"),
        ("ring*ulysses:2", "each part needs its devices, as in ulysses:2"),
        ("", "strategy '' is unknown"),
    ],
)
def test_spellings_that_say_nothing(spelling, said):
    with pytest.raises(ValueError, match=said):
        make_strategy(spelling)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses:2*ring:2"])
def test_strict_promotion(strategy, kernel):
    """Nothing is promoted in silence: ranks and dtypes are as written, for a caller who wants it so."""
    case = Case(
        "",
        K=4,
        mask=Causal() & Window(7),
        softcap=3.0,
        bias=alibi(4),
        sinks=True,
        documents=(20, 9),
    )
    x = inputs(case)
    at = x.q_at._replace(heads_N=None)
    attention = attended(case, 4, strategy=strategy, kernel=kernel)

    def loss(q, k, v, sinks):
        out, lse = attention(q, k, v, at, x.k_at, sinks)
        return out.astype(jnp.float32).sum() + lse.sum()

    low = [jnp.asarray(a, jnp.bfloat16) for a in x[:3]]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        grads = jax.eval_shape(jax.grad(loss, (0, 1, 2, 3)), *low, jnp.asarray(x.sinks_N))
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 3 + [jnp.float32]
