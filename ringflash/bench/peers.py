"""Attention as others have it, on the same numbers: causal, forward and forward+backward."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.lib
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.extend.backend import get_backend
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.bench.timing import Program, program
from ringflash.exits import ConfigFault
from ringflash.plan.compiler import require

EXTRA = "pip install 'ringflash[bench]'"


class Problem(NamedTuple):
    """q, dout: [1, T, N, H]; k, v: [1, T, K, H]; fp32 numpy, to be rounded to `dtype`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dtype: str

    def arrays(self) -> tuple[Any, ...]:
        """q, k, v and dout as jax arrays."""
        return tuple(jnp.asarray(x, self.dtype) for x in self[:4])


def problem(seq_len: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> Problem:
    """Normal random numbers, batch 1."""
    draw = np.random.default_rng(0)

    def normal(n: int) -> np.ndarray:
        return draw.normal(size=(1, seq_len, n, head_dim)).astype(np.float32)

    return Problem(normal(heads), normal(kv_heads), normal(kv_heads), normal(heads), dtype)


def both(attention: Callable[..., Any], q: Any, k: Any, v: Any, dout: Any, *rest: Any) -> list:
    """The programs of attention(q, k, v, *rest): forward, and forward+backward."""

    def gradients(q: Any, k: Any, v: Any, dout: Any, *rest: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, *rest), q, k, v)
        return out, pull(dout)

    return [program(attention, q, k, v, *rest), program(gradients, q, k, v, dout, *rest)]


def of_jax(x: Problem) -> list[Program]:
    """jax.nn.dot_product_attention, the implementation in plain XLA."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

    return both(attention, *x.arrays())


def of_tokamax(x: Problem) -> list[Program]:
    """tokamax's own XLA implementation whose memory is linear in the length."""
    # An extra that need not be there, and seconds to import.
    import tokamax

    if not flags.FLAGS.is_parsed():  # else it parses the arguments of this command as its own
        flags.FLAGS.mark_as_parsed()

    def attention(q: Any, k: Any, v: Any) -> Any:
        return tokamax.dot_product_attention(q, k, v, is_causal=True, implementation="xla_chunked")

    return both(attention, *x.arrays())


def of_torch(x: Problem) -> list[Program]:
    """scaled_dot_product_attention on as many threads as this process has cores."""
    # An extra that need not be there.
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dtype = getattr(torch, x.dtype)
    q, k, v, dout = (torch.tensor(a).to(dtype).transpose(1, 2).contiguous() for a in x[:4])
    grouped = q.shape[1] != k.shape[1]
    wanted = [y.detach().clone().requires_grad_(True) for y in (q, k, v)]

    def attention(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=grouped
        )

    def forward() -> None:
        with torch.no_grad():
            attention(q, k, v)

    def backward() -> None:
        for y in wanted:
            y.grad = None
        attention(*wanted).backward(dout)

    return [Program(forward), Program(backward)]


def of_ringattention(x: Problem, devices: int = 1) -> list[Program]:
    """PyPI's ringattention, its XLA implementation, in tiles of 512; K and V are repeated for it."""
    # It asks for the backend at a place that is gone from JAX.
    vars(jax.lib).setdefault("xla_bridge", SimpleNamespace(get_backend=get_backend))
    # An extra that need not be there.
    from ringattention import ringattention_jax

    tile = min(512, x.q.shape[1] // devices)
    options = {
        "causal_block_size": 1,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "query_chunk_size": tile,
        "key_chunk_size": tile,
        "dtype": jnp.float32,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": False,
    }
    mesh = jax.make_mesh(
        (devices,), ("context",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,)
    )
    where = P(None, "context")
    group = x.q.shape[2] // x.k.shape[2]

    @partial(jax.shard_map, mesh=mesh, in_specs=(where,) * 3, out_specs=where, check_vma=False)
    def attention(q: Any, k: Any, v: Any) -> Any:
        k, v = (jnp.repeat(y, group, axis=2) for y in (k, v))
        return ringattention_jax(q, k, v, None, None, None, "context", True, options)

    return both(attention, *(jax.device_put(y, NamedSharding(mesh, where)) for y in x.arrays()))


MAKERS = {
    "jax": of_jax,
    "torch": of_torch,
    "tokamax": of_tokamax,
    "ringattention": of_ringattention,
}


def chosen(peers: tuple[str, ...] | None) -> tuple[list[str], list[str]]:
    """The peers to measure, and those passed over as not installed.

    Raises ConfigFault for one that was asked for by name and is not installed.
    """
    absent = [name for name in MAKERS if importlib.util.find_spec(name) is None]
    if peers is None:
        return [name for name in MAKERS if name not in absent], absent
    faults = [f"--peers: {name} is not installed: {EXTRA}" for name in peers if name in absent]
    if faults:
        raise ConfigFault(*faults)
    return list(peers), []


def require_compared(modules: Sequence[str]) -> None:
    """Raises ConfigFault, all at once, unless the TPU compiler and these modules are installed."""
    faults = []
    try:
        require()
    except ConfigFault as fault:
        faults += fault.lines()
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    faults += [f"--compare: {name} is not installed: {EXTRA}" for name in absent]
    if faults:
        raise ConfigFault(*faults)
