"""`ringflash launch render`: its arguments, and the machines they name. Nothing is compiled."""

from pathlib import Path

import pytest

from ringflash import cli
from ringflash.exits import ConfigFault
from ringflash.launch.options import NEEDED, USED, parse
from ringflash.launch.shape import of_slice
from ringflash.plan.generations import GENERATIONS
from ringflash.plan.where import Where

ROOT = Path(__file__).parents[2]
LLAMA = "--config=configs/llama3_8b_128k.py"
PLACES = {
    "gke": ("--topology=v5p:4x4x4", "--image=gcr.io/p/i:1"),
    "xpk": ("--topology=v5p:4x4x4", "--image=gcr.io/p/i:1", "--cluster=c"),
    "tpu-vm": ("--topology=v5p:4x4x4", "--project=p", "--zone=us-east5-a"),
    "slurm": ("--nodes=8", "--devices=8"),
    "local": ("--nodes=8", "--devices=8", "--config.cpu_devices=64"),
}
WORKDIR = "--workdir=/w/run"
TWICE = ("--slices=2", "--config.data.source=a\nb")  # wrong in two ways


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(ROOT)


def asked(target, *more):
    return ["render", f"--target={target}", LLAMA, WORKDIR, "--out=x", *PLACES[target], *more]


def faults(*arguments):
    with pytest.raises(ConfigFault) as told:
        parse(arguments)
    return told.value.lines()


@pytest.mark.parametrize("target", PLACES)
def test_each_target_takes_what_it_needs(target):
    found = parse(asked(target))
    assert found.train[:1] == ("train",)
    assert found.name == "llama3-8b-128k"
    assert NEEDED.keys() == USED.keys() == PLACES.keys()
    for name in NEEDED[target]:
        flag = f"--{name}="
        (told,) = faults(*[one for one in asked(target) if not one.startswith(flag)])
        assert told.startswith(f"--{name} is missing: wanted --{name}=")


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--name=Llama", "wanted small letters, digits and dashes, a letter first"),
        ("--name=3b", "a letter first"),
        ("--name=a-", "a letter first"),
        ("--name=a\n", "a letter first"),
        (f"--name={'a' * 41}", "41 characters: wanted 40 at most"),
        ("--queue=a;b", "wanted letters, digits"),
        ("--bucket=gs://b", "a bucket's name, without gs://"),
        ("--image=a b", "an image such as"),
        ("--grace=0", "wanted whole numbers above 0"),
        ("--slices=2", "mesh.data = 1 over 2 slices"),
        ("--topology=v5p:3x3x3", "no such slice; wanted 2x2x1"),
        ("--topology=v5q:4x4x4", "is no TPU generation: did you mean"),
        ("--topology=v5p:4x4x8", "takes 64 devices, v5p:4x4x8 has 128; one that fits"),
        ("--nodes=2", "--nodes: --target=gke has no use for it"),
        ("--zone=us-east5-a", "--zone: --target=gke has no use for it"),
        ("--spto", "--spto: unknown flag: did you mean --spot?"),
        ("--spot=1", "--spot takes no value"),
        ("--bucket=b-1", "wanted a folder below /gcs, where the bucket is mounted"),
        ("--workdir=runs", "wanted a whole path, as all hosts have it"),
        ("--workdir=/w/[a]", "checkpoints would be lost there"),
        ("--workdir=gs://b/r", "wanted a folder; with --bucket=NAME one below /gcs"),
        ("--config.seqlen=4", "unknown key; nearest: seq_len"),
        ("--config.data.source=a\nb", "wanted no control characters"),
        ("--config=missing.py", "missing.py: no such config file"),
        ("--target=gce", "'gce' is unknown; known: gke, slurm, tpu-vm, xpk, local"),
        ("5", "5: left over"),
    ],
)  # fmt: skip
def test_wrong_arguments(capsys, flag, told):
    assert cli.main(["launch", *asked("gke", flag)]) == 3
    said = capsys.readouterr()
    assert told in said.err
    assert len(said.err.splitlines()) == (2 if flag in TWICE else 1), said.err
    assert said.out == ""


def test_all_that_is_wrong_is_told_at_once():
    told = faults("render", "--target=gke", LLAMA, "--name=X", "--topology=v9", "--config.steps=0")
    assert len(told) == 6  # --name, --topology, --workdir, --out, --image, steps
    assert len(faults("render")) == 4


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("10", 600), ("10:00", 600), ("0:10:00", 600), ("1-0", 86400), ("1-0:10", 87000)],
)
def test_a_time_limit_leaves_time_to_save(limit, seconds):
    asked_for = asked("slurm", f"--time={limit}")
    (told,) = faults(*asked_for, f"--grace={seconds}")
    assert f"--time={limit} is {seconds} s" in told
    assert parse([*asked_for, f"--grace={seconds - 1}"]).time == limit


def test_no_restarts_at_all():
    assert parse(asked("gke", "--restarts=0")).restarts == 0
    (told,) = faults(*asked("gke", "--restarts=-1"))
    assert "wanted a whole number" in told


@pytest.mark.parametrize("verb", [(), ("rendr",), ("--target=gke",)])
def test_another_verb(verb):
    (told,) = faults(*verb)
    assert "wanted ringflash launch render" in told


def test_help(capsys):
    assert cli.main(["launch", "--help"]) == 0
    assert "usage: ringflash launch render --target=" in capsys.readouterr().out


def test_the_mesh_on_nodes():
    (told,) = faults(*asked("slurm", "--nodes=4"))
    assert "takes 64 devices, 4 nodes of 8 has 32" in told
    found = parse(asked("slurm", "--platform=cpu"))
    assert found.overrides == ("--config.cpu_devices=64",)
    assert parse(asked("slurm")).overrides == ()


def test_the_config_file_as_the_image_has_it(tmp_path):
    assert parse(asked("gke")).train[1] == "--config=/app/configs/llama3_8b_128k.py"
    whole = f"--config={ROOT}/configs/../configs/llama3_8b_128k.py"
    assert parse(asked("gke", whole)).train[1] == "--config=/app/configs/llama3_8b_128k.py"
    for file in ("base.py", "llama3_8b_128k.py"):
        (tmp_path / file).write_text((ROOT / "configs" / file).read_text())
    away = f"--config={tmp_path}/llama3_8b_128k.py"
    (told,) = faults(*asked("gke", away))
    assert "its place in the image is not known: wanted --image-config=" in told
    found = parse(asked("gke", away, "--image-config=/mine/x.py"))
    assert found.train[1] == "--config=/mine/x.py"
    assert parse(asked("slurm", away)).train[1] == away


@pytest.mark.parametrize(
    ("topology", "names", "hosts", "tpu_vm"),
    [
        ("v4:4x4x4", ("tpu-v4-podslice", "ct4p-hightpu-4t", "v4-128"), (16, 4), (16, 4)),
        ("v5p:4x4x4", ("tpu-v5p-slice", "ct5p-hightpu-4t", "v5p-128"), (16, 4), (16, 4)),
        ("v5p:2x2x1", ("tpu-v5p-slice", "ct5p-hightpu-4t", "v5p-8"), (1, 4), (1, 4)),
        ("v5e:16x16", ("tpu-v5-lite-podslice", "ct5lp-hightpu-4t", "v5litepod-256"), (64, 4), (64, 4)),
        ("v5e:2x4", ("tpu-v5-lite-podslice", "ct5lp-hightpu-4t", "v5litepod-8"), (2, 4), (1, 8)),
        ("v6e:1x1", ("tpu-v6e-slice", "ct6e-standard-1t", "v6e-1"), (1, 1), (1, 1)),
        ("v6e:2x4", ("tpu-v6e-slice", "ct6e-standard-4t", "v6e-8"), (2, 4), (1, 8)),
        ("tpu7x:4x4x8", ("tpu7x", "tpu7x-standard-4t", "tpu7x-256"), (32, 4), None),
    ],
)  # fmt: skip
def test_shapes(topology, names, hosts, tpu_vm):
    found = of_slice(Where(topology))
    assert (found.accelerator, found.machine, found.accelerator_type) == names
    assert (found.hosts, found.chips) == hosts
    if tpu_vm is None:
        with pytest.raises(ConfigFault, match="has no TPU VMs"):
            of_slice(Where(topology), tpu_vm=True)
    else:
        vm = of_slice(Where(topology), tpu_vm=True)
        assert (vm.hosts, vm.chips) == tpu_vm


def test_every_generation_has_names():
    for generation in GENERATIONS.values():
        assert of_slice(Where(generation.topology)).accelerator


def test_gke_joins_slices_of_several_hosts():
    more = ("--topology=v5p:2x2x1", "--slices=16")
    (told,) = faults(*asked("gke", *more))
    assert "is one host, and GKE joins slices of several hosts only" in told
