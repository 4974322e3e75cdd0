"""The Batch: what a model is fed, labelled on whole rows before anything is split.

Labels, positions, segment ids and the mask of counted targets are made here, once, on the row as
it was read. A layout or a mesh later moves tokens about; it never computes one of these again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

Array: TypeAlias = Any  # np.ndarray on the host, jax.Array on the mesh
Piece: TypeAlias = tuple[np.ndarray, np.ndarray]

PADDING_SEGMENT = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of tokens with all that belongs to each token; int32 [B, T], the mask bool [B, T].

    `positions_BT` counts from 0 in each document's piece of a row; `segment_ids_BT` numbers the
    pieces of a row 0, 1, 2, ... with -1 for padding; `loss_mask_BT` says which targets count.
    """

    tokens_BT: Array
    targets_BT: Array
    positions_BT: Array
    segment_ids_BT: Array
    loss_mask_BT: Array


def reorder(batch: Batch, order: np.ndarray) -> Batch:
    """Put every array of a host batch in the same order of tokens.

    order [T], or [B, T] where each row has its own: new[b, t] = old[b, order[b, t]].
    """
    order_BT = np.broadcast_to(order, batch.tokens_BT.shape)
    return jax.tree.map(lambda array: np.take_along_axis(array, order_BT, axis=1), batch)


def concatenate(batches: Sequence[Batch]) -> Batch:
    """The rows of several host batches, one under the other."""
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)


def padding_rows(rows: int, *, seq_len: int) -> Batch:
    """Rows that hold nothing: no target counts, and every token is padding."""
    return Batch(
        tokens_BT=np.zeros((rows, seq_len), np.int32),
        targets_BT=np.zeros((rows, seq_len), np.int32),
        positions_BT=np.zeros((rows, seq_len), np.int32),
        segment_ids_BT=np.full((rows, seq_len), PADDING_SEGMENT, np.int32),
        loss_mask_BT=np.zeros((rows, seq_len), np.bool_),
    )


def label_row(pieces: Iterable[Piece], *, seq_len: int) -> Batch:
    """One row, [1, seq_len], of pieces of documents laid end to end and padded at its end.

    A piece is (inputs, targets): targets are the tokens that follow the inputs in the same
    document, so there is one fewer where the document ends, and that last token counts for nothing.
    """
    tokens_T = np.zeros(seq_len, np.int32)
    targets_T = np.zeros(seq_len, np.int32)
    positions_T = np.zeros(seq_len, np.int32)
    segment_ids_T = np.full(seq_len, PADDING_SEGMENT, np.int32)
    loss_mask_T = np.zeros(seq_len, np.bool_)
    start = 0
    for segment, (inputs, targets) in enumerate(pieces):
        assert len(inputs) - 1 <= len(targets) <= len(inputs), (len(inputs), len(targets))
        stop, last_target = start + len(inputs), start + len(targets)
        assert stop <= seq_len, f"pieces hold {stop} tokens or more, the row {seq_len}"
        tokens_T[start:stop] = inputs
        targets_T[start:last_target] = targets
        positions_T[start:stop] = np.arange(len(inputs))
        segment_ids_T[start:stop] = segment
        loss_mask_T[start:last_target] = True
        start = stop
    row = Batch(tokens_T, targets_T, positions_T, segment_ids_T, loss_mask_T)
    return jax.tree.map(lambda array: array[np.newaxis], row)


def unpacked(batch: Batch) -> Batch:
    """The documents of a host batch, one a row, each where it lay; all else of a row is padding."""
    rows = []
    for row in range(len(batch.tokens_BT)):
        for segment in np.unique(batch.segment_ids_BT[row]):
            if segment >= 0:
                here_T = batch.segment_ids_BT[row] == segment
                empty = padding_rows(1, seq_len=len(here_T))
                rows.append(
                    jax.tree.map(
                        lambda x, pad, r=row, m=here_T: np.where(m, x[r], pad), batch, empty
                    )
                )
    return concatenate(rows)
