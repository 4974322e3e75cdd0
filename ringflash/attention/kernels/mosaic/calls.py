"""One call of the TPU kernels: arrays of the contract into tiles and back, and what is made of queries alone.

In tiles heads go before time; V and out have width before time, as have dk and dv where that is quicker. XLA
does that in the pass that makes or casts the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringflash.attention.axis import alike
from ringflash.attention.cost import Cost, costs_needed
from ringflash.attention.kernel import Grads, Keys, Partial
from ringflash.attention.kernels.mosaic import backward_call as down
from ringflash.attention.kernels.mosaic import forward_call as up
from ringflash.attention.kernels.mosaic.agenda import Tests, agenda, tests_of_tiles
from ringflash.attention.kernels.mosaic.backward import Form
from ringflash.attention.kernels.mosaic.steps import Sizes, Steps, backward_steps, forward_steps
from ringflash.attention.kernels.mosaic.tiles import Tiles, tests_cost, vmem_bytes
from ringflash.attention.kernels.mosaic.tiling import (
    beside_queries,
    heads_first,
    lengthened_to,
    marked,
    scaled,
    tested,
    time_first,
    whole,
)
from ringflash.attention.mask import Tokens
from ringflash.attention.spec import Request, Spec
from ringflash.attention.tile import beside_scale

Array = jax.Array
COMPUTED = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "float16": jnp.float32}


@dataclass(frozen=True)
class Device:
    """Where a kernel runs: the generation sets tile sizes; interpret, whether Pallas' interpreter runs it."""

    generation: str
    interpret: Any = False

    def options(self, name: str, grid_dims: int, cost: pl.CostEstimate) -> dict[str, Any]:
        """Of `pallas_call`. The last dim of the grid carries state; over the others, cores may share."""
        params = pltpu.CompilerParams(
            dimension_semantics=[pltpu.PARALLEL] * (grid_dims - 1) + [pltpu.ARBITRARY],
            vmem_limit_bytes=vmem_bytes(self.generation),
        )
        return {
            "name": name,
            "cost_estimate": cost,
            "interpret": self.interpret,
            "compiler_params": params,
        }


class Ready(NamedTuple):
    """What a call needs of its queries, in tiles; `dout` in the backward only."""

    q: Array
    rows: Array
    dout: Array | None = None


@dataclass(frozen=True)
class Call:
    """How calls of some shape are cut: by tiles, in time padded to whole steps."""

    asked: Request
    device: Device
    steps: Steps
    tests: Tests
    nq: int  # tiles of queries
    nk: int  # tiles of keys

    @staticmethod
    def up(
        spec: Spec, device: Device, wanted: Tiles | None, q: Array, v: Array, *, carried: bool
    ) -> Call:
        """Of the forward."""
        asked = Request.of(spec, "tpu", q, v)
        sizes = sizes_of(asked)
        steps = forward_steps(device.generation, sizes, wanted, carried=carried)
        bq, bk = steps.tiles.block_q, steps.tiles.block_k
        nq, nk = steps.held * -(-sizes.T // (bq * steps.held)), -(-sizes.S // bk)
        apart = tests_cost(device.generation, "forward", max(sizes.H, sizes.V))
        return Call(asked, device, steps, Tests.of(spec, apart=apart), nq, nk)

    @staticmethod
    def down(
        spec: Spec, device: Device, wanted: Tiles | None, q: Array, v: Array, *, given: bool
    ) -> Call:
        """Of the backward."""
        asked = Request.of(spec, "tpu", q, v)
        sizes = sizes_of(asked)
        steps = backward_steps(device.generation, sizes, wanted, given=given)
        bq, bk = steps.tiles.block_q, steps.tiles.block_k
        nq, nk = -(-sizes.T // bq), steps.held * -(-sizes.S // (bk * steps.held))
        apart = tests_cost(device.generation, "backward", max(sizes.H, sizes.V))
        return Call(asked, device, steps, Tests.of(spec, apart=apart), nq, nk)

    @property
    def spec(self) -> Spec:
        """Of the request."""
        return self.asked.spec

    @property
    def dtype(self) -> Any:
        """That products are computed in."""
        return COMPUTED[self.asked.dtype]

    def queries(self, q: Array, q_at: Tokens, *rest: Array) -> Ready:
        """Of the forward; of the backward too with `rest`: dout, lse, delta."""
        bq = self.steps.tiles.block_q
        rows = tested(self.spec, self.padded_queries(q_at), self.nq)
        ready = Ready(heads_first(scaled(q, self.spec, self.dtype), bq, self.nq), rows)
        if not rest:
            return ready
        dout, lse_BNT, delta_BNT = rest
        dout = heads_first(dout.astype(self.dtype), bq, self.nq)
        return Ready(ready.q, beside_queries(lse_BNT, delta_BNT, rows), dout)

    def padded_queries(self, q_at: Tokens) -> Tokens:
        """The tokens of whole tiles."""
        return whole(q_at, self.nq * self.steps.tiles.block_q)

    def padded_keys(self, k_at: Tokens) -> Tokens:
        """The tokens of whole tiles."""
        return whole(k_at, self.nk * self.steps.tiles.block_k)

    def forward(
        self, ready: Ready, q_at: Tokens, k: Keys, v: Keys, k_at: Tokens, carry: Partial | None
    ) -> Partial:
        """`Kernel.forward`, of K and V in parts."""
        steps, T, nk = self.steps, self.asked.T, self.nk
        bq, bk, sub = steps.tiles.block_q, steps.tiles.block_k, steps.held
        k_at, tests = self.padded_keys(k_at), self.tests
        kinds = tests_of_tiles(self.spec, tests, self.padded_queries(q_at), k_at, self.nq, nk)
        x = up.Inputs(
            ready.q,
            ready.rows,
            marked(k_at, nk),
            [heads_first(x.astype(self.dtype), bk, nk) for x in k],
            [lengthened_to(x.astype(self.dtype), bk * nk).transpose(0, 2, 3, 1) for x in v],
        )
        state: list[Array] = []
        if carry is not None:
            state = [carry.out_BTNH.transpose(0, 2, 3, 1), carry.lse_BNT[:, :, None]]
        more = ((0, 0), (0, 0), (0, 0), (0, bq * self.nq - T))
        out, lse = up.forward(
            x,
            tuple(jnp.pad(y, more) for y in state),
            lists=agenda(kinds, sub, look=self.nq // sub),
            tests=tests,
            softcap=self.spec.softcap,
            heads=steps.heads,
            sub=sub,
            chunk=steps.tiles.chunk,
            options=self.device.options(
                "ringflash_forward", 4, estimate(costs_needed(self.asked).forward)
            ),
        )
        return Partial(out[..., :T].transpose(0, 3, 1, 2), lse[:, :, 0, :T])

    def backward(
        self, ready: Ready, q_at: Tokens, k: Keys, v: Keys, k_at: Tokens, into: Grads
    ) -> Grads:
        """`Kernel.backward`, of K and V in parts; dk and dv are whole."""
        tiles, held = self.steps.tiles, self.steps.held
        B, T, S, N, _, H, *_ = self.asked
        bq, bk, nk = tiles.block_q, tiles.block_k, self.nk
        k_at, tests = self.padded_keys(k_at), self.tests
        kinds = tests_of_tiles(self.spec, tests, self.padded_queries(q_at), k_at, self.nq, nk)
        assert ready.dout is not None
        x = down.Inputs(
            ready.q,
            ready.dout,
            ready.rows,
            marked(k_at, nk),
            *([heads_first(x.astype(self.dtype), bk, nk) for x in xs] for xs in (k, v)),
        )
        dq = into.dq_BTNH
        dq = jnp.zeros((B, T, N, H), jnp.float32) if dq is None else dq
        given = []
        if adds(into):
            pairs = zip(into[1:], (k, v), strict=True)
            whole_ones = [
                jnp.zeros((B, *xs[0].shape[1:]), jnp.float32) if g is None else g for g, xs in pairs
            ]
            given = [alike(lengthened_to(g, bk * nk), ready.q) for g in whole_ones]
        order = (0, 2, 3, 1) if tiles.turned else (0, 2, 1, 3)
        scale = self.spec.scale_for(H)
        dq, *dkv = down.backward(
            x,
            alike(heads_first(dq, bq, self.nq), ready.q),
            tuple(y.transpose(order) for y in given),
            lists=agenda(kinds.swapaxes(1, 2), held),
            tests=tests,
            form=Form(
                keys_down=tiles.keys_down,
                turned=tiles.turned,
                chunk=tiles.chunk,
                scale=scale,
                unscale=1 / beside_scale(self.spec),
                softcap=self.spec.softcap,
            ),
            held=held,
            options=self.device.options(
                "ringflash_backward", 3, estimate(costs_needed(self.asked).backward)
            ),
        )
        back = (0, 3, 1, 2) if tiles.turned else (0, 2, 1, 3)
        dk, dv = (y.transpose(back)[:, :S] for y in dkv)
        return Grads(time_first(dq, T), dk, dv)


def estimate(cost: Cost) -> pl.CostEstimate:
    """In Pallas' words."""
    return pl.CostEstimate(
        flops=cost.flops, transcendentals=cost.exponentials, bytes_accessed=cost.bytes
    )


def sizes_of(asked: Request) -> Sizes:
    """Of a call on one device."""
    _, T, S, N, K, H, V, dtype, *_ = asked
    return Sizes(T, S, N // K, H, V, jnp.dtype(COMPUTED[dtype]).itemsize)


def adds(into: Grads) -> bool:
    """Whether there is a dk and dv to add to."""
    return into.dk_BSKH is not None or into.dv_BSKH is not None
