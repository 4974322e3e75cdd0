import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import tiny, tiny_parts

from ringflash.build import make_model
from ringflash.data.tokenizers import ByteTokenizer
from ringflash.evaluate.perplexity import Score, bucket_sums, edges, measure, metrics
from ringflash.mesh import make_mesh

LENGTHS = (1500, 700, 513, 30)  # in bytes; rows hold 1,024
SIZES = {"seq_len": 1024, "model__layers": 1, "model__width": 16, "data__held_out_percent": 50}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Four documents that are held out, by their names, and some that are not."""
    folder, draw = tmp_path_factory.mktemp("long"), random.Random(1)
    lengths = dict(zip((0, 4, 6, 9), LENGTHS, strict=True))
    for number in range(12):
        text = bytes(draw.choices(b"abcdefgh ", k=lengths.get(number, 40)))
        (folder / f"{number}.txt").write_bytes(text)
    return f"files:{folder}/*.txt"


@pytest.fixture(scope="module")
def sharded(source):
    return tiny_parts(source, **SIZES)


@pytest.fixture(scope="module")
def params(sharded):
    return sharded.own.init().params


def by_hand(source, params, parts):
    """nats of each target of each document, one forward a document, with the reference kernel."""
    config = tiny(source, attention__kernel="reference", mesh__context=1, **SIZES)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    graph = make_model(config, mesh)[0]
    params = jax.tree.map(np.asarray, params)

    @jax.jit
    def log_probabilities(params, tokens_BT):
        model = nnx.merge(graph, params)
        positions_BT = jnp.arange(tokens_BT.shape[1])[None]
        states = model(tokens_BT, positions_BT, jnp.zeros_like(positions_BT))
        return jax.nn.log_softmax(states @ model.unembedding())

    found = []
    root = source.removeprefix("files:").removesuffix("*.txt")
    for name in parts.eval_rows.document_names:
        with open(root + name, "rb") as file:
            text = np.frombuffer(file.read(), np.uint8).astype(np.int32)[:1024]
        tokens = np.concatenate([[ByteTokenizer.bos], text])[:-1]
        padded = np.pad(tokens, (0, 1024 - len(tokens)))[None]
        found.append(-np.asarray(log_probabilities(params, padded))[0, np.arange(len(text)), text])
    return found


def test_is_the_definition(source, sharded, params):
    """Over eight shards in zigzag order, against one document at a time on one device."""
    overall, *buckets = sharded.score(params, 1)
    nats = by_hand(source, params, sharded)
    assert overall.targets == overall.bytes == sum(map(len, nats))
    assert overall.nats == pytest.approx(sum(n.sum() for n in nats), rel=1e-5)
    assert overall.perplexity == pytest.approx(math.exp(np.concatenate(nats).mean()), rel=1e-5)
    assert [score.name for score in buckets] == ["0-512", "512-1024"]
    for score in buckets:
        wanted = np.concatenate([n[score.first : score.last] for n in nats])
        assert score.targets == len(wanted)
        assert score.nats == pytest.approx(wanted.sum(), rel=1e-5)


def test_the_buckets_sum_to_the_whole(sharded, params):
    overall, *buckets = sharded.score(params, 1)
    assert sum(score.targets for score in buckets) == overall.targets
    assert sum(score.bytes for score in buckets) == overall.bytes
    assert sum(score.nats for score in buckets) == pytest.approx(overall.nats, rel=1e-12)


def test_one_shard_and_eight_find_the_same(source, sharded, params):
    one = tiny_parts(source, mesh__context=1, attention__layout="contiguous", **SIZES)
    assert one.eval_rows.document_names == sharded.eval_rows.document_names
    host = jax.tree.map(np.asarray, params)
    for found, wanted in zip(one.score(host, 1), sharded.score(params, 1), strict=True):
        assert (found.targets, found.bytes) == (wanted.targets, wanted.bytes)
        assert found.nats == pytest.approx(wanted.nats, rel=1e-6)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(sharded, params):
    scores = sharded.score(jax.tree.map(jnp.zeros_like, params), 1)
    for score in scores:
        assert score.perplexity == pytest.approx(258, rel=1e-5)
        assert score.bits_per_byte == pytest.approx(math.log2(258), rel=1e-6)


@pytest.mark.parametrize(
    ("seq_len", "wanted"),
    [
        (64, [0, 64]),
        (512, [0, 512]),
        (513, [0, 512, 513]),
        (4096, [0, 512, 1024, 2048, 4096]),
        (5000, [0, 512, 1024, 2048, 4096, 5000]),
    ],
)
def test_edges(seq_len, wanted):
    assert edges(seq_len) == wanted


def test_an_edge_belongs_to_the_run_that_it_begins():
    positions = jnp.array([[0, 511, 512, 1023, 1024, 1029, 7, 600]])
    mask = jnp.array([[1, 1, 1, 1, 1, 1, 0, 0]], bool)
    losses = jnp.array([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, jnp.nan, 100.0]])
    found = bucket_sums(losses, positions, mask, jnp.full((1, 8), 3), [0, 512, 1024, 1030])
    nats, targets, sizes = map(np.asarray, found)
    np.testing.assert_array_equal(nats, [3, 12, 48])
    np.testing.assert_array_equal(targets, [2, 2, 2])
    np.testing.assert_array_equal(sizes, [6, 6, 6])


def test_batches_are_summed_before_anything_is_divided():
    def sums(params, batch, target_bytes):
        return np.array([batch, 0.0]), np.array([1 if batch == 2 else 3, 0]), np.array([4, 0])

    overall, *buckets = measure(sums, None, [(2.0, None), (10.0, None)], [0, 512, 1024])
    assert overall == Score(0, 1024, nats=12.0, targets=4, bytes=8)
    assert buckets == [Score(0, 512, 12.0, 4, 8)], "a run without a target is left out"
    assert overall.perplexity == pytest.approx(math.exp(3))
    assert overall.bits_per_byte == pytest.approx(12 / 8 / math.log(2))


def test_what_overflows_or_has_no_bytes_is_still_a_number():
    assert Score(0, 1, nats=1e6, targets=1, bytes=1).perplexity == math.inf
    assert math.isnan(Score(0, 1, nats=math.nan, targets=1, bytes=1).perplexity)
    assert math.isnan(Score(0, 1, nats=1.0, targets=1, bytes=0).bits_per_byte)


def test_metrics_have_the_whole_and_each_run():
    whole = Score(0, 1024, 12.0, 4, 8)
    found = metrics([whole, Score(0, 512, 2.0, 2, 2), Score(512, 1024, 10.0, 2, 6)])
    assert list(found) == [
        "eval/loss",
        "eval/perplexity",
        "eval/bits_per_byte",
        "eval/perplexity/0-512",
        "eval/bits_per_byte/0-512",
        "eval/perplexity/512-1024",
        "eval/bits_per_byte/512-1024",
    ]
    assert found["eval/loss"] == 3
    assert found["eval/perplexity/512-1024"] == pytest.approx(math.exp(5))
