"""JAX's splash attention and tokamax's, which grew out of it, as candidates.

Each is told at its best: for each figure the best of a few tile sizes, the fused backward, and for
tokamax a body without mask arithmetic where a tile needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.bench.candidates import DIRECTIONS, Candidate, Job, Part, causal_tiles
from ringflash.plan.generations import GENERATIONS


class Tiles(NamedTuple):
    """Queries and keys of a grid step, and how many of its keys are taken at once."""

    block_q: int
    block_k: int
    compute_k: int


# Of a wider sweep (512 to 2048, and 256 to 1024 keys at once) those that were best somewhere.
SWEEP = (
    Tiles(1024, 2048, 512),
    Tiles(2048, 1024, 512),
    Tiles(2048, 2048, 512),
    Tiles(1024, 1024, 512),
)


def tiles_of(job: Job) -> Tiles:
    """Those asked for, else the first of the sweep."""
    return Tiles(*job.tiles) if job.tiles else SWEEP[0]


def arguments(job: Job, device: Any) -> tuple[Any, ...]:
    """q and dout [N, T, H], k and v [K, T, H], abstract, on one device of the slice."""
    where = NamedSharding(Mesh(np.array([device]), ("x",)), P())
    s = job.shape

    def array(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (heads, s.seq_len, s.head_dim), jnp.dtype(s.dtype), sharding=where
        )

    return array(s.heads), array(s.kv_heads), array(s.kv_heads), array(s.heads)


def directed(job: Job, attention: Callable[..., Any], device: Any) -> tuple[Any, tuple[Any, ...]]:
    """attention(q, k, v), or its gradients, with the arguments for it."""
    q, k, v, dout = arguments(job, device)
    if job.direction == "forward":
        return attention, (q, k, v)

    def gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return jax.vjp(attention, q, k, v)[1](dout)

    return gradients, (q, k, v, dout)


def build_splash(job: Job, device: Any) -> tuple[Any, tuple[Any, ...]]:
    """JAX's, with its fused backward."""
    return of_jax(job, device, fused=True)


def build_unfused(job: Job, device: Any) -> tuple[Any, tuple[Any, ...]]:
    """JAX's, with dq in a kernel of its own."""
    return of_jax(job, device, fused=False)


def of_jax(job: Job, device: Any, *, fused: bool) -> tuple[Any, tuple[Any, ...]]:
    """JAX's splash attention."""
    # Only the child needs it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    # As above.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    t, s = tiles_of(job), job.shape
    sizes = kernel.BlockSizes(
        block_q=t.block_q,
        block_kv=t.block_k,
        block_kv_compute=t.compute_k,
        block_q_dkv=t.block_q,
        block_kv_dkv=t.block_k,
        block_kv_dkv_compute=t.compute_k,
        block_q_dq=None if fused else t.block_q,
        block_kv_dq=None if fused else t.block_k,
        use_fused_bwd_kernel=fused,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((s.seq_len, s.seq_len))] * s.heads)
    return directed(job, kernel.make_splash_mha_single_device(mask, block_sizes=sizes), device)


def build_tokamax(job: Job, device: Any) -> tuple[Any, tuple[Any, ...]]:
    """Tokamax's."""
    return of_tokamax(job, device, scheduler=False)


def build_tokamax_lp(job: Job, device: Any) -> tuple[Any, tuple[Any, ...]]:
    """Tokamax's, with the compiler's other scheduler, which it has for the forward only."""
    return of_tokamax(job, device, scheduler=True)


def of_tokamax(job: Job, device: Any, *, scheduler: bool) -> tuple[Any, tuple[Any, ...]]:
    """Tokamax's splash attention for TPU, which it does not export."""
    # An extra that need not be there.
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernel

    # As above.
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    t, s = tiles_of(job), job.shape
    config = kernel.SplashConfig(
        block_q=t.block_q,
        block_kv=t.block_k,
        block_kv_compute=t.compute_k,
        block_q_dkv=t.block_q,
        block_kv_dkv=t.block_k,
        block_kv_dkv_compute=t.compute_k,
        use_experimental_scheduler=scheduler,
    )
    mask = masks.CausalMask((s.seq_len, s.seq_len))
    attention = kernel.make_splash_mha_single_device(mask, config=config)
    return directed(job, attention, device)


def parts(job: Job, name: str, *, dense: bool) -> Part:
    """A kernel that computes one tile a grid step; a dense grid passes by the EMPTY ones too."""
    t, s = tiles_of(job), job.shape
    full, partial = causal_tiles(s.seq_len, t.block_q, t.block_k)
    rows, columns = s.seq_len // t.block_q, s.seq_len // t.block_k
    backward = name == "dkv"
    size = jnp.dtype(s.dtype).itemsize
    one_side = t.block_q if backward else t.block_k  # the side whose blocks change at each step
    moved = 2 * one_side * s.head_dim * size + (4 * one_side * s.head_dim if backward else 0)
    return Part(
        kernel=name,
        rows=t.block_q,
        keys=t.block_k,
        full=full,
        partial=partial,
        steps=rows * columns if dense else full + partial,
        starts=columns if backward else rows,
        moved=moved,
        cores=GENERATIONS[job.generation].cores if name == "fwd" else 1,
    )


def parts_of_splash(job: Job) -> list[Part]:
    """The grid of both kernels is dense."""
    return [parts(job, "fwd" if job.direction == "forward" else "dkv", dense=True)]


def parts_of_unfused(job: Job) -> list[Part]:
    """The backward is two kernels, and computes the scores twice."""
    return [parts(job, "dkv", dense=True), parts(job, "dq", dense=True)]


def parts_of_tokamax(job: Job) -> list[Part]:
    """The forward's grid holds only the tiles that are not EMPTY; the backward's is dense."""
    forward = job.direction == "forward"
    return [parts(job, "fwd" if forward else "dkv", dense=not forward)]


def candidate(
    name: str,
    build: Any,
    parts: Any,
    directions: tuple[str, ...] = DIRECTIONS,
    sweep: tuple[Tiles, ...] = SWEEP,
) -> Candidate:
    """Of one of the two libraries, whose kernels are in JAX itself or in tokamax."""
    needs = "tokamax" if name.startswith("tokamax") else "jax"
    return Candidate(name, needs, build, parts, directions, sweep)


PEERS = {
    each.name: each
    for each in (
        candidate("splash", build_splash, parts_of_splash),
        # Far behind whatever its tiles: not worth the minutes of a sweep.
        candidate("splash_unfused", build_unfused, parts_of_unfused, ("backward",), SWEEP[:1]),
        candidate("tokamax", build_tokamax, parts_of_tokamax),
        candidate("tokamax_lp", build_tokamax_lp, parts_of_tokamax, ("forward",)),
    )
}
