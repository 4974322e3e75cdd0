"""What the tests of the TPU kernel have a child with the TPU compiler do: compile, and tell what failed."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.attention import Tokens, differentiable, make_strategy
from ringflash.attention.cases import CASES, Case, inputs
from ringflash.attention.kernels.tpu import tpu
from ringflash.attention.strategies.sharded import sharded

BY_NAME = {case.name: case for case in CASES}


def compile_cases(asked, dump):
    """Forward and gradients of each [case, dtype] for one device of the slice: what was refused, by name."""
    device = devices_of(asked["topology"])[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("device",))
    told = {}
    for name, dtype in asked["cases"]:
        clear(dump)
        case = BY_NAME[name]
        attention = differentiable(tpu(case.spec, device_kind=device.device_kind))
        try:
            text = compiled(attention, case, dtype, lambda dims: NamedSharding(mesh, P()))
            assert "ringflash_forward" in text, "no forward kernel in the program"
            assert "ringflash_backward" in text, "no backward kernel in the program"
        except Exception as refusal:
            told[f"{name} {dtype}"] = f"{type(refusal).__name__}: {refusal}"[:500]
    return told


def compile_ring(asked, dump):
    """A ring over all devices of the slice, 256 tokens on each: how often what is in the program."""
    devices = devices_of(asked["topology"])
    mesh = jax.sharding.Mesh(np.array(devices), ("context",), axis_types=(AxisType.Auto,))
    case = Case("", B=1, T=256 * len(devices), N=2, K=1, H=128)
    kernel = make_strategy("ring")(tpu(case.spec), "context")
    attention = differentiable(sharded(kernel, mesh, batch=None, time="context", heads=None))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = compiled(
            attention, case, "bfloat16", lambda time: NamedSharding(mesh, spread_over(time))
        )
    wanted = ("ringflash_forward", "ringflash_backward", "collective-permute-start")
    return {"devices": len(devices), **{name: text.count(name) for name in wanted}}


def spread_over(time):
    """The dim of an array that is time, over the ring; None is none."""
    return P() if time is None else P(*[None] * time, "context")


def devices_of(topology):
    """The devices of a slice that is only compiled for."""
    # Loads the compiler: never in the parent.
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def clear(dump):
    """What the compiler wrote of the case before: gigabytes, over all."""
    shutil.rmtree(dump)
    dump.mkdir()


def compiled(attention, case, dtype, placed):
    """The program of forward and all gradients; `placed` gives the sharding for the dim that is time."""
    x = inputs(case)

    def shape(array, time, to=None):
        return (
            None
            if array is None
            else jax.ShapeDtypeStruct(
                array.shape, jnp.dtype(to or array.dtype), sharding=placed(time)
            )
        )

    def run(q, k, v, sinks, dout, dlse, q_at, k_at):
        (out, lse), pull = jax.vjp(
            lambda q, k, v, sinks: attention(q, k, v, q_at, k_at, sinks), q, k, v, sinks
        )
        return out, lse, pull((dout, dlse))

    arrays = [shape(a, 1, dtype) for a in x[:3]]
    q_at, k_at = (Tokens(*(shape(a, 1) for a in at[:2])) for at in (x.q_at, x.k_at))
    rest = (shape(x.sinks_N, None), shape(x.dout_BTNH, 1, dtype), shape(x.dlse_BNT, 2))
    return jax.jit(run).lower(*arrays, *rest, q_at, k_at).compile().as_text()
