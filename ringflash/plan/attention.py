"""Attention compiled for a slice that is not there: forward and backward in one program, and what is in it.

`compiled` is the parent's side, `compile_all` the child's. Arrays are abstract: nothing is computed.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.attention import Spec, Tokens, compiler_options, differentiable
from ringflash.attention.attend import Axes, request, spread
from ringflash.attention.kernels.tpu import tpu
from ringflash.config import MeshConfig
from ringflash.mesh import make_mesh
from ringflash.plan import case as cases
from ringflash.plan import program, rivals
from ringflash.plan.case import OURS, Case, Facts
from ringflash.plan.compiler import in_child, slice_devices
from ringflash.plan.load import mask_of
from ringflash.ring_order import ring_hops

SECONDS_A_CASE = 900
FLAGS = "--xla_jf_dump_to="  # no schedules: they would take several times as long as the compiler
TEXT = "after_codegen.txt"
AXES = Axes(batch=("data",), time=("context",), heads=())


def compiled(asked: Sequence[Case]) -> list[Facts | str]:
    """The facts of each case, or why there are none. Raises what `in_child` does."""
    values = [dataclasses.asdict(each) for each in asked]
    work = f"{__name__}:compile_all"
    told = in_child(work, values, seconds=SECONDS_A_CASE * len(asked), flags=FLAGS)
    return [one if isinstance(one, str) else cases.from_json(one) for one in told]


def compile_all(asked: list[dict[str, Any]], dump: Path) -> list[dict[str, Any] | str]:
    """In the child: facts as JSON has them, or what a strategy or the compiler raised."""
    told: list[dict[str, Any] | str] = []
    for values in asked:
        try:
            told.append(dataclasses.asdict(compile_one(cases.case_of(values), dump)))
        except Exception as refusal:  # whatever it is, it is the answer
            told.append(f"{type(refusal).__name__}: {refusal}"[:2000])
    return told


def compile_one(case: Case, dump: Path) -> Facts:
    """In the child: one case. Raises ValueError where the strategy cannot serve it."""
    shutil.rmtree(dump)
    dump.mkdir()
    mesh = mesh_of(case)
    function, arguments = (ours if case.who == OURS else rivals.tokamax_ring)(case, mesh)
    lowered = jax.jit(function).lower(*arguments)
    # The compiler writes the program itself: a newer libtpu's is not always one that jaxlib can read.
    wanted: dict[str, str | bool] = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    wanted |= compiler_options(mesh)
    start = time.process_time()
    done = lowered.compile(compiler_options=wanted)
    seconds = time.process_time() - start
    used = done.memory_analysis()
    assert used is not None
    return Facts(
        program=program.read(text_of(dump)),
        shards=mesh.shape["context"],
        compile_seconds=seconds,
        code_bytes=used.generated_code_size_in_bytes,
        temp_bytes=used.temp_size_in_bytes,
        argument_bytes=used.argument_size_in_bytes,
        output_bytes=used.output_size_in_bytes,
        hop_links=ring_hops(mesh),
    )


def mesh_of(case: Case) -> Mesh:
    """The sequence over all devices of a slice in the order that training has; slices over `data`."""
    devices = slice_devices(case.topology, case.slices)
    return make_mesh(MeshConfig(data=case.slices, fsdp=1, context=-1, tensor=1), devices)


def ours(case: Case, mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Our TPU kernel under the strategy: out and the gradients of q, k and v."""
    where = NamedSharding(mesh, P("data", "context"))

    def array(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((case.slices, case.seq_len, *dims), dtype, sharding=where)

    spec = Spec(mask_of(case.mask))
    kernel = tpu(spec, device_kind=mesh.devices.flat[0].device_kind)
    q, dout = (array(case.heads, case.head_dim) for _ in range(2))
    k, v = (array(case.kv_heads, case.head_dim) for _ in range(2))
    reason = kernel.unsupported(request(q, k, v, spec, mesh, AXES))
    if reason is not None:
        raise ValueError(reason)
    attention = differentiable(spread(kernel, case.strategy, mesh, AXES))

    def run(q: Any, k: Any, v: Any, dout: Any, at: Tokens) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, at, at)[0], q, k, v)
        return out, pull(dout)

    return run, (q, k, v, dout, Tokens(array(dtype=jnp.int32), array(dtype=jnp.int32)))


def text_of(dump: Path) -> str:
    """The scheduled HLO of the one program that the compiler wrote."""
    written = list(dump.glob(f"*.{TEXT}"))
    if len(written) != 1:
        raise ValueError(f"wanted one file *.{TEXT} from the compiler, found {len(written)}")
    return written[0].read_text()
