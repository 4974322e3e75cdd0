"""What the environment of each launcher says of a run's processes."""

import http.server
import re
import threading

import jax
import pytest

from ringflash import cli, processes
from ringflash.cluster import Cluster, detect
from ringflash.exits import ConfigFault
from ringflash.hostlists import expand, tasks

JAX = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


def slurm(count, rank, nodes="node[1-4]", **more):
    """Of a task that srun started, one on each node."""
    return {
        "SLURM_JOB_ID": "4096007",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        **more,
    }


def test_nothing_set_is_one_process():
    assert detect({}, "cpu") == Cluster()


def test_jax_variables():
    found = detect(JAX, "cpu")
    assert (found.coordinator, found.count, found.rank) == ("a:1", 2, 1)
    assert "JAX_PROCESS_ID=0 to 1" in found.start


def test_jax_variables_go_before_a_schedulers():
    assert detect({**JAX, **slurm(4, 3)}, "cpu").launcher == "JAX_* variables"


@pytest.mark.parametrize("count", [2, 4])
def test_slurm(count):
    names = [f"node{n + 1}" for n in range(count)]
    for rank in range(count):
        found = detect(slurm(count, rank, f"node[1-{count}]"), "gpu")
        assert (found.launcher, found.count, found.rank) == ("SLURM", count, rank)
        assert found.coordinator == f"node1:{61440 + 4096007 % 4096}"
        assert found.hosts == tuple(names)
        assert found.local_rank is None, "one task has all devices of its node"
        assert found.start == f"srun -N {count} -n {count} with the same command"


def test_one_task_of_slurm_is_one_process():
    assert detect(slurm(1, 0, "node7"), "cpu") == Cluster()


def test_several_tasks_of_a_node_take_one_device_each():
    more = {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}
    found = detect(slurm(4, 3, "node[1-2]", **more), "gpu")
    assert found.local_rank == 1
    assert found.hosts == ("node1", "node1", "node2", "node2")


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
            "not started by srun: no SLURM_STEP_NUM_TASKS",
        ),
        ({"JAX_NUM_PROCESSES": "4"}, "JAX_NUM_PROCESSES set without JAX_COORDINATOR_ADDRESS"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "set without TPU_WORKER_ID"),
    ],
)
def test_half_of_the_variables_are_one_process_and_a_notice(variables, told):
    found = detect(variables, "cpu")
    assert (found.count, found.coordinator) == (1, "")
    assert told in found.notice


def test_half_of_one_launchers_variables_do_not_hide_another():
    assert detect({"JAX_NUM_PROCESSES": "4", **slurm(4, 2)}, "cpu").launcher == "SLURM"


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({**JAX, "JAX_PROCESS_ID": "x"}, "JAX_PROCESS_ID: wanted a whole number, found 'x'"),
        ({**JAX, "JAX_PROCESS_ID": "2"}, "rank 2 of 2 processes"),
        (slurm(2, 0, "node[1-"), "wanted a list of nodes"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_LOCAL_SIZE: wanted a whole number"),
        (
            {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0", "MEGASCALE_NUM_SLICES": "2"},
            "without MEGASCALE_COORDINATOR_ADDRESS",
        ),
    ],
)
def test_what_cannot_be_understood(variables, told):
    with pytest.raises(ConfigFault, match=re.escape(told)):
        detect(variables, "cpu")


def mpi(size, rank, here, **more):
    return {
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(here),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % here),
        **more,
    }


def test_open_mpi():
    found = detect(mpi(2, 1, 2), "cpu")
    assert (found.coordinator.partition(":")[0], found.count, found.rank) == ("localhost", 2, 1)
    uri = "153157632.0;tcp://10.96.0.1,10.148.0.1:34911"
    far = detect(mpi(4, 3, 1, OMPI_MCA_orte_hnp_uri=uri), "cpu")
    assert far.coordinator.startswith("10.96.0.1:6")
    given = detect(mpi(4, 3, 1, JAX_COORDINATOR_ADDRESS="n0:7"), "cpu")
    assert given.coordinator == "n0:7"
    with pytest.raises(ConfigFault, match="set JAX_COORDINATOR_ADDRESS"):
        detect(mpi(4, 3, 1), "cpu")


def gke(worker, **more):
    hosts = ",".join(f"job-0-{n}.sub" for n in range(4))
    return {"TPU_WORKER_HOSTNAMES": hosts, "TPU_WORKER_ID": str(worker), **more}


def test_gke():
    found = detect(gke(3), "tpu")
    assert (found.launcher, found.count, found.rank) == ("GKE", 4, 3)
    assert found.coordinator == "job-0-0.sub:8476"
    assert found.hosts[3] == "job-0-3.sub"
    alone = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
    assert detect(alone, "tpu") == Cluster()


def test_several_slices():
    megascale = {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "first.sub:8080",
    }
    found = detect(gke(2, **megascale), "tpu")
    assert (found.count, found.rank, found.coordinator) == (8, 6, "first.sub:8476")
    assert found.hosts == ("", "", "", "", *(f"job-0-{n}.sub" for n in range(4)))


@pytest.fixture
def metadata(monkeypatch):
    """A metadata server with these attributes."""
    served = {
        "worker-network-endpoints": "unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3",
        "agent-worker-number": "1",
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            value = served.get(self.path.rpartition("/")[2])
            known = value is not None and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("localhost", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"localhost:{server.server_port}")
    yield served
    server.shutdown()
    server.server_close()


def test_a_tpu_vm(metadata):
    found = detect({}, "tpu")
    assert (found.launcher, found.count, found.rank) == ("TPU VM", 2, 1)
    assert (found.coordinator, found.hosts) == ("10.0.0.2:8476", ("10.0.0.2", "10.0.0.3"))
    assert "--worker=all" in found.start
    assert detect({}, "cpu") == Cluster(), "no TPU: nobody is asked"


def test_a_tpu_without_metadata_is_one_process(metadata):
    metadata.clear()
    found = detect({}, "tpu")
    assert found.count == 1
    assert "no metadata of its slice" in found.notice


def test_lists_of_nodes():
    assert expand("node[01-03,7],gpu5") == ["node01", "node02", "node03", "node7", "gpu5"]
    assert expand("a-[9-11]-ib,b") == ["a-9-ib", "a-10-ib", "a-11-ib", "b"]
    assert tasks("2(x3),1", 4) == [2, 2, 2, 1]
    assert tasks("", 3) == [1, 1, 1]
    for wrong in ("", "a[1-", "a[1-x]", "a[1]b[2]"):
        with pytest.raises(ValueError, match="wanted"):
            expand(wrong)
    with pytest.raises(ValueError, match="wanted tasks"):
        tasks("x", 1)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset"), True),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: the other end is gone"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (jax.errors.JaxRuntimeError("INTERNAL: a fault"), False),
        (ValueError("UNAVAILABLE"), False),
    ],
)
def test_what_is_seen_of_a_process_that_died(error, lost):
    assert processes.is_lost_peer(error) == lost


@pytest.mark.parametrize(("message", "code"), [("UNAVAILABLE: gone", 124), ("INTERNAL: no", 1)])
def test_a_lost_peer_is_worth_another_start(monkeypatch, capfd, message, code):
    """In a run of several processes; each leaves without waiting for the others."""

    def fail(arguments):
        raise jax.errors.JaxRuntimeError(message)

    left = []
    monkeypatch.setattr(cli, "_run", fail)
    monkeypatch.setattr(processes, "many", lambda: True)
    monkeypatch.setattr(processes, "leave", lambda seconds: bool(left.append(seconds)))
    monkeypatch.setattr(cli.os, "_exit", left.append)
    assert cli.main(["train"]) == code
    assert left == [0, code]
    assert message in capfd.readouterr().err
    monkeypatch.setattr(processes, "many", lambda: False)
    with pytest.raises(jax.errors.JaxRuntimeError):
        cli.main(["train"])
