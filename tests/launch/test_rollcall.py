"""The roll of processes, called between threads of this one."""

import socket
import threading
import time
from pathlib import Path

import pytest

from ringflash.exits import ConfigFault, Missing, Stop
from ringflash.rollcall import Hello, call, code_of, differences
from ringflash.supervisor import free_port

SAME = Hello(
    "h", workdir="/runs/a", versions={"jax": "1"}, code={"x.py": "aa"}, config={"steps": "3"}
)


def hello(host, **more):
    return Hello(
        host, **{"workdir": "/runs/a", "versions": SAME.versions, "code": SAME.code} | more
    )


def called(hellos, *, count=None, seconds=10.0, hosts=(), port=None):
    """What each of these, as ranks 0, 1, ..., gets: the names of all hosts, or what was raised."""
    address = f"localhost:{port or free_port()}"
    found = {}

    def one(rank, said):
        try:
            roll = call(
                address,
                count or len(hellos),
                rank,
                said,
                hosts=hosts,
                start="the command on all",
                seconds=seconds,
            )
            found[rank] = [(x.rank, x.host) for x in roll]
        except Stop as stop:
            found[rank] = stop

    threads = [threading.Thread(target=one, args=item) for item in hellos.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    return found


def test_all_come_and_are_alike():
    everyone = [(n, f"h{n}") for n in range(5)]
    found = called({n: hello(f"h{n}") for n in range(5)})
    assert found == dict.fromkeys(range(5), everyone)


def test_the_odd_one_is_named_to_all_and_soon():
    start = time.monotonic()
    odd = hello("h2", code={"ringflash/ring.py": "bb"})
    usual = {"code": {"ringflash/ring.py": "aa"}}
    found = called({0: hello("h0", **usual), 1: hello("h1", **usual), 2: odd}, seconds=300)
    assert time.monotonic() - start < 10
    for fault in found.values():
        assert isinstance(fault, ConfigFault)
        (line,) = fault.lines()
        assert line == (
            "rank 2 (host h2) is not as the others are: code of ringflash/ring.py: bb, elsewhere aa"
        )


def test_whoever_does_not_come_is_named_to_all():
    there = {n: hello(f"h{n}") for n in (0, 2)}
    found = called(there, count=4, seconds=1.0, hosts=("n0", "n1", "n2", ""))
    for fault in found.values():
        assert isinstance(fault, Missing)
        assert fault.code == 124
        (line,) = fault.lines()
        assert (
            line == "2 of 4 processes did not come: rank 1 (n1), rank 3. Start the command on all"
        )


def test_without_rank_0():
    found = called({1: hello("h1")}, count=2, seconds=0.5)
    assert "rank 0 was not reached at localhost" in str(found[1])
    assert isinstance(found[1], Missing)


def test_a_stranger_does_not_hold_up_the_roll():
    port = free_port()
    done = threading.Event()

    def stranger():
        while not done.is_set():
            try:
                with socket.create_connection(("localhost", port), 1.0) as door:
                    door.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    done.wait(0.05)
            except OSError:
                done.wait(0.01)

    thread = threading.Thread(target=stranger)
    thread.start()
    found = called({n: hello("h") for n in range(2)}, port=port)
    done.set()
    thread.join()
    assert found[1] == [(0, "h"), (1, "h")]


def test_two_that_say_they_are_the_same():
    port = free_port()
    results = []
    first = threading.Thread(
        target=lambda: results.append(called({0: hello("h0"), 1: hello("h1")}, count=3, port=port))
    )
    first.start()
    results.append(called({1: hello("other")}, count=3, port=port))
    first.join()
    told = " ".join(str(fault) for found in results for fault in found.values())
    assert "both came as rank 1" in told


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as other:
        other.listen()
        found = called({0: hello("h")}, count=2, seconds=0.3, port=other.getsockname()[1])
    assert "cannot be had" in str(found[0])
    assert "JAX_COORDINATOR_ADDRESS names another" in str(found[0])


def test_an_address_without_a_port():
    with pytest.raises(ConfigFault, match="wanted HOST:PORT, found 'host'"):
        call("host", 2, 0, SAME, hosts=(), start="", seconds=1.0)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"workdir": "/runs/b"}, "--workdir: /runs/b, elsewhere /runs/a"),
        ({"versions": {"jax": "2"}}, "version of jax: 2, elsewhere 1"),
        ({"versions": {}}, "version of jax: absent, elsewhere 1"),
        ({"config": {"steps": "4"}}, "--config.steps: 4, elsewhere absent"),
    ],
)
def test_what_differs(more, told):
    (line,) = differences(
        [hello("a"), hello("b"), Hello(**{**hello("c", **more).__dict__, "rank": 2})]
    )
    assert line == f"rank 2 (host c) is not as the others are: {told}"


def test_of_two_the_first_is_right_and_many_differences_are_counted():
    one = hello("a", code={f"{n}.py": "1" for n in range(9)})
    two = hello("b", rank=1, code={f"{n}.py": "2" for n in range(9)})
    (line,) = differences([one, two])
    assert line.startswith("rank 1 (host b)")
    assert line.endswith("3.py: 2, elsewhere 1 and 5 more")


def test_the_digest_of_a_file_moves_with_the_file(tmp_path: Path):
    package = tmp_path / "package"
    (package / "deep").mkdir(parents=True)
    (package / "deep" / "a.py").write_text("1")
    before = code_of(package)
    assert list(before) == ["package/deep/a.py"]
    (package / "deep" / "a.py").write_text("2")
    assert code_of(package) != before
