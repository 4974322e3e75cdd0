"""The layers of a Llama-style decoder block. Parameters are named with their dims.

Activations are in `dtype`; RMSNorm and RoPE run in fp32. Attention itself is a function that the block is
given: (q_BTNH, k_BTKH, v_BTKH, positions_BT, segment_ids_BT) -> out_BTNH; and so is what works a function of
tokens off in pieces: (f, x_BTD) -> f(x_BTD); and what multiplies with the weights, a `matmul.Product`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ringflash.config import ModelConfig
from ringflash.model.matmul import Product, plain
from ringflash.model.rope import angles, rotate

Array = jax.Array
LookupFn = Callable[[Array, Array], Array]
AttentionFn = Callable[[Array, Array, Array, Array, Array], Array]
Pieces = Callable[[Callable[[Array], Array], Array], Array]
CUT_STD = 0.87962566  # the standard deviation of a standard normal that is cut at -2 and 2


def matrix(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: str) -> nnx.Param:
    """A weight drawn from a truncated normal of variance 1 / fan_in."""
    init = jax.nn.initializers.truncated_normal(stddev=fan_in**-0.5 / CUT_STD)
    return nnx.Param(init(rngs.params(), shape, jnp.dtype(dtype)))


def at_once(f: Callable[[Array], Array], x_BTD: Array) -> Array:
    """The `Pieces` that are one."""
    return f(x_BTD)


def normed(x: Array, scale: nnx.Param, eps: float) -> Array:
    """x / rms(x) * scale over the last dim, in fp32 (arXiv:1910.07467); the result has x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return (wide * scale[...]).astype(x.dtype)


def rows(table_VD: Array, tokens_BT: Array) -> Array:
    """The table's row of each token, where the table is whole."""
    return table_VD[tokens_BT]


class RMSNorm(nnx.Module):
    """`normed` over the model's width."""

    def __init__(self, config: ModelConfig) -> None:
        self.eps = config.norm_eps
        self.scale_D = nnx.Param(jnp.ones(config.width, jnp.dtype(config.param_dtype)))

    def __call__(self, x_BTD: Array) -> Array:
        return normed(x_BTD, self.scale_D, self.eps)


class Attention(nnx.Module):
    """Grouped-query attention with RoPE.

    qk_norm: each head's queries and keys are `normed` before it, as in Qwen3 (arXiv:2505.09388).
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionFn,
        rngs: nnx.Rngs,
        product: Product = plain,
    ) -> None:
        D, N, K, H = config.width, config.heads, config.kv_heads, config.head_dim
        self.config, self.attention, self.product = config, attention, product
        self.q_DNH = matrix(rngs, (D, N, H), D, config.param_dtype)
        self.k_DKH = matrix(rngs, (D, K, H), D, config.param_dtype)
        self.v_DKH = matrix(rngs, (D, K, H), D, config.param_dtype)
        depth_scaled = N * H * 2 * config.layers
        self.out_NHD = matrix(rngs, (N, H, D), depth_scaled, config.param_dtype)
        if config.qk_norm:
            self.q_scale_H = nnx.Param(jnp.ones(H, jnp.dtype(config.param_dtype)))
            self.k_scale_H = nnx.Param(jnp.ones(H, jnp.dtype(config.param_dtype)))

    def __call__(self, x_BTD: Array, positions_BT: Array, segment_ids_BT: Array) -> Array:
        turn = angles(positions_BT, head_dim=self.config.head_dim, theta=self.config.rope_theta)
        q, k, v = (self.product(x_BTD, w[...], 1) for w in (self.q_DNH, self.k_DKH, self.v_DKH))
        if self.config.qk_norm:
            q = normed(q, self.q_scale_H, self.config.norm_eps)
            k = normed(k, self.k_scale_H, self.config.norm_eps)
        out = self.attention(rotate(q, turn), rotate(k, turn), v, positions_BT, segment_ids_BT)
        return self.product(out, self.out_NHD[...], 2)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, product: Product = plain) -> None:
        D, F = config.width, config.mlp_width
        self.product = product
        self.gate_DF = matrix(rngs, (D, F), D, config.param_dtype)
        self.up_DF = matrix(rngs, (D, F), D, config.param_dtype)
        self.down_FD = matrix(rngs, (F, D), F * 2 * config.layers, config.param_dtype)

    def __call__(self, x_BTD: Array) -> Array:
        gate, up = (self.product(x_BTD, w[...], 1) for w in (self.gate_DF, self.up_DF))
        return self.product(jax.nn.silu(gate) * up, self.down_FD[...], 1)


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionFn,
        rngs: nnx.Rngs,
        *,
        pieces: Pieces = at_once,
        product: Product = plain,
    ) -> None:
        self.pieces = pieces
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, attention, rngs, product)
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config, rngs, product)

    def __call__(self, x_BTD: Array, positions_BT: Array, segment_ids_BT: Array) -> Array:
        x_BTD = checkpoint_name(x_BTD, "block_in")
        x = x_BTD + self.attention(self.attention_norm(x_BTD), positions_BT, segment_ids_BT)
        return self.pieces(lambda x: x + self.mlp(self.mlp_norm(x)), x)
