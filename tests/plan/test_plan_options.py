"""`ringflash plan`: its arguments, what must be installed, and the tables from facts."""

import json

import pytest

from ringflash import cli
from ringflash.exits import ConfigFault
from ringflash.plan import compiler, run
from ringflash.plan.case import Case, Facts
from ringflash.plan.forecast import candidates
from ringflash.plan.generations import topology
from ringflash.plan.options import PlanOptions, parse
from ringflash.plan.program import Call, Place, Program, Transfer

ASKED = ["--attention", "--topology=v6e:2x4"]


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("5", "5: left over"),
        ("--head=64", "--head: unknown flag: did you mean --heads?"),
        (
            "--mask=window",
            "--mask=window: wanted causal, packed, full or window:TOKENS, found 'window'",
        ),
        ("--strategy=rings", "strategy 'rings' is unknown; known: ring, all_gather, ulysses"),
        ("--strategy=ulysses:2*ring:2", "is over 2 * 2 devices, found 8"),
        (
            "--strategy=ulysses --heads=4 --kv_heads=1",
            "--strategy on v6e:2x4: ulysses over 8 devices needs query heads in a multiple of 8",
        ),
        ("--head_dim=1024", "--head_dim=1024: the kernel has head widths up to 512"),
        ("--seq_len=1000000000000", "--seq_len=1000000000000: positions go up to 1073741824"),
        ("--layout=zig", "'zig' is unknown; known: contiguous, zigzag, striped"),
        ("--compare=splash", "'splash' is unknown; known: tokamax, all_gather"),
        ("--kv_heads=5", "--heads=32 must be a multiple of --kv_heads=5"),
        (
            "--seq_len=1000",
            "--seq_len=1000 must be a multiple of 16, twice the 8 devices of v6e:2x4",
        ),
        ("--topology=v6e:8", "the shape of a v6e slice is 2 numbers such as 2x2, found 8"),
        ("--slices=0", "--slices=0: wanted whole numbers above 0, found '0'"),
        ("--json=1", "--json takes no value"),
    ],
)
def test_wrong_arguments(capsys, argument, line):
    assert cli.main(["plan", *ASKED, *argument.split()]) == 3
    said = capsys.readouterr().err
    assert line in said
    assert len(said.splitlines()) == 1


def test_all_that_is_wrong_is_told():
    with pytest.raises(ConfigFault) as told:
        parse(["--heads=x", "--layout=y", "z", "--compare=tokamax", "--mask=packed"])
    lines = told.value.lines()
    assert len(lines) == 6
    assert "wanted --config=FILE.py, for a whole step, or --attention" in lines
    assert "--topology is missing: wanted --topology=v6e:2x4, say" in lines
    assert "--mask=packed: tokamax's ring takes causal or full" in lines


def test_arguments():
    found = parse([*ASKED, "--strategy=all", "--compare=tokamax", "--seq_len=4096", "--json"])
    assert found == PlanOptions(
        topology=(topology("v6e:2x4"),),
        strategy="all",
        compare=("tokamax",),
        seq_len=4096,
        attention=True,
        json=True,
    )


def test_cases():
    where = topology("v6e:2x4")
    found = parse([*ASKED, "--strategy=auto", "--compare=tokamax,all_gather"]).cases(where)
    names = ["ring", "ulysses", "all_gather", "ulysses:4*ring:2", "tokamax ring"]
    assert [each.name for each in found] == names
    assert [each.layout for each in found] == ["zigzag"] * 4 + ["contiguous"]
    (one,) = parse([*ASKED, "--mask=window:4096"]).cases(where)
    assert one == Case("v6e", "v6e:2x4", mask="window:4096", layout="contiguous")


@pytest.mark.parametrize(
    ("shards", "kv_heads", "wanted"),
    [
        (64, 8, ["ulysses:8*ring:8"]),
        (8, 8, ["ulysses:4*ring:2"]),
        (6, 4, ["ulysses:2*ring:3"]),
        (8, 1, []),
        (2, 8, []),
    ],
)
def test_hybrids(shards, kv_heads, wanted):
    assert candidates(shards, kv_heads) == ["ring", "ulysses", "all_gather", *wanted]


def test_what_is_not_installed_is_told_at_once(monkeypatch, capsys):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["plan", *ASKED, "--compare=tokamax"]) == 3
    said = capsys.readouterr().err
    assert "libtpu, the TPU compiler, is not installed: pip install 'ringflash[plan]'" in said
    assert "--compare: tokamax is not installed: pip install 'ringflash[bench]'" in said


def facts(bytes_sent):
    place = Place("body", ("while",), 7)
    pairs = tuple((n, (n + 1) % 8) for n in range(8))
    sent = Transfer("p", "collective-permute", bytes_sent, place, pairs, kernels=("k",))
    program = Program(8, [sent], [Call("k", place), Call("k", Place("main"))], [])
    return Facts(program, 8, 20.0, 10_000_000, 2**30, 0, 0, 1)


@pytest.fixture
def compiled(monkeypatch):
    """No compiler: rings that send little, and whatever else is refused."""

    def pretend(asked):
        return [facts(2**20) if each.strategy == "ring" else "ValueError: no" for each in asked]

    monkeypatch.setattr(run, "prepare", lambda options: None)
    monkeypatch.setattr(run, "compiled", pretend)


def test_a_table_for_each_topology(compiled, capsys):
    assert cli.main(["plan", "--attention", "--topology=v6e:2x4,v5e:2x4", "--strategy=all"]) == 0
    said = capsys.readouterr().out
    assert "v6e:2x4 (8 devices): causal, zigzag, 65536 tokens, 32 heads over 8, width 128" in said
    assert "v5e:2x4 (8 devices)" in said
    (row, *_) = (line for line in said.splitlines() if "ring, forward" in line)
    assert row.split()[2:6] == ["7", "1.0", "1", "0.0105"]
    assert "7/7" in row
    assert "v6e:2x4, forecast without the compiler, as auto does: ring 30.6 ms; all_gather" in said
    assert "best by this estimate: ring" in said
    assert "ulysses ValueError: no" in said


def test_a_slice_that_nothing_serves_ends_with_1(compiled, capsys):
    """After the tables of the others."""
    asked = ["plan", *ASKED, "--topology=v6e:2x4,v5e:2x4", "--strategy=all_gather"]
    assert cli.main(asked) == 1
    shown = capsys.readouterr()
    assert shown.out.count("no strategy could be compiled: all_gather ValueError: no") == 2
    assert "no strategy could be compiled for v6e:2x4, v5e:2x4" in shown.err


def test_auto_shows_the_best_alone(compiled, capsys):
    assert cli.main(["plan", *ASKED, "--strategy=auto"]) == 0
    said = capsys.readouterr().out
    assert "ring, forward" in said
    assert not any(line.strip().startswith("all_gather") for line in said.splitlines())


def test_records(compiled, capsys):
    assert cli.main(["plan", *ASKED, "--compare=all_gather", "--json"]) == 0
    _, forecast, table, best = map(json.loads, capsys.readouterr().out.splitlines())
    assert forecast["records"][0]["forecast"].keys() == {*candidates(8, 8)}
    ring, gather = table["records"]
    assert ring["passes"]["forward"]["hops"] == 7
    assert ring["hop_links"] == 1
    assert ring["executed_tiles"] == ring["needed_tiles"] == 2080
    assert ring["busiest"] == 1
    assert ring["total_seconds"] > 0
    assert gather == {"name": "all_gather", "case": gather["case"], "error": "ValueError: no"}
    assert best["records"] == [{"best": "ring"}]


def test_a_total_that_is_not_known_is_null():
    case = Case("v6e", "v6e:2x4", who="tokamax", layout="contiguous", head_dim=64)
    found = run.record(case, facts(2**20))
    assert found["total_seconds"] is None
    assert found["passes"]["forward"]["kernel_seconds"] is None
    json.dumps(found, allow_nan=False)
    assert run.rows(found)[0][-1] == "-"


def test_an_estimate_of_links_that_are_assumed_says_so():
    options = parse(["--attention", "--topology=v4:2x2x1"])
    assert "v4:2x2x1 (8 devices, its links assumed)" in run.title(options, options.topology[0])


def test_help(capsys):
    assert cli.main(["plan", "--help"]) == 0
    assert "usage: ringflash plan --attention" in capsys.readouterr().out
