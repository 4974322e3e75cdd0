from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_source import MemorySource, source_of_lengths

from ringflash.data.batch import Batch, reorder
from ringflash.data.cuts import Cut
from ringflash.data.packing import FramedDocuments, PackedRows
from ringflash.data.pipeline import Pipeline, eval_batches, train_pipeline
from ringflash.data.sources import DataError, hash_name, split
from ringflash.data.tokenizers import ByteTokenizer

SEQ_LEN = 8
PLAIN = np.arange(SEQ_LEN)
ZIGZAG = np.array([0, 1, 6, 7, 2, 3, 4, 5])
LENGTHS = [3, 12, 0, 7, 21, 1]


def always(order_T):
    """The same order for each row."""
    return lambda batch: np.broadcast_to(order_T, batch.tokens_BT.shape)


def make(source=None, tokenizer=None, **changes) -> Pipeline:
    settings = {"seq_len": SEQ_LEN, "global_batch_size": 2, "order": always(PLAIN)} | changes
    cut = Cut(0, settings["seq_len"], settings["global_batch_size"], settings["order"])
    return make_cut([cut], source, tokenizer, changes.get("epochs", 2), changes.get("seed", 3))


def make_cut(cuts, source=None, tokenizer=None, epochs=2, seed=3) -> Pipeline:
    source = source_of_lengths(LENGTHS) if source is None else source
    return train_pipeline(source, tokenizer or ByteTokenizer(), cuts, seed=seed, epochs=epochs)


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    assert len(left) == len(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)


def through_json(state: dict) -> dict:
    return json.loads(json.dumps(state))


def test_batches_hold_the_packed_rows_in_order_filled_up_with_padding():
    documents = FramedDocuments(source_of_lengths(LENGTHS), ByteTokenizer())
    rows = PackedRows(documents, seq_len=SEQ_LEN, seed=3, epochs=2)
    batches = list(make(global_batch_size=3))
    tokens = np.concatenate([batch.tokens_BT for batch in batches])
    assert all(batch.tokens_BT.shape == (3, SEQ_LEN) for batch in batches)
    assert len(rows) % 3 != 0
    for i in range(len(rows)):
        np.testing.assert_array_equal(tokens[i], rows[i].tokens_BT[0])
    assert (batches[-1].segment_ids_BT[len(rows) % 3 :] == -1).all()


@pytest.mark.parametrize("epochs", [0, 2])
def test_resume_at_every_step_equals_the_run_that_was_not_stopped(epochs):
    whole = make(epochs=epochs)
    batches, states = [], [through_json(whole.get_state())]
    for _ in range(len(list(make()))):
        batches.append(next(whole))
        states.append(through_json(whole.get_state()))
    for k, state in enumerate(states):
        assert state["next_batch"] == k
        resumed = make(epochs=epochs)
        resumed.set_state(state)
        assert_same([next(resumed) for _ in range(len(batches) - k)], batches[k:])
        assert resumed.get_state() == states[-1]


def test_state_set_on_an_iterator_that_has_read_ahead():
    pipeline = make()
    state = pipeline.get_state()
    batches = [next(pipeline) for _ in range(5)]
    pipeline.set_state(state)
    assert_same([next(pipeline) for _ in range(5)], batches)


def test_the_end_stays_the_end_and_can_be_saved():
    pipeline = make()
    count = len(list(pipeline))
    assert pipeline.get_state()["next_batch"] == count
    resumed = make()
    resumed.set_state(through_json(pipeline.get_state()))
    for ended in (pipeline, resumed):
        with pytest.raises(StopIteration):
            next(ended)


def test_layout_moves_tokens_and_may_change_at_resume():
    plain, zigzag = make(), make(order=always(ZIGZAG))
    assert_same([reorder(batch, ZIGZAG) for batch in make()], list(make(order=always(ZIGZAG))))
    next(plain)
    zigzag.set_state(through_json(plain.get_state()))
    assert_same([next(zigzag)], [reorder(next(plain), ZIGZAG)])


def test_an_order_that_is_no_permutation_is_refused():
    with pytest.raises(AssertionError, match=r"permutation of 0\.\.7"):
        next(make(order=always(np.array([0, 0, 1, 2, 3, 4, 5, 6]))))


class OtherTokenizer(ByteTokenizer):
    fingerprint = "other"


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"seed": 4}, ["seed: saved 3, now 4"]),
        ({"seq_len": 4, "order": always(np.arange(4))}, ["seq_len: saved 8, now 4"]),
        ({"global_batch_size": 4}, ["global_batch_size: saved 2, now 4"]),
        ({"epochs": 0}, ["epochs: saved 2, now 0"]),
        ({"tokenizer": OtherTokenizer()}, ["tokenizer: saved 'byte", "now 'other'"]),
        ({"source": source_of_lengths([*LENGTHS, 1])}, ["documents: saved 6, now 7", "source: "]),
        ({"source": source_of_lengths(LENGTHS[::-1])}, ["source: saved"]),
    ],
)
def test_state_of_other_data_is_refused_and_nothing_moves(changes, fields):
    saved, other = make(), make(**changes)
    next(saved)
    before = other.get_state()
    with pytest.raises(DataError, match="the saved run read other data") as caught:
        other.set_state(through_json(saved.get_state()))
    assert all(field in str(caught.value) for field in fields)
    assert "order" not in str(caught.value)
    assert other.get_state() == before


def test_another_share_held_out_is_refused():
    source = source_of_lengths([5] * 40)
    saved, other = (make(source=split(source, percent)[0]) for percent in (50, 60))
    with pytest.raises(DataError, match=r"saved 'training, 50% held out', now 'training, 60%"):
        other.set_state(saved.get_state())


@pytest.mark.parametrize("next_batch", [-1, 10**6])
def test_a_position_outside_the_data_is_refused(next_batch):
    pipeline = make()
    with pytest.raises(DataError, match=f"next_batch is {next_batch}"):
        pipeline.set_state(pipeline.get_state() | {"next_batch": next_batch})


def test_a_broken_document_stops_the_run_at_its_own_batch():
    source = source_of_lengths([30])
    pipeline = make(source=source, epochs=1)
    source.documents[0], good = b"short", source.documents[0]
    for _ in range(2):
        with pytest.raises(DataError, match="changed while in use"):
            next(pipeline)
        assert pipeline.get_state()["next_batch"] == 0
    source.documents[0] = good
    assert_same(list(pipeline), list(make(source=source_of_lengths([30]), epochs=1)))


def cuts_of(*sizes, tokens=16):
    """(first, seq_len) each, in whatever order of tokens."""
    return [Cut(first, size, tokens // size, always(np.arange(size))) for first, size in sizes]


def streamed(batches):
    """The tokens that are no padding and their targets (-1: none), in the order of the stream.

    Without the very last token, which has no target: it is left out where it would be a row of its own.
    """
    kept = [batch.segment_ids_BT >= 0 for batch in batches]
    tokens = [b.tokens_BT[k] for b, k in zip(batches, kept, strict=True)]
    targets = [
        np.where(b.loss_mask_BT, b.targets_BT, -1)[k] for b, k in zip(batches, kept, strict=True)
    ]
    both = np.stack([np.concatenate(tokens), np.concatenate(targets)], 1).tolist()
    return both[:-1] if both[-1][1] == -1 else both


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    epochs=st.integers(1, 3),
    sizes=st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 3), min_size=3, max_size=3),
)
def test_another_cut_drops_no_token_and_repeats_none(lengths, epochs, sizes, steps):
    firsts = np.cumsum([0, *steps])[: len(sizes)].tolist()
    source = source_of_lengths(lengths)
    uncut = list(make_cut(cuts_of((0, 16)), source, epochs=epochs))
    cut = list(make_cut(cuts_of(*zip(firsts, sizes, strict=True)), source, epochs=epochs))
    assert len(cut) == len(uncut)
    assert streamed(cut) == streamed(uncut)
    for number, batch in enumerate(cut):
        size = [size for first, size in zip(firsts, sizes, strict=True) if first <= number][-1]
        assert batch.tokens_BT.shape == (16 // size, size)


CUTS = cuts_of((0, 4), (2, 8), (4, 16))


def test_the_batches_of_a_cut_are_those_of_a_run_that_has_no_other():
    alone = [list(make_cut(cuts_of((0, size)))) for size in (4, 8, 16)]
    assert_same(list(make_cut(CUTS)), [*alone[0][:2], *alone[1][2:4], *alone[2][4:]])


def test_resume_before_at_and_after_a_cut_equals_the_run_that_was_not_stopped():
    whole = make_cut(CUTS)
    batches, states = [], [through_json(whole.get_state())]
    for batch in whole:
        batches.append(batch)
        states.append(through_json(whole.get_state()))
    assert [state["next_batch"] for state in states] == list(range(len(batches) + 1))
    for k, state in enumerate(states):
        resumed = make_cut(CUTS)
        resumed.set_state(state)
        assert_same(list(resumed), batches[k:])
        assert resumed.get_state() == states[-1]


def test_only_cuts_that_have_not_begun_may_change():
    data = make_cut(CUTS)
    others = {
        "changed": cuts_of((0, 4), (2, 16)),
        "moved": cuts_of((0, 4), (3, 8)),
        "left out": cuts_of((0, 4)),
    }
    for _ in range(2):
        next(data)
    for cuts in (CUTS, *others.values()):
        make_cut(cuts).set_state(through_json(data.get_state()))
    next(data)
    for cuts in (CUTS, CUTS[:2], cuts_of((0, 4), (2, 8), (3, 16))):
        make_cut(cuts).set_state(through_json(data.get_state()))
    now = {"changed": "'4 until 2, then 16'", "moved": "4", "left out": "4"}
    for name, cuts in others.items():
        with pytest.raises(
            DataError, match=f"seq_len: saved '4 until 2, then 8', now {now[name]}$"
        ):
            make_cut(cuts).set_state(through_json(data.get_state()))


def evaluate(source, *, documents, batch_size=2, order=PLAIN, tokenizer=None):
    return eval_batches(
        source,
        tokenizer or ByteTokenizer(),
        seq_len=SEQ_LEN,
        batch_size=batch_size,
        documents=documents,
        order=always(order),
    )


def test_eval_row_scores_each_of_the_first_tokens():
    result = evaluate(MemorySource({"long": b"abcdefghij", "short": b"xyz"}), documents=2)
    (batch,) = result.batches
    assert batch.tokens_BT.tolist() == [[256, *b"abcdefg"], [256, *b"xyz", 0, 0, 0, 0]]
    assert batch.targets_BT.tolist() == [[*b"abcdefgh"], [*b"xyz", 0, 0, 0, 0, 0]]
    assert batch.loss_mask_BT.tolist() == [[1] * 8, [1, 1, 1, 0, 0, 0, 0, 0]]
    assert batch.positions_BT.tolist() == [list(range(8)), [0, 1, 2, 3, 0, 0, 0, 0]]
    assert batch.segment_ids_BT.tolist() == [[0] * 8, [0, 0, 0, 0, -1, -1, -1, -1]]
    assert [b.tolist() for b in result.target_bytes] == [batch.loss_mask_BT.tolist()]


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    documents=st.integers(1, 10),
    batch_size=st.integers(1, 4),
)
def test_eval_takes_the_longest_documents_once(lengths, documents, batch_size):
    source = source_of_lengths(lengths)
    result = evaluate(source, documents=documents, batch_size=batch_size)
    by_size = sorted(source.names, key=lambda n: (-min(lengths[int(n[3:])], SEQ_LEN), hash_name(n)))
    assert list(result.document_names) == by_size[:documents]
    scored = np.concatenate([batch.loss_mask_BT.sum(axis=1) for batch in result.batches])
    expected = [min(lengths[int(name[3:])], SEQ_LEN) for name in result.document_names]
    assert scored.tolist() == expected + [0] * (len(scored) - len(expected))
    assert np.concatenate([b.sum(axis=1) for b in result.target_bytes]).tolist() == scored.tolist()
    assert all(batch.tokens_BT.shape == (batch_size, SEQ_LEN) for batch in result.batches)
    assert len(result.batches) == -(-len(result.document_names) // batch_size)


def test_eval_choice_does_not_depend_on_the_order_of_the_source():
    documents = {f"doc{i}": bytes([65 + i]) * 20 for i in range(9)}
    backwards = dict(reversed(documents.items()))
    forward, backward = (evaluate(MemorySource(d), documents=4) for d in (documents, backwards))
    assert forward.document_names == backward.document_names
    assert_same(forward.batches, backward.batches)


def test_eval_batches_are_in_layout_order():
    source = source_of_lengths([20, 5, 9])
    plain, zigzag = (evaluate(source, documents=3, order=o) for o in (PLAIN, ZIGZAG))
    assert_same(zigzag.batches, [reorder(batch, ZIGZAG) for batch in plain.batches])
    for ours, theirs in zip(zigzag.target_bytes, plain.target_bytes, strict=True):
        np.testing.assert_array_equal(ours, theirs[:, ZIGZAG])


class PairTokenizer(ByteTokenizer):
    """Two bytes a token, so that bytes and tokens differ in number."""

    bos, eos, vocab_size = 65536, 65537, 65538

    def encode(self, document: bytes) -> np.ndarray:
        return np.frombuffer(document, np.uint16).astype(np.int32)

    def decode(self, ids: np.ndarray) -> bytes:
        return ids[ids < 65536].astype(np.uint16).tobytes()

    def byte_lengths(self, ids: np.ndarray) -> np.ndarray:
        return np.where(ids < 65536, 2, 0)


def test_target_bytes_are_those_of_the_scored_text():
    source = MemorySource({"long": b"a" * 40, "short": b"b" * 6})
    result = evaluate(source, documents=2, tokenizer=PairTokenizer())
    assert [int(row.sum()) for row in result.batches[0].loss_mask_BT] == [8, 3]
    assert result.target_bytes[0].sum(axis=1).tolist() == [16, 6]
