"""The arguments of `ringflash bench kernel`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ringflash.attention.kernels.tpu import WIDEST
from ringflash.bench import flags
from ringflash.bench.candidates import Shape
from ringflash.exits import ConfigFault
from ringflash.plan.generations import GENERATIONS, Topology, topology

OURS = "tpu"
PEERS = ("splash", "splash_unfused", "tokamax", "tokamax_lp")
DTYPES = ("bfloat16", "float32")
LENGTH_UNIT = 1024  # a tile that is not whole would need a model of its own
WIDTHS = (64, 128, 256)  # those of the table of tile sizes
SWITCHES = ("tune", "check", "json")
HELP = """usage: ringflash bench kernel [--topology=v5p:2x2x1,v6e|all] [--compare=splash,tokamax]
         [--head_dim=128,64] [--heads=32] [--kv_heads=8] [--seq_len=8192] [--dtype=bfloat16]
         [--tune | --check] [--json]

Compiles attention kernels for a TPU that need not be there, and reads cycles from their schedules.
--topology names generations (v4, v5e, v5p, v6e, 7x) or slices of them; without it, all.
--compare names what must be there: splash, splash_unfused (JAX's), tokamax, tokamax_lp (with the
compiler's other scheduler); without it, what is installed. `pip install 'ringflash[plan]'` installs
the compiler. A table takes a minute or two. Where 8 does not divide --heads, --kv_heads is as many.
--tune tries tile sizes of our kernel and writes the best into its table, about two minutes for each
generation, pass and width; --check compiles the table's rows again, and ends with 1 where cycles are not
what they were. Both take --head_dim=64,128,256 unless it is given.
"""


@dataclass(frozen=True)
class KernelOptions:
    """What to compile, and for what. `compare` None: those that are installed.

    widths: the head widths, one after the other; that of `shape` is the first.
    """

    topology: tuple[Topology, ...] = tuple(map(topology, GENERATIONS))
    compare: tuple[str, ...] | None = None
    shape: Shape = field(default_factory=Shape)
    widths: tuple[int, ...] = (Shape.head_dim,)
    tune: bool = False
    check: bool = False
    json: bool = False


SIZES = tuple(f.name for f in fields(Shape) if f.name != "dtype")
NAMES = ("topology", "compare", *SIZES, "dtype", *SWITCHES)


def parse(arguments: Sequence[str]) -> KernelOptions:
    """`--name=value ...` as KernelOptions. Raises ConfigFault with all that is wrong."""
    taken, faults = flags.gather(arguments, value)
    table = bool({"tune", "check"} & taken.keys())
    taken.setdefault("widths", WIDTHS if table else KernelOptions.widths)
    shape = {name: taken.pop(name) for name in (*SIZES, "dtype") if name in taken}
    shape["head_dim"] = taken["widths"][0]
    if "heads" in shape and "kv_heads" not in shape and shape["heads"] % Shape.kv_heads:
        shape["kv_heads"] = shape["heads"]
    options = replace(KernelOptions(), shape=replace(Shape(), **shape), **taken)
    faults += together(options)
    if faults:
        raise ConfigFault(*faults)
    return options


def value(argument: str) -> dict[str, Any]:
    """One argument. Raises ConfigFault."""
    name, text = flags.split(argument, NAMES, SWITCHES)
    if name in SWITCHES:
        return {name: True}
    if name == "topology":
        return {name: topologies(argument, text)}
    if name == "compare":
        return {name: flags.chosen(argument, text, PEERS)}
    if name == "dtype":
        return {name: flags.one_of(argument, text, DTYPES)}
    if name == "head_dim":
        parts = dict.fromkeys(text.split(","))
        return {"widths": tuple(flags.positive(argument, part) for part in parts)}
    return {name: flags.positive(argument, text)}


def topologies(argument: str, text: str) -> tuple[Topology, ...]:
    """A comma list, or `all`. Raises ConfigFault with all that is wrong."""
    if text == "all":
        return KernelOptions.topology
    found, faults = [], []
    for part in text.split(","):
        try:
            found.append(topology(part))
        except ConfigFault as fault:
            faults += [f"{argument}: {line}" for line in fault.lines()]
    if faults:
        raise ConfigFault(*faults)
    return tuple(found)


def together(options: KernelOptions) -> list[str]:
    """What is wrong with values that are each right."""
    shape, faults = options.shape, []
    if shape.heads % shape.kv_heads:
        faults.append(f"--heads={shape.heads} must be a multiple of --kv_heads={shape.kv_heads}")
    if shape.seq_len % LENGTH_UNIT:
        faults.append(f"--seq_len={shape.seq_len} must be a multiple of {LENGTH_UNIT}")
    if max(options.widths) > WIDEST:
        faults.append(
            f"--head_dim={max(options.widths)}: the kernel has head widths up to {WIDEST}"
        )
    alone = [name for name in ("tune", "check", "compare") if getattr(options, name)]
    if len(alone) > 1:
        faults.append(f"wanted one of {', '.join(f'--{name}' for name in alone)}")
    return faults
