"""Documents to rows of one length, every row reached by its index.

An epoch is [BOS] document [EOS] for all documents in an order that is a pure function of seed and
epoch; epochs follow each other without a gap. That one stream is cut every seq_len tokens, so no
token is lost or repeated, and a row needs only the documents' lengths to find its place. Where a
document crosses a cut, the target of a row's last token is the first token of the next row.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache

import numpy as np

from ringflash.data.batch import Batch, Piece, label_row
from ringflash.data.sources import DataError, Source
from ringflash.data.tokenizers import Tokenizer

ENDLESS_ROWS = 2**40
CACHE_BYTES = 256 * 2**20


class FramedDocuments:
    """[BOS] document [EOS] by index, int32, with the latest ones kept up to `cache_bytes`.

    Every document is tokenised once on construction, for `lengths` (int64, framed tokens).
    """

    def __init__(self, source: Source, tokenizer: Tokenizer, *, cache_bytes: int = CACHE_BYTES):
        self.source = source
        self.tokenizer = tokenizer
        self._cache: OrderedDict[int, np.ndarray] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._lock = threading.Lock()
        self.lengths = np.array([len(self._frame(i)) for i in range(len(source))], np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        with self._lock:
            if index in self._cache:
                self._cache.move_to_end(index)
                return self._cache[index]
        tokens = self._frame(index)
        if len(tokens) != self.lengths[index]:
            raise DataError(
                f"document {self.source.names[index]!r} changed while in use: it had "
                f"{self.lengths[index]} tokens at the start and has {len(tokens)} now"
            )
        self._keep(index, tokens)
        return tokens

    def _frame(self, index: int) -> np.ndarray:
        tokens = self.tokenizer.encode(self.source[index])
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.tokenizer.vocab_size:
            raise DataError(
                f"document {self.source.names[index]!r} has token ids {tokens.min()} to "
                f"{tokens.max()}, the tokenizer says 0 to {self.tokenizer.vocab_size - 1}"
            )
        frame = np.empty(len(tokens) + 2, np.int32)
        frame[0], frame[1:-1], frame[-1] = self.tokenizer.bos, tokens, self.tokenizer.eos
        frame.setflags(write=False)
        return frame

    def _keep(self, index: int, tokens: np.ndarray) -> None:
        """Keep a document, and drop the longest unused until the rest fits; one always stays."""
        with self._lock:
            if index in self._cache:
                return
            self._cache[index] = tokens
            self._cached_bytes += tokens.nbytes
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                _, dropped = self._cache.popitem(last=False)
                self._cached_bytes -= dropped.nbytes


class PackedRows:
    """The rows of `epochs` epochs (0: without end), each a Batch [1, seq_len].

    The end of the last epoch is padded. A last row that would hold a single token has nothing to
    predict and is left out.
    """

    def __init__(self, documents: FramedDocuments, *, seq_len: int, seed: int, epochs: int):
        if not len(documents):
            raise DataError("there are no documents to train on")
        self.documents = documents
        self.seq_len = seq_len
        self.seed = seed
        self.epoch_tokens = int(documents.lengths.sum())
        self._stop = epochs * self.epoch_tokens if epochs else ENDLESS_ROWS * seq_len + 1
        self._plan = lru_cache(maxsize=2)(self._plan_epoch)

    def __len__(self) -> int:
        return -(-(self._stop - 1) // self.seq_len)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        at = int(index) * self.seq_len
        stop = min(at + self.seq_len, self._stop)
        pieces = []
        while at < stop:
            pieces.append(self._piece(at, stop))
            at += len(pieces[-1][0])
        return label_row(pieces, seq_len=self.seq_len)

    def _piece(self, at: int, stop: int) -> Piece:
        """What the document at stream token `at` gives of the tokens before `stop`."""
        epoch, offset = divmod(at, self.epoch_tokens)
        order, ends = self._plan(epoch)
        place = np.searchsorted(ends, offset, side="right")
        document = self.documents[order[place]]
        first = offset - int(ends[place]) + len(document)
        last = min(len(document), first + stop - at)
        return document[first:last], document[first + 1 : last + 1]

    def _plan_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of documents in an epoch, and where each ends, in tokens of the epoch."""
        order = shuffle(len(self.documents), seed=self.seed, epoch=epoch)
        return order, np.cumsum(self.documents.lengths[order])


def shuffle(count: int, *, seed: int, epoch: int) -> np.ndarray:
    """An order of `count` things, a pure function of its arguments.

    Made from the raw stream of Philox: NumPy promises that this stays the same from release to
    release, and does not promise it of its `permutation`.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(keys, kind="stable")
