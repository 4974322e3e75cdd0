import importlib.util
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from ringflash import checks, cli, combinations, rules
from ringflash.config import leaves, load, override, resolve

CONFIGS = Path(__file__).parents[1] / "configs"
QUICKSTART = load(str(CONFIGS / "quickstart.py"))


def faults(*overrides: str, values: ConfigDict = QUICKSTART, platform: str = "cpu") -> list[str]:
    flags = [f"--config.{text}" for text in overrides]
    return checks.faults(values, path="x.py", overrides=flags, platform=platform)


def changed(key: str, value: object) -> ConfigDict:
    """The quickstart with a leaf set as a config file sets it: to anything, or to nothing."""
    values = load(str(CONFIGS / "quickstart.py"))
    values.unlock()
    section, _, name = key.rpartition(".")
    holder = values[section] if section else values
    if value is None:
        del holder[name]
    else:
        holder[name] = value
    return values


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.name)
def test_shipped_configs_are_right(path):
    platform = "tpu" if "--topology=" in path.read_text() else "cpu"
    assert checks.faults(load(str(path)), path=path.name, platform=platform) == []


def test_every_leaf_has_a_rule():
    assert set(rules.RULES) == set(leaves())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stepz=5", r"stepz = '5' .*unknown key; nearest: steps \(a whole number, at least 1\)"),
        ("learning_rate=1", r"unknown key; nearest: optimizer\.learning_rate \(a number, above 0"),
        ("model.layer=1", r"unknown key; nearest: model\.layers"),
        ("modle.layers=1", r"unknown key; nearest: model\.layers"),
        ("=5", r"unknown key"),
        ("model=5", r"a section: set its leaves, model\.preset, model\.vocab_size"),
        ("steps=abc", r"steps = 'abc' .*wanted a whole number, at least 1"),
        ("steps=", r"steps = '' .*wanted a whole number"),
        ("steps=1.5", r"steps = '1\.5' .*wanted a whole number"),
        ("steps=true", r"steps = 'true' .*wanted a whole number"),
        ("steps=0", r"steps = 0 .*wanted a whole number, at least 1"),
        ("seq_len=-4096", r"seq_len = -4096 .*at least 1"),
        ("seed=-1", r"seed = -1 .*0 to 2147483647"),
        ("optimizer.learning_rate=nan", r"learning_rate = nan .*above 0"),
        ("optimizer.learning_rate=inf", r"learning_rate = inf .*above 0"),
        ("optimizer.learning_rate=0", r"learning_rate = 0\.0 .*above 0"),
        ("optimizer.beta1=1", r"beta1 = 1\.0 .*below 1"),
        ("model.tied_embeddings=maybe", r"tied_embeddings = 'maybe' .*wanted true or false"),
        ("model.layers=-1", r"model\.layers = -1 .*or 0 for the preset's"),
        ("model.preset=big", r"preset = 'big' .*one of llama3-70b, .*quickstart, qwen3-4b, small"),
        ("model.dtype=float16", r"dtype = 'float16' .*one of bfloat16, float32"),
        ("model.remat=some", r"remat = 'some' .*one of .*none"),
        ("model.matmul=int4", r"matmul = 'int4' .*one of fp8, int8, plain"),
        ("attention.kernel=flush", r"kernel = 'flush' .*one of auto, chunked, .*reference"),
        ("attention.strategy=rings", r"strategy = 'rings' .*one of auto, all_gather, ring"),
        (
            "attention.layout=zigzig",
            r"layout = 'zigzig' .*one of balanced, contiguous, striped, zigzag",
        ),
        ("data.source=web", r"source = 'web' .*stdlib or files:GLOB"),
        ("data.source=files", r"source = 'files' .*stdlib or files:GLOB"),
        ("data.source=stdlib:x", r"source = 'stdlib:x' .*stdlib or files:GLOB"),
        ("data.tokenizer=bytes", r"tokenizer = 'bytes' .*one of byte"),
        ("data.held_out_percent=100", r"held_out_percent = 100 .*1 to 99"),
        ("checkpoint.keep=0", r"keep = 0 .*at least 1"),
        ("loss.chunk=0", r"chunk = 0 .*at least 1"),
        ("loss.vocab_chunk=0", r"vocab_chunk = 0 .*at least 1"),
        ("loss.z_loss=-1e-4", r"z_loss = -0\.0001 .*at least 0"),
        ("mesh.data=0", r"mesh\.data = 0 .*at least 1, or -1"),
        ("mesh.fsdp=-2", r"mesh\.fsdp = -2 .*at least 1, or -1"),
        ("model.heads=5", r"heads = 5 .*kv_heads = 2: wanted a multiple .*nearest: 4 or 6"),
        ("model.head_dim=31", r"head_dim = 31 .*even number; nearest: 30 or 32"),
        ("model.vocab_size=257", r"vocab_size = 257 .*at least the tokenizer's 258"),
        ("seq_len=4104", r"seq_len = 4104 .*2 \* context = 16; nearest: 4096 or 4112"),
        ("seq_len=3", r"seq_len = 3 .*nearest: 16$"),
        ("optimizer.warmup_steps=80", r"warmup_steps = 80 .*wanted warmup_steps below"),
        ("optimizer.name=sgd", r"name = 'sgd' .*one of adamw, muon"),
        ("optimizer.schedule=step", r"schedule = 'step' .*one of constant, cosine, linear, wsd"),
        ("optimizer.momentum=1", r"momentum = 1\.0 .*below 1"),
        ("optimizer.ema_decay=1", r"ema_decay = 1\.0 .*below 1"),
        ("skip_norm=-1", r"skip_norm = -1\.0 .*at least 0"),
        ("optimizer.schedule=wsd", r"decay_start = 800, .*decay_start from 5 to 79: after the"),
        (
            "mesh.context=3",
            r"product is 3, .*cpu_devices = 8; .*context = 2, .* or cpu_devices = 3",
        ),
        ("mesh.context=16", r"product is 16, .*context = 8, .*_devices = 16"),
        ("cpu_devices=12", r"product is 8, .*cpu_devices = 12; .*context = 6"),
    ],
)
def test_one_fault_is_one_line(text, told):
    (line,) = faults(text)
    assert line.startswith("x.py: ")
    assert "(command line)" in line
    assert re.search(told, line), line


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["mesh.tensor=4", "mesh.context=2"], r"model\.kv_heads = 2, mesh\.tensor = 4 .*multiple"),
        (["mesh.data=2", "mesh.context=4"], r"data \* fsdp = 2; nearest: 2$"),
        (["mesh.data=-1", "mesh.fsdp=-1"], r"wanted -1 on one axis at most"),
        (["mesh.data=3", "mesh.context=-1"], r"product is 3, .*data = 2, .*context = -1"),
        (["mesh.data=-1", "mesh.context=4"], r"data \* fsdp = 2; nearest: 2$"),
        (
            ["optimizer.schedule=wsd", "optimizer.decay_start=4"],
            r"decay_start from 5 to 79",
        ),
        (
            ["optimizer.schedule=wsd", "optimizer.warmup_steps=80"],
            r"wanted warmup_steps below decay_steps",
        ),
        (["attention.layout=contiguous", "seq_len=4097"], r"of context = 8; nearest: 4096 or 4104"),
        (["attention.layout=striped", "seq_len=4097"], r"of context = 8; nearest: 4096 or 4104"),
    ],
)
def test_leaves_that_do_not_fit_together(texts, told):
    (line,) = faults(*texts)
    assert re.search(told, line), line


@pytest.mark.parametrize(
    "texts",
    [
        ["mesh.context=4"],
        ["mesh.context=-1"],
        ["mesh.context=1"],
        ["attention.layout=contiguous", "seq_len=4104"],
        ["attention.kernel=auto"],
        ["data.source=files:/tmp/**/*.txt"],
        ["optimizer.learning_rate=1"],
        ["optimizer.schedule=wsd", "optimizer.decay_start=5"],
        ["optimizer.schedule=wsd", "optimizer.decay_start=79"],
        ["optimizer.schedule=constant", "optimizer.warmup_steps=80"],
        ["checkpoint.every=0"],
        ["model.tied_embeddings=false"],
        ["mesh.context=16", "cpu_devices=16"],
    ],
    ids=" ".join,
)
def test_what_is_allowed(texts):
    assert faults(*texts) == []


def test_an_accelerator_has_its_own_number_of_devices():
    assert faults("mesh.context=16", platform="tpu") == []
    assert len(faults("mesh.context=-1", "mesh.data=-1", platform="tpu")) == 1


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("steps", "60", r"^x\.py: steps = '60': wanted a whole number, at least 1$"),
        ("steps", True, r"steps = True: wanted a whole number"),
        ("steps", 5.0, r"steps = 5\.0: wanted a whole number"),
        ("model.tied_embeddings", 1, r"tied_embeddings = 1: wanted true or false"),
        ("optimizer.learning_rate", "1", r"learning_rate = '1': wanted a number, above 0"),
        ("optimizer.learning_rate", math.inf, r"learning_rate = inf: wanted a number, above 0"),
        ("model.dtype", 32, r"dtype = 32: wanted a name, one of"),
        ("steps", None, r"steps is missing: wanted a whole number"),
        ("loss.chunk", None, r"loss\.chunk is missing: wanted a whole number"),
        ("steps", ConfigDict({"a": 1}), r"steps = a section: wanted a whole number"),
        ("stepz", 5, r"stepz = 5: unknown key; nearest: steps \(a whole number, at least 1\)"),
        ("model.widht", 5, r"model\.widht = 5: unknown key; nearest: model\.width"),
        ("modle", ConfigDict({"width": 1}), r"modle: unknown section; nearest: model"),
        (
            "loss",
            5,
            r"loss = 5: wanted a section with loss\.chunk, loss\.vocab_chunk, loss\.z_loss$",
        ),
    ],
)
def test_what_a_file_says_wrong(key, value, told):
    (line,) = faults(values=changed(key, value))
    assert re.search(told, line), line


def test_an_int_may_stand_for_a_float():
    values = changed("optimizer.learning_rate", 1)
    assert faults(values=values) == []
    assert type(resolve(values).optimizer.learning_rate) is float


def test_a_missing_section_tells_each_leaf():
    lines = faults("loss.chunk=5", values=changed("loss", None))
    assert lines == [
        "x.py: loss.chunk is missing: wanted a whole number, at least 1",
        "x.py: loss.vocab_chunk is missing: wanted a whole number, at least 1",
        "x.py: loss.z_loss is missing: wanted a number, at least 0",
    ]


def test_all_faults_come_at_once():
    lines = faults("stepz=5", "steps=abc", "seq_len=-1", "mesh.context=3", "model.heads=5")
    assert [re.split(" = ", line)[0] for line in lines] == [
        "x.py: stepz",
        "x.py: steps",
        "x.py: seq_len",
        "x.py: mesh.data",
        "x.py: model.heads",
    ]


@given(key=st.sampled_from(sorted(leaves())), text=st.text(max_size=8) | st.floats().map(str))
def test_what_passes_the_checks_passes_config_flags(key, text):
    flag = f"--config.{key}={text}"
    if not checks.faults(QUICKSTART, path="x.py", overrides=[flag]):
        resolve(override(QUICKSTART, [flag]))


@given(
    sizes=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    devices=st.integers(1, 64),
    open_axis=st.none() | st.integers(0, 3),
)
def test_the_mesh_that_is_offered_fits(sizes, devices, open_axis):
    if open_axis is not None:
        sizes[open_axis] = -1
    keys = [*combinations.MESH, "cpu_devices"]
    told = dict(
        combinations.faults(dict(zip(keys, [*sizes, devices], strict=True)), platform="cpu")
    )
    fixed = math.prod(size for size in sizes if size > 0)
    assert bool(told) == (devices % fixed != 0)
    for fault in told.values():
        offered = [int(size) for size in re.findall(r"mesh\.\w+ = (-?\d+)", fault)]
        assert devices % math.prod(size for size in offered if size > 0) == 0
        assert all(new <= old for new, old in zip(offered, sizes, strict=True))


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?", "a\\b", "gs://bucket/a"])
def test_a_workdir_that_loses_checkpoints_is_refused(name):
    fault = checks.workdir_fault(f"runs/{name}" if "://" not in name else name)
    assert fault is not None
    assert name in fault


def test_a_workdir_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    fault = checks.workdir_fault(str(tmp_path / "file" / "run"))
    assert fault is not None
    assert f"{tmp_path / 'file'} is no folder" in fault


def test_a_workdir_that_holds_another_users_files_is_refused(tmp_path, monkeypatch):
    """Root may write anything, so the answer is made up."""
    (tmp_path / "metrics.jsonl").write_text("")
    assert checks.workdir_fault(str(tmp_path)) is None
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "metrics.jsonl")
    fault = checks.workdir_fault(str(tmp_path))
    assert fault == f"--workdir={tmp_path}: {tmp_path}/metrics.jsonl cannot be written"


def test_looking_at_a_workdir_makes_nothing(tmp_path):
    assert checks.workdir_fault(str(tmp_path / "a" / "b")) is None
    assert list(tmp_path.iterdir()) == []


def test_probe_makes_the_folder_and_leaves_no_file(tmp_path):
    assert checks.probe_workdir(tmp_path / "a" / "b") is None
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_probe_says_why_a_workdir_cannot_be_written(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    fault = checks.probe_workdir(tmp_path)
    assert fault is not None
    assert "No space left on device" in fault


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_products_in_8_bits_need_an_extra(name, monkeypatch, capsys):
    """Told with all else that is wrong, before a device is touched."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "qwix" else real(n))
    (told,) = faults(f"model.matmul={name}")
    assert re.search(rf"matmul = '{name}' .*pip install 'ringflash\[quant\]'", told)
    assert faults("model.matmul=plain") == []
    monkeypatch.setattr(cli.startup, "prepare", lambda *_: pytest.fail("a device is touched"))
    path = CONFIGS / "quickstart.py"
    assert cli.main(["check", f"--config={path}", f"--config.model.matmul={name}"]) == 3
    assert "ringflash[quant]" in capsys.readouterr().err
