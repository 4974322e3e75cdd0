"""Tokamax's ring attention for TPU on the same arrays and the same mesh, to be read by the same facts.

It is not exported, and takes a mask only as a dense array; here it is handed one that computes the part that
is asked for, so that its length is no matter of the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.plan.case import Case

NEEDS = "tokamax"
# Cycles of a 1024 x 1024 tile at head width `WIDTH`, forward and backward: `ringflash bench kernel`'s for its
# best tile sizes, a body without a mask where a tile needs none.
CYCLES = {
    "v5e": (4716, 10345),
    "v5p": (4732, 10346),
    "v6e": (2858, 5414),
    "7x": (2704, 5264),
}
WIDTH = 128
BLOCK = 1024
COMPUTE = 512


def tokamax_ring(case: Case, mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Out and the gradients of q, k and v, [heads, time, width], contiguous over the ring."""
    # An extra that need not be there.
    from tokamax._src.ops.experimental.tpu.splash_attention import ring_attention_kernel as ring

    # As above.
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash

    shards = mesh.shape["context"]
    block = min(BLOCK, case.seq_len // shards)
    compute = min(COMPUTE, block)
    config = splash.SplashConfig(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
    )
    kernel = ring.make_ring_attention(
        mask_of(case),
        is_mqa=False,
        ring_axis="context",
        config=config,
        q_seq_shards=shards,
        kv_seq_shards=shards,
    )
    spec = P(None, "context")
    attention = jax.shard_map(
        lambda kernel, q, k, v: kernel(q, k, v),
        mesh=mesh,
        in_specs=(kernel.manual_sharding_spec(), spec, spec, spec),
        out_specs=spec,
        check_vma=False,
    )

    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attention(kernel, q, k, v), q, k, v)
        return out, pull(dout)

    def array(heads: int) -> jax.ShapeDtypeStruct:
        dims, where = (heads, case.seq_len, case.head_dim), NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=where)

    return run, (array(case.heads), array(case.kv_heads), array(case.kv_heads), array(case.heads))


def mask_of(case: Case) -> Any:
    """Its mask for causal or full. Raises ValueError for any other."""
    # An extra that need not be there.
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    T = case.seq_len
    if case.mask == "full":
        return masks.FullMask((T, T))
    if case.mask != "causal":
        raise ValueError(f"tokamax's ring takes causal and full masks, found {case.mask}")

    class Lazy(masks.NumpyMask):
        """Of the class that it asks for, without its array."""

        def __init__(self) -> None:
            pass

        @property
        def shape(self) -> tuple[int, int]:
            return T, T

        def __getitem__(self, index: Any) -> np.ndarray:
            rows, columns = (np.arange(T)[part] for part in index)
            return np.asarray(rows[:, None] >= columns[None])

        def __hash__(self) -> int:
            return hash(T)

    return Lazy()
