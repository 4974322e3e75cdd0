from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringflash.data.batch import Batch, concatenate, label_row, padding_rows, reorder


def whole_documents(lengths: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    tokens = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    return [(document, document[1:]) for document in tokens]


def assert_equal(left: Batch, right: Batch) -> None:
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)


def test_row_of_four_documents_is_labelled_by_document():
    row = label_row(whole_documents([3, 2, 4, 1]), seq_len=12)
    assert row.tokens_BT.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0]]
    assert row.targets_BT.tolist() == [[1, 2, 0, 4, 0, 6, 7, 8, 0, 0, 0, 0]]
    assert row.positions_BT.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 0, 0]]
    assert row.segment_ids_BT.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 2, 3, -1, -1]]
    assert row.loss_mask_BT.tolist() == [[1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0]]


def test_positions_of_a_shard_are_a_slice_of_the_row():
    row = label_row(whole_documents([3, 2, 4, 1]), seq_len=10)
    assert row.positions_BT[0, 2:8].tolist() == [2, 0, 1, 0, 1, 2]


def test_target_at_a_shard_border_is_the_next_token():
    row = label_row([(np.arange(8), np.arange(1, 9))], seq_len=8)
    assert row.targets_BT[0, 3] == 4
    assert row.targets_BT[0, 7] == 8
    assert row.loss_mask_BT.all()


def test_pieces_longer_than_the_row_are_refused():
    with pytest.raises(AssertionError, match="pieces hold 5 tokens or more, the row 4"):
        label_row(whole_documents([5]), seq_len=4)


def test_types_and_shapes():
    for batch in (label_row(whole_documents([2]), seq_len=4), padding_rows(1, seq_len=4)):
        kinds = {name: (array.shape, array.dtype.name) for name, array in vars(batch).items()}
        assert kinds.pop("loss_mask_BT") == ((1, 4), "bool")
        assert set(kinds.values()) == {((1, 4), "int32")}


def test_padding_rows_count_for_nothing():
    batch = padding_rows(2, seq_len=3)
    assert not batch.loss_mask_BT.any()
    assert (batch.segment_ids_BT == -1).all()


@given(order=st.permutations(range(10)))
def test_reorder_then_its_inverse_is_the_batch(order):
    batch = label_row(whole_documents([3, 2, 4, 1]), seq_len=10)
    moved = reorder(batch, np.array(order))
    assert_equal(reorder(moved, np.argsort(order)), batch)


@given(order=st.permutations(range(10)))
def test_reorder_moves_every_array_alike(order):
    batch = label_row(whole_documents([3, 2, 4, 1]), seq_len=10)
    moved = reorder(batch, np.array(order))
    for name, array in vars(batch).items():
        assert [getattr(moved, name)[0, t] for t in range(10)] == [array[0, o] for o in order]


def test_batch_passes_through_jit():
    batch = label_row(whole_documents([3, 2]), seq_len=6)
    order = np.array([5, 4, 3, 2, 1, 0])
    on_device = jax.tree.map(jnp.asarray, batch)
    moved = jax.jit(lambda b: reorder(b, order))(on_device)
    assert isinstance(moved, Batch)
    assert_equal(moved, reorder(batch, order))


def test_concatenate_keeps_rows_in_order():
    first = label_row(whole_documents([3]), seq_len=3)
    both = concatenate([first, padding_rows(2, seq_len=3)])
    assert both.segment_ids_BT.tolist() == [[0, 0, 0], [-1, -1, -1], [-1, -1, -1]]
