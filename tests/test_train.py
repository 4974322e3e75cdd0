import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import BASE, VALUES, tiny, tiny_parts, write_documents

import ringflash
from ringflash import train as module
from ringflash.checkpoint import Checkpoints
from ringflash.config import leaves
from ringflash.evaluate.run import evaluate
from ringflash.exits import ConfigFault, DataFault, Diverged, Preempted
from ringflash.train import train

pytestmark = pytest.mark.slow  # whole runs: with the oldest JAX only, in `.ci/run`

STEPS = 8
# All-gather compiles in a third of the time of the ring; nothing here is about either.
RUN = {
    "steps": STEPS,
    "attention__strategy": "all_gather",
    "checkpoint__every": 3,
    "checkpoint__keep": 9,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="module")
def uncut(source, tmp_path_factory):
    """The workdir of a run that was not stopped."""
    workdir = tmp_path_factory.mktemp("uncut")
    start(workdir, source)
    return workdir


def start(workdir, source, **changes):
    workdir.mkdir(exist_ok=True)
    train(configured(source, **changes), workdir, sources=dict.fromkeys(leaves(), "test"))


def configured(source, **changes):
    return tiny(source, **(RUN | changes))


def records(workdir, name):
    """{step: value} of every line that has the metric; each step stands there once."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    found = [(line["step"], line[name]) for line in lines if name in line]
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    return dict(found)


def saved(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").glob("[0-9]*"))


def final_state(workdir, source, **changes):
    """The newest checkpoint, as NumPy arrays."""
    abstract = tiny_parts(source, **(RUN | changes)).own.abstract_state
    checkpoints = Checkpoints(workdir, keep=1)
    restored = checkpoints.restore(abstract)
    checkpoints.close()
    assert restored.step == int(restored.state.step)
    return jax.tree.map(np.asarray, restored.state)


def assert_same_run(workdir, uncut, source, **changes):
    """Bit for bit: every loss and gradient norm, every evaluation, every parameter and moment."""
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert records(workdir, name) == records(uncut, name)
    found, wanted = (final_state(folder, source, **changes) for folder in (workdir, uncut))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def killed_after(uncut, step, workdir):
    """What a run leaves that is killed when `step` was its last checkpoint, some steps later."""
    shutil.copytree(uncut, workdir)
    for later in saved(workdir):
        if later > step:
            shutil.rmtree(workdir / "checkpoints" / str(later))
    return workdir


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(step) sends a signal once that many steps are done."""
    requests = []
    true_loop, true_update = module.loop, module.update

    def loop(run, out, stop):
        requests.append(stop)
        true_loop(run, out, stop)

    def arrange(step, signum=signal.SIGTERM):
        def update(run):
            metrics = true_update(run)
            if run.step == step:
                os.kill(os.getpid(), signum)
                while not requests[-1].requested:
                    pass
            return metrics

        monkeypatch.setattr(module, "update", update)

    monkeypatch.setattr(module, "loop", loop)
    yield arrange
    monkeypatch.undo()


def test_what_a_run_leaves(uncut):
    assert saved(uncut) == [3, 6, 8]
    assert {path.name for path in uncut.iterdir()} == {
        "checkpoints",
        "config.json",
        "eval",
        "log.txt",
        "metrics.jsonl",
        "tensorboard",
    }
    losses = records(uncut, "train/loss")
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < 0.8 * losses[1]
    assert list(records(uncut, "eval/perplexity")) == [1, STEPS]
    assert {path.name for path in (uncut / "eval").iterdir()} == {"1.json", f"{STEPS}.json"}
    assert json.loads((uncut / "config.json").read_text())["steps"] == {"value": 8, "from": "test"}


def test_the_compile_is_no_part_of_a_step(uncut):
    seconds, compile_seconds = (
        records(uncut, "perf/step_seconds"),
        records(uncut, "perf/compile_seconds"),
    )
    assert list(compile_seconds) == [1]
    assert seconds[1] < compile_seconds[1]
    for step, rate in records(uncut, "perf/tokens_per_second").items():
        assert rate == pytest.approx(128 / seconds[step])
    assert all(
        0 <= wait < seconds[step] for step, wait in records(uncut, "data/wait_seconds").items()
    )


@pytest.mark.parametrize("step", [3, 6])
def test_a_killed_run_goes_on_from_its_checkpoint(uncut, source, tmp_path, step):
    workdir = killed_after(uncut, step, tmp_path / "run")
    start(workdir, source)
    assert saved(workdir) == [3, 6, 8]
    assert_same_run(workdir, uncut, source)
    assert list(records(workdir, "perf/compile_seconds")) == [1, step + 1]


@pytest.mark.parametrize(("step", "signum"), [(4, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_stopped_run_goes_on_where_it_was(uncut, source, tmp_path, stop_at, step, signum):
    """After step 1 the first evaluation is still owed."""
    workdir = tmp_path / "run"
    stop_at(step, signum)
    with pytest.raises(Preempted, match=f"stopped and saved at step {step}") as stop:
        start(workdir, source)
    assert stop.value.code == 42
    assert saved(workdir)[-1] == step
    start(workdir, source)
    assert_same_run(workdir, uncut, source)


def test_a_signal_at_the_last_step_leaves_the_evaluation_to_the_next_start(
    uncut, source, tmp_path, stop_at, capsys
):
    workdir = killed_after(uncut, 6, tmp_path / "run")
    stop_at(STEPS)
    with pytest.raises(Preempted):
        start(workdir, source)
    assert list(records(workdir, "eval/perplexity")) == [1]
    capsys.readouterr()
    start(workdir, source)
    said = capsys.readouterr().out
    assert "8 steps are done and steps=8: nothing left to train" in said
    assert "held-out documents at step 8" in said
    assert_same_run(workdir, uncut, source)


def test_a_longer_run_repeats_the_shorter_one(uncut, source, tmp_path):
    start(tmp_path / "run", source, steps=5)
    assert saved(tmp_path / "run") == [3, 5]
    start(tmp_path / "run", source)
    assert list(records(tmp_path / "run", "eval/loss")) == [1, 5, 8]
    assert records(tmp_path / "run", "train/loss") == records(uncut, "train/loss")
    found, wanted = final_state(tmp_path / "run", source), final_state(uncut, source)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_run_goes_on_on_another_mesh(uncut, source, tmp_path, capsys):
    workdir = killed_after(uncut, 3, tmp_path / "run")
    other = {"mesh__data": 2, "mesh__context": 4, "attention__strategy": "ring"}
    start(workdir, source, attention__layout="contiguous", **other)
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        found, wanted = records(workdir, name), records(uncut, name)
        assert found.keys() == wanted.keys()
        np.testing.assert_allclose([*found.values()], [*wanted.values()], rtol=1e-5)
    assert "ring over context=4" in capsys.readouterr().out


def contents(workdir):
    """Every file and folder with its hash, but for what is appended to at each start."""
    return {
        path.relative_to(workdir): path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest()
        for path in workdir.rglob("*")
        if path.name != "log.txt"
    }


def test_a_finished_run_is_left_as_it_is(uncut, source, tmp_path, capsys):
    workdir = killed_after(uncut, STEPS, tmp_path / "run")
    shutil.rmtree(workdir / "tensorboard")
    before = contents(workdir)
    start(workdir, source)
    shutil.rmtree(workdir / "tensorboard")
    assert contents(workdir) == before
    assert "nothing left to train" in capsys.readouterr().out


REFUSED = {
    "width": (
        {"model__mlp_width": 64},
        r"checkpoints/8 is a checkpoint of another model or optimizer: .*down_FD: found float32\[2,48,32\]",
    ),
    "layers": ({"model__layers": 3}, "is a checkpoint of another model"),
    "untied": ({"model__tied_embeddings": False}, "unembedding_DV: found nothing"),
    "optimizer": (
        {"optimizer__name": "muon"},
        "of another model or optimizer: .*inner_states.adam.*found nothing",
    ),
    "average": ({"optimizer__ema_decay": 0.9}, r"opt_state\.2\.steps: found nothing"),
    "theta": (
        {"model__rope_theta": 5e5},
        r"8 is a checkpoint of another model: model.rope_theta: found 10000.0, wanted 500000.0",
    ),
    "epsilon": ({"model__norm_eps": 1e-6}, "model.norm_eps: found 1e-05, wanted 1e-06"),
    "seed": ({"seed": 7}, "cannot go on: the saved run read other data: seed: saved 0, now 7"),
    "seq_len": ({"seq_len": 128}, "seq_len: saved 64, now 128"),
    "batch": ({"global_batch_size": 4}, "global_batch_size: saved 2, now 4"),
    "held out": ({"data__held_out_percent": 26}, "part: saved 'training, 25% held out', now "),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_of_another_run_is_refused_and_left_alone(uncut, source, changes, reason):
    before = contents(uncut)
    with pytest.raises(ConfigFault, match=reason) as refused:
        start(uncut, source, **(changes | {"steps": 20}))
    assert refused.value.code == 3
    assert "\n" not in str(refused.value)
    assert contents(uncut) == before


def test_other_documents_are_refused(uncut, tmp_path):
    source = write_documents(tmp_path / "documents")
    (tmp_path / "documents" / "0.txt").write_text("something else")
    before = contents(uncut)
    with pytest.raises(ConfigFault, match=r"the saved run read other data: .*source"):
        start(uncut, source)
    assert contents(uncut) == before


def test_data_that_ends_is_told_and_what_was_done_is_saved(source, tmp_path, uncut, capsys):
    workdir = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(
            DataFault, match=r"ended after step \d+ of 99: data.epochs holds no more"
        ) as stop:
            start(workdir, source, steps=99, data__epochs=1, checkpoint__every=0)
        last = max(records(workdir, "train/loss"))
        assert STEPS < last == saved(workdir)[-1]
        assert f"step {last} is saved" in str(stop.value)
        assert "already saved" not in capsys.readouterr().err
        assert stop.value.code == 4
    found = records(workdir, "train/loss")
    wanted = records(uncut, "train/loss")
    assert {step: found[step] for step in wanted} == wanted


def test_documents_that_vanish_are_told_and_what_was_done_is_saved(tmp_path, monkeypatch):
    source, true_update = write_documents(tmp_path / "documents"), module.update

    def update(run):
        if run.step == 2:  # some batches are read ahead
            shutil.rmtree(tmp_path / "documents")
        return true_update(run)

    monkeypatch.setattr(module, "update", update)
    with pytest.raises(DataFault, match=r"cannot read document .*; step \d+ is saved") as stop:
        start(tmp_path / "run", source, steps=99, checkpoint__every=0)
    assert stop.value.code == 4
    assert 2 < saved(tmp_path / "run")[-1] == max(records(tmp_path / "run", "train/loss"))


def test_a_run_that_diverges_saves_nothing_of_it(source, tmp_path):
    changes = {
        "optimizer__learning_rate": 1e16,
        "checkpoint__every": 1,
        "max_skipped": 0,
    }
    reason = "train/loss is nan at step 2, which is not saved"
    with pytest.raises(Diverged, match=reason) as stop:
        start(tmp_path / "run", source, **changes)
    assert stop.value.code == 5
    assert saved(tmp_path / "run") == [1]
    state = final_state(tmp_path / "run", source)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["train/loss", "train/grad_norm"])
def test_steps_that_are_not_finite_are_skipped_but_not_for_ever(source, name, value):
    run = SimpleNamespace(step=3, skipped=0, config=configured(source, max_skipped=2))
    good = dict.fromkeys(module.FINITE, 1.0) | {"train/skipped": 0}
    bad = good | {name: value, "train/skipped": 1}
    assert [module.check_skipped(run, each) for each in (bad, bad, good, bad, bad)] == [
        *(True, True, False),
        *(True, True),
    ]
    with pytest.raises(Diverged, match=rf"{name} is {value} at step 3.*3 in a row, of .* = 2"):
        module.check_skipped(run, bad)


def test_spikes_are_skipped_and_told_but_not_for_ever(source, caplog):
    """They count in a row together with steps that are not finite."""
    run = SimpleNamespace(step=3, skipped=0, config=configured(source, max_skipped=2, skip_norm=5))
    good = dict.fromkeys(module.FINITE, 1.0) | {"train/skipped": 0}
    spike = good | {"train/grad_norm": 7.25, "train/skipped": 1}
    odd = good | {"train/loss": float("nan"), "train/skipped": 1}
    told = "train/grad_norm is 7.25, above skip_norm = 5, at step 3"
    assert [module.check_skipped(run, each) for each in (spike, good, odd, spike)] == [
        *(True, False, True, True)
    ]
    assert caplog.messages[0] == f"{told}: no update, 1 in a row (at most 2)"
    with pytest.raises(Diverged, match=f"{told}, which is not saved; 3 in a row, of .* = 2"):
        module.check_skipped(run, spike)


def test_a_run_goes_on_after_spikes(source, uncut, tmp_path):
    """The first gradient that is larger than the first step's is left out; with all, the run ends."""
    norms = records(uncut, "train/grad_norm")
    first = next(step for step in norms if norms[step] > norms[1])
    limit = (norms[1] + norms[first]) / 2
    with pytest.raises(Diverged, match=r"above skip_norm = .*, of max_skipped = 3"):
        start(tmp_path / "never", source, skip_norm=min(norms.values()) / 9)
    start(tmp_path / "run", source, skip_norm=limit, steps=first + 1)
    found = records(tmp_path / "run", "train/skipped")
    assert [found[step] for step in range(1, first + 1)] == [0.0] * (first - 1) + [1.0]


def test_parameters_that_are_not_finite_stop_the_run_at_once(source):
    run = SimpleNamespace(step=3, skipped=0, config=configured(source, max_skipped=2))
    metrics = dict.fromkeys(module.FINITE, 1.0) | {"train/skipped": 0}
    with pytest.raises(Diverged, match="train/param_norm is inf at step 3, which is not saved"):
        module.check_skipped(run, metrics | {"train/param_norm": float("inf")})


def test_a_run_goes_on_after_a_step_that_is_not_finite(source, tmp_path, monkeypatch, capsys):
    """As if the batch of step 2 had not been: one update less, and the schedule one behind."""
    real = module.update

    def poisoned(run):
        if run.step != 1:
            return real(run)
        good = run.state
        run.state = good._replace(params=jax.tree.map(lambda x: x * np.nan, good.params))
        kept = jax.tree.map(np.asarray, good)
        metrics = real(run)
        run.state = jax.device_put(kept, jax.tree.map(lambda x: x.sharding, run.state))
        return metrics

    monkeypatch.setattr(module, "update", poisoned)
    start(tmp_path / "run", source)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    skipped = [(line["step"], line["train/skipped"]) for line in lines if "train/skipped" in line]
    assert skipped == [(n, float(n == 2)) for n in range(1, STEPS + 1)]
    assert (
        "train/loss is nan at step 2: no update, 1 in a row"
        in (tmp_path / "run" / "log.txt").read_text()
    )


AVERAGED = {"optimizer__name": "muon", "optimizer__ema_decay": 0.7}


def test_a_run_with_muon_and_an_average_goes_on_bit_for_bit(source, tmp_path, capsys):
    """The average is what is evaluated, at the end and by `ringflash eval`, and none other."""
    uncut, cut = tmp_path / "uncut", tmp_path / "cut"
    start(uncut, source, **AVERAGED)
    killed_after(uncut, 3, cut)
    start(cut, source, **AVERAGED)
    assert_same_run(cut, uncut, source, **AVERAGED)
    losses = records(uncut, "train/loss")
    assert losses[STEPS] < 0.9 * losses[1]

    state = final_state(uncut, source, **AVERAGED)
    parts = tiny_parts(source, **(RUN | AVERAGED))
    mean = state.opt_state[-1].mean
    assert int(state.opt_state[-1].steps) == STEPS
    found, last = (parts.score(params, STEPS)[0].perplexity for params in (mean, state.params))
    assert records(uncut, "eval/perplexity")[STEPS] == pytest.approx(found, rel=1e-6)
    assert last != pytest.approx(found, rel=1e-3)

    (cut / "eval" / "8.json").unlink()
    evaluate(configured(source, **AVERAGED), cut)
    name = "eval/8.json"
    assert json.loads((cut / name).read_text()) == json.loads((uncut / name).read_text())


def test_a_run_with_its_optimizer_on_the_host_goes_on_bit_for_bit(uncut, source, tmp_path, capsys):
    """Also one that began with it on the devices."""
    offload = {"optimizer__offload": True}
    cut = killed_after(uncut, 3, tmp_path / "cut")
    start(cut, source, **offload)
    assert_same_run(cut, uncut, source, **offload)


def test_eval_scores_the_newest_checkpoint(uncut, source, tmp_path, capsys):
    workdir = killed_after(uncut, STEPS, tmp_path / "run")
    (workdir / "eval" / "8.json").unlink()
    evaluate(configured(source), workdir)
    name = "eval/8.json"
    assert json.loads((workdir / name).read_text()) == json.loads((uncut / name).read_text())
    perplexity = records(uncut, "eval/perplexity")[STEPS]
    assert re.search(rf"\n  all +192 +{perplexity:.3f} ", capsys.readouterr().out)


def test_eval_refuses_another_model_and_an_empty_workdir(uncut, source, tmp_path):
    with pytest.raises(ConfigFault, match=r"of another model: model\.rope_theta"):
        evaluate(configured(source, model__rope_theta=5e5), uncut)
    with pytest.raises(ConfigFault, match="holds no checkpoint to evaluate"):
        evaluate(configured(source), tmp_path)


class Command:
    """`ringflash train` in a process of its own, with the session's compilation cache."""

    def __init__(self, source, workdir, steps):
        values = VALUES | {"data.source": source, "steps": steps}
        values["attention.strategy"] = RUN["attention__strategy"]
        flags = [f"--config.{key}={value}" for key, value in values.items()]
        arguments = ["train", f"--config={BASE}", f"--workdir={workdir}", *flags]
        path = os.pathsep.join([str(Path(ringflash.__file__).parents[1]), *sys.path])
        cache = str(jax.config.jax_compilation_cache_dir)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ringflash.cli", *arguments],
            env={**os.environ, "PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": cache},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def signal_after(self, start, signum):
        """Once a line begins like this, send the signal."""
        assert any(line.startswith(start) for line in self.process.stdout)
        self.process.send_signal(signum)

    def end(self):
        """Exit code and what was said on standard output (from here on) and error."""
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def test_the_command_stops_on_signals_and_goes_on(source, uncut, tmp_path):
    workdir, last = tmp_path / "run", 0
    for signum in (signal.SIGTERM, signal.SIGINT):
        command = Command(source, workdir, steps=100_000)
        command.signal_after(f"step {last + 2}/", signum)
        code, _, err = command.end()
        assert code == 42, err
        first, second = err.splitlines()
        assert first.startswith(f"{signum.name}: finishing this step, saving a checkpoint")
        assert second.startswith("ringflash: stopped and saved at step ")
        last = int(re.search(r"at step (\d+)", second)[1])
        assert saved(workdir)[-1] == last == max(records(workdir, "train/loss"))
    code, out, err = Command(source, workdir, steps=last + 2).end()
    assert (code, err) == (0, "")
    assert f"resuming from step {last} of {workdir}" in out
    losses = records(workdir, "train/loss")
    assert list(losses) == list(range(1, last + 3))
    known = records(uncut, "train/loss")
    common = losses.keys() & known.keys()
    assert {step: losses[step] for step in common} == {step: known[step] for step in common}
    assert list(records(workdir, "eval/loss")) == [1, last + 2]
