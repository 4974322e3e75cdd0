"""Our TPU kernel as a candidate."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.attention import Causal, Spec, Tokens
from ringflash.attention.kernels.mosaic.steps import Steps
from ringflash.attention.kernels.mosaic.tiles import Tiles
from ringflash.attention.kernels.tpu import tpu
from ringflash.bench.candidates import Candidate, Job, Part
from ringflash.bench.ours_runs import Counts, counts_of, plan_of
from ringflash.plan.generations import GENERATIONS


def build(job: Job, device: Any) -> tuple[Any, tuple[Any, ...]]:
    """The pair of functions of the Kernel contract, each alone."""
    s = job.shape
    where = NamedSharding(Mesh(np.array([device]), ("x",)), P())

    def array(*shape: int, dtype: Any = s.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=where)

    tiles = (Tiles(*job.tiles),) * 2 if job.tiles else None
    kernel = tpu(Spec(Causal()), tiles=tiles, device_kind=device.device_kind)
    at = Tokens(array(1, s.seq_len, dtype=jnp.int32), array(1, s.seq_len, dtype=jnp.int32))
    q, dout = (array(1, s.seq_len, s.heads, s.head_dim) for _ in range(2))
    k, v = (array(1, s.seq_len, s.kv_heads, s.head_dim) for _ in range(2))
    if job.direction == "forward":
        return kernel.forward, (q, k, v, at, at)
    rows = array(1, s.heads, s.seq_len, dtype=jnp.float32)
    return kernel.backward, (q, k, v, at, at, dout, rows, rows)


def of_tiles(tiles: Tiles) -> tuple[Any, ...]:
    """`Job.tiles` that asks for these."""
    return astuple(tiles)


def moved(job: Job, plan: Steps, counts: Counts) -> float:
    """Bytes between HBM and VMEM for one query head."""
    s, t = job.shape, plan.tiles
    size, width = jnp.dtype(s.dtype).itemsize, s.head_dim
    if job.direction == "forward":
        return counts.fetched * 2 * t.block_k * width * size + s.seq_len * width * (size + 4)
    streamed = counts.fetched * t.block_q * (2 * width * size + 2 * width * 4)
    return streamed + 2 * s.seq_len * width * (size + 4) * s.kv_heads / s.heads


def parts(job: Job) -> list[Part]:
    """One kernel for each direction."""
    plan = plan_of(job)
    counts = counts_of(job, plan)
    full, partial = counts.units
    split = job.shape.kv_heads * (job.shape.heads // job.shape.kv_heads // plan.heads)
    cores = GENERATIONS[job.generation].cores
    return [
        Part(
            kernel=f"ringflash_{job.direction}",
            rows=plan.tiles.block_q,
            keys=plan.tiles.block_k,
            full=full,
            partial=partial,
            steps=0,
            starts=0,
            moved=int(moved(job, plan, counts) / (full + partial)),
            cores=1 if split % cores else cores,
            runs=counts,
        )
    ]


TPU = Candidate("tpu", "jax", build, parts)
