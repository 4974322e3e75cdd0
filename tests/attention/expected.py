"""What attention has to give: the plain definition, the reference in fp64, how far off one may be."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from ringflash.attention import FLOOR, Tokens, attend, differentiable, make_strategy
from ringflash.attention.cases import inputs
from ringflash.attention.kernels.reference import reference
from ringflash.attention.strategies.sharded import sharded
from ringflash.attention.tile import dropped

TOLERANCE = 2e-5  # of fp32, relative to the largest entry
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def results(attention, x, *, dtype=jnp.float32):
    """out, lse and every gradient of attention(q, k, v, q_at, k_at, sinks), by name, as they come."""
    return jitted(attention)(*cast(x, dtype))


def jitted(attention):
    """The function of `Inputs` behind `results`, for calling one program on several inputs."""

    @jax.jit
    def run(q, k, v, sinks, dout, dlse, q_at, k_at):
        def given_tokens(q, k, v, sinks):
            return attention(q, k, v, q_at, k_at, sinks)

        (out, lse), pull = jax.vjp(given_tokens, q, k, v, sinks)
        return out, lse, *pull((dout.astype(out.dtype), dlse.astype(lse.dtype)))

    return lambda *x: dict(zip(NAMES, run(*x), strict=True))


def cast(x, dtype):
    """The inputs with q, k, v and dout in `dtype`; sinks and dlse are fp32, or fp64 with the others."""
    rest = jnp.float64 if dtype == jnp.float64 else jnp.float32
    dtypes = x._replace(**dict.fromkeys(x._fields, dtype))._replace(
        sinks_N=rest, dlse_BNT=rest, q_at=None, k_at=None
    )
    return type(x)(
        *(
            a if to is None or a is None else jnp.asarray(a, to)
            for a, to in zip(x, dtypes, strict=True)
        )
    )


def truth(spec, x, *, rounded=jnp.float32):
    """The reference in fp64 on inputs that were rounded to `rounded`."""
    with jax.enable_x64(True):
        found = results(differentiable(reference(spec)), cast(x, rounded), dtype=jnp.float64)
        return jax.tree.map(np.asarray, found)


@cache
def truth_of(case, rounded=jnp.float32):
    """`truth` of a case and its own inputs, once in each process."""
    return truth(case.spec, inputs(case), rounded=rounded)


def plain(spec):
    """Dense attention as anybody writes it, for `jax.grad`; p is rounded to v's dtype, as in jax.nn."""

    def attention(q, k, v, q_at, k_at, sinks=None):
        B, T, N, H = q.shape
        grouped = q.reshape(B, T, k.shape[2], -1, H)
        wide = jnp.promote_types(q.dtype, jnp.float32)
        score = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=wide)
        score = score.reshape(B, N, T, -1) * (H**-0.5 if spec.scale is None else spec.scale)
        if spec.softcap is not None:
            score = spec.softcap * jnp.tanh(score / spec.softcap)
        if spec.bias is not None:
            i, j = q_at.positions_BT[:, None, :, None], k_at.positions_BT[:, None, None, :]
            score = score + spec.bias(i, j, q_at.heads_N[:, None, None]).astype(wide)
        seen = spec.mask.visible(
            Tokens(*(x[:, None, :, None] for x in q_at[:2])),
            Tokens(*(x[:, None, None, :] for x in k_at[:2])),
        )
        seen = jnp.broadcast_to(seen & (k_at.segment_ids_BT >= 0)[:, None, None], score.shape)
        score = jnp.where(seen, score, FLOOR)
        none = ~seen.any(-1)
        if sinks is not None:
            extra = jnp.broadcast_to(sinks.astype(wide)[:, None, None], (B, N, T, 1))
            score, none = jnp.concatenate([score, extra], -1), jnp.zeros_like(none)
        lse = jnp.where(none, FLOOR, jax.nn.logsumexp(score, axis=-1))
        p = jnp.where(seen, jax.nn.softmax(score, axis=-1)[..., : k.shape[1]], 0.0)
        p = dropped(p.reshape(B, k.shape[2], -1, T, k.shape[1]), spec, q_at, k_at)
        out = jnp.einsum("bkgts,bskh->btkgh", p.astype(v.dtype), v, preferred_element_type=wide)
        return out.reshape(B, T, N, -1).astype(q.dtype), lse

    return attention


def largest(x):
    return np.abs(x).max()


def norm(x):
    """For bf16: it sums up the noise of rounding, where the largest entry is a matter of luck."""
    return np.sqrt(np.square(x).sum())


def errors(found, wanted, how=largest):
    """How far each result is off, by name, relative to the wanted one; `how` makes an array a number."""
    return {n: error(found[n], wanted[n], n, how) for n in NAMES if wanted[n] is not None}


def error(found, wanted, name, how):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape, f"{name} is {found.shape}, wanted {wanted.shape}"
    assert np.isfinite(found).all(), f"{name} is not finite"
    if name == "lse":
        nothing, floor = wanted < FLOOR / 2, np.float32(FLOOR)
        assert (found[nothing].astype(np.float32) == floor).all(), (
            "a row sees nothing: lse not FLOOR"
        )
        found, wanted = np.where(nothing, 0, found), np.where(nothing, 0, wanted)
    return how(found - wanted) / (how(wanted) or 1.0)


def check(found, wanted, *, at_most=TOLERANCE, about=""):
    """Assert that nothing is further off than `at_most`."""
    off = errors(found, wanted)
    assert max(off.values()) <= at_most, f"{about} errors {off}, at most {at_most}"


def mesh_of(devices):
    return jax.make_mesh(
        (devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def over(spelling, devices, kernel):
    """The strategy on global arrays, for `results`, without anything that `attend` adds."""
    spread = make_strategy(spelling)(kernel, "context")
    placed = sharded(spread, mesh_of(devices), batch=None, time="context", heads=None)
    return differentiable(placed)


def attended(case, devices, *, strategy="ring", kernel="reference"):
    """`attend` of a case over so many devices, for `results`; tokens are given if it has documents."""
    options = {"mask": case.mask, "scale": case.scale, "softcap": case.softcap, "bias": case.bias}

    def attention(q, k, v, q_at, k_at, sinks):
        given = {} if case.documents is None else {"at": q_at, "k_at": k_at}
        where = {"mesh": mesh_of(devices), "strategy": strategy, "kernel": kernel}
        return attend(q, k, v, sinks_N=sinks, return_lse=True, **options, **given, **where)

    return attention
