from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_source import MemorySource, source_of_lengths

from ringflash.data.sources import DataError, FileSource, make_source, split


def write(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def test_stdlib_is_sorted_python_without_tests_and_empty_files():
    source = make_source("stdlib")
    assert {"argparse.py", "asyncio/base_events.py"} <= set(source.names)
    assert list(source.names) == sorted(set(source.names))
    folders = {part for name in source.names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idlelib", "site-packages", "ensurepip", "tkinter"}
    assert all(len(source[i]) > 0 for i in range(len(source)))
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert source[source.names.index("argparse.py")] == (stdlib / "argparse.py").read_bytes()


def test_stdlib_skips_machine_specific_folders(tmp_path, monkeypatch):
    kept = {"a.py": b"1", "p/b.py": b"2"}
    left_out = {"p/tests/c.py": b"3", "config-3.11-linux/d.py": b"4", "e.txt": b"5", "f.py": b""}
    write(tmp_path, kept | left_out)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert make_source("stdlib").names == ("a.py", "p/b.py")


def test_stdlib_takes_no_argument():
    with pytest.raises(ValueError, match="takes no argument, got 'x'"):
        make_source("stdlib:x")


@pytest.mark.parametrize("spec", ["stdlibb", "https://x", ""])
def test_unknown_source_names_the_known(spec):
    with pytest.raises(ValueError, match=r"known: files, stdlib"):
        make_source(spec)


def test_files_match_a_glob_and_are_named_below_its_fixed_part(tmp_path):
    write(tmp_path, {"x/b.txt": b"B", "x/y/a.txt": b"A\xff", "x/c.md": b"C", "x/empty.txt": b""})
    source = make_source(f"files:{tmp_path}/x/**/*.txt")
    assert source.names == ("b.txt", "y/a.txt")
    assert [source[i] for i in range(2)] == [b"B", b"A\xff"]


def test_files_from_a_relative_glob_are_the_same_source(tmp_path, monkeypatch):
    write(tmp_path, {"x/b.txt": b"B", "x/y/a.txt": b"A"})
    absolute = make_source(f"files:{tmp_path}/x/**/*.txt")
    monkeypatch.chdir(tmp_path)
    relative = make_source("files:x/**/*.txt")
    assert relative.names == absolute.names
    assert relative.fingerprint == absolute.fingerprint
    assert make_source("files:./*/b.txt").names == ("x/b.txt",)


def test_folders_that_match_are_no_documents(tmp_path):
    write(tmp_path, {"x/b.txt": b"B", "x/y/a.txt": b"A"})
    assert make_source(f"files:{tmp_path}/x/**").names == ("b.txt", "y/a.txt")


def test_a_single_file_is_a_source(tmp_path):
    write(tmp_path, {"x/b.txt": b"B"})
    assert make_source(f"files:{tmp_path}/x/b.txt").names == ("b.txt",)


def test_no_match_names_the_pattern(tmp_path):
    write(tmp_path, {"empty.txt": b""})
    for pattern in ("*.nothing", "*.txt"):
        with pytest.raises(DataError) as caught:
            make_source(f"files:{tmp_path}/{pattern}")
        assert f"{tmp_path}/{pattern}" in str(caught.value)


def test_a_file_that_went_away_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read document .*gone\.txt: No such file"):
        FileSource(tmp_path, ["gone.txt"])[0]


def test_fingerprint_sees_names_sizes_contents_and_order():
    documents = {"a": b"xy", "b": b"z"}
    others = [
        {"a": b"xybz"},
        {"ax": b"y", "b": b"z"},
        {"a": b"xy", "c": b"z"},
        {"a": b"x", "b": b"yz"},
        {"a": b"xy", "b": b"y"},
        {"b": b"z", "a": b"xy"},
        {"a": b"xy"},
    ]
    prints = [MemorySource(d).fingerprint for d in [documents, *others]]
    assert len(set(prints)) == len(prints)
    assert MemorySource(dict(documents)).fingerprint == prints[0]


@given(names=st.sets(st.text(st.characters(codec="utf-8"), min_size=1), min_size=30, max_size=60))
def test_split_is_a_partition_by_name_alone(names):
    source = MemorySource({name: name.encode() for name in sorted(names)})
    train, held_out = split(source, 50)
    assert sorted([*train.names, *held_out.names]) == sorted(names)
    for part, expected in ((train, False), (held_out, True)):
        for index, name in enumerate(part.names):
            assert part[index] == name.encode()
            assert (int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < 50) is expected


def test_split_does_not_move_when_documents_are_added():
    train, _ = split(source_of_lengths([1] * 40), 50)
    more_train, _ = split(source_of_lengths([1] * 80), 50)
    assert set(train.names) <= set(more_train.names)


def test_parts_say_what_they_are_and_differ():
    train, held_out = split(source_of_lengths([1] * 40), 50)
    assert (train.part, held_out.part) == ("training, 50% held out", "held out, 50%")
    assert train.fingerprint != held_out.fingerprint


@pytest.mark.parametrize(("percent", "counts"), [(0, (3, 0)), (100, (0, 3))])
def test_an_empty_part_is_refused(percent, counts):
    with pytest.raises(DataError, match=f"{counts[0]} are for training and {counts[1]} are held"):
        split(source_of_lengths([1, 2, 3]), percent)
