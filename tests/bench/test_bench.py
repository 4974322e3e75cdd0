"""`ringflash bench`: its arguments, and tables of a few tiny measurements."""

import json
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

from ringflash import cli
from ringflash.bench import attention, ours, peers, timing
from ringflash.bench.options import HELP, NAMES, Options, parse
from ringflash.exits import ConfigFault

TINY = Options(seq_len=128, heads=4, kv_heads=2, head_dim=16, repeats=1, peers=("jax",), devices=2)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "wanted one of attention, kernel, found nothing"),
        (["atention"], "wanted one of attention, kernel, found ['atention']"),
        (["attention", "5"], "5: left over"),
        (["attention", "--sequence=5"], "--sequence: unknown flag"),
        (["attention", "--head=5"], "--head: unknown flag: did you mean --heads?"),
        (["attention", "--heads"], "--heads has no value: wanted --heads=VALUE"),
        (["attention", "--heads=0"], "--heads=0: wanted whole numbers above 0, found '0'"),
        (["attention", "--heads=many"], "found 'many'"),
        (["attention", "--heads=6", "--kv_heads=4"], "must be a multiple of --kv_heads=4"),
        (["attention", "--seq_len=1000"], "must be a multiple of 16 for zigzag"),
        (["attention", "--dtype=float64"], "'float64' is unknown; known: float32, bfloat16"),
        (["attention", "--peers=torch,levanter"], "'levanter' is unknown; known: torch"),
        (["attention", "--tables=all"], "'all' is unknown; known: one_device"),
        (["attention", "--blocks=128"], "--blocks=128: wanted whole numbers above 0, found ''"),
        (["attention", "--json=1"], "--json takes no value"),
    ],
)
def test_wrong_arguments(capsys, arguments, line):
    assert cli.main(["bench", *arguments]) == 3
    said = capsys.readouterr().err
    assert said.startswith("ringflash: ")
    assert line in said
    assert len(said.splitlines()) == 1


def test_all_that_is_wrong_is_told():
    with pytest.raises(ConfigFault) as told:
        parse(["attention", "--heads=x", "--dtype=y", "z"])
    assert len(told.value.lines()) == 3


def test_arguments():
    found = parse(["attention", "--heads=4", "--blocks=8x16,32x8", "--peers=jax", "--json"])
    blocks = ((8, 16), (32, 8))
    assert found == Options(heads=4, kv_heads=4, blocks=blocks, peers=("jax",), json=True)


def test_help(capsys):
    assert cli.main(["bench", "--help"]) == 0
    assert capsys.readouterr().out == HELP
    assert all(f"--{name}" in HELP for name in NAMES)


def test_a_peer_that_is_asked_for_and_absent(capsys, monkeypatch):
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda name: None if name == "torch" else 1
    )
    assert cli.main(["bench", "attention", "--peers=torch"]) == 3
    said = capsys.readouterr().err
    assert said == "ringflash: --peers: torch is not installed: pip install 'ringflash[bench]'\n"


def test_absent_peers_are_told(monkeypatch):
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda name: 1 if name == "jax" else None
    )
    assert peers.chosen(None) == (["jax"], ["torch", "tokamax", "ringattention"])
    machine = attention.machine(replace(TINY, peers=None))
    assert (
        "not installed torch, tokamax, ringattention (pip install 'ringflash[bench]')"
        in machine.title
    )


def test_one_device():
    table = attention.one_device(TINY)
    assert [(r["who"], r["pass"]) for r in table.records] == [
        (who, name) for name in attention.PASSES for who in ("chunked", "jax")
    ]
    mine, theirs = table.records[:2]
    assert mine["x_wall"] == mine["x_cpu"] == 1
    assert theirs["x_wall"] == pytest.approx(mine["wall_seconds"] / theirs["wall_seconds"])
    assert all(r["temp_bytes"] > 0 and r["compile_seconds"] > 0 for r in table.records)
    assert {len(row) for row in table.rows} == {len(table.header)}


def test_all_compute_the_same():
    """What is timed is attention: output and gradients of each, ours on a ring too."""
    x = peers.problem(128, 4, 2, 16, "float32")
    wanted = jax.tree.leaves(peers.of_jax(x)[1].run())
    for programs in (
        ours.whole(x),
        ours.whole(x, block_q=32),
        ours.sharded(x, "ring", "contiguous", 2),
    ):
        np.testing.assert_allclose(programs[0].run(), wanted[0], atol=1e-5)
        for found, want in zip(jax.tree.leaves(programs[1].run()), wanted, strict=True):
            np.testing.assert_allclose(found, want, atol=1e-5)


def test_over_devices():
    table = attention.over_devices(TINY)
    kinds = ["one device", "ring contiguous", "ring zigzag"]
    kinds += ["all_gather contiguous", "ulysses contiguous"]
    assert [r["who"] for r in table.records] == 2 * kinds
    one, ring = table.records[:2]
    assert ring["x_wall"] == pytest.approx(ring["wall_seconds"] / one["wall_seconds"])


@pytest.mark.slow
def test_ulysses_only_where_the_heads_allow():
    table = attention.over_devices(replace(TINY, heads=3, kv_heads=3))
    assert not [r for r in table.records if r["who"].startswith("ulysses")]


@pytest.mark.slow
def test_errors_do_not_grow_with_the_ring():
    """The promise: at most 1.2 times that of one device, and at most twice that of jax.nn in bf16."""
    table = attention.error_by_ring(replace(TINY, seq_len=256, devices=8))
    assert [r["who"] for r in table.records] == ["jax.nn", *(f"ring of {n}" for n in (1, 2, 4, 8))]
    usual, one, *_, eight = table.records
    for name in ("out", "dq", "dk", "dv"):
        assert 0 < eight[name] <= 1.2 * one[name]
        assert eight[name] <= 2 * usual[name]


def test_blocks():
    table = attention.block_sizes(replace(TINY, blocks=((32, 16),)))
    assert [r["who"] for r in table.records[:2]] == ["own choice", "32 x 16"]


def test_the_ratio_is_the_median_of_those_of_each_round():
    assert timing.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0


def test_turns_are_taken():
    order = []
    programs = {name: timing.Program(lambda name=name: order.append(name)) for name in "ab"}
    times = timing.interleaved(programs, 2)
    assert "".join(order) == "ab" + "ab" + "ba"
    assert [len(times["a"].wall), len(times["b"].cpu)] == [2, 2]


def test_json(capsys, monkeypatch):
    """One object a line; the table of tiles is the promise of zigzag too."""
    monkeypatch.setattr(attention, "prepare", lambda options: None)  # the devices are there already
    assert cli.main(["bench", "attention", "--tables=tiles", "--peers=jax", "--json"]) == 0
    machine, tiles = map(json.loads, capsys.readouterr().out.splitlines())
    assert machine["records"][0]["cores"] > 0
    records = {r["layout"]: r for r in tiles["records"] if r["documents"] == 1}
    packed = {r["layout"]: r for r in tiles["records"] if r["documents"] > 1}
    assert records["one device"]["visited_to_needed"] <= 1.1
    assert records["zigzag"]["busiest_to_mean"] <= 1.02 < records["contiguous"]["busiest_to_mean"]
    assert packed["balanced"]["busiest_to_mean"] <= 1.1 < packed["zigzag"]["busiest_to_mean"]


def test_tables_for_a_person(capsys, monkeypatch):
    monkeypatch.setattr(attention, "prepare", lambda options: None)
    assert cli.main(["bench", "attention", "--tables=tiles", "--peers=jax"]) == 0
    first, title, header, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("cpu ")
    assert title.startswith("tiles, causal, 16384 tokens")
    assert header.split()[:2] == ["documents", "layout"]


def test_no_peer_is_imported_by_looking():
    before = {"torch", "tokamax", "ringattention"} & sys.modules.keys()
    peers.chosen(None)
    assert {"torch", "tokamax", "ringattention"} & sys.modules.keys() == before
