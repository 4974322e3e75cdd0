import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import ringflash
from ringflash import startup

ROOT = Path(__file__).parents[1]
PREPARE = """
import sys
from ringflash.config import load, resolve
from ringflash.startup import prepare
prepare(resolve(load("configs/quickstart.py", sys.argv[1:])))
import jax
print(len(jax.devices()), jax.devices()[0].platform, jax.config.values["jax_compilation_cache_dir"])
jax.jit(lambda x: x + 1)(1.0)
"""


def prepare(*overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(ringflash.__file__).parents[1]), *sys.path])
    clean = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, "-c", PREPARE, *overrides],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_mesh_is_simulated_and_programs_are_kept(tmp_path):
    cache = tmp_path / "deep" / "cache"
    done = prepare("--config.mesh.context=4", RINGFLASH_CACHE_DIR=str(cache), JAX_PLATFORMS="cpu")
    assert done.stdout == f"4 cpu {cache}\n", done.stderr
    assert done.stderr == ""
    assert cache.stat().st_mode & 0o777 == 0o700
    assert list(cache.iterdir())


def test_without_a_cache_there_is_one_notice(tmp_path):
    (tmp_path / "file").write_text("")
    done = prepare(RINGFLASH_CACHE_DIR=str(tmp_path / "file"), JAX_PLATFORMS="cpu")
    assert done.stdout == "8 cpu None\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("ringflash: no compilation cache: ")


def test_a_cache_that_others_can_write_is_not_used(tmp_path, monkeypatch, capsys):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("RINGFLASH_CACHE_DIR", str(shared))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.values["jax_compilation_cache_dir"]
    startup._cache_compilations()
    assert jax.config.values["jax_compilation_cache_dir"] == before
    assert f"others can write to {shared}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "modules", "devices", "platform"),
    [
        ("", {"libtpu"}, {"accel*"}, "tpu"),
        ("", {"libtpu"}, {"vfio/[0-9]*"}, "tpu"),
        ("", {"libtpu"}, set(), "cpu"),
        ("", {"jax_cuda13_plugin"}, {"nvidia0"}, "gpu"),
        ("", {"jax_cuda12_plugin"}, set(), "cpu"),
        ("", set(), {"nvidia0", "accel*"}, "cpu"),
        ("cpu", {"libtpu"}, {"accel*"}, "cpu"),
        ("cuda,cpu", set(), set(), "gpu"),
        ("tpu", set(), set(), "tpu"),
    ],
)
def test_platform_needs_a_device_and_its_plugin(monkeypatch, named, modules, devices, platform):
    monkeypatch.setenv("JAX_PLATFORMS", named)
    monkeypatch.setattr(startup, "_installed", modules.__contains__)
    monkeypatch.setattr(startup, "_has_device", devices.__contains__)
    assert startup.platform() == platform


def test_simulated_devices_have_one_order_and_threads_to_wait_in(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    told = {}
    monkeypatch.setattr(startup.jax.config, "update", told.__setitem__)
    for _ in range(2):
        startup.simulate(8)
        assert told == {"jax_platforms": "cpu", "jax_num_cpu_devices": 8}
        assert os.environ["XLA_FLAGS"] == f"--xla_dump_to=x {startup.ONE_ORDER}"
        assert os.environ["NPROC"] == "16"


def test_no_processor_idles_for_few_devices_and_the_users_number_stands(monkeypatch):
    monkeypatch.setattr(startup.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.delenv("NPROC")
    startup.simulate(8)
    assert os.environ["NPROC"] == "64"
    monkeypatch.setenv("NPROC", "5")
    startup.simulate(8)
    assert os.environ["NPROC"] == "5"
