"""The arguments of `ringflash bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ringflash.bench import flags, kernel_options
from ringflash.bench.kernel_options import KernelOptions
from ringflash.exits import ConfigFault

SUBJECTS = ("attention", "kernel")
TABLES = ("one_device", "ring", "tiles", "errors", "blocks")
PEERS = ("torch", "tokamax", "jax", "ringattention")
DTYPES = ("float32", "bfloat16")
HELP = f"""usage: ringflash bench attention [--seq_len=4096] [--heads=8] [--kv_heads=8] [--head_dim=64]
         [--dtype=float32] [--devices=8] [--repeats=5] [--json]
         [--peers=torch,tokamax,jax,ringattention] [--tables=one_device,ring,tiles]
         [--blocks=128x128,256x128]

Times attention, causal, batch 1, forward and forward+backward, in turns in one process.
  one_device  the kernel `chunked` beside those of others
  ring        strategies and layouts over --devices simulated devices beside one device
  tiles       tiles visited, tiles needed and the busiest shard, at 16k tokens; counted, not timed
  errors      bf16: error against the fp32 reference, by size of the ring
  blocks      tile sizes of `chunked`, as QUERIESxKEYS, beside its own choice
--peers names what must be there; without it, what is installed is used and what is not is told.
`pip install 'ringflash[bench]'` installs them. --json prints one JSON object a line.

{kernel_options.HELP}"""


@dataclass(frozen=True)
class Options:
    """What to measure; batch is 1, the mask causal. `peers` None: those that are installed."""

    seq_len: int = 4096
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    devices: int = 8
    repeats: int = 5
    peers: tuple[str, ...] | None = None
    tables: tuple[str, ...] = ("one_device", "ring", "tiles")
    blocks: tuple[tuple[int, int], ...] = ((128, 128), (256, 128), (256, 256), (512, 128))
    json: bool = False


NAMES = tuple(field.name for field in fields(Options))


def parse(arguments: Sequence[str]) -> Options | KernelOptions:
    """`attention --name=value ...` as Options, `kernel ...` as KernelOptions.

    Raises ConfigFault with all that is wrong.
    """
    rest, faults = list(arguments), []
    if not rest or rest[0] not in SUBJECTS:
        faults.append(f"bench: wanted one of {', '.join(SUBJECTS)}, found {rest[:1] or 'nothing'}")
        rest = [x for x in rest if x.startswith("--")]
    elif rest[0] == "kernel":
        return kernel_options.parse(rest[1:])
    else:
        rest = rest[1:]
    taken, wrong = flags.gather(rest, value)
    options = replace(Options(), **taken)
    if "heads" in taken and "kv_heads" not in taken:
        options = replace(options, kv_heads=options.heads)
    faults += [*wrong, *together(options)]
    if faults:
        raise ConfigFault(*faults)
    return options


def value(argument: str) -> dict[str, Any]:
    """One argument. Raises ConfigFault."""
    name, text = flags.split(argument, NAMES)
    if name == "json":
        return {"json": True}
    if name == "blocks":
        return {name: tuple(block(argument, part) for part in text.split(","))}
    if name == "dtype":
        return {name: flags.one_of(argument, text, DTYPES)}
    if name in ("peers", "tables"):
        return {name: flags.chosen(argument, text, PEERS if name == "peers" else TABLES)}
    return {name: flags.positive(argument, text)}


def block(argument: str, text: str) -> tuple[int, int]:
    """128x256 as (128, 256). Raises ConfigFault."""
    queries, _, keys = text.partition("x")
    return flags.positive(argument, queries), flags.positive(argument, keys)


def together(options: Options) -> list[str]:
    """What is wrong with values that are each right."""
    faults = []
    if options.heads % options.kv_heads:
        faults.append(
            f"--heads={options.heads} must be a multiple of --kv_heads={options.kv_heads}"
        )
    if options.seq_len % (2 * options.devices) and "ring" in options.tables:
        unit = 2 * options.devices
        faults.append(f"--seq_len={options.seq_len} must be a multiple of {unit} for zigzag")
    return faults
