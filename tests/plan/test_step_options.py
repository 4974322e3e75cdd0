"""`ringflash plan --config=...`: its arguments, and the configuration on a slice. Nothing is compiled."""

from pathlib import Path

import pytest

from ringflash import cli
from ringflash.config import MeshConfig
from ringflash.exits import ConfigFault
from ringflash.plan import step_run
from ringflash.plan.step_options import mesh_faults, parse
from ringflash.plan.where import Where

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.py")
ASKED = [f"--config={QUICKSTART}", "--topology=v5e:2x4"]


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    def compiled(asked):
        raise AssertionError(f"compiled {asked}")

    monkeypatch.setattr(step_run, "compiled", compiled)


def lines(*arguments):
    with pytest.raises(ConfigFault) as told:
        parse(arguments)
    return told.value.lines()


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("5", "5: left over"),
        ("--pric=4", "--pric: unknown flag: did you mean --price?"),
        ("--foo=4", "--foo: unknown flag; known: config, topology, slices, price, json, search"),
        ("--price=0", "--price=0: wanted a number above 0"),
        ("--price=nan", "--price=nan: wanted a number above 0"),
        ("--price=inf", "--price=inf: wanted a number above 0"),
        ("--price=much", "--price=much: wanted a number above 0"),
        ("--slices=0", "--slices=0: wanted whole numbers above 0, found '0'"),
        ("--json=1", "--json=1: --json takes no value"),
        ("--search=1", "--search=1: --search takes no value"),
        ("--topology=cpu:0", "--topology=cpu:0: wanted cpu:8, say"),
        ("--topology=cpu", "--topology=cpu: wanted cpu:8, say"),
        ("--topology=v5f:2x4", "--topology=v5f:2x4: 'v5f' is no TPU generation: did you mean v5p?"),
        ("--topology=v5e:8", "the shape of a v5e slice is 2 numbers such as 2x2, found 8"),
        ("--topology=", "--topology has no value: wanted --topology=VALUE"),
        ("--config=missing.py", "missing.py: no such config file"),
        ("--config.seqlen=4", "seqlen = '4' (command line): unknown key; nearest: seq_len"),
        ("--config.mesh.context=3", "wanted a multiple of 2 * context = 6"),
        ("--config.mesh.context=4", "takes 4 devices, v5e:2x4 has 8; one that fits: mesh.context = 8"),
    ],
)  # fmt: skip
def test_wrong_arguments(capsys, argument, line):
    assert cli.main(["plan", *ASKED, argument]) == 3
    said = capsys.readouterr()
    assert line in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


def test_all_that_is_wrong_is_told_at_once():
    found = lines(
        "--config=missing.py", "--topology=cpu:x", "--price=0", "--slices=x", "--json=1", "z"
    )
    assert [line.partition(": ")[0] for line in found] == [
        *("--topology=cpu:x", "--price=0", "--slices=x", "--json=1", "z", "missing.py"),
    ]
    both = lines(ASKED[0], "--topology=v9", "--config.seqlen=4", "--config.steps=0")
    assert len(both) == 3


def test_what_is_missing():
    """Without a slice there is nothing to say on how the mesh lies on it."""
    assert lines(ASKED[0]) == ["--topology is missing: wanted --topology=v5p:4x4x4, say"]
    assert lines("--topology=v5e:2x4") == ["--config is missing: wanted --config=FILE.py"]
    assert len(lines("--json")) == 2


@pytest.mark.parametrize(
    ("sizes", "devices", "line"),
    [
        ((1, 1, 4, 1), 8, "takes 4 devices, v5e:2x4 has 8; one that fits: mesh.context = 8"),
        ((1, 2, 2, 1), 8, "v5e:2x4 has 8; one that fits: mesh.context = 4"),
        ((-1, 1, 16, 1), 8, "takes 16 devices, v5e:2x4 has 8; one that fits: mesh.context = 8"),
        ((3, 1, 2, 1), 8, "takes 6 devices, v5e:2x4 has 8"),
        ((3, 1, -1, 1), 8, "context=-1 x tensor=1 takes 3 devices, v5e:2x4 has 8"),
        ((1, 1, 8, 1), 16, "takes 8 devices, v5e:4x4 has 16; one that fits: mesh.context = 16"),
    ],
)
def test_a_mesh_that_does_not_lie_on_the_slice(sizes, devices, line):
    where = Where({8: "v5e:2x4", 16: "v5e:4x4"}[devices])
    (found,) = mesh_faults(MeshConfig(*sizes), where)
    assert line in found
    fits = "one that fits" in line
    assert ("one that fits" in found) == fits
    if fits:
        context = int(found.rpartition(" = ")[2])
        data, fsdp, _, tensor = sizes
        assert mesh_faults(MeshConfig(data, fsdp, context, tensor), where) == []


@pytest.mark.parametrize("sizes", [(1, 1, 8, 1), (1, 1, -1, 1), (2, 2, 1, 2), (-1, 1, 2, 1)])
def test_a_mesh_that_does(sizes):
    assert mesh_faults(MeshConfig(*sizes), Where("v5e:2x4")) == []


def test_slices_divide_data():
    where = Where("v5e:2x4", 2)
    (found,) = mesh_faults(MeshConfig(1, 2, 8, 1), where)
    assert found == (
        "mesh.data = 1 over 2 slices: wanted a multiple of 2,"
        " since only `data` may reach from slice to slice"
    )
    assert mesh_faults(MeshConfig(-1, 1, 8, 1), where) == []
    (odd,) = mesh_faults(MeshConfig(-1, 1, 16, 1), where)
    assert "mesh.data = 1 over 2 slices" in odd
    assert "data = 3 over 2" in mesh_faults(MeshConfig(3, 1, 4, 1), where)[1]
    assert mesh_faults(MeshConfig(4, 1, 4, 1), where) == []


def test_devices_of_several_slices_are_in_one_mesh():
    found = lines(*ASKED, "--slices=2")
    assert (
        "takes 8 devices, 2 x v5e:2x4 has 16; one that fits: mesh.data = 2, mesh.context = 8"
        in found[0]
    )
    assert "mesh.data = 1 over 2 slices" in found[1]


def test_what_is_left_for_an_axis_is_checked_too():
    """Before anything is compiled; a run would find out on its devices."""
    left = [*ASKED, "--config.mesh.context=-1"]
    assert parse(left).config.mesh == MeshConfig(1, 1, 8, 1)
    two = ["--config.mesh.fsdp=2", "--config.global_batch_size=2"]
    assert parse([*left, *two]).config.mesh == MeshConfig(1, 2, 4, 1)
    (found,) = lines(*left, "--config.seq_len=1000")
    assert "mesh.context = 8" in found
    assert "wanted a multiple of 2 * context = 16" in found


def test_simulated_devices():
    found = parse([ASKED[0], "--topology=cpu:8"])
    assert (found.where.devices, found.generation, found.config.cpu_devices) == (8, None, 8)
    (told,) = lines(ASKED[0], "--topology=cpu:4")
    assert "does not divide cpu_devices = 4" in told
    (told,) = lines(ASKED[0], "--topology=cpu:16")
    assert "takes 8 devices, cpu:16 has 16; one that fits: mesh.context = 16" in told
    assert lines(ASKED[0], "--topology=cpu:8", "--slices=2") == [
        "--slices=2: simulated devices are one slice"
    ]


def test_arguments():
    found = parse([*ASKED, "--price=4.2", "--json", "--config.seq_len=4096"])
    assert (found.path, found.where, found.price) == (QUICKSTART, Where("v5e:2x4"), 4.2)
    assert (found.json, found.search) == (True, False)
    assert found.config.seq_len == 4096
    assert found.generation.name == "v5e"
    usual = parse(ASKED)
    assert (usual.price, usual.json, usual.config.seq_len) == (None, False, 8192)


@pytest.mark.parametrize(
    ("topology", "name", "devices"),
    [("v5e", "v5e:2x2", 4), ("7x:2x2x2", "tpu7x:2x2x2", 16), ("v4:2x2x1", "v4:2x2x1", 8)],
)
def test_slices_by_the_compilers_names_and_their_devices(topology, name, devices):
    flags = [ASKED[0], f"--topology={topology}", f"--config.mesh.context={devices}"]
    found = parse(flags)
    assert (found.where.topology, found.where.devices) == (name, devices)
    assert str(Where(name, 2)) == f"2 x {name}"
    assert Where(name, 2).devices == 2 * devices


def test_help(capsys):
    assert cli.main(["plan", "--help"]) == 0
    assert "usage: ringflash plan --config=FILE.py" in capsys.readouterr().out
