"""Bytes that this process holds, on the host and on its devices."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import jax


def host_bytes() -> int:
    """Resident memory of this process now; where there is no /proc, its peak so far."""
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


def device_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Peak bytes on the fullest of these local `devices`; None where they keep no count."""
    counts = [device.memory_stats() for device in devices]
    peaks = [count["peak_bytes_in_use"] for count in counts if count]
    return max(peaks, default=None)
