"""Our TPU kernel as a candidate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.attention import Causal, Spec, Tokens
from ringflash.attention.kernels.mosaic.tiles import Tiles
from ringflash.attention.kernels.tpu import tpu
from ringflash.bench.candidates import Candidate, Job, Part


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


def parts(job: Job) -> list[Part]:
    """One kernel for each direction."""
    return [Part(f"ringflash_{job.direction}", 1024, 1024, 28, 8, 1, 1, 0)]


TPU = Candidate("tpu", "jax", build, parts)
