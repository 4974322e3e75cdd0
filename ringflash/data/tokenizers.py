"""From bytes to token ids and back.

A tokenizer adds no special tokens by itself: packing frames documents with `bos` and `eos`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Bytes to ids below `vocab_size`; `bos` and `eos` are ids that `encode` never gives."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def bos(self) -> int:
        """The id put before each document."""

    @property
    def eos(self) -> int:
        """The id put after each document."""

    @property
    def fingerprint(self) -> str:
        """Differs between two tokenizers that can give different ids."""

    def encode(self, document: bytes) -> np.ndarray:
        """The ids of a document, int32, without special tokens."""

    def decode(self, ids: np.ndarray) -> bytes:
        """The bytes that ids stand for; special tokens stand for none."""

    def byte_lengths(self, ids: np.ndarray) -> np.ndarray:
        """How many bytes each id stands for, int32, of the shape of `ids`."""


class ByteTokenizer:
    """A byte is a token: ids 0 to 255 are bytes, 256 is BOS, 257 is EOS."""

    vocab_size = 258
    bos = 256
    eos = 257
    fingerprint = "byte: 256 bytes, bos 256, eos 257"

    def encode(self, document: bytes) -> np.ndarray:
        """The bytes as int32."""
        return np.frombuffer(document, np.uint8).astype(np.int32)

    def decode(self, ids: np.ndarray) -> bytes:
        """The bytes among `ids`."""
        return ids[ids < 256].astype(np.uint8).tobytes()

    def byte_lengths(self, ids: np.ndarray) -> np.ndarray:
        """1 for a byte, 0 for BOS and EOS."""
        return (ids < 256).astype(np.int32)


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"byte": ByteTokenizer}


def make_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name in TOKENIZERS."""
    if name not in TOKENIZERS:
        raise ValueError(f"no tokenizer {name!r}; known: {', '.join(sorted(TOKENIZERS))}")
    return TOKENIZERS[name]()


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer that can give ids which a model of `vocab_size` rows does not have.

    An embedding lookup clamps such an id to its last row without a word.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, so the model's vocab_size must be at "
            f"least {tokenizer.vocab_size}; it is {vocab_size}"
        )
