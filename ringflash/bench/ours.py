"""Our attention on the numbers of a problem: on one device, and over the devices of a ring."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.attention import LAYOUTS, Causal, Spec, Tokens, differentiable
from ringflash.attention.attend import Axes, spread
from ringflash.attention.kernels.chunked import chunked
from ringflash.bench.peers import Problem, both
from ringflash.bench.timing import Program


def whole(x: Problem, **blocks: Any) -> list[Program]:
    """`chunked` on one device, with tiles of its own choice or of these sizes."""
    at = counted(x.q.shape[1])
    attention = differentiable(chunked(Spec(Causal()), **blocks))
    return both(lambda q, k, v: attention(q, k, v, at, at)[0], *x.arrays())


def sharded(x: Problem, strategy: str, layout: str, devices: int) -> list[Program]:
    """The same with the sequence over the first `devices` devices."""
    mesh = jax.make_mesh(
        (devices,), ("context",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,)
    )
    where = NamedSharding(mesh, P(None, "context"))
    order = LAYOUTS[layout](x.q.shape[1], devices)
    arrays = [jax.device_put(a[:, order], where) for a in x.arrays()]
    at = Tokens(*(jax.device_put(a[:, order], where) for a in counted(len(order))[:2]))
    kernel = spread(chunked(Spec(Causal())), strategy, mesh, Axes((), ("context",), ()))
    attention = differentiable(kernel)
    return both(lambda q, k, v, at: attention(q, k, v, at, at)[0], *arrays, at)


def counted(length: int) -> Tokens:
    """Positions 0, 1, 2, ... in one segment, batch 1, as numpy arrays."""
    return Tokens(np.arange(length, dtype=np.int32)[None], np.zeros((1, length), np.int32))
