"""The verb `bench`: measures, and shows each table as soon as it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ringflash.bench import attention, kernel
from ringflash.bench.kernel_options import KernelOptions
from ringflash.bench.options import parse
from ringflash.bench.report import tell


def run(arguments: Sequence[str], show: Callable[..., Any]) -> None:
    """Measure what the arguments ask for; `show(title, rows, header=...)` prints a table for a person.

    Raises ConfigFault for arguments that are wrong, before a device is touched.
    """
    options = parse(arguments)
    if isinstance(options, KernelOptions):
        kernel.prepare(options)
        tables = kernel.measured(options)
    else:
        attention.prepare(options)
        tables = attention.measured(options)
    tell(tables, show, as_json=options.json)
