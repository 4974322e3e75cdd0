import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ringflash.preemption import stop_requested

SIGNALS = [signal.SIGTERM, signal.SIGINT]


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    assert condition()


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_sets_the_flag_and_says_so(signum, capfd):
    with stop_requested() as stop:
        assert not stop.requested
        assert not stop.at(1)
        os.kill(os.getpid(), signum)
        wait_until(lambda: stop.requested)
        assert stop.reason == signum.name
        assert stop.at(2)
    said = capfd.readouterr().err
    assert said.startswith(f"{signum.name}: finishing this step, saving a checkpoint")
    assert "code 42" in said


def test_everything_is_put_back():
    handlers = [signal.getsignal(signum) for signum in SIGNALS]
    threads = threading.active_count()
    with stop_requested():
        assert [signal.getsignal(signum) for signum in SIGNALS] != handlers
        assert threading.active_count() == threads + 1
    assert [signal.getsignal(signum) for signum in SIGNALS] == handlers
    assert threading.active_count() == threads
    with stop_requested() as stop:
        assert not stop.requested


def start(script, *arguments):
    root = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# The main thread is held in one long C call, as it is by a compile: no Python handler can run.
STUCK = """
import ctypes
from ringflash.preemption import stop_requested
with stop_requested():
    print("ready", flush=True)
    nap = ctypes.CDLL(None)
    while True:
        nap.usleep(100_000_000)
"""


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_second_signal_exits_at_once_even_from_a_long_call(signum):
    process = start(STUCK)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    assert "finishing this step" in process.stderr.readline()
    process.send_signal(signum)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 128 + signum
    assert "nothing saved" in said


# Two hosts that train, are stopped by a signal to one of them, save, and restore what they saved.
HOST = """
import sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from ringflash.checkpoint import Checkpoints
from ringflash.preemption import stop_requested

port, rank, workdir = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
split = NamedSharding(mesh, P("a"))
state = jax.jit(lambda: {"w": jnp.arange(8.0)}, out_shardings=split)()
update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
checkpoints = Checkpoints(Path(workdir), keep=1)
with stop_requested() as stop:
    print("ready", flush=True)
    for step in range(1, 1000):
        state = update(state)
        time.sleep(0.02 * (1 + int(rank)))
        if stop.at(step):
            break
checkpoints.save(step, state, data={"next": step}, config={})
checkpoints.close()
wanted = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split)}
back = Checkpoints(Path(workdir), keep=1).restore(wanted)
assert back.step == step and back.data == {"next": step}
whole = multihost_utils.process_allgather(back.state["w"], tiled=True)
np.testing.assert_array_equal(whole, np.arange(8.0) + step)
print("stopped", step, stop.reason, flush=True)
"""


@pytest.mark.parametrize("signum", SIGNALS)
def test_two_hosts_stop_after_the_same_step_and_save_it(tmp_path, signum):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    hosts = [start(HOST, port, rank, tmp_path) for rank in range(2)]
    try:
        for host in hosts:
            assert "ready\n" in iter(host.stdout.readline, "")
        hosts[1].send_signal(signum)
        outputs = [host.communicate(timeout=60) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], outputs
    stopped = {out.splitlines()[-1] for out, _ in outputs}
    assert len(stopped) == 1, outputs
    assert stopped.pop().startswith("stopped ")
    assert "finishing this step" in outputs[0][1]
