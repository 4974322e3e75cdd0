"""`ringflash bench kernel`: its arguments, what must be installed, and rows from schedules."""

import json
import sys
from dataclasses import replace

import pytest

from ringflash import cli
from ringflash.bench import compiled, kernel, kernel_options, options, peers
from ringflash.bench.candidates import DIRECTIONS, Shape
from ringflash.bench.kernel_options import KernelOptions, parse
from ringflash.exits import ConfigFault
from ringflash.plan import compiler
from ringflash.plan.generations import GENERATIONS, topology
from ringflash.plan.schedule import UNITS, Block, Schedule


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("5", "5: left over"),
        ("--head=64", "--head: unknown flag: did you mean --heads?"),
        ("--tables=ring", "--tables: unknown flag; known: topology, compare, seq_len, heads,"),
        ("--topology", "--topology has no value: wanted --topology=VALUE"),
        ("--topology=v5x", "--topology=v5x: 'v5x' is no TPU generation: did you mean v5p?"),
        ("--topology=v6e,v5p:2x2", "slice is 3 numbers such as 2x2x1, found 2x2"),
        ("--compare=torch", "'torch' is unknown; known: splash, splash_unfused, tokamax"),
        ("--dtype=float64", "'float64' is unknown; known: bfloat16, float32"),
        ("--head_dim=0", "--head_dim=0: wanted whole numbers above 0, found '0'"),
        ("--head_dim=64,520", "--head_dim=520: the kernel has head widths up to 512"),
        ("--kv_heads=5", "--heads=32 must be a multiple of --kv_heads=5"),
        ("--seq_len=1000", "--seq_len=1000 must be a multiple of 1024"),
        ("--json=1", "--json takes no value"),
        ("--tune=v6e", "--tune takes no value"),
        ("--head_dim=64,x", "--head_dim=64,x: wanted whole numbers above 0, found 'x'"),
    ],
)
def test_wrong_arguments(capsys, argument, line):
    assert cli.main(["bench", "kernel", argument]) == 3
    said = capsys.readouterr().err
    assert line in said
    assert len(said.splitlines()) == 1


def test_all_that_is_wrong_is_told():
    with pytest.raises(ConfigFault) as told:
        parse(["--topology=v9,v5p:2", "--heads=x", "--dtype=y", "z", "--seq_len=8"])
    assert len(told.value.lines()) == 6


def test_arguments():
    found = parse(["--topology=v5p:4x4x4,7x", "--compare=tokamax", "--head_dim=64", "--json"])
    assert found == KernelOptions(
        topology=(topology("v5p:4x4x4"), topology("7x")),
        compare=("tokamax",),
        shape=Shape(head_dim=64),
        widths=(64,),
        json=True,
    )


def test_widths():
    found = parse(["--head_dim=64,256,64"])
    assert found.widths == (64, 256)
    assert found.shape.head_dim == 64
    assert parse([]).widths == (128,)
    assert parse(["--check"]).widths == parse(["--tune"]).widths == kernel_options.WIDTHS


def test_tune_check_and_compare_are_alone():
    with pytest.raises(ConfigFault, match="wanted one of --tune, --check"):
        parse(["--tune", "--check"])
    with pytest.raises(ConfigFault, match="wanted one of --check, --compare"):
        parse(["--check", "--compare=splash"])


def test_without_arguments_and_all_every_generation_is_meant():
    assert [t.generation.name for t in parse([]).topology] == list(GENERATIONS)
    assert parse(["--topology=all"]) == parse([])


def test_beside_bench_attention():
    assert options.parse(["kernel", "--topology=v6e"]) == parse(["--topology=v6e"])
    assert kernel_options.HELP in options.HELP
    assert all(f"--{name}" in kernel_options.HELP for name in kernel_options.NAMES)


def test_names_are_those_of_candidates():
    assert list(compiled.CANDIDATES) == [kernel_options.OURS, *kernel_options.PEERS]
    assert all(c.name == name for name, c in compiled.CANDIDATES.items())
    assert all(set(c.directions) <= set(DIRECTIONS) for c in compiled.CANDIDATES.values())


def without(monkeypatch, *names):
    def find_spec(name):
        return None if name in names else 1

    monkeypatch.setattr(kernel.importlib.util, "find_spec", find_spec)


def test_the_compiler_is_absent(capsys, monkeypatch):
    without(monkeypatch, "libtpu", "tokamax")
    assert cli.main(["bench", "kernel", "--topology=v6e", "--compare=splash,tokamax"]) == 3
    assert capsys.readouterr().err.splitlines() == [
        "ringflash: libtpu, the TPU compiler, is not installed: pip install 'ringflash[plan]'",
        "ringflash: --compare: tokamax is not installed: pip install 'ringflash[bench]'",
    ]


def test_without_compare_what_is_installed_is_used(monkeypatch):
    without(monkeypatch, "tokamax")
    assert kernel.candidates(parse([])) == ["tpu", "splash", "splash_unfused"]
    without(monkeypatch)
    assert kernel.candidates(parse([])) == list(compiled.CANDIDATES)
    assert kernel.candidates(parse(["--compare=tokamax_lp"])) == ["tpu", "tokamax_lp"]


def test_nothing_is_loaded_by_looking():
    before = {"libtpu", "tokamax"} & sys.modules.keys()
    kernel.candidates(parse([]))
    assert {"libtpu", "tokamax"} & sys.modules.keys() == before


BUNDLES = {
    (1024, 2048, 512): 6190,
    (2048, 2048, 512): 13000,
    (2048, 1024, 512): 6400,
    (1024, 1024, 512): 3100,
}


def answer(work, asked, *, seconds, flags=""):
    """In place of the child: each job one block; the backward is refused."""
    told = []
    for job in asked["jobs"]:
        busy = dict.fromkeys(UNITS, 0) | {"MATMUL": 4096}
        tiles = job["tiles"] and tuple(job["tiles"])
        one = Schedule("fwd", (Block(5, BUNDLES.get(tiles, 4000), busy, busy, (1,), ()),), 2**21)
        refused = job["direction"] == "backward"
        told.append({"schedules": [one], "error": "Refused: out of\nVMEM" if refused else ""})
    return json.loads(json.dumps(told, default=vars))


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(compiled, "in_child", answer)
    tpu = compiled.CANDIDATES["tpu"]
    like = compiled.CANDIDATES["splash"].parts
    monkeypatch.setitem(compiled.CANDIDATES, "tpu", replace(tpu, parts=like))
    return kernel.of_topology(parse([]), ["tpu", "splash", "tokamax_lp"], topology("v6e"))


def test_rows(table):
    assert [(r["who"], r["pass"]) for r in table.records] == [
        ("tpu", "forward"),
        ("splash", "forward"),
        ("tokamax_lp", "forward"),
        ("tpu", "backward"),
        ("splash", "backward"),
    ]
    assert {len(row) for row in table.rows} == {len(table.header)}
    ours, splash = table.records[:2]
    assert splash["generation"] == "v6e"
    assert splash["full_cycles"] == splash["partial_cycles"] == 3095
    assert splash["bound"] == "MATMUL"
    assert splash["efficiency"] == pytest.approx(1024 / 3095)
    assert ours["full_cycles"] == 2000
    assert ours["x_whole"] == 1


def test_each_figure_is_that_of_the_tiles_best_there(table):
    splash = table.records[1]
    assert splash["tiles"] == (1024, 2048, 512)
    assert splash["whole_tiles"] == (1024, 1024, 512)
    assert splash["whole_cycles_per_head"] == 36 * 3100
    assert splash["x_whole"] == pytest.approx(36 * 3100 / (20 * 4000))


def test_a_refusal_is_a_row(table):
    assert table.records[-1]["error"] == "Refused: out of\nVMEM"
    assert table.rows[-1][:2] == ["splash, backward: Refused: out of VMEM", "-"]


def test_the_child_fails(capsys, monkeypatch):
    def fail(*arguments, **named):
        raise compiler.CompilerFailed("the TPU compiler ended with code -6; it said nothing")

    monkeypatch.setattr(compiled, "in_child", fail)
    monkeypatch.setattr(peers, "require", lambda: None)
    monkeypatch.setattr(kernel.metadata, "version", lambda name: "1")
    assert cli.main(["bench", "kernel", "--topology=v6e", "--compare=splash"]) == 1
    assert capsys.readouterr().err == (
        "ringflash: the TPU compiler ended with code -6; it said nothing\n"
    )
