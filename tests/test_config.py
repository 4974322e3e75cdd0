import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from ringflash import config_file
from ringflash.config import (
    SIZES,
    Config,
    MeshConfig,
    device_count,
    get,
    leaves,
    load,
    origins,
    override,
    resolve,
    write_config,
)
from ringflash.exits import ConfigFault
from ringflash.model.presets import PRESETS

CONFIGS = Path(__file__).parents[1] / "configs"
BASE = str(CONFIGS / "base.py")
QUICKSTART = str(CONFIGS / "quickstart.py")


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_base_has_every_leaf_and_no_other():
    values = load(BASE)
    named: set[str] = set()
    for key, value in values.items():
        named |= {f"{key}.{leaf}" for leaf in value} if hasattr(value, "items") else {key}
    assert named == set(leaves())


def test_every_leaf_of_base_has_a_comment():
    lines = (CONFIGS / "base.py").read_text().splitlines()
    for key in leaves():
        of_key = [line for line in lines if line.startswith(f"    config.{key} = ")]
        assert len(of_key) == 1, key
        assert re.search(r"  # \w+", of_key[0]), of_key[0]


def test_every_preset_gives_every_size():
    for name, sizes in PRESETS.items():
        assert set(sizes) == set(SIZES), name
        assert all(sizes.values()), name


def test_resolve_gives_each_leaf_its_type():
    config = resolve(load(QUICKSTART, ["--config.optimizer.learning_rate=1"]))
    assert isinstance(config, Config)
    flat = dataclasses.asdict(config)
    for key, kind in leaves().items():
        section, _, name = key.rpartition(".")
        assert type(flat[section][name] if section else flat[name]) is kind, key


def test_an_explicit_size_wins_over_the_preset():
    config = resolve(load(QUICKSTART, ["--config.model.width=64", "--config.model.layers=0"]))
    assert config.model.width == 64
    assert config.model.layers == PRESETS["quickstart"]["layers"]


def test_the_last_of_two_overrides_counts():
    values = load(BASE, ["--config.steps=5", "--config.mesh.data=2", "--config.steps=6"])
    assert (values.steps, values.mesh.data) == (6, 2)


def test_override_leaves_its_argument_alone():
    values = load(BASE)
    changed = override(values, ["--config.loss.chunk=7"])
    assert (values.loss.chunk, changed.loss.chunk) == (1024, 7)


def test_override_repairs_a_wrong_type_of_the_file(tmp_path):
    write(tmp_path, "base.py", (CONFIGS / "base.py").read_text())
    path = write(
        tmp_path,
        "x.py",
        "from base import get_config as base\n"
        "def get_config():\n    c = base()\n    c.steps = 'many'\n    return c\n",
    )
    assert load(path).steps == "many"
    assert load(path, ["--config.steps=5"]).steps == 5


def test_origins():
    file = config_file.read(QUICKSTART)
    found = origins(file, ["--config.steps=60", "--config.model.heads=8"])
    assert found.keys() == leaves().keys()
    assert found["seed"] == "base"
    assert found["steps"] == "command line"
    assert found["seq_len"] == QUICKSTART
    assert found["model.heads"] == "command line"
    assert found["model.width"] == "preset quickstart"


def test_write_config(tmp_path):
    file = config_file.read(QUICKSTART)
    path = tmp_path / "config.json"
    write_config(path, resolve(file.values), origins(file, []))
    read = json.loads(path.read_text())
    assert list(read) == list(leaves())
    assert read["model.width"] == {"value": 128, "from": "preset quickstart"}
    assert read["seq_len"] == {"value": 8192, "from": QUICKSTART}
    assert [found.name for found in tmp_path.iterdir()] == ["config.json"]


def test_siblings_load_from_any_folder_and_are_forgotten(tmp_path, monkeypatch):
    """Two folders may each have a `base`, and an edit within the same second is seen."""
    text = "from ml_collections import ConfigDict\ndef get_config(): return ConfigDict({})\n"
    child = "from base import get_config\n"
    paths = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, "base.py", text.format({"a": name}))
        paths.append(write(folder, "child.py", child))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before = list(sys.path)
    assert [load(path).a for path in paths] == ["one", "two"]
    write(tmp_path / "two", "base.py", text.format({"a": "owt"}))
    assert load("two/child.py").a == "owt"
    assert sys.path == before
    assert {"base", config_file.MODULE}.isdisjoint(sys.modules)
    assert not list(tmp_path.rglob("__pycache__"))


def test_argument_after_a_colon(tmp_path):
    path = write(
        tmp_path,
        "x.py",
        "from ml_collections import ConfigDict\n"
        "def get_config(name='none'): return ConfigDict(dict(name=name))\n",
    )
    assert get(load(path), "name") == "none"
    assert get(load(f"{path}:a:b"), "name") == "a:b"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def get_config(:\n", r"x\.py:1: SyntaxError"),
        ("\n\n1 / 0\n", r"x\.py:3: ZeroDivisionError: division by zero$"),
        ("import sys\nsys.exit(0)\n", r"x\.py:2: SystemExit: 0$"),
        ("import no_such\n", r"x\.py:1: ModuleNotFoundError: .*no_such"),
        ("def config(): pass\n", r"x\.py: ValueError: no get_config\(\)"),
        ("def get_config(): pass\n", r"x\.py: get_config\(\) returned NoneType: wanted a Config"),
        ("def get_config(): return {}\n", r"x\.py: get_config\(\) returned dict: wanted a Config"),
        ("def get_config(size): return {}\n", r"x\.py: TypeError: .*missing 1 required"),
        (
            "def get_config():\n\n    raise ValueError('two\\nlines')",
            r"x\.py:3: ValueError: two lines",
        ),
    ],
)
def test_a_file_that_fails_is_one_line(tmp_path, text, told):
    path = write(tmp_path, "x.py", text)
    with pytest.raises(ConfigFault) as fault:
        load(path)
    (line,) = fault.value.lines()
    assert line.startswith(str(tmp_path))
    assert re.search(told, line), line


def test_a_failing_sibling_is_named(tmp_path):
    write(tmp_path, "base.py", "\nraise KeyError('here')\n")
    with pytest.raises(ConfigFault, match=r"base\.py:2: KeyError"):
        load(write(tmp_path, "x.py", "import base\n"))


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path, "quickstart.py", "")
    with pytest.raises(ConfigFault, match=r"quikstart\.py: no such config file; nearest: .*quicks"):
        load(str(tmp_path / "quikstart.py"))


def test_device_count():
    assert device_count(MeshConfig(data=2, fsdp=1, context=2, tensor=1), 8) == 4
    assert device_count(MeshConfig(data=2, fsdp=1, context=-1, tensor=1), 8) == 8
