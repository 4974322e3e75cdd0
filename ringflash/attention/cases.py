"""Named cases of attention: shapes, masks and options, shared by tests, benchmarks and tuning.

Small, so that the dense reference serves as the truth, and awkward on purpose: lengths that divide
nothing, documents that end in the middle of a tile, rows that are all padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from ringflash.attention.mask import (
    PADDING,
    Causal,
    Chunked,
    Full,
    Mask,
    Prefix,
    Segments,
    Tokens,
    Window,
)
from ringflash.attention.spec import Bias, Spec
from ringflash.attention.tile import alibi

Array = np.ndarray | jax.Array


@dataclass(frozen=True)
class Case:
    """One problem. `S` and `value_width` are `T` and `H` where they are None.

    documents: the lengths of the documents in a row, the rest of which is padding; later rows of the
    batch have the same ones turned by one. Positions count from the start of each document. None is
    one sequence of the whole length. k_documents: those of the keys, where they are others; a document
    of length 0 is one that only the other side has. q_start: the position of the first query.
    """

    name: str
    B: int = 2
    T: int = 96
    S: int | None = None
    N: int = 4
    K: int = 2
    H: int = 16
    value_width: int | None = None
    mask: Mask = Causal()
    scale: float | None = None
    softcap: float | None = None
    bias: Bias | None = None
    dropout: float = 0.0
    sinks: bool = False
    documents: tuple[int, ...] | None = None
    k_documents: tuple[int, ...] | None = None
    q_start: int = 0

    @property
    def spec(self) -> Spec:
        """What a kernel is made of."""
        mask = self.mask if self.documents is None else self.mask & Segments()
        return Spec(mask, self.scale, self.softcap, self.bias, self.dropout)


class Inputs(NamedTuple):
    """The arrays of a case in fp32: the cotangents `dout_BTNH` and `dlse_BNT` are random too."""

    q_BTNH: Array
    k_BSKH: Array
    v_BSKH: Array
    sinks_N: Array | None
    dout_BTNH: Array
    dlse_BNT: Array
    q_at: Tokens
    k_at: Tokens


def inputs(case: Case, *, seed: int = 0) -> Inputs:
    """Normal random numbers; the tokens name heads and seeds where bias or dropout ask for them."""
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    B, T, N, K, H = case.B, case.T, case.N, case.K, case.H
    S = case.T if case.S is None else case.S
    width = case.H if case.value_width is None else case.value_width
    q_at = tokens(B, T, case.documents, case.q_start)
    if case.bias is not None or case.dropout:
        q_at = q_at._replace(heads_N=np.arange(N, dtype=np.int32))
    if case.dropout:
        q_at = q_at._replace(seeds_B=draw.integers(2**32, size=B, dtype=np.uint32))
    return Inputs(
        normal(B, T, N, H),
        normal(B, S, K, H),
        normal(B, S, K, width),
        normal(N) if case.sinks else None,
        normal(B, T, N, width),
        normal(B, N, T),
        q_at,
        tokens(B, S, case.documents if case.k_documents is None else case.k_documents),
    )


def tokens(rows: int, length: int, documents: tuple[int, ...] | None, start: int = 0) -> Tokens:
    """The tokens of packed rows, each with the documents of the one before turned by one."""
    if documents is None:
        positions = start + np.arange(length, dtype=np.int32)
        return Tokens(np.tile(positions, (rows, 1)), np.zeros((rows, length), np.int32))
    assert sum(documents) <= length, f"documents {documents} are longer than the row, {length}"
    at = Tokens(np.zeros((rows, length), np.int32), np.full((rows, length), PADDING, np.int32))
    for row in range(rows):
        turn, first = row % max(1, len(documents)), 0
        for segment, size in enumerate((*documents[turn:], *documents[:turn])):
            at.positions_BT[row, first : first + size] = np.arange(size)
            at.segment_ids_BT[row, first : first + size] = segment
            first += size
    return at


EVERYTHING = Case(
    "everything",
    N=6,
    K=3,
    H=24,
    value_width=16,
    mask=Causal() & Window(20),
    scale=0.3,
    softcap=5.0,
    bias=alibi(6),
    dropout=0.2,
    sinks=True,
    documents=(29, 3, 40, 11),
)

HEADS = (
    Case("mha", K=4),
    Case("gqa"),
    Case("mqa", K=1),
    *(Case(f"width_{H}", B=1, T=40, N=2, K=1, H=H) for H in (32, 64, 80, 96, 128, 192, 256)),
    Case("wider_values", value_width=40),
    Case("narrower_values", H=48, value_width=32),
)
LENGTHS = (
    Case("length_1", T=1),
    Case("length_7", T=7),
    Case("length_1001", B=1, T=1001, N=2, K=1),
    Case("cross", T=40, S=104, mask=Full()),
    Case("cross_causal", T=24, S=104, q_start=80),
    Case("more_queries", T=104, S=40),
    Case("cross_packed", T=64, S=104, mask=Full(), documents=(20, 30, 0), k_documents=(11, 0, 90)),
)
MASKS = (
    Case("full", mask=Full()),
    Case("window", mask=Causal() & Window(24)),
    Case("window_both_sides", mask=Window(9, 5)),
    Case("window_of_1", mask=Causal() & Window(1)),
    Case("chunks", mask=Causal() & Chunked(20)),
    Case("prefix", mask=Prefix(30)),
    Case("packed", documents=(29, 1, 40, 17)),
    Case("packed_full", mask=Full(), documents=(50, 46)),
    Case("packed_window", mask=Causal() & Window(10), documents=(29, 3, 50)),
    Case("all_padding", documents=()),
)
OPTIONS = (
    Case("scale", scale=0.9),
    Case("softcap", softcap=2.0),
    Case("alibi", bias=alibi(4)),
    Case("sinks", sinks=True),
    Case("sinks_on_padding", sinks=True, documents=(30, 20)),
    Case("dropout", dropout=0.4),
    EVERYTHING,
)
CASES = (*HEADS, *LENGTHS, *MASKS, *OPTIONS)
