"""What a search thinks of and in which order; that what it tells was compiled is seen end to end."""

import dataclasses

import pytest
from tiny import BASE

from ringflash import config
from ringflash.config import with_leaves
from ringflash.plan import step_search
from ringflash.plan.step import StepFacts
from ringflash.plan.step_guess import guess
from ringflash.plan.step_search import guessed, longest, meshes, nearest, right, twice
from ringflash.plan.where import Where

SLICE = Where("v5p:4x4x4")
FLAGS = {
    "seq_len": 262_144,
    "global_batch_size": 4,
    "model.preset": "llama3-8b",
    "model.remat": "attention",
    "mesh.fsdp": 4,
    "mesh.context": 16,
}
MESH = {"data": 1, "fsdp": 4, "context": 16, "tensor": 1}
LLAMA = config.resolve(config.load(BASE, [f"--config.{k}={v}" for k, v in FLAGS.items()]))


def facts(total, *, mesh=MESH, fits=True):
    """Of a step that needs so many GiB, all temporaries."""
    size = int(total * 2**30)
    return StepFacts(mesh, "ring", fits, size, 0, 0, 0, 0, 0, (), 1.0, 1, None)


@pytest.fixture
def compiler(monkeypatch):
    """In place of the compiler: GiB by a function of the configuration; what it was asked for."""
    asked = []

    def install(needs):
        def compiled(pairs):
            ((cfg, where),) = pairs
            asked.append((cfg, where))
            total = needs(cfg, where)
            return [facts(total, mesh=dataclasses.asdict(cfg.mesh), fits=total < 95)]

        monkeypatch.setattr(step_search, "compiled", compiled)
        monkeypatch.setattr(step_search, "step_time", lambda step: None)
        return asked

    return install


def test_meshes_take_all_devices_and_share_the_batch_out():
    found = list(meshes(LLAMA, SLICE))
    assert MESH in found
    for mesh in found:
        assert mesh["data"] * mesh["fsdp"] * mesh["context"] * mesh["tensor"] == 64
        assert LLAMA.global_batch_size % (mesh["data"] * mesh["fsdp"]) == 0
    assert {mesh["tensor"] for mesh in found} == {1, 2, 4, 8}


def test_slices_lie_on_data_alone():
    found = list(meshes(LLAMA, Where("v5p:4x4x4", 2)))
    assert found
    assert {mesh["data"] for mesh in found} == {2}


def test_what_is_worth_compiling_fits_together_and_is_thought_of_once():
    found = [tuple(sorted(leaves.items())) for _, leaves in guessed(LLAMA, SLICE)]
    assert len(found) == len(set(found)) > 20
    assert all(right(LLAMA, dict(leaves)) for leaves in found)
    assert () in found, "the configuration as it is"


def test_the_guess_prefers_what_computes_less():
    """Keeping more, a matrix product of the block less; full runs attention again too."""
    times = [
        guess(with_leaves(LLAMA, {"model.remat": each}), MESH, SLICE.generation)
        for each in ("none", "attention", "full")
    ]
    assert times == sorted(times)
    assert len(set(times)) == 3


def test_a_longer_ring_for_the_same_tokens_is_not_quicker():
    wide = MESH | {"fsdp": 1, "context": 64}
    changed = with_leaves(LLAMA, {"mesh.fsdp": 1, "mesh.context": 64})
    assert guess(changed, wide, SLICE.generation) >= guess(LLAMA, MESH, SLICE.generation)


def test_the_nearest_that_fits_is_the_least_change(compiler):
    gib = {"attention": 120, "offload": 110, "full": 90}
    asked = compiler(lambda cfg, where: gib[cfg.model.remat])
    found = nearest(LLAMA, SLICE, MESH)
    assert found.leaves == {"model.remat": "full"}
    assert "--config.model.remat=full on v5p:4x4x4: 90.00 GiB" in str(found)
    assert [cfg.model.remat for cfg, _ in asked] == ["offload", "full"]


def test_then_fewer_sequences_then_twice_the_slice(compiler):
    two = with_leaves(LLAMA, {"global_batch_size": 8})
    compiler(lambda cfg, where: 120 if cfg.accumulation == 1 else 80)
    assert nearest(two, SLICE, MESH).leaves == {"accumulation": 2}
    compiler(lambda cfg, where: 120 if where == SLICE else 60)
    found = nearest(two, SLICE, MESH)
    assert found.where == Where("v5p:4x4x8")
    assert found.leaves == {"mesh.context": 32}
    compiler(lambda cfg, where: 120)
    assert nearest(two, SLICE, MESH) is None


@pytest.mark.parametrize(
    ("name", "wider"),
    [("v5p:4x4x4", "v5p:4x4x8"), ("v5e:2x4", "v5e:4x4"), ("v6e:16x16", None)],
)
def test_twice_a_slice_doubles_its_shortest_side(name, wider):
    assert twice(Where(name)) == (None if wider is None else Where(wider))


def test_the_longest_sequence_is_compiled_and_fills_the_memory(compiler):
    """Memory by tokens of a device, and 1 % more where it is long, so that the first try is too long."""

    def needs(cfg, where):
        tokens = cfg.seq_len * cfg.global_batch_size / 64 / 16384
        return 10 * tokens * (1.01 if tokens > 9 else 1)

    compiler(needs)
    start = step_search.tried(LLAMA, SLICE, {})
    found = longest(LLAMA, start)
    assert found.leaves["global_batch_size"] == 4
    assert 0.8 * 95 < found.facts.total_bytes / 2**30 < 95
    assert found.leaves["seq_len"] % (2 * 16 * 1024) == 0
