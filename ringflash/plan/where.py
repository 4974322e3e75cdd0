"""Where a step is to run: a slice, several of them, or simulated devices. Nothing heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass

from ringflash.plan.generations import GENERATIONS, Generation
from ringflash.plan.links import LINKS, chips

CPU = "cpu"


@dataclass(frozen=True)
class Where:
    """A slice, or several that the data centre's network joins; `cpu:8` for simulated devices.

    topology: of one slice, as the compiler calls it.
    """

    topology: str
    slices: int = 1

    @property
    def simulated(self) -> bool:
        """Whether there is no slice."""
        return self.topology.startswith(f"{CPU}:")

    @property
    def generation(self) -> Generation | None:
        """None for simulated devices."""
        return GENERATIONS.get(self.topology.partition(":")[0].removeprefix("tpu"))

    @property
    def devices(self) -> int:
        """Of all slices, as compiled here."""
        if self.generation is None:
            return int(self.topology.partition(":")[2])
        return chips(self.topology) * LINKS[self.generation.name].devices * self.slices

    def __str__(self) -> str:
        return f"{self.slices} x {self.topology}" if self.slices > 1 else self.topology
