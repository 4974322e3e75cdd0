"""A Llama-style decoder in flax nnx. Its layers are stacked and scanned: compile time is flat in depth.

The model ends at the hidden states: logits belong to the loss, which never holds all of them.
"""

from __future__ import annotations

import jax
from flax import nnx

from ringflash.config import ModelConfig
from ringflash.model.layers import (
    AttentionFn,
    Block,
    LookupFn,
    Pieces,
    RMSNorm,
    at_once,
    matrix,
    rows,
)
from ringflash.model.matmul import Product, plain

Array = jax.Array

SAVED = ("attention_out", "attention_lse")  # what makes the ring run only once
KEPT = jax.checkpoint_policies
# What the backward pass may keep of a layer, beside what goes into it.
POLICIES = {
    "none": KEPT.everything_saveable,
    "attention": KEPT.save_only_these_names(*SAVED),
    "offload": KEPT.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["block_in", *SAVED],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "full": KEPT.nothing_saveable,
}


class Decoder(nnx.Module):
    """tokens -> hidden states; `unembedding` gives the matrix that makes logits of them.

    lookup: (table_VD, tokens_BT) -> x_BTD, in the table's dtype or the compute dtype; its gradients must be
    added up in the table's dtype or a wider one.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionFn,
        rngs: nnx.Rngs,
        *,
        lookup: LookupFn = rows,
        pieces: Pieces = at_once,
        product: Product = plain,
    ) -> None:
        V, D = config.vocab_size, config.width
        self.config, self.lookup = config, lookup
        # Rows of variance 1 / D: tied, they make logits of variance 1 from normalised states.
        self.embedding_VD = matrix(rngs, (V, D), D, config.param_dtype)
        self.norm = RMSNorm(config)
        if not config.tied_embeddings:
            self.unembedding_DV = matrix(rngs, (D, V), D, config.param_dtype)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, attention, rngs, pieces=pieces, product=product)

        self.blocks = stacked(rngs)

    def __call__(self, tokens_BT: Array, positions_BT: Array, segment_ids_BT: Array) -> Array:
        """Hidden states [B, T, D] in the compute dtype, normalised."""
        graph, blocks = nnx.split(self.blocks)
        policy = POLICIES[self.config.remat]

        def layer(x_BTD: Array, block: nnx.State) -> tuple[Array, None]:
            return nnx.merge(graph, block)(x_BTD, positions_BT, segment_ids_BT), None

        # Rows are cast after the look-up, so that their gradients are added up in the parameters' dtype.
        x = self.lookup(self.embedding_VD[...], tokens_BT).astype(self.config.dtype)
        x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, blocks)
        return self.norm(x)

    def unembedding(self) -> Array:
        """[D, V] in the parameters' dtype; the embedding transposed where they are tied."""
        if self.config.tied_embeddings:
            return self.embedding_VD[...].T
        return self.unembedding_DV[...]
