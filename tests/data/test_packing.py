from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_source import MemorySource, source_of_lengths

from ringflash.data.batch import Batch
from ringflash.data.packing import ENDLESS_ROWS, FramedDocuments, PackedRows, shuffle
from ringflash.data.sources import DataError
from ringflash.data.tokenizers import ByteTokenizer

BOS, EOS = 256, 257
GOLDEN_ORDER = [3, 7, 4, 2, 1, 6, 5, 0]

cases = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(0, 40), min_size=1, max_size=6),
        "seq_len": st.integers(2, 24),
        "seed": st.integers(0, 2**32),
        "epochs": st.integers(1, 4),
    }
)


def packed(lengths: list[int], *, seq_len: int, seed: int = 0, epochs: int = 1) -> PackedRows:
    documents = FramedDocuments(source_of_lengths(lengths), ByteTokenizer())
    return PackedRows(documents, seq_len=seq_len, seed=seed, epochs=epochs)


def stream_of(case: dict) -> tuple[list[int], list[int]]:
    """Every token of all epochs, and which document's turn it belongs to, written out plainly."""
    source, tokens, turns, turn = source_of_lengths(case["lengths"]), [], [], 0
    for epoch in range(case["epochs"]):
        for i in shuffle(len(source), seed=case["seed"], epoch=epoch):
            document = [BOS, *source[i], EOS]
            tokens += document
            turns += [turn] * len(document)
            turn += 1
    return tokens, turns


def rows_of(rows: PackedRows) -> list[Batch]:
    return [rows[i] for i in range(len(rows))]


def kept(rows: list[Batch], name: str) -> np.ndarray:
    """The array `name` of all rows on end, without padding."""
    return np.concatenate([getattr(row, name)[row.segment_ids_BT >= 0] for row in rows])


@given(case=cases)
def test_rows_on_end_are_the_stream(case):
    tokens, _ = stream_of(case)
    rows = rows_of(packed(**case))
    inputs = kept(rows, "tokens_BT").tolist()
    assert len(tokens) - 1 <= len(inputs) <= len(tokens)
    assert inputs == tokens[: len(inputs)]
    assert all(row.tokens_BT.shape == (1, case["seq_len"]) for row in rows)
    assert all((row.segment_ids_BT >= 0).all() for row in rows[:-1])


@given(case=cases)
def test_every_token_but_bos_is_a_target_once(case):
    tokens, _ = stream_of(case)
    rows = rows_of(packed(**case))
    targets = np.concatenate([row.targets_BT[row.loss_mask_BT] for row in rows])
    assert targets.tolist() == [token for token in tokens if token != BOS]
    assert all(row.loss_mask_BT.any() for row in rows)


@given(case=cases)
def test_targets_are_the_next_token_of_the_same_document(case):
    tokens, turns = stream_of(case)
    rows = rows_of(packed(**case))
    mask, targets = kept(rows, "loss_mask_BT"), kept(rows, "targets_BT")
    for t in range(len(mask)):
        same_document = t + 1 < len(tokens) and turns[t] == turns[t + 1]
        assert mask[t] == same_document
        assert targets[t] == (tokens[t + 1] if same_document else 0)


@given(case=cases)
def test_segments_and_positions_follow_the_documents(case):
    _, turns = stream_of(case)
    seq_len = case["seq_len"]
    for i, row in enumerate(rows_of(packed(**case))):
        held = turns[i * seq_len : (i + 1) * seq_len]
        padding = seq_len - len(held)
        assert row.segment_ids_BT[0].tolist() == [t - held[0] for t in held] + [-1] * padding
        positions = [t - held.index(turn) for t, turn in enumerate(held)]
        assert row.positions_BT[0].tolist() == positions + [0] * padding


@given(case=cases, data=st.data())
def test_a_row_does_not_depend_on_what_was_read_before(case, data):
    order = data.draw(st.permutations(range(len(packed(**case)))))
    rows, fresh = packed(**case), [packed(**case)[i] for i in order]
    for i, row in zip(order, fresh, strict=True):
        np.testing.assert_array_equal(rows[i].tokens_BT, row.tokens_BT)


def test_known_lengths_in_one_row():
    rows = packed([3, 2, 4, 1], seq_len=20, seed=0)
    order = shuffle(4, seed=0, epoch=0).tolist()
    framed = [[5, 4, 6, 3][i] for i in order]
    assert len(rows) == 1
    expected = [position for length in framed for position in range(length)]
    assert rows[0].positions_BT[0].tolist() == [*expected, 0, 0]
    assert rows[0].segment_ids_BT[0].tolist() == [*np.repeat(range(4), framed), -1, -1]


def test_document_longer_than_many_rows():
    rows = rows_of(packed([1000], seq_len=8))
    assert len(rows) == 126
    assert all(row.positions_BT[0].tolist() == list(range(8)) for row in rows[:-1])
    assert all(row.loss_mask_BT.all() for row in rows[:-1])
    assert rows[0].targets_BT[0, -1] == rows[1].tokens_BT[0, 0]


def test_a_row_may_span_several_epochs():
    rows = packed([1], seq_len=10, epochs=5)
    assert rows[0].tokens_BT[0].tolist() == [BOS, 0, EOS] * 3 + [BOS]
    assert rows[0].segment_ids_BT[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert rows[1].tokens_BT[0].tolist() == [0, EOS, BOS, 0, EOS, 0, 0, 0, 0, 0]
    assert len(rows) == 2


def test_a_last_row_of_one_token_is_left_out():
    rows = packed([6], seq_len=7)
    assert len(rows) == 1
    assert rows[0].targets_BT[0].tolist() == [0, 1, 2, 3, 4, 5, EOS]


def test_rows_without_end():
    rows = packed([3, 2], seq_len=4, epochs=0)
    assert len(rows) == ENDLESS_ROWS
    assert (rows[ENDLESS_ROWS - 1].segment_ids_BT >= 0).all()


def test_rows_past_the_end_are_refused():
    rows = packed([3], seq_len=4)
    for index in (-1, 1):
        with pytest.raises(IndexError, match=f"row {index} of 1"):
            rows[index]


def test_orders_differ_by_epoch_and_seed_and_are_the_same_everywhere():
    orders = [shuffle(8, seed=s, epoch=e).tolist() for s, e in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert orders[1] == GOLDEN_ORDER, (
        "the order of documents moved: every run that is resumed now reads other data than it "
        "would have read; change it only with a field of the pipeline's fingerprint that says so"
    )


def test_no_documents_are_refused():
    with pytest.raises(DataError, match="no documents"):
        packed([], seq_len=4)


def test_a_document_that_changes_while_in_use_is_named():
    source = MemorySource({"a": b"xyz"})
    documents = FramedDocuments(source, ByteTokenizer())
    source.documents[0] = b"xy"
    with pytest.raises(DataError, match=r"'a' changed while in use: it had 5 tokens .* has 4"):
        documents[0]


def test_a_tokenizer_that_gives_ids_it_does_not_have_is_refused():
    class Wrong(ByteTokenizer):
        vocab_size = 100

    with pytest.raises(DataError, match=r"'a' has token ids 65 to 200, the tokenizer says 0 to 99"):
        FramedDocuments(MemorySource({"a": b"A\xc8"}), Wrong())


def test_cache_keeps_to_its_size_and_gives_the_same_tokens():
    source = source_of_lengths([8] * 10)
    documents = FramedDocuments(source, ByteTokenizer(), cache_bytes=100)
    for i in [*range(10), 9, 8, 0]:
        assert documents[i].tolist() == [BOS, *source[i], EOS]
    assert documents._cached_bytes == 80
    assert list(documents._cache) == [8, 0]


def test_cached_tokens_cannot_be_written():
    documents = FramedDocuments(source_of_lengths([3]), ByteTokenizer())
    with pytest.raises(ValueError, match="read-only"):
        documents[0][0] = 1
