"""Stages: their spelling, what is wrong with them, and the configuration that each of them is."""

import dataclasses
import re

import pytest
from test_checks import faults
from tiny import tiny

from ringflash.config import MeshConfig
from ringflash.stages import Early, changed, history, parse, stages_of

# The quickstart: seq_len 8192, global_batch_size 1, context 8, zigzag.
WRONG = {
    "8192": "'8192': '8192' is none of until, seq_len, context, theta, as in until=1000 ",
    "until=5 seqlen=64": "'until=5 seqlen=64': 'seqlen' is none of until, seq_len, context, theta",
    "seq_len=64": "'seq_len=64': until=STEP is missing",
    "until=5 seq_len=64;": "'': until=STEP is missing",
    "until=0 seq_len=64": "until = '0': wanted a whole number, at least 1",
    "until=5 seq_len=-64": "seq_len = '-64': wanted a whole number",
    "until=5 context=1.5": "context = '1.5': wanted a whole number",
    "until=5 theta=0": "theta = '0': wanted a number above 0",
    "until=5 theta=nan": "theta = 'nan': wanted a number above 0",
    "until=5 until=6": "until stands there twice",
    "until=5 seq_len=1024; until=5": "'until=5': wanted until above 5, where the stage begins",
    "until=5 seq_len=3000": (
        "until=5: seq_len = 3000 does not divide the tokens of a step, "
        "seq_len * global_batch_size = 8192"
    ),
    "until=5 seq_len=16384": "until=5: seq_len = 16384 does not divide the tokens of a step",
    "until=5 context=3": "until=5: context = 3 does not divide mesh.context = 8",
    "until=5 context=16": "until=5: context = 16 does not divide mesh.context = 8",
    "until=5 seq_len=8": (
        "until=5: seq_len = 8, mesh.context = 8, attention.layout = zigzag: wanted a multiple of "
        "2 * context = 16; nearest: 16"
    ),
    "until=5 seq_len=4096 context=2": (
        "until=5: global_batch_size = 2, accumulation = 1, mesh.data = 1, mesh.fsdp = 4: wanted a "
        "multiple of data * fsdp = 4; nearest: 4"
    ),
}


@pytest.mark.parametrize(("text", "told"), WRONG.items(), ids=WRONG)
def test_one_fault_is_one_line(text, told):
    (line,) = faults(f"stages={text}")
    assert line.startswith(f"x.py: stages = {text!r} (command line): ")
    assert told in line


def test_all_faults_come_at_once():
    lines = faults("stages=until=x size=3; until=5 theta=-1; seq_len=64", "steps=0")
    told = [line.rpartition(": wanted")[0] or line for line in lines]
    assert len(told) == 5
    assert all(
        re.search(name, line)
        for name, line in zip(("steps", "until = 'x'", "size", "theta", "STEP"), told, strict=True)
    )
    lines = faults("stages=until=5 context=3; until=6 seq_len=3000")
    assert [re.search(r"until=\d: \w+", line)[0] for line in lines] == [
        "until=5: context",
        "until=6: seq_len",
    ]


def test_a_strategy_that_a_stage_cannot_have_is_told():
    texts = ["stages=until=5 seq_len=2048 context=2", "attention.strategy=ulysses:2*ring:4"]
    (line,) = faults(*texts)
    assert re.search(r"until=5: attention\.strategy = ulysses:2\*ring:4, mesh\.context = 2", line)


def test_where_the_devices_are_not_known_what_is_known_is_judged():
    fine = ["stages=until=5 seq_len=1024 context=2", "mesh.context=-1"]
    assert faults(*fine, platform="tpu") == []
    (line,) = faults("stages=until=5 seq_len=2 context=2", "mesh.context=-1", platform="tpu")
    assert "until=5: seq_len = 2, mesh.context = 2" in line
    assert faults(fine[0], "mesh.context=3") == faults("mesh.context=3"), "no stage of a wrong mesh"


@pytest.mark.parametrize(
    "text", ["", " ", "until=5", "until=5 theta=5e5; until=9 seq_len=64 context=1"]
)
def test_what_is_allowed(text):
    assert faults(f"stages={text}", "mesh.context=8") == []


def test_each_stage_is_a_config():
    text = "until=3 seq_len=16 context=2 theta=100; until=5 seq_len=32 context=4"
    config = tiny("stdlib", mesh__fsdp=1, stages=text)
    first, second, own = stages_of(config)
    assert [stage.begin for stage in (first, second, own)] == [0, 3, 5]
    assert own.config == dataclasses.replace(config, stages="")
    assert first.config.mesh == MeshConfig(1, 4, 2, 1)
    assert (first.config.seq_len, first.config.global_batch_size) == (16, 8)
    assert first.config.model.rope_theta == 100
    assert second.config.mesh == MeshConfig(1, 2, 4, 1)
    assert (second.config.seq_len, second.config.global_batch_size) == (32, 4)
    assert second.config.model == own.config.model
    assert [s.config.mesh.fsdp * s.config.mesh.context for s in (first, second, own)] == [8, 8, 8]


def test_without_stages_there_is_one():
    config = tiny("stdlib")
    (stage,) = stages_of(config)
    assert (stage.begin, stage.config) == (0, config)


@pytest.mark.parametrize(("fsdp", "context", "wanted"), [(1, -1, -1), (-1, 8, -1), (2, 8, 8)])
def test_devices_that_context_gives_up_go_to_fsdp(fsdp, context, wanted):
    leaves = {"mesh.fsdp": fsdp, "mesh.context": context}
    assert changed(Early(5, context=2), leaves) == {"mesh.context": 2, "mesh.fsdp": wanted}


def test_spelled_and_read():
    early, wrong = parse(" until=3  theta=5e5 ;until=7 seq_len=16")
    assert (early, wrong) == ([Early(3, theta=5e5), Early(7, seq_len=16)], [])


def test_history():
    values = [(0, 64), (100, 64), (200, 128), (300, 32)]
    assert [history(values, step) for step in (0, 200)] == [64, 64]
    assert [history(values, step) for step in (201, 300)] == ["64 until 200, then 128"] * 2
    assert history(values, 301) == "64 until 200, then 128 until 300, then 32"
