"""What is asked of `plan --attention`: one strategy on one slice, and what the compiler made of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ringflash.plan import program
from ringflash.plan.program import Program

OURS = "ringflash"


@dataclass(frozen=True)
class Case:
    """Attention forward and backward, batch 1 on each slice, in bf16.

    who: `ringflash`, or whose ring is compiled instead.  topology: of one slice, as the compiler calls it.
    mask: as `load.mask_of` takes it.  seq_len: of the whole sequence, which lies over one slice.
    """

    generation: str
    topology: str
    who: str = OURS
    strategy: str = "ring"
    mask: str = "causal"
    layout: str = "zigzag"
    seq_len: int = 65536
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    slices: int = 1

    @property
    def name(self) -> str:
        """For a person."""
        return self.strategy if self.who == OURS else f"{self.who} {self.strategy}"


@dataclass(frozen=True)
class Facts:
    """Of one compiled case; sizes in bytes, of one device.

    shards: over which a sequence lies.  hop_links: of the longest hop between two of them; None: not known.
    """

    program: Program
    shards: int
    compile_seconds: float
    code_bytes: int
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    hop_links: int | None


def from_json(values: dict[str, Any]) -> Facts:
    """The inverse of `dataclasses.asdict`."""
    return Facts(**{**values, "program": program.from_json(values["program"])})


def case_of(values: dict[str, Any]) -> Case:
    """The inverse of `dataclasses.asdict`."""
    return Case(**{f.name: values[f.name] for f in dataclasses.fields(Case)})
