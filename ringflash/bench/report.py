"""What a measurement or a plan has to tell, for a person and for a machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Table:
    """A table for a person, and the same as plain values for a machine."""

    title: str
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)


def tell(tables: Iterable[Table], show: Callable[..., Any], *, as_json: bool) -> None:
    """Each table as soon as it is there; `show(title, rows, header=...)` prints one for a person."""
    for table in tables:
        if as_json:
            print(json.dumps({"title": table.title, "records": table.records}), flush=True)
        elif table.rows:
            show(table.title, table.rows, header=table.header)
        else:
            print(table.title, flush=True)
