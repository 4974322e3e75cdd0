"""A compiled case as rows of a table, and what is best in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringflash.plan.case import OURS
from ringflash.plan.estimate import PASSES

HEADER = [
    "",
    "hops",
    "MiB a hop",
    "links",
    "transfer",
    "kernel",
    "hidden",
    "exposed",
    "XLA",
    "busiest",
    "tiles",
    "temp MiB",
    "code MB",
    "compile s",
    "total",
]
HELP = """Read from the compiled program: hops, MiB that a device sends at one (in the mean: all of
the pass, the way home too), hidden (transfers with a kernel between start and done, of all), temp, code, CPU
seconds of the compiler. links: of the longest hop.
Estimates, in ms: transfer and kernel of a hop; exposed, what of all transfers is not under a kernel, in
place and in time; XLA, what it computes and copies between kernels; total. busiest: the most tiles of a
device over the mean; tiles: executed over needed."""


def best_of(told: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The quickest of ours by the estimate."""
    ours = [one for one in told if one["case"]["who"] == OURS and one.get("total_seconds")]
    return min(ours, key=lambda one: float(one["total_seconds"]), default=None)


def verdict(told: Sequence[dict[str, Any]], best: dict[str, Any] | None) -> str:
    """Which strategy serves best by the estimate, and what the others take."""
    others = "; ".join(f"{one['name']} {outcome(one)}" for one in told if one is not best)
    if best is None:
        return f"no strategy could be compiled: {others}"
    return f"best by this estimate: {best['name']}, {outcome(best)}" + (
        f" ({others})" if others else ""
    )


def outcome(one: dict[str, Any]) -> str:
    """The total in ms, or why there is none."""
    if "error" in one:
        return " ".join(one["error"].split())[:160]
    return f"{ms(one['total_seconds'])} ms"


def ms(seconds: float | None) -> str:
    """Milliseconds, three digits at least."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def rows(one: dict[str, Any]) -> list[list[str]]:
    """A row for each pass and one for both; a case without figures shows dashes, its error at the end."""
    if "error" in one:
        return [[one["name"], *["-"] * (len(HEADER) - 1)]]
    found = [[f"{one['name']}, {name}", *cells(one, one["passes"][name])] for name in PASSES]
    each = one["passes"].values()
    hidden, count = (sum(x[key] for x in each) for key in ("hidden", "transfers"))
    exposed, other = (
        sum(x[key] or 0.0 for x in each) for key in ("exposed_seconds", "other_seconds")
    )
    last = [
        *("both", "", "", "", "", "", f"{hidden}/{count}", ms(exposed), ms(other), ""),
        f"{one['executed_tiles'] / one['needed_tiles']:.2f}",
        f"{one['temp_bytes'] / 2**20:.0f}",
        f"{one['code_bytes'] / 1e6:.1f}",
        f"{one['compile_seconds']:.0f}",
        ms(one["total_seconds"]),
    ]
    return [*found, last]


def cells(one: dict[str, Any], each: dict[str, Any]) -> list[str]:
    """The columns of one pass."""
    links = one["hop_links"]
    return [
        str(each["hops"]),
        f"{each['hop_bytes'] / 2**20:.1f}",
        "-" if links is None else str(links),
        ms(each["hop_seconds"]),
        ms(each["hop_kernel_seconds"]),
        f"{each['hidden']}/{each['transfers']}",
        ms(each["exposed_seconds"]),
        ms(each["other_seconds"]),
        f"{one['busiest']:.2f}",
        *("", "", "", ""),
        ms(each["total_seconds"]),
    ]
