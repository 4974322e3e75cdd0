"""Processes that start in the environment of a launcher, find one another, and see each other's devices."""

import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ringflash.supervisor import free_port

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
# argument 1: the platform that is taken to be there.
DRIVER = """
import os, sys
from pathlib import Path
from ringflash import cluster, processes, startup
from ringflash.config import flat, load, resolve
config = resolve(load("configs/quickstart.py"))
found = cluster.detect(os.environ, sys.argv[1])
startup.prepare(config, found.count)
roll = processes.join(found, processes.hello(flat(config), Path("/runs/a")), "cpu")
import jax
devices = [row[2] for row in processes.hosts(roll)]
print()  # gloo may have written half a line
print("ours:", found.launcher, found.rank, len(roll), devices, len(jax.devices()))
print("ours:", processes.odd_ones("all alike"), processes.odd_ones(str(min(found.rank, 2))), flush=True)
assert processes.leave(60.0)
"""


def started(environments, device="cpu"):
    """What each process says."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, device],
            env={**kept, **path, **own},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in environments
    ]
    said = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0] * len(children), said
    return [re.findall("ours: (.*)", out) for out, _ in said]


def wanted(launcher, count):
    """Of the first; the others leave standard output to it."""
    kinds = [f"{8 // count} x cpu"] * count
    odd = list(range(1, count))
    return [f"{launcher} 0 {count} {kinds} 8", f"[] {odd}"]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_tasks_of_slurm(count):
    environments = [
        {
            "SLURM_JOB_ID": str(4096 + free_port() % 4096),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_TASKS_PER_NODE": str(count),
            "SLURM_LOCALID": str(rank),
            "SLURM_PROCID": str(rank),
        }
        for rank in range(count)
    ]
    job = environments[0]["SLURM_JOB_ID"]
    said = started([{**one, "SLURM_JOB_ID": job} for one in environments])
    if count == 1:
        assert said == [["one process 0 0 [] 8", "[] []"]]
    else:
        assert said == [wanted("SLURM", count), *[[]] * (count - 1)]


def test_pods_of_gke():
    address = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}"}
    pods = [
        {"TPU_WORKER_HOSTNAMES": "localhost,localhost", "TPU_WORKER_ID": str(rank), **address}
        for rank in range(2)
    ]
    assert started(pods) == [wanted("GKE", 2), []]


def test_pods_of_two_slices_on_gke():
    address = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}"}
    pods = [
        {
            "TPU_WORKER_HOSTNAMES": "localhost,localhost",
            "TPU_WORKER_ID": str(worker),
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": str(at),
            "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080",
            **address,
        }
        for at in range(2)
        for worker in range(2)
    ]
    assert started(pods) == [wanted("GKE", 4), [], [], []]


class Metadata(http.server.BaseHTTPRequestHandler):
    """As each TPU VM's own metadata server, which its port here tells apart."""

    def do_GET(self):
        workers = {
            "worker-network-endpoints": "unknown:unknown:localhost,unknown:unknown:localhost",
            "agent-worker-number": str(self.server.worker),
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(workers[self.path.rpartition("/")[2]].encode())

    def log_message(self, *_):
        pass


def test_tpu_vms():
    servers = [http.server.HTTPServer(("localhost", 0), Metadata) for _ in range(2)]
    for worker, server in enumerate(servers):
        server.worker = worker
        threading.Thread(target=server.serve_forever, daemon=True).start()
    address = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}"}
    machines = [{"GCE_METADATA_HOST": f"localhost:{s.server_port}", **address} for s in servers]
    try:
        assert started(machines, "tpu") == [wanted("TPU VM", 2), []]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
