"""Global batches in layout order: an iterator for training, a fixed list for evaluation.

Batches are NumPy arrays of the whole batch; who owns which rows is said by a mesh, elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from ringflash.data.batch import Batch, label_row, reorder
from ringflash.data.cuts import Batches, Cut, Order, checked, stack
from ringflash.data.packing import FramedDocuments
from ringflash.data.sources import DataError, Source, hash_name
from ringflash.data.tokenizers import Tokenizer
from ringflash.stages import history

READ_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


class Pipeline(Iterator[Batch]):
    """Training batches, with a state that names the next batch to hand out.

    `fixed` says what the data are; a state saved under another one, or under other cuts of what had been
    read by then, is refused. Cuts that begin later may change.
    """

    def __init__(self, batches: Batches, fixed: Mapping[str, Any]):
        self._batches = batches
        self._fixed = fixed
        self._next_batch = 0
        self._iterator = iter(grain.MapDataset.source(batches).to_iter_dataset(READ_AHEAD))

    def __next__(self) -> Batch:
        try:
            batch = next(self._iterator)
        except BaseException:
            # After an error grain goes on with the batch behind the one that failed.
            self._iterator.set_state({"next_index": self._next_batch})
            raise
        self._next_batch += 1
        return batch

    def fingerprint(self, next_batch: int) -> dict[str, Any]:
        """What the data are, and how the batches before this one were cut."""
        cuts = self._batches.cuts
        return {
            **self._fixed,
            "seq_len": history([(cut.first, cut.seq_len) for cut in cuts], next_batch),
            "global_batch_size": history([(cut.first, cut.batch_size) for cut in cuts], next_batch),
        }

    def get_state(self) -> dict[str, Any]:
        """The number of the next batch and the fingerprint, in types that JSON has."""
        return {
            "next_batch": self._next_batch,
            "fingerprint": self.fingerprint(self._next_batch),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state that `get_state` gave, here or in another process.

        Raises DataError, with the fields that differ, if the state belongs to other data.
        """
        saved, next_batch = state["fingerprint"], state["next_batch"]
        ours = self.fingerprint(next_batch)
        differences = [
            f"{name}: saved {saved.get(name)!r}, now {ours.get(name)!r}"
            for name in sorted(saved.keys() | ours.keys())
            if saved.get(name) != ours.get(name)
        ]
        if differences:
            raise DataError("the saved run read other data: " + "; ".join(differences))
        count = len(self._batches)
        if not 0 <= next_batch <= count:
            raise DataError(f"saved next_batch is {next_batch}, there are {count} batches")
        self._iterator.set_state({"next_index": next_batch})
        self._next_batch = next_batch


def train_pipeline(
    source: Source, tokenizer: Tokenizer, cuts: Sequence[Cut], *, seed: int, epochs: int
) -> Pipeline:
    """Packed rows of all documents, `epochs` times over (0: without end), in layout order.

    The orders of `cuts` are no part of the fingerprint: a run may go on under another layout.
    """
    batches = Batches(FramedDocuments(source, tokenizer), cuts, seed=seed, epochs=epochs)
    fixed = {
        "source": source.fingerprint,
        "part": source.part,
        "documents": len(source),
        "tokens": batches.epoch_tokens,
        "tokenizer": tokenizer.fingerprint,
        "seed": seed,
        "epochs": epochs,
    }
    return Pipeline(batches, fixed)


@dataclass(frozen=True, eq=False)
class EvalRows:
    """Held-out documents, one a row, and what is needed to state the result per byte.

    `document_names` has one name for each row that is not padding. `target_bytes` (one int32 [B, T]
    for each batch, in the same order of tokens) counts the bytes that each counted target stands
    for, and is 0 elsewhere. `fingerprint` differs where the rows do, whatever their layout and batches.
    """

    batches: list[Batch]
    document_names: tuple[str, ...]
    fingerprint: str
    target_bytes: list[np.ndarray]


def eval_batches(
    source: Source,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    batch_size: int,
    documents: int,
    order: Order,
) -> EvalRows:
    """The longest documents, one a row, in layout order; all of them if there are fewer.

    A row is fed [BOS] and the document, and scores the document's first seq_len tokens: each of
    them has a target, for BOS stands before the first; EOS is neither fed nor scored. Documents
    that fill a row are alike in length; the hash of the name decides between them.
    """
    framed = FramedDocuments(source, tokenizer)
    filled = np.minimum(framed.lengths - 2, seq_len)
    chosen = sorted(range(len(source)), key=lambda i: (-filled[i], hash_name(source.names[i])))
    chosen = chosen[:documents]
    texts = [framed[i][1:-1][:seq_len] for i in chosen]
    rows = [
        label_row([(framed[i][: len(text) + 1][:seq_len], text)], seq_len=seq_len)
        for i, text in zip(chosen, texts, strict=True)
    ]
    groups = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    whole = [stack(group, batch_size=batch_size) for group in groups]
    batches = [reorder(batch, checked(order, batch)) for batch in whole]
    return EvalRows(
        batches=batches,
        document_names=tuple(source.names[i] for i in chosen),
        fingerprint=hash_rows(whole),
        target_bytes=[
            np.where(b.loss_mask_BT, tokenizer.byte_lengths(np.asarray(b.targets_BT)), 0)
            for b in batches
        ],
    )


def hash_rows(batches: Sequence[Batch]) -> str:
    """SHA-256 of the tokens and targets of every row that is not padding, as they were read."""
    digest = hashlib.sha256()
    for batch in batches:
        for row in np.flatnonzero(batch.loss_mask_BT.any(axis=1)):
            digest.update(batch.tokens_BT[row].tobytes() + batch.targets_BT[row].tobytes())
    return digest.hexdigest()
