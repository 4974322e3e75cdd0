"""`bench kernel --tune` and `--check` with a made-up compiler: what is tried, kept, written and told."""

import json

import pytest

from ringflash import cli
from ringflash.attention.kernels.mosaic.tiles import Tiles
from ringflash.bench import compiled, peers, tile_check, tile_table, tune
from ringflash.bench.candidates import Shape
from ringflash.bench.compiled import Compiled
from ringflash.bench.cycles import Cycles
from ringflash.bench.kernel_options import WIDTHS, parse
from ringflash.bench.tile_table import Table
from ringflash.exits import ConfigFault
from ringflash.plan.compiler import CompilerFailed
from ringflash.plan.generations import GENERATIONS, topology

ROW = {"tiles": {"block_q": 1024, "block_k": 1024, "chunk": 512, "held": 16}}
ROW |= {"full": 2000, "partial": 2500}


def of(full, partial, whole=100_000.0):
    return Cycles(full, partial, 0.5, {"MATMUL": full / 2}, 0, None, whole, 0.05)


def fake(monkeypatch, figures, refuse=lambda tiles: ""):
    """`measure` and `cycles` that give figures(tiles); returns the tiles asked for, child by child."""
    asked = []

    def measure(jobs, topology):
        asked.append([Tiles(*job.tiles) for job in jobs])
        return [Compiled(job, error=refuse(Tiles(*job.tiles))) for job in jobs]

    for module in (tune, tile_check):
        monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(
        compiled, "cycles", lambda job, parts, schedules, generation: figures(Tiles(*job.tiles))
    )
    monkeypatch.setattr(tile_table.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(peers, "require", lambda: None)
    return asked


@pytest.fixture
def table(monkeypatch, tmp_path):
    """A table of one row, for v6e forward at width 128."""
    rows = {name: {"forward": {}, "backward": {}} for name in GENERATIONS}
    rows["v6e"]["forward"]["128"] = ROW
    monkeypatch.setattr(tile_table.mosaic, "table", lambda: {"libtpu": "1.0", "tiles": rows})
    monkeypatch.setattr(tile_table, "FILE", tmp_path / "tiles.json")
    return rows


def test_forms_then_sizes_then_chunks(monkeypatch):
    def figures(tiles):
        right = (not tiles.keys_down) + tiles.turned + (tiles.chunk == 128) + tiles.block_k / 4096
        return of(5000, 5000, 1e6 - 1e4 * right)

    asked = fake(monkeypatch, figures)
    found = tune.sweep(topology("v6e"), "backward", Shape(seq_len=32768))
    forms, sizes, chunks = asked
    assert len({(t.keys_down, t.turned) for t in forms}) == 4
    assert {(t.block_q, t.block_k) for t in forms} == {(1024, 1024)}
    assert {(t.keys_down, t.turned) for t in sizes + chunks} == {(False, True)}
    assert {(t.block_q, t.block_k) for t in chunks} == {(1024, 2048)}
    assert len(found) == len(forms) + len(sizes) + len(chunks)  # nothing twice
    assert tune.best(found) == Tiles(1024, 2048, 128, 4, keys_down=False, turned=True)


def test_small_vmem_has_small_tiles(monkeypatch):
    asked = fake(monkeypatch, lambda tiles: of(5000, 5000))
    tune.sweep(topology("v4"), "forward", Shape())
    assert max(t.block_q * t.block_k for tries in asked for t in tries) <= 512 * 1024
    assert {t.held for tries in asked for t in tries} == {8}


def test_a_unit_is_a_small_part_of_the_sequence(monkeypatch):
    for length, longest in ((1024, 1024), (8192, 1024), (32768, 2048)):
        asked = fake(monkeypatch, lambda tiles: of(5000, 5000))
        tune.sweep(topology("v6e"), "forward", Shape(seq_len=length))
        assert max(max(t.block_q, t.block_k) for tries in asked for t in tries) == longest


def test_tiles_that_the_kernel_would_shrink_are_not_tried(monkeypatch):
    asked = fake(monkeypatch, lambda tiles: of(5000, 5000))
    monkeypatch.setattr(tune, "SIZES", ((1024, 1024), (8192, 8192)))
    tune.sweep(topology("v6e"), "forward", Shape(seq_len=65536))
    assert {t.block_k for tries in asked for t in tries} == {1024}


def test_best():
    a, b, c = (Tiles(1024, 1024, chunk, 16) for chunk in (128, 256, 512))
    assert tune.best({a: of(2000, 2000, 90.0), b: of(1900, 1900, 80.0), c: "refused"}) == b
    assert tune.best({a: of(2000, 2000, 90.0), b: of(1000, 1301, 80.0)}) == a
    assert tune.best({b: of(1000, 1301, 80.0)}) == b
    with pytest.raises(CompilerFailed, match="no tile size compiles: refused"):
        tune.best({c: "refused"})


def test_tune_writes_its_rows_and_keeps_the_others(capsys, monkeypatch, table):
    fake(monkeypatch, lambda tiles: of(1800.4, 2200, tiles.chunk))
    assert cli.main(["bench", "kernel", "--tune", "--topology=v6e", "--head_dim=64"]) == 0
    written = json.loads(tile_table.FILE.read_text())
    assert written["libtpu"] == "1.0"
    forward = written["tiles"]["v6e"]["forward"]
    assert list(forward) == ["64", "128"]
    assert forward["128"] == ROW
    assert forward["64"]["full"] == 1800
    assert forward["64"]["tiles"] == ROW["tiles"] | {"chunk": 256}
    assert "keys_down" not in written["tiles"]["v6e"]["backward"]["64"]["tiles"]
    told = capsys.readouterr().out
    assert "v6e (v6e:2x2), forward, width 64" in told
    assert told.count("<") == 2


def test_rows_of_two_compilers_are_not_mixed(monkeypatch, table):
    monkeypatch.setattr(tile_table.metadata, "version", lambda name: "1.1")
    with pytest.raises(ConfigFault, match=r"made with libtpu 1\.0, here is 1\.1: wanted all"):
        Table.installed().same_compiler(parse(["--tune", "--topology=v6e"]))
    fresh = Table.installed()
    fresh.same_compiler(parse(["--tune"]))
    assert fresh.libtpu == "1.1"


CHECK = ["bench", "kernel", "--check", "--topology=v6e", "--head_dim=128"]


def test_check_within_two_percent(capsys, monkeypatch, table):
    fake(monkeypatch, lambda tiles: of(2039, 2451))
    assert cli.main(CHECK) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert "forward, width 128" in told.out


@pytest.mark.parametrize(
    ("full", "partial", "line"),
    [
        (2041, 2500, "FULL tile 2000 cycles before, 2041 after (+2.0%)"),
        (1950, 2500, "FULL tile 2000 cycles before, 1950 after (-2.5%)"),
        (2000, 2600, "PARTIAL tile 2500 cycles before, 2600 after (+4.0%)"),
    ],
)
def test_check_beyond(capsys, monkeypatch, table, full, partial, line):
    fake(monkeypatch, lambda tiles: of(full, partial))
    assert cli.main(CHECK) == 1
    assert capsys.readouterr().err == (
        f"ringflash: ringflash_forward, v6e, width 128: {line}: wanted within 2% of the table;"
        " --tune makes it anew\n"
    )


def test_check_with_another_compiler_only_compiles(capsys, monkeypatch, table):
    fake(monkeypatch, lambda tiles: of(4000, 4000))
    monkeypatch.setattr(tile_check.metadata, "version", lambda name: "1.1")
    assert cli.main(CHECK) == 0
    assert (
        "libtpu 1.1; the table was made with libtpu 1.0: cycles cannot be"
        in capsys.readouterr().out
    )
    fake(monkeypatch, lambda tiles: of(4000, 4000), refuse=lambda tiles: "out of VMEM")
    monkeypatch.setattr(tile_check.metadata, "version", lambda name: "1.1")
    assert cli.main(CHECK) == 1
    assert (
        "ringflash_forward, v6e, width 128: does not compile: out of VMEM"
        in capsys.readouterr().err
    )


def test_the_installed_table_has_all_that_is_checked():
    rows = Table.installed().rows
    assert {*rows} == {*GENERATIONS}
    for passes in rows.values():
        for kinds in passes.values():
            assert {*map(int, kinds)} == {*WIDTHS}
            assert all(row["partial"] <= 1.3 * row["full"] for row in kinds.values())
