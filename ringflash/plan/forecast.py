"""How long attention would take under each strategy, from figures alone: `attention.strategy=auto` uses it.

The same kernels and links as in `estimate`, but nothing is compiled. What `estimate` reads from the program
is assumed here: a ring's transfers stand under the kernels of their hop, exchanges of Ulysses and all-gather
under none, and XLA adds nothing. Memory is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from ringflash.attention import Mask
from ringflash.attention.dispatch import sizes
from ringflash.attention.kernels.mosaic import tiles
from ringflash.attention.strategies.ulysses import key_copies
from ringflash.plan import links
from ringflash.plan.generations import GENERATIONS
from ringflash.plan.load import Load, load, reach

NARROW, WIDE = 2, 4  # bytes: what kernels take; out, dq, dk and dv as kernels give them
TOKEN = 8  # bytes of a token's position and segment


@dataclass(frozen=True)
class Job:
    """Attention of one layer, as one device of those along the sequence has it.

    shape: of the chips along which the sequence lies.  shards: devices there.  hop_links: of the longest
    hop between neighbours.  rows: of the batch.  heads, kv_heads: before a strategy shares them out.
    """

    generation: str
    shape: tuple[int, ...]
    shards: int
    hop_links: int
    mask: Mask
    layout: str
    seq_len: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int

    @cached_property
    def load(self) -> Load:
        """The tiles of the mask."""
        return load(self.mask, self.layout, self.seq_len, self.shards)

    def near(self, inner: int) -> tuple[int, int] | None:
        """Hops up and down of a ring over every `inner`-th device that goes only as far as the mask needs;
        None where it goes all the way round: see `strategies.routes`."""
        if not self.mask.local:
            return None
        around = self.shards // inner
        up, down = (
            -(-hops // inner) for hops in reach(self.mask, self.layout, self.seq_len, self.shards)
        )
        return (up, down) if around == 2 or 2 * (up + down) < around else None


@dataclass(frozen=True)
class Pass:
    """One forward or one backward, in seconds. exposed: of transfers, what stands under no kernel."""

    kernel_seconds: float
    exposed_seconds: float

    @property
    def total_seconds(self) -> float:
        return self.kernel_seconds + self.exposed_seconds


@dataclass(frozen=True)
class Forecast:
    """Of one layer."""

    strategy: str
    forward: Pass
    backward: Pass

    @property
    def kernel_seconds(self) -> float:
        """Of both."""
        return self.forward.kernel_seconds + self.backward.kernel_seconds

    @property
    def exposed_seconds(self) -> float:
        """Of both."""
        return self.forward.exposed_seconds + self.backward.exposed_seconds

    @property
    def total_seconds(self) -> float:
        """Of one forward and one backward."""
        return self.forward.total_seconds + self.backward.total_seconds

    def __str__(self) -> str:
        return f"{self.strategy} {self.total_seconds * 1e3:.3g} ms"


def candidates(shards: int, kv_heads: int) -> list[str]:
    """Every strategy; and Ulysses over as many neighbours as share out the K/V heads, a ring beyond."""
    inner = max(n for n in range(1, shards + 1) if shards % n == 0 and kv_heads % n == 0)
    inner = inner // 2 if inner == shards and inner % 2 == 0 else inner
    hybrid = [f"ulysses:{inner}*ring:{shards // inner}"] if 1 < inner < shards else []
    return ["ring", "ulysses", "all_gather", *hybrid]


def choose(job: Job) -> tuple[list[Forecast], dict[str, str]]:
    """What each strategy takes, the quickest first; and of those that cannot serve, why.

    Equal ones stay in the order of `candidates`.
    """
    served, refused = [], {}
    for strategy in candidates(job.shards, job.kv_heads):
        try:
            served.append(forecast(job, strategy))
        except ValueError as reason:
            refused[strategy] = str(reason)
    return sorted(served, key=lambda one: one.total_seconds), refused


def in_words(served: Sequence[Forecast], refused: Mapping[str, str]) -> str:
    """What `choose` found, in one line."""
    return "; ".join([*map(str, served), *(f"{name}: {why}" for name, why in refused.items())])


def forecast(job: Job, strategy: str) -> Forecast:
    """Raises ValueError where the strategy cannot share the heads out."""
    return Forecast(strategy, *(one_pass(job, strategy, name) for name in ("forward", "backward")))


def one_pass(job: Job, strategy: str, direction: str) -> Pass:
    """As `forecast`."""
    over = sizes(strategy, job.shards)
    inner, around = over["ulysses"], over["ring"]
    copies = key_copies(job.heads, job.kv_heads, inner)
    generation = GENERATIONS[job.generation]
    per_second = generation.cores * generation.clock_ghz * 1e9 / (job.rows * job.heads / inner)
    near = job.near(inner) if around > 1 else None
    cost = tiles.cycles(job.generation, direction, job.head_dim)
    hops = job.load.folded(inner).hops(cost, both_ways=around > 1, reach=near)
    each = hops.reshape(len(hops) if near else around, -1, hops.shape[1]).sum(1).max(1)
    each = each / per_second
    left = partial(left_over_near, near=near) if near else left_over
    exposed = exchanged(job, direction, inner, copies)
    exposed += gathered(job, direction, over["all_gather"])
    exposed += sum(left(job, direction, each, inner=inner, copies=copies))
    return Pass(float(each.sum()), exposed)


def left_over(
    job: Job, direction: str, each: np.ndarray, inner: int, copies: int
) -> Iterator[float]:
    """Of each hop of a ring over every `inner`-th device, the seconds that its kernel does not cover.

    Half of K and V goes each way. In the backward dk and dv follow a hop behind, and the block at home covers
    with one half the first hop of K and V, with the other the last of dk and dv.
    """
    keys, sums = (seconds / 2 for seconds in hop_seconds(job, inner, copies))
    if direction == "forward" or len(each) == 1:
        pairs = [(keys, kernel) for kernel in each[:-1]]
    else:
        both = [(keys + sums, kernel) for kernel in each[1:-1]]
        pairs = [(keys, each[0] / 2), *both, (sums, each[-1]), (sums, each[0] / 2)]
    return (max(0.0, taken - float(kernel)) for taken, kernel in pairs)


def left_over_near(
    job: Job, direction: str, each: np.ndarray, near: tuple[int, int], inner: int, copies: int
) -> Iterator[float]:
    """The same of a ring that goes `near` far: all of K and V up, then down, where the block at home covers
    no hop. In the backward dk and dv go out beside them, once more to catch up, and home, where half of the
    block at home covers the last hop up."""
    keys, sums = hop_seconds(job, inner, copies)
    up, down = near
    for hops, kernels in ((up, [*each[: up + 1]]), (down, [0.0, *each[up + 1 :]])):
        if direction == "forward":
            yield from (max(0.0, keys - float(kernel)) for kernel in kernels[:hops])
        elif hops:
            half, *others = kernels[0] / 2, *kernels[1:hops]
            yield from (max(0.0, keys + sums - float(kernel)) for kernel in (half, *others))
            yield from (max(0.0, sums - float(kernel)) for kernel in (kernels[hops], half))
            yield (hops - 1) * sums


def hop_seconds(job: Job, inner: int, copies: int) -> tuple[float, float]:
    """Of all of K, V and their tokens, and of all of dk and dv, of one block, sent one way."""
    tokens = job.rows * job.seq_len * inner // job.shards
    numbers = 2 * job.kv_heads * copies // inner * job.head_dim
    over = max(1, job.hop_links) * inner
    hop = partial(links.hop_seconds, job.generation, links=over)
    return hop(tokens * (numbers * NARROW + 2 * TOKEN)), hop(tokens * numbers * WIDE)


def exchanged(job: Job, direction: str, inner: int, copies: int) -> float:
    """Of Ulysses over `inner` neighbours: q, k and v one way and out the other; in the backward, beside them,
    dout one way and dq, dk and dv the other."""
    if inner == 1:
        return 0.0
    q = job.rows * job.seq_len // job.shards * job.heads * job.head_dim
    kv = 2 * q * job.kv_heads * copies // job.heads
    held = NARROW * (q + kv) + WIDE * q
    if direction == "backward":
        held = NARROW * (2 * q + kv) + WIDE * (q + kv)
    shape = job.shape if inner == job.shards else (inner,)
    return links.exchange_seconds(job.generation, held, shape)


def gathered(job: Job, direction: str, devices: int) -> float:
    """Of all-gather: K and V of the others; in the backward dk and dv too, to be summed."""
    own = 2 * job.rows * job.seq_len // job.shards * job.kv_heads * job.head_dim
    width = NARROW if direction == "forward" else NARROW + WIDE
    return links.gather_seconds(job.generation, own * (devices - 1) * width, job.shape)
