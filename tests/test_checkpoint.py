import logging
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash import integrity
from ringflash.checkpoint import CheckpointDamaged, CheckpointMismatch, Checkpoints, SaveFailed

DATA = {"next": 7, "remainder": [1, 2, 3]}
CONFIG = {"seed": 0, "model": {"width": 16}}


def mesh_of(*sizes):
    return jax.make_mesh(sizes, ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def sharding(mesh, leaf):
    return NamedSharding(mesh, P("a", "b") if leaf.ndim == 2 else P())


def a_state(mesh, seed=0, width=16):
    """A tree with what a train state has: nnx and optax containers, several dtypes, a key."""
    params = nnx.state(nnx.Linear(8, width, rngs=nnx.Rngs(seed)))
    state = {
        "params": params,
        "optimizer": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params),
        "low": jax.random.normal(jax.random.key(seed), (8, 8), jnp.bfloat16),
        "step": jnp.int32(seed),
        "key": jax.random.key(seed),
    }
    return jax.device_put(state, jax.tree.map(lambda leaf: sharding(mesh, leaf), state))


def abstract(state, mesh):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(mesh, leaf)),
        state,
    )


def bits(leaf):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        assert bits(one) == bits(other)


def save_steps(workdir, *steps, keep=9):
    """Saves step s with the state of seed s."""
    checkpoints = Checkpoints(workdir, keep=keep)
    for step in steps:
        checkpoints.save(step, a_state(mesh_of(8, 1), step), data=DATA, config=CONFIG)
    checkpoints.close()


def restored_step(workdir):
    mesh = mesh_of(8, 1)
    restored = Checkpoints(workdir, keep=9).restore(abstract(a_state(mesh), mesh))
    if restored is None:
        return None
    assert_same(restored.state, a_state(mesh, restored.step))
    return restored.step


def largest_file(step_dir):
    return max(step_dir.glob("state/**/d/*"), key=lambda path: path.stat().st_size)


def contents(directory):
    return {p.relative_to(directory): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("sizes", [(8, 1), (2, 4), (1, 8)])
def test_comes_back_bit_for_bit_on_any_mesh(tmp_path, sizes):
    save_steps(tmp_path, 3)
    mesh = mesh_of(*sizes)
    wanted = a_state(mesh, 3)
    restored = Checkpoints(tmp_path, keep=1).restore(abstract(wanted, mesh))
    assert (restored.step, restored.data, restored.config) == (3, DATA, CONFIG)
    assert_same(restored.state, wanted)
    assert restored.state["low"].sharding == sharding(mesh, wanted["low"])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_works_under_a_global_mesh(tmp_path, axis_type):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(axis_type,) * 2)
    state = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("a", "b")))}
    with jax.set_mesh(mesh):
        checkpoints = Checkpoints(tmp_path, keep=1)
        checkpoints.save(1, state, data=DATA, config=CONFIG)
        checkpoints.close()
        restored = Checkpoints(tmp_path, keep=1).restore(abstract(state, mesh))
    assert_same(restored.state, state)


def test_an_empty_workdir_has_nothing_to_restore(tmp_path):
    assert Checkpoints(tmp_path, keep=1).latest() is None
    assert restored_step(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_keeps_the_newest(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert integrity.steps(tmp_path / "checkpoints") == [4, 3]
    save_steps(tmp_path, 5, keep=2)
    assert integrity.steps(tmp_path / "checkpoints") == [5, 4]


def test_a_chosen_step_comes_back_and_an_absent_one_is_refused(tmp_path):
    save_steps(tmp_path, 1, 2)
    mesh = mesh_of(8, 1)
    wanted = abstract(a_state(mesh), mesh)
    assert Checkpoints(tmp_path, keep=1).restore(wanted, step=1).step == 1
    with pytest.raises(ValueError, match=r"no step 7 in .*; found \[1, 2\]"):
        Checkpoints(tmp_path, keep=1).restore(wanted, step=7)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


HARM = {
    "flipped bit": flip_a_bit,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
@pytest.mark.parametrize("item", ["state", "data"])
def test_a_damaged_step_is_passed_over_loudly(tmp_path, caplog, harm, item):
    save_steps(tmp_path, 1, 2, 3)
    step_dir = tmp_path / "checkpoints" / "3"
    hurt = largest_file(step_dir) if item == "state" else step_dir / "data" / "metadata"
    harm(hurt)
    seen_without_reading = harm is not flip_a_bit
    assert Checkpoints(tmp_path, keep=1).latest() == (2 if seen_without_reading else 3)
    assert restored_step(tmp_path) == 2
    assert "PASSED OVER: step 3" in caplog.text
    assert str(hurt) in caplog.text


def test_training_goes_on_over_a_damaged_step(tmp_path):
    save_steps(tmp_path, 1, 2, 3)
    flip_a_bit(largest_file(tmp_path / "checkpoints" / "3"))
    mesh = mesh_of(8, 1)
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.restore(abstract(a_state(mesh), mesh)).step == 2
    checkpoints.save(3, a_state(mesh, 3), data=DATA, config=CONFIG)
    checkpoints.close()
    assert (tmp_path / "checkpoints" / "3.set-aside").is_dir()
    assert integrity.steps(tmp_path / "checkpoints") == [3, 2]
    assert restored_step(tmp_path) == 3


def test_damage_everywhere_is_an_error_and_not_a_fresh_start(tmp_path):
    save_steps(tmp_path, 1, 2)
    for step in "12":
        flip_a_bit(largest_file(tmp_path / "checkpoints" / step))
    with pytest.raises(CheckpointDamaged, match="SHA-256"):
        restored_step(tmp_path)


def test_stray_and_half_copied_directories_are_no_steps(tmp_path, caplog):
    save_steps(tmp_path, 1)
    directory = tmp_path / "checkpoints"
    (directory / "77").mkdir()
    shutil.copytree(directory / "1", directory / "78")
    largest_file(directory / "78").unlink()
    shutil.copytree(directory / "1", directory / "79")
    (directory / "79" / integrity.MANIFEST).unlink()
    (directory / "80.orbax-checkpoint-tmp").mkdir()
    before = contents(directory)
    assert Checkpoints(tmp_path, keep=1).latest() == 1
    assert restored_step(tmp_path) == 1
    assert contents(directory) == before
    assert (directory / "80.orbax-checkpoint-tmp").is_dir()

    save_steps(tmp_path, 2, keep=2)
    assert integrity.steps(directory) == [2, 1]
    assert {path.name for path in directory.glob("*.set-aside")} == {
        "77.set-aside",
        "78.set-aside",
        "79.set-aside",
    }
    assert not (directory / "80.orbax-checkpoint-tmp").exists()
    assert "80.orbax-checkpoint-tmp was a save that did not finish" in caplog.text


CHANGED = {
    "width": (
        lambda state: state | {"low": jnp.zeros((8, 4), jnp.bfloat16)},
        r"low: found bfloat16\[8,8\], wanted bfloat16\[8,4\]",
    ),
    "dtype": (
        lambda state: state | {"low": state["low"].astype(jnp.float32)},
        r"low: found bfloat16\[8,8\], wanted float32\[8,8\]",
    ),
    "missing": (
        lambda state: state | {"new": jnp.zeros(3)},
        r"new: found nothing, wanted float32\[3\]",
    ),
    "extra": (
        lambda state: {name: leaf for name, leaf in state.items() if name != "low"},
        r"low: found bfloat16\[8,8\], wanted nothing",
    ),
}


@pytest.mark.parametrize(("change", "reason"), CHANGED.values(), ids=CHANGED)
def test_another_models_checkpoint_is_refused_and_left_alone(tmp_path, change, reason):
    save_steps(tmp_path, 3)
    before = contents(tmp_path)
    mesh = mesh_of(8, 1)
    checkpoints = Checkpoints(tmp_path, keep=1)
    with pytest.raises(CheckpointMismatch, match=reason) as refused:
        checkpoints.restore(abstract(change(a_state(mesh)), mesh))
    checkpoints.close()
    assert "\n" not in str(refused.value)
    assert contents(tmp_path) == before


def test_a_mismatch_of_many_leaves_names_a_few(tmp_path):
    save_steps(tmp_path, 3)
    mesh = mesh_of(8, 1)
    wanted = abstract(a_state(mesh, width=32), mesh)
    with pytest.raises(CheckpointMismatch, match=r"found float32\[8,16\], wanted .*; and 3 more"):
        Checkpoints(tmp_path, keep=1).restore(wanted)


def test_saving_a_step_twice_is_told_and_saving_an_older_one_refused(tmp_path, caplog):
    state = a_state(mesh_of(8, 1), 5)
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(5, state, data=DATA, config=CONFIG)
    checkpoints.save(5, state, data=DATA, config=CONFIG)
    assert "step 5 is already saved" in caplog.text
    with pytest.raises(ValueError, match=r"step 4 not saved: .* holds step 5 already"):
        checkpoints.save(4, state, data=DATA, config=CONFIG)
    checkpoints.close()
    with pytest.raises(ValueError, match="holds step 5 already"):
        save_steps(tmp_path, 5)


def check_until_error(checkpoints):
    for _ in range(500):
        checkpoints.check_errors()
        time.sleep(0.01)


def test_a_failed_save_surfaces_later_and_can_be_tried_again(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    state = a_state(mesh_of(8, 1), 5)
    checkpoints = Checkpoints(tmp_path, keep=3)

    def full(step_dir):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(integrity, "seal", full)
        checkpoints.save(5, state, data=DATA, config=CONFIG)
        with pytest.raises(SaveFailed, match="step 5 is not saved: No space left"):
            check_until_error(checkpoints)
    assert checkpoints.latest() is None
    checkpoints.check_errors()
    checkpoints.save(5, state, data=DATA, config=CONFIG)
    checkpoints.close()
    assert restored_step(tmp_path) == 5


def test_a_restored_step_is_not_saved_again(tmp_path, caplog):
    save_steps(tmp_path, 5)
    before = contents(tmp_path)
    mesh = mesh_of(8, 1)
    checkpoints = Checkpoints(tmp_path, keep=3)
    restored = checkpoints.restore(abstract(a_state(mesh), mesh))
    checkpoints.save(5, restored.state, data=DATA, config=CONFIG)
    checkpoints.close()
    assert "step 5 is already saved" in caplog.text
    assert contents(tmp_path) == before


def test_a_failed_save_surfaces_at_close_which_lets_go_all_the_same(tmp_path, monkeypatch):
    save_steps(tmp_path, 1)
    threads = set(threading.enumerate())

    def full(step_dir):
        raise OSError("No space left on device")

    monkeypatch.setattr(integrity, "seal", full)
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(5, {"w": jnp.zeros(3)}, data=DATA, config=CONFIG)
    with pytest.raises(SaveFailed, match="step 5 is not saved: No space left"):
        checkpoints.close()
    left = [thread for thread in set(threading.enumerate()) - threads if not thread.daemon]
    assert left == []
    assert checkpoints.latest() == 1


def test_what_json_or_orbax_would_change_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    good = {"w": jnp.zeros(3)}
    with pytest.raises(AssertionError):
        checkpoints.save(1, {"w": np.int32(3)}, data=DATA, config=CONFIG)
    with pytest.raises(AssertionError, match="not plain JSON"):
        checkpoints.save(1, good, data={"remainder": (1, 2)}, config=CONFIG)


@pytest.mark.parametrize("name", ["run[1]", "run\\1"])
def test_a_path_that_orbax_misreads_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="which orbax misreads"):
        Checkpoints(tmp_path / name, keep=1)


def test_odd_paths_work(tmp_path):
    workdir = tmp_path / "my run *?é~"
    save_steps(workdir, 2)
    assert restored_step(workdir) == 2
