"""Runs in stages: short sequences over few devices first, then longer ones over more."""

import itertools
import json
import threading
import time

import jax
import numpy as np
import pytest
from test_train import (
    assert_same_run,
    contents,
    final_state,
    killed_after,
    records,
    saved,
    start,
)
from tiny import tiny, tiny_parts, write_documents

from ringflash import check, legs, mesh
from ringflash import train as module
from ringflash.checkpoint import Checkpoints
from ringflash.evaluate import report
from ringflash.evaluate.run import evaluate
from ringflash.exits import ConfigFault
from ringflash.legs import Leg

pytestmark = pytest.mark.slow  # whole runs: with the oldest JAX only, in `.ci/run`

STAGES = "until=3 seq_len=16 context=2 theta=100; until=5 seq_len=32 context=4"
RUN = {"attention__strategy": "all_gather", "steps": 8, "checkpoint__every": 1}
# The same by hand: the steps done at its end, and a config without stages.
BY_HAND = [
    (
        3,
        {"seq_len": 16, "global_batch_size": 8, "mesh__fsdp": 4, "mesh__context": 2}
        | {"model__rope_theta": 100},
    ),
    (5, {"seq_len": 32, "global_batch_size": 4, "mesh__fsdp": 2, "mesh__context": 4}),
    (8, {}),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="module")
def uncut(source, tmp_path_factory):
    """The workdir of a run in three stages that was not stopped."""
    workdir = tmp_path_factory.mktemp("uncut")
    go(workdir, source)
    return workdir


def go(workdir, source, stages=STAGES, **changes):
    start(workdir, source, stages=stages, **(RUN | changes))


def configured(source, stages=STAGES, **changes):
    return tiny(source, stages=stages, checkpoint__keep=9, **(RUN | changes))


def test_the_run_is_its_stages_one_after_another(uncut, source):
    """Bit for bit what three runs without stages do, each from the state that the one before it left."""
    state, losses, done = None, {}, 0
    for end, changes in BY_HAND:
        parts = tiny_parts(source, **(RUN | changes))
        placed = jax.tree.map(lambda x: x.sharding, parts.own.abstract_state)
        state = parts.own.init() if state is None else jax.device_put(state, placed)
        for batch in itertools.islice(parts.train_data, done, end):
            state, metrics = parts.own.step(state, parts.own.put(batch))
            done += 1
            losses[done] = float(metrics["train/loss"])
        state = jax.tree.map(np.asarray, state)
    assert records(uncut, "train/loss") == losses
    jax.tree.map(np.testing.assert_array_equal, final_state(uncut, source), state)


def test_what_is_told_of_stages(uncut, source):
    lengths = records(uncut, "train/seq_len")
    assert lengths == {1: 16, 2: 16, 3: 16, 4: 32, 5: 32, 6: 64, 7: 64, 8: 64}
    assert list(records(uncut, "perf/compile_seconds")) == [1, 4, 6]
    told = dict(tiny_parts(source, stages=STAGES, **RUN).description)
    assert told["mesh"] == "data=1 x fsdp=1 x context=8 x tensor=1"
    assert told["until step 3"] == (
        "8 x 16 tokens, RoPE theta 100, all_gather over context=2, fsdp=4, chunked"
    )
    assert told["until step 5"].startswith("4 x 32 tokens, RoPE theta 10000, ")


@pytest.mark.parametrize("step", [2, 3, 4, 5, 7])
def test_a_run_goes_on_before_at_and_after_a_boundary(uncut, source, tmp_path, step):
    workdir = killed_after(uncut, step, tmp_path / "run")
    go(workdir, source)
    assert_same_run(workdir, uncut, source)
    state = json.loads(next((workdir / f"checkpoints/{step}/data").glob("*")).read_text())
    assert state["next_batch"] == step


def test_a_run_goes_on_on_another_mesh(uncut, source, tmp_path):
    workdir = killed_after(uncut, 2, tmp_path / "run")
    go(workdir, source, mesh__data=2, mesh__context=4, attention__layout="contiguous")
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        found, wanted = records(workdir, name), records(uncut, name)
        assert found.keys() == wanted.keys()
        np.testing.assert_allclose([*found.values()], [*wanted.values()], rtol=1e-5)


def test_the_next_program_is_there_before_its_stage(source, tmp_path, monkeypatch):
    compiled, waited = [], {}
    true_compile, true_update = Leg.compile, module.update

    def compile(leg):
        program = true_compile(leg)
        compiled.append((leg.begin, threading.current_thread() is threading.main_thread()))
        return program

    def update(run):
        leg = run.leg
        metrics = true_update(run)
        if run.leg is not leg:
            waited[run.step] = metrics["perf/compile_seconds"]
        number = run.parts.legs.index(run.leg) + 1
        end = time.monotonic() + 60
        while number < 3 and not run.programs.ready(number) and time.monotonic() < end:
            time.sleep(0.001)
        assert compiled[-1] == (run.parts.legs[min(number, 2)].begin, False)
        return metrics

    monkeypatch.setattr(Leg, "compile", compile)
    monkeypatch.setattr(module, "update", update)
    go(tmp_path / "run", source)
    assert [begin for begin, _ in compiled] == [0, 3, 5], "each once"
    assert waited[4] < waited[1] / 10
    assert waited[6] < waited[1] / 10


def test_a_stage_that_is_not_reached_is_not_compiled(source, tmp_path, monkeypatch):
    compiled, true_compile = [], Leg.compile
    monkeypatch.setattr(Leg, "compile", lambda leg: compiled.append(leg.begin) or true_compile(leg))
    go(tmp_path / "run", source, steps=3)
    assert compiled == [0]


REFUSED = {
    "theta": (
        "until=3 seq_len=16 context=2; until=5 seq_len=32 context=4",
        r"another model: model.rope_theta: found 100.0 until 3, then 10000.0, wanted 10000.0$",
    ),
    "length": (
        "until=3 seq_len=32 context=2 theta=100; until=5 seq_len=32 context=4",
        r"seq_len: saved '16 until 3, then 32', now 32$",
    ),
    "end": (
        "until=2 seq_len=16 context=2 theta=100; until=5 seq_len=32 context=4",
        r"rope_theta: found 100.0 until 3, then 10000.0, wanted 100.0 until 2, then 10000.0$",
    ),
    "none": ("", "rope_theta: found 100.0 until 3, then 10000.0, wanted 10000.0$"),
}


@pytest.mark.parametrize(("stages", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_change_of_the_past_is_refused_and_all_left_alone(
    uncut, source, tmp_path, stages, reason
):
    workdir = killed_after(uncut, 4, tmp_path / "run")
    before = contents(workdir)
    with pytest.raises(ConfigFault, match=reason) as refused:
        go(workdir, source, stages=stages)
    assert refused.value.code == 3
    assert contents(workdir) == before


@pytest.mark.parametrize(
    "stages",
    [
        "until=3 seq_len=16 context=2 theta=100; until=6 seq_len=32 context=4",
        "until=3 seq_len=16 context=2 theta=100; until=4 seq_len=32 context=2; until=6 theta=5e5",
    ],
)
def test_what_is_to_come_may_change(uncut, source, tmp_path, stages):
    """Also where devices of a stage that has begun are other ones."""
    workdir = killed_after(uncut, 4, tmp_path / "run")
    go(workdir, source, stages=stages)
    assert saved(workdir)[-1] == 8
    found, wanted = records(workdir, "train/loss"), records(uncut, "train/loss")
    assert {step: found[step] for step in range(1, 5)} == {s: wanted[s] for s in range(1, 5)}
    assert found[8] != wanted[8]


def test_a_run_without_stages_goes_on_with_longer_sequences(source, tmp_path):
    workdir = tmp_path / "run"
    go(workdir, source, "", steps=3, seq_len=16, global_batch_size=8, mesh__context=2, mesh__fsdp=4)
    go(workdir, source, "until=3 seq_len=16 context=2", model__rope_theta=1e4, steps=5)
    assert list(records(workdir, "train/seq_len").values()) == [16] * 3 + [64] * 2


def test_evaluation_is_at_the_configs_length_with_the_theta_of_the_step(uncut, source, tmp_path):
    workdir = killed_after(uncut, 3, tmp_path / "run")
    evaluate(configured(source), workdir)
    parts = tiny_parts(source, model__rope_theta=100.0, **RUN)
    checkpoints = Checkpoints(workdir, keep=1)
    state = checkpoints.restore(parts.own.abstract_state).state
    checkpoints.close()
    wanted = parts.score(state.params, 3)
    assert report.read(workdir, 3, parts.eval_rows.fingerprint) == wanted
    assert wanted[0].last == 64
    with pytest.raises(ConfigFault, match=r"found 100\.0, wanted 10000\.0"):
        evaluate(configured(source, ""), workdir)


def test_the_last_stage_is_what_is_checked(source, monkeypatch):
    seen = []
    monkeypatch.setattr(
        check, "ways", lambda config, batch, devices: seen.append((config, batch)) or []
    )
    check.check(configured(source))
    ((config, batch),) = seen
    assert config == configured(source, "")
    assert batch.tokens_BT.shape == (2, 64)


def test_devices_may_lie_in_another_order_on_the_mesh_of_each_stage(
    uncut, source, tmp_path, monkeypatch
):
    """As they do on a TPU, where each mesh has its own rings."""

    def make_mesh(config, devices):
        order = [0, 1, 3, 2, 6, 7, 5, 4] if config.context < 8 else range(8)
        return mesh.make_mesh(config, [jax.devices()[n] for n in order])

    monkeypatch.setattr(legs, "make_mesh", make_mesh)
    go(tmp_path / "run", source)
    assert_same_run(tmp_path / "run", uncut, source)
