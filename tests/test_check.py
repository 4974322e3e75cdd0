"""`ringflash check` agrees where it should, and sees what it is there to see."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import tiny, write_documents

from ringflash import check, cli, curve
from ringflash.config import MeshConfig
from ringflash.data.batch import Batch, unpacked
from ringflash.exits import Unequal


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    source = write_documents(tmp_path_factory.mktemp("documents"))
    return tiny(source, mesh__context=2, cpu_devices=2)


def few(names):
    """Only these ways."""
    every = check.ways
    return lambda *a: (way for way in every(*a) if way.name in names)


@pytest.mark.slow
def test_ways_agree_and_nothing_leaks(config, monkeypatch, capsys):
    names = ["strategy all_gather", "layout balanced", "one row at a time", "one document a row"]
    monkeypatch.setattr(check, "ways", few(names))
    check.check(config)
    said = capsys.readouterr().out
    assert all(name in said for name in names), said
    assert said.count("others moved by 0 nats") == 2


def test_a_way_that_differs_is_named(config, monkeypatch, capsys):
    """A layout that loses the order of positions must not pass."""
    wrong = dataclasses.replace(config.model, rope_theta=100.0)
    way = check.Way("another model", dataclasses.replace(config, model=wrong))
    monkeypatch.setattr(check, "ways", lambda *a: iter([way]))
    with pytest.raises(Unequal, match="differs too much: another model"):
        check.check(config)


def test_a_leak_is_seen(config, monkeypatch):
    """Losses that see the whole row move when another document does."""
    real = check.batch_losses

    def leaky(graph, chunk, mesh, params, batch):
        return real(graph, chunk, mesh, params, batch) + batch.tokens_BT.sum() * 1e-3

    monkeypatch.setattr(check, "ways", lambda *a: iter(()))
    monkeypatch.setattr(check, "batch_losses", leaky)
    with pytest.raises(Unequal, match=r"another document.*the future"):
        check.check(config)


def test_every_config_of_the_tree_has_ways(config):
    batch, packed = check.first_batch(config)
    assert packed
    names = [way.name for way in check.ways(config, batch, 8)]
    assert len(names) == len(set(names))
    for wanted in ("mesh of one device", "mesh fsdp=2 context=2 tensor=2", "layout striped"):
        assert wanted in names
    assert (
        MeshConfig(1, 1, 2, 1) not in [way.config.mesh for way in check.ways(config, batch, 2)][:1]
    )


def test_unpacked_keeps_each_target_once():
    row = np.arange(8, dtype=np.int32)[None]
    segments = np.array([[0, 0, 0, 1, 1, 2, -1, -1]], np.int32)
    mask = np.array([[1, 1, 0, 1, 0, 0, 0, 0]], bool)
    alone = unpacked(Batch(row, row + 1, row, segments, mask))
    assert alone.tokens_BT.shape == (3, 8)
    assert alone.loss_mask_BT.sum(1).tolist() == [2, 1, 0]
    assert (alone.segment_ids_BT >= 0).sum(1).tolist() == [3, 2, 1]
    assert len(jax.devices()) == 8


@pytest.mark.slow
def test_the_losses_of_ten_steps_agree(config, monkeypatch, capsys):
    names = ["mesh of one device", "accumulation 2", "remat offload", "layout striped"]
    monkeypatch.setattr(curve, "ways", few([*names, "one row at a time"]))
    curve.curves(config, 10)
    said = capsys.readouterr().out
    assert "10 steps as configured" in said
    assert all(name in said for name in names), said
    assert "one row at a time" not in said, "that one takes other steps"


def test_a_curve_that_parts_is_named(config, monkeypatch):
    """The first loss is the same, and so is the gradient: another learning rate shows only then."""
    faster = dataclasses.replace(config.optimizer, learning_rate=2 * config.optimizer.learning_rate)
    way = check.Way("faster", dataclasses.replace(config, optimizer=faster))
    monkeypatch.setattr(curve, "ways", lambda *a: iter([way]))
    with pytest.raises(Unequal, match="loss curve differs too much: faster"):
        curve.curves(config, 3)


def test_steps_are_a_number_and_of_check_alone(capsys):
    path = str(Path(__file__).parents[1] / "configs" / "quickstart.py")
    assert cli.main(["check", f"--config={path}", "--steps=ten"]) == 3
    assert "--steps=ten: wanted whole numbers above 0" in capsys.readouterr().err
    assert cli.main(["show-config", f"--config={path}", "--steps=3"]) == 3
    assert "--steps: unknown flag" in capsys.readouterr().err
