"""A stream of documents as batches, found by their number; from some number on cut to another length.

The batches are NumPy arrays of whole batches, in the order of tokens that a layout wants.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ringflash.data.batch import Batch, concatenate, padding_rows, reorder
from ringflash.data.packing import FramedDocuments, PackedRows

# The order [B, T] in which a batch's tokens are handed out: the layout's.
Order = Callable[[Batch], np.ndarray]


@dataclass(frozen=True)
class Cut:
    """From batch `first` on, batches are `batch_size` rows of `seq_len` tokens each, in this order."""

    first: int
    seq_len: int
    batch_size: int
    order: Order


class Batches:
    """Training batches by number, of one stream of tokens that is cut anew from some batches on.

    Batch n has the tokens n * seq_len * batch_size and following of the stream, and that product is the
    same in every cut: so a new cut drops no token and repeats none, and a batch is found by its number
    alone. The last batch is filled with padding rows.
    """

    def __init__(
        self, documents: FramedDocuments, cuts: Sequence[Cut], *, seed: int, epochs: int
    ) -> None:
        tokens = {cut.seq_len * cut.batch_size for cut in cuts}
        assert len(tokens) == 1, f"batches of unequal size: {cuts}"
        assert cuts[0].first == 0, cuts
        self.cuts = cuts
        self._rows = [
            PackedRows(documents, seq_len=cut.seq_len, seed=seed, epochs=epochs) for cut in cuts
        ]
        self.epoch_tokens = self._rows[0].epoch_tokens

    def __len__(self) -> int:
        counts = zip(self.cuts, self._rows, strict=True)
        return min(-(-len(rows) // cut.batch_size) for cut, rows in counts)

    def __getitem__(self, index: int) -> Batch:
        number = int(index)
        which = bisect.bisect_right([cut.first for cut in self.cuts], number) - 1
        cut, rows = self.cuts[which], self._rows[which]
        start = number * cut.batch_size
        stop = min(start + cut.batch_size, len(rows))
        batch = stack([rows[i] for i in range(start, stop)], batch_size=cut.batch_size)
        return reorder(batch, checked(cut.order, batch))


def stack(rows: Sequence[Batch], *, batch_size: int) -> Batch:
    """Rows as one batch, filled up to `batch_size` with padding rows."""
    missing = batch_size - len(rows)
    return concatenate([*rows, padding_rows(missing, seq_len=rows[0].tokens_BT.shape[1])])


def checked(order: Order, batch: Batch) -> np.ndarray:
    """The order of this batch, which must hold each token of a row once."""
    order_BT = order(batch)
    assert np.array_equal(
        np.sort(order_BT, axis=1), np.broadcast_to(np.arange(order_BT.shape[1]), order_BT.shape)
    ), f"an order must be a permutation of 0..{order_BT.shape[1] - 1}"
    return order_BT
