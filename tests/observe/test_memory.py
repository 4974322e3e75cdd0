import resource

import jax
import numpy as np

from ringflash.observe import memory
from ringflash.observe.memory import device_bytes, host_bytes


def test_host_bytes_follow_what_is_allocated_and_freed():
    before = host_bytes()
    held = np.ones(64 << 20, np.uint8)
    during = host_bytes()
    del held
    assert abs(during - before - (64 << 20)) < 8 << 20
    assert host_bytes() < during - (56 << 20)


def test_host_bytes_where_there_is_no_proc(monkeypatch):
    def absent(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(memory, "Path", absent)
    assert host_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Device:
    def __init__(self, peak):
        self._peak = peak

    def memory_stats(self):
        return None if self._peak is None else {"peak_bytes_in_use": self._peak}


def test_device_bytes_are_those_of_the_fullest():
    assert device_bytes([Device(3), Device(None), Device(7)]) == 7


def test_devices_that_keep_no_count():
    assert device_bytes(jax.devices("cpu")) is None
