"""`ringflash plan --config=...`: what is told of facts, and steps compiled from the command to the answer."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from ringflash import cli
from ringflash.plan import compiler, step_run, step_search
from ringflash.plan.compiler import in_child
from ringflash.plan.memory import Buffer
from ringflash.plan.program import Call, Place, Program, Transfer
from ringflash.plan.step import FLAGS, StepFacts, from_json
from ringflash.plan.step_options import parse

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.py")
TPU = ["--config.model.dtype=bfloat16", "--config.attention.kernel=tpu"]
ASKED = [f"--config={QUICKSTART}", "--topology=v5e:2x4", *TPU]
GIB = 2**30
HBM = 15.75
OWN = "jit(step)/jvp()/while/body/attention/ring(tpu)/shard_map/ppermute"


def facts(gib=1.0, *, code=0, fits=True, kernels=("k",)):
    """Of a step that needs so much, and sends one array round a ring."""
    pairs = tuple((n, (n + 1) % 8) for n in range(8))
    place = Place("body", ("while",), 7, (), OWN)
    ring = Transfer("p", "collective-permute", 2**20, place, pairs, kernels=kernels)
    gather = Transfer("g", "all-gather", 2**26, Place("main"), group=8, span=7, synchronous=True)
    program = Program(8, [ring, gather], [Call("k", place)], [])
    return StepFacts(
        mesh={"data": 1, "fsdp": 1, "context": 8, "tensor": 1},
        strategy="ring",
        fits=fits,
        total_bytes=int(gib * GIB),
        parameter_bytes=100,
        optimizer_bytes=200,
        batch_bytes=300,
        code_bytes=code,
        host_bytes=0,
        buffers=(Buffer(2 * GIB, "f32[4]", "jit(step)/a/b", "ringflash/x.py:1"),),
        compile_seconds=12.0,
        hop_links=1,
        program=program if fits else None,
    )


@pytest.fixture
def told(monkeypatch, capsys):
    """told(facts, *arguments, code): what is said, and what is said on standard error."""

    def told(found, *arguments, code=0):
        monkeypatch.setattr(step_run, "compiled", lambda asked: [found])
        monkeypatch.setattr(step_search, "nearest", lambda *asked: None)
        assert cli.main(["plan", *ASKED, *arguments]) == code
        return capsys.readouterr()

    return told


def records(text):
    return [one for line in text.splitlines() for one in json.loads(line)["records"]]


def test_tables(told):
    said = told(facts(4, code=GIB), "--price=3.6").out
    assert "yes: 5.00 of 15.75 GiB, 68% to spare" in said
    assert "tokens per step      8,192" in said
    (row,) = (line.split() for line in said.splitlines() if "f32[4]" in line)
    assert row == ["1", "2.000", "f32[4]", "a/b", "ringflash/x.py:1"]
    assert "all-gather over ICI" in said
    assert "collective-permute" not in said
    assert "per billion tokens" in said
    assert "warning: heads of 32 lie in memory as 128 wide: padding" in said
    assert "warning: all-gather over ICI is not hidden" in said
    assert "is to spare" not in said
    assert "transfers stand under no kernel" not in said


def test_a_record(told):
    first, *warned = records(told(facts(4), "--json", "--price=3.6").out)
    assert first["fits"]
    assert first["hbm_bytes"] == HBM * GIB
    assert first["memory"]["temporary_bytes"] == 4 * GIB - 600
    assert "program" not in first["memory"]
    time = first["time"]
    cost = 3.6 * 8 / 3600 * 1e9 / time["tokens_per_second"]
    assert first["cost_per_billion_tokens"] == pytest.approx(cost)
    assert all(one.keys() == {"warning"} for one in warned)


@pytest.mark.parametrize(
    ("found", "code", "fits"),
    [
        (facts(15.75), 0, True),
        (facts(15.76), 1, False),
        (facts(15, code=GIB), 1, False),
        (facts(20, fits=False), 1, False),
        (facts(15, fits=False), 1, False),  # room, but in pieces
    ],
)
def test_code_lies_in_the_same_memory(told, found, code, fits):
    said = told(found, "--json", code=code)
    assert records(said.out)[0]["fits"] == fits
    need = (found.total_bytes + found.code_bytes) / GIB
    wanted = f"does not fit v5e:2x4: a device needs {need:.2f} GiB and has 15.75"
    assert (wanted in said.err) == (not fits)


def test_what_does_not_fit_has_no_time(told):
    first, *_ = records(told(facts(20, fits=False), "--json", code=1).out)
    assert "time" not in first


def test_warnings(told):
    assert "warning: only 5% of a device's memory is to spare" in told(facts(0.95 * HBM)).out
    assert "of a device's memory" not in told(facts(0.89 * HBM)).out
    assert (
        "warning: 1 of the ring's 1 transfers stand under no kernel" in told(facts(kernels=())).out
    )
    wide = told(facts(), "--config.model.head_dim=128")
    assert "padding" not in wide.out


def test_what_cannot_be_put_together_is_a_fault_of_the_configuration(told):
    assert "heads do not fit" in told("ValueError: heads do not fit", code=3).err
    assert "XlaRuntimeError: INTERNAL" in told("XlaRuntimeError: INTERNAL: no", code=1).err


def test_json_and_back():
    for found in (facts(), facts(fits=False)):
        assert from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def planned(capsys, *arguments, code=0):
    """What the command says from end to end, and what a run's own program says of its memory."""
    assert cli.main(["plan", *arguments, "--json"]) == code
    said = capsys.readouterr()
    first, *others = records(said.out)
    return first, said.err, *others


def by_a_run(*arguments):
    options = parse(arguments)
    asked = [dataclasses.asdict(options.config), options.where.topology]
    return in_child("chores:compiled_by_a_run", asked, seconds=600, flags=FLAGS)


def state_bytes(found):
    memory = found["memory"]
    return memory["parameter_bytes"] + memory["optimizer_bytes"] + memory["batch_bytes"]


@pytest.mark.slow
def test_simulated_devices_from_end_to_end(capsys, monkeypatch):
    """libtpu is not needed."""
    asked = [f"--config={QUICKSTART}", "--topology=cpu:8", "--config.seq_len=512"]
    run = by_a_run(*asked)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    found, *_ = planned(capsys, *asked)
    assert found["fits"]
    assert found["memory"]["total_bytes"] == run["total"]
    assert state_bytes(found) == run["arguments"]
    assert found["memory"]["temporary_bytes"] == run["total"] - run["arguments"]
    assert "time" not in found


@pytest.mark.slow
def test_an_optimizer_on_the_host_takes_nothing_of_a_device(capsys):
    asked = [*ASKED, "--config.seq_len=512", "--config.model.layers=1"]
    small = ["--config.attention.kernel=chunked", "--config.optimizer.offload=True"]
    found, *_ = planned(capsys, *asked, *small)
    memory = found["memory"]
    assert memory["optimizer_bytes"] == 4, "the number of the step"
    assert memory["host_bytes"] >= 2 * memory["parameter_bytes"] > 0, "both moments"


@pytest.mark.slow
def test_two_slices_add_their_gradients_over_the_data_centres_network(capsys):
    two = ["--slices=2", "--config.mesh.data=2", "--config.global_batch_size=2"]
    small = ["--config.seq_len=512", "--config.model.layers=1", "--config.attention.kernel=chunked"]
    found, *_ = planned(capsys, *ASKED, *small, *two)
    over = {(one["kind"], one["over_dcn"]): one for one in found["time"]["collectives"]}
    assert {kind for kind, dcn in over if dcn} == {"all-reduce"}
    assert found["time"]["devices"] == 16
    # Each of the 8 devices of a slice adds its part: in fp32 or, halved, in bf16.
    assert over["all-reduce", True]["bytes"] >= found["memory"]["parameter_bytes"] / 2


@pytest.mark.slow
def test_a_slice_from_end_to_end(capsys):
    asked = [*ASKED, "--config.seq_len=4096"]
    found, *_ = planned(capsys, *asked)
    run = by_a_run(*asked)
    memory, time = found["memory"], found["time"]
    assert found["fits"]
    assert (memory["total_bytes"], memory["code_bytes"]) == (run["total"], run["code"])
    assert state_bytes(found) <= run["arguments"] < 2 * state_bytes(found), "but for tiles"
    assert memory["optimizer_bytes"] == 2 * memory["parameter_bytes"] + 3 * 4, "moments, counts"
    assert memory["batch_bytes"] == 4096 // 8 * (4 * 4 + 1)
    for one in found["buffers"]:
        assert one["bytes"] < memory["total_bytes"]
        assert one["line"].startswith("ringflash/")
    parts = ("attention_seconds", "attention_exposed_seconds", "other_seconds", "exposed_seconds")
    assert math.isclose(time["total_seconds"], sum(time[name] for name in parts))
    assert min(time[name] for name in ("attention_seconds", "other_seconds")) > 0
    assert "collective-permute" not in {one["kind"] for one in time["collectives"]}
    assert 0 < time["mfu"] < 1
    assert (time["devices"], time["tokens"]) == (8, 4096)


@pytest.mark.slow
def test_a_step_that_does_not_fit_from_end_to_end(capsys, monkeypatch):
    """Each of two layers keeps three arrays of 2 GiB of the MLP."""
    light = [{"accumulation": 64}]  # one compile, of what is known to fit
    monkeypatch.setattr(step_search, "nearer", lambda config, mesh: iter(light))
    large = ["--config.global_batch_size=128", "--config.model.mlp_width=16384"]
    large.append("--config.attention.kernel=chunked")
    found, said, *others = planned(capsys, *ASKED, "--config.seq_len=4096", *large, code=1)
    (fits,) = [one["would_fit"] for one in others if "would_fit" in one]
    assert fits["leaves"] == light[0]
    assert fits["total_bytes"] < HBM * GIB
    need = found["memory"]["total_bytes"] / GIB
    assert not found["fits"]
    assert 16 < need < 100
    assert f"does not fit v5e:2x4: a device needs {need:.2f} GiB and has 15.75" in said
    assert "time" not in found
    sizes = [one["bytes"] for one in found["buffers"]]
    assert len(sizes) == 10
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 2 * 128 * 512 * 16384 * 2, "of both layers, bf16"
    assert sum(sizes) <= found["memory"]["total_bytes"]
