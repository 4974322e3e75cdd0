import jax
import numpy as np
import pytest
from fake_devices import fake_slice
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from ringflash.config import MeshConfig
from ringflash.mesh import AXES, RULES, extent, make_mesh, move, put, shardings, spec
from ringflash.plan.compiler import in_child
from ringflash.ring_order import ring_hops

PARAMS = ("fsdp", "context")


def mesh(data=1, fsdp=2, context=2, tensor=2):
    return make_mesh(MeshConfig(data, fsdp, context, tensor))


def test_an_axis_of_minus_1_takes_what_is_left():
    assert dict(mesh(data=2, fsdp=1, context=-1, tensor=2).shape) == {
        "data": 2,
        "fsdp": 1,
        "context": 2,
        "tensor": 2,
    }


@pytest.mark.parametrize("sizes", [(1, 1, 3, 1), (1, 1, 4, 1), (2, 2, 2, 2), (3, 1, -1, 1)])
def test_a_product_that_does_not_match_is_refused(sizes):
    with pytest.raises(ValueError, match=r"the mesh data=.* takes \d+ devices, found 8"):
        mesh(*sizes)


def test_a_mesh_may_take_some_of_the_devices():
    chosen = jax.devices()[2:4]
    found = make_mesh(MeshConfig(1, 1, -1, 1), chosen)
    assert set(found.devices.flat) == set(chosen)


def test_devices_that_are_no_tpu_keep_their_order():
    found = mesh(data=1, fsdp=1, context=8, tensor=1)
    assert list(found.devices.flat) == jax.devices()
    assert ring_hops(found) is None


def test_tpus_stand_in_the_order_of_the_ring():
    devices = fake_slice((2, 4, 1), kind="TPU v6 lite")
    found = make_mesh(MeshConfig(1, 1, -1, 1), devices)
    assert found.shape["context"] == 8
    assert ring_hops(found) == 1


def test_real_slices():
    """Devices and compiler are those that a run and a plan have: both ways round at once."""
    asked = {
        "topologies": [
            ["v4:4x4x8", 1],
            ["v5e:4x4", 1],
            ["v5e:16x16", 1],
            ["v6e:16x16", 1],
            ["v6e:2x4", 2],
            ["v5p:2x2x1", 1],
            ["v5p:4x4x4", 2],
            ["v5p:8x8x16", 1],
            ["tpu7x:4x4x4", 1],
        ],
        "compile": ["v5p:2x2x2", "v6e:2x4"],
    }
    found = in_child("mesh_chores:rings", asked, seconds=120)
    assert found["hops"] == {f"{name} x {slices}": 1 for name, slices in asked["topologies"]}
    assert found["transfers"] == dict.fromkeys(asked["compile"], 2)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_names_axes_that_exist_and_none_twice(rule):
    parts = [(axis,) if isinstance(axis, str) else axis or () for axis in RULES[rule]]
    used = [axis for part in parts for axis in part]
    assert set(used) <= set(AXES)
    assert len(used) == len(set(used))
    assert len(RULES[rule]) == len(rule.split("_")[-1]), "one entry for each dim of the name"


@pytest.mark.parametrize(
    ("path", "shape", "wanted"),
    [
        ([DictKey("embedding_VD")], (256, 32), P("tensor", PARAMS)),
        # A dim that does not divide is left whole, the others are not.
        ([DictKey("embedding_VD")], (257, 32), P(None, PARAMS)),
        ([DictKey("embedding_VD")], (256, 6), P("tensor", None)),
        # Stacked layers are whole; the name stands anywhere on the path.
        ([DictKey("blocks"), DictKey("down_FD")], (3, 48, 32), P(None, "tensor", PARAMS)),
        (
            [SequenceKey(1), GetAttrKey("mu"), DictKey("blocks"), DictKey("q_DNH")],
            (3, 32, 4, 8),
            P(None, PARAMS, "tensor", None),
        ),
        ([DictKey("scale_D")], (32,), P(None)),
        ([GetAttrKey("count")], (), P()),
        ([DictKey("stranger")], (32, 32), P(None, None)),
    ],
)
def test_a_leaf_is_split_by_its_name(path, shape, wanted):
    assert spec(tuple(path), shape, mesh()) == wanted


def test_shardings_hold_for_values():
    tree = {"q_DNH": np.zeros((32, 4, 8), np.float32), "step": np.int32(0)}
    placed = jax.device_put(tree, shardings(tree, mesh()))
    assert {shard.data.shape for shard in placed["q_DNH"].addressable_shards} == {(8, 2, 8)}
    assert placed["step"].sharding.is_fully_replicated


def test_a_batch_is_split_over_rows_and_time():
    rows = np.arange(4 * 16).reshape(4, 16)
    (placed,) = put([rows], mesh(data=2, fsdp=2, context=2, tensor=1))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(1, 8)}
    np.testing.assert_array_equal(placed, rows)


def test_extent_counts_devices():
    assert extent("context", mesh()) == 2
    assert extent(PARAMS, mesh()) == 4


def lying(tree):
    """Where the parts of each array lie in memory."""
    return [[part.data.unsafe_buffer_pointer() for part in x.addressable_shards] for x in tree]


@pytest.mark.parametrize("order", [range(8), [0, 1, 3, 2, 6, 7, 5, 4]], ids=["same", "other"])
def test_a_state_moves_from_mesh_to_mesh(order):
    """Devices that go from fsdp to context keep their parts; nothing is copied, but for another order."""
    names = ["q_DNH", "embedding_VD", "scale_D"]
    shapes = [(16, 4, 2), (258, 16), (16,)]
    host = [np.arange(np.prod(s), dtype=np.float32).reshape(s) for s in shapes]
    first = mesh(data=1, fsdp=4, context=2, tensor=1)
    second = make_mesh(MeshConfig(1, 1, 8, 1), [jax.devices()[n] for n in order])
    before, after = (shardings(dict(zip(names, host, strict=True)), m) for m in (first, second))
    tree = [jax.device_put(x, before[name]) for name, x in zip(names, host, strict=True)]
    like = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=after[name])
        for name, x in zip(names, host, strict=True)
    ]
    places = lying(tree)
    moved = move(tree, like, donate=True)
    assert [x.sharding for x in moved] == [x.sharding for x in like]
    assert (lying(moved) == places) == (list(order) == list(range(8)))
    for found, wanted in zip(moved, host, strict=True):
        np.testing.assert_array_equal(found, wanted)
