"""SLURM's short spellings: `node[01-03,7],gpu5` of hosts, `2(x3),1` of tasks on each."""

from __future__ import annotations

import re

PART = re.compile(r"([^,\[]+)(?:\[([^\]]*)\])?([^,\[]*)(?:,|$)")
SHARE = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(nodes: str) -> list[str]:
    """The hosts' names, in order.

    Raises ValueError for what is no such list; names with two ranges are not read.
    """
    found, at = [], 0
    while at < len(nodes):
        part = PART.match(nodes, at)
        if part is None or "[" in part[3] or "]" in part[1]:
            raise ValueError(f"wanted a list of nodes such as node[01-03,7],gpu5, found {nodes!r}")
        found += [f"{part[1]}{number}{part[3]}" for number in numbers(part[2])]
        at = part.end()
    if not found:
        raise ValueError("wanted a list of nodes, found none")
    return found


def numbers(ranges: str | None) -> list[str]:
    """`01-03,7` as 01, 02, 03, 7; one empty text for no ranges."""
    if ranges is None:
        return [""]
    found = []
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"wanted a range of nodes such as 01-03, found {one!r}")
        found += [f"{n:0{len(first)}}" for n in range(int(first), int(last or first) + 1)]
    return found


def tasks(shares: str, nodes: int) -> list[int]:
    """Of each node its number of tasks; one each where nothing is said."""
    if not shares:
        return [1] * nodes
    found = []
    for one in shares.split(","):
        share = SHARE.fullmatch(one)
        if share is None:
            raise ValueError(f"wanted tasks of nodes such as 2(x3),1, found {shares!r}")
        found += [int(share[1])] * int(share[2] or 1)
    return found
