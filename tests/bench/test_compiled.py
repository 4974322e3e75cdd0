"""A kernel of JAX's own through the real compiler; where that is absent, what is said then."""

import importlib.util

import pytest

from ringflash.bench.candidates import Job, Shape
from ringflash.bench.compiled import CANDIDATES, Compiled, measure
from ringflash.bench.cycles import cycles
from ringflash.exits import ConfigFault
from ringflash.plan.generations import topology

SHAPE = Shape(seq_len=2048, heads=2, kv_heads=1)
JOBS = [
    Job("splash", "forward", SHAPE, "v6e", (1024, 1024, 1024)),
    Job("splash", "forward", SHAPE, "v6e", (1000, 1024, 1024)),
    Job("splash_unfused", "backward", SHAPE, "v6e", (1024, 1024, 512)),
]


def test_splash_on_v6e():
    if importlib.util.find_spec("libtpu") is None:
        with pytest.raises(ConfigFault, match=r"libtpu.* is not installed: pip install 'ringflash"):
            measure(JOBS, topology("v6e"))
        return
    forward, refused, backward = measure(JOBS, topology("v6e"))
    assert (forward.error, backward.error) == ("", "")
    assert [schedule.kernel.split("_")[2] for schedule in backward.schedules] == ["dkv", "dq"]
    assert refused.schedules == ()
    assert "1000" in refused.error
    tile = weigh(forward)
    assert 2048 <= tile.full < 4500  # two products at half the peak, and what they wait for
    assert tile.busy["MATMUL"] >= 2048
    assert 2**20 < tile.vmem_bytes < 2**25
    assert weigh(backward).busy["MATMUL"] >= 7 * 1024  # with dq alone, the scores are made twice


def weigh(one: Compiled):
    parts = CANDIDATES[one.job.candidate].parts(one.job)
    return cycles(one.job, parts, one.schedules, topology("v6e").generation)
