"""The arguments of `ringflash plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringflash.attention import LAYOUTS
from ringflash.attention.dispatch import check_strategy, sizes
from ringflash.attention.dispatch import parse as spelled
from ringflash.attention.kernels.tpu import WIDEST
from ringflash.attention.strategies.ulysses import key_copies
from ringflash.attention.validate import LARGEST
from ringflash.bench import flags
from ringflash.bench.kernel_options import topologies
from ringflash.exits import ConfigFault
from ringflash.plan.case import Case
from ringflash.plan.forecast import Job, candidates
from ringflash.plan.generations import Topology
from ringflash.plan.links import LINKS, chips, shape_of
from ringflash.plan.load import mask_of
from ringflash.torus import Torus, slice_wraps

EVERY = ("auto", "all")
COMPARE = ("tokamax", "all_gather")
SIZES = ("seq_len", "heads", "kv_heads", "head_dim", "slices")
SWITCHES = ("attention", "json")
NAMES = ("topology", "strategy", "mask", "layout", "compare", *SIZES, *SWITCHES)
HELP = """usage: ringflash plan --attention --topology=v6e:2x4[,v5p:4x4x4] [--slices=1]
         [--strategy=ring|ulysses|all_gather|ulysses:2*ring:4|auto|all] [--layout=zigzag|contiguous|striped]
         [--mask=causal|packed|full|window:4096] [--seq_len=65536] [--heads=32] [--kv_heads=8]
         [--head_dim=128] [--compare=tokamax,all_gather] [--json]

Compiles attention, forward and backward, for slices that need not be there, and tells what the program does:
hops and their bytes, what of them stands under a kernel, how evenly the work lies, memory, code; and an
estimate of the time. `pip install 'ringflash[plan]'` installs the compiler.
--strategy=all compiles every strategy, auto too, but prints only the best of them.
--seq_len is a multiple of twice the devices.
--layout is zigzag, or contiguous for full and window masks. --mask=packed is causal within documents: the
work told is that of one. The sequence lies over one slice; with --slices, each has one of its own.
--compare=tokamax compiles tokamax's ring on the same arrays; all_gather, ours with that strategy.
"""


@dataclass(frozen=True)
class PlanOptions:
    """What to compile. `case` has what all have in common; layout None: see `HELP`."""

    topology: tuple[Topology, ...] = ()
    strategy: str = "ring"
    layout: str | None = None
    compare: tuple[str, ...] = ()
    mask: str = "causal"
    seq_len: int = Case.seq_len
    heads: int = Case.heads
    kv_heads: int = Case.kv_heads
    head_dim: int = Case.head_dim
    slices: int = 1
    attention: bool = False
    json: bool = False

    def cases(self, where: Topology) -> list[Case]:
        """What to compile for one topology, each once."""
        usual = "zigzag" if self.mask in ("causal", "packed") else "contiguous"
        common = Case(
            generation=where.generation.name,
            topology=where.name,
            layout=self.layout or usual,
            mask=self.mask,
            **{name: getattr(self, name) for name in SIZES},
        )
        spellings = [self.strategy]
        if self.strategy in EVERY:
            spellings = candidates(devices(where), self.kv_heads)
        spellings += [name for name in self.compare if name != "tokamax"]
        found = [replace(common, strategy=each) for each in dict.fromkeys(spellings)]
        if "tokamax" in self.compare:
            found.append(replace(common, who="tokamax", layout="contiguous"))
        return found

    def job(self, where: Topology) -> Job:
        """The same for `forecast`."""
        case, name, shape = self.cases(where)[0], where.generation.name, shape_of(where.name)
        wraps, links = slice_wraps(name, shape), (1,) * len(shape)
        torus = Torus((*shape, LINKS[name].devices), (*wraps, False), (*links, 0))
        return Job(
            generation=name,
            shape=shape,
            shards=devices(where),
            hop_links=torus.longest_hop(torus.cycle()),
            mask=mask_of(case.mask),
            layout=case.layout,
            seq_len=case.seq_len,
            rows=1,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
        )


def devices(where: Topology) -> int:
    """Of one slice, as compiled here."""
    return chips(where.name) * LINKS[where.generation.name].devices


def parse(arguments: Sequence[str]) -> PlanOptions:
    """`--name=value ...` as PlanOptions. Raises ConfigFault with all that is wrong."""
    taken, faults = flags.gather(arguments, value)
    if not taken.get("attention"):
        faults.append("wanted --config=FILE.py, for a whole step, or --attention")
    if "topology" not in taken and not any("--topology" in fault for fault in faults):
        faults.append("--topology is missing: wanted --topology=v6e:2x4, say")
    options = replace(PlanOptions(), **taken)
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
        return {name: flags.chosen(argument, text, COMPARE)}
    if name == "layout":
        return {name: flags.one_of(argument, text, tuple(LAYOUTS))}
    if name in ("mask", "strategy"):
        try:
            _ = mask_of(text) if name == "mask" else text in EVERY or spelled(text)
        except ValueError as fault:
            raise ConfigFault(f"{argument}: {fault}") from None
        return {name: text}
    return {name: flags.positive(argument, text)}


def together(options: PlanOptions) -> list[str]:
    """What is wrong with values that are each right."""
    faults = []
    if options.heads % options.kv_heads:
        faults.append(
            f"--heads={options.heads} must be a multiple of --kv_heads={options.kv_heads}"
        )
    if "tokamax" in options.compare and options.mask not in ("causal", "full"):
        faults.append(f"--mask={options.mask}: tokamax's ring takes causal or full")
    if options.head_dim > WIDEST:
        faults.append(f"--head_dim={options.head_dim}: the kernel has head widths up to {WIDEST}")
    if options.seq_len > LARGEST:
        faults.append(f"--seq_len={options.seq_len}: positions go up to {LARGEST}")
    for where in options.topology:
        shards = devices(where)
        if options.seq_len % (2 * shards):
            faults.append(
                f"--seq_len={options.seq_len} must be a multiple of {2 * shards},"
                f" twice the {shards} devices of {where.name}"
            )
        if options.strategy not in EVERY:
            try:
                check_strategy(options.strategy, shards)
                if not options.heads % options.kv_heads:
                    over = sizes(options.strategy, shards)["ulysses"]
                    key_copies(options.heads, options.kv_heads, over)
            except ValueError as fault:
                faults.append(f"--strategy on {where.name}: {fault}")
    return faults
