"""Small tables for a person: what runs, and what an evaluation found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table


def table(
    title: str,
    rows: Sequence[Sequence[str]],
    *,
    header: Sequence[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Print `rows` of equal width; under a `header`, all columns but the first are numbers.

    Boxed by rich on a terminal, aligned plain text elsewhere.
    """
    out = sys.stdout if stream is None else stream
    assert len({len(row) for row in [*rows, *([header] if header else [])]}) <= 1, rows
    if not out.isatty():
        out.write(_plain(title, rows, header))
        out.flush()
        return
    drawn = Table(title=title, title_justify="left", show_header=bool(header))
    for at, name in enumerate(header or [""] * len(rows[0])):
        drawn.add_column(name, justify="right" if header and at else "left")
    for row in rows:
        drawn.add_row(*row)
    Console(file=out, markup=False, highlight=False).print(drawn)


def _plain(title: str, rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    lines = [*([header] if header else []), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [title]
    for line in lines:
        cells = [
            cell.rjust(width) if header and at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(text) + "\n"
