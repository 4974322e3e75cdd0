"""What attention computes, apart from how; and what a kernel is asked to serve."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ringflash.attention.mask import Causal, Mask, RealKeys, Span, Tokens

Array = jax.Array
Bias = Callable[[Array, Array, Array], Array]


@dataclass(frozen=True)
class Spec:
    """What attention computes, apart from how: bound when a kernel is made.

    score = softcap * tanh(scale * q.k / softcap) + bias(q position, k position, query head), then the mask.

    scale: None is 1/sqrt(head_dim).  softcap: None is none.  bias: a function of int32 arrays that
    broadcast to [..., T, S], such as `alibi`; it has no gradient.  dropout: the share of weights that is
    dropped after the softmax, chosen by seed, head, segment and positions, so that it is the same
    however the sequence is sharded; the rest is scaled by 1 / (1 - dropout).
    """

    mask: Mask = Causal()
    scale: float | None = None
    softcap: float | None = None
    bias: Bias | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), found {self.dropout}")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap must be above 0 and finite, found {self.softcap}")
        if isinstance(self.scale, int | float) and not math.isfinite(self.scale):
            raise ValueError(f"scale must be finite, found {self.scale}")

    def scale_for(self, head_dim: int) -> float:
        """The scale in use for this head width."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def visible(self, q: Tokens, k: Tokens) -> Array:
        """[..., T, S] truth for the tokens of a tile: the mask, and no key is padding."""
        return (self.mask & RealKeys()).visible(*facing(q, k))

    def relation(self, q: Span, k: Span) -> Array:
        """EMPTY, PARTIAL or FULL for spans that broadcast against each other."""
        return (self.mask & RealKeys()).relation(q, k)


def facing(q: Tokens, k: Tokens) -> tuple[Tokens, Tokens]:
    """The tokens of a tile, so that their fields broadcast to [..., T, S]."""
    return Tokens(*(x[..., :, None] for x in q[:2])), Tokens(*(x[..., None, :] for x in k[:2]))


class Request(NamedTuple):
    """What a kernel is asked to serve, for `unsupported` and `cost`: local shapes and the platform."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    value_width: int
    dtype: str
    platform: str
    spec: Spec

    @staticmethod
    def of(spec: Spec, platform: str, q_BTNH: Any, v_BSKH: Any) -> Request:
        """What these arrays ask for."""
        (B, T, N, H), (_, S, K, V) = q_BTNH.shape, v_BSKH.shape
        return Request(B, T, S, N, K, H, V, str(q_BTNH.dtype), platform, spec)
