"""Stopping on SIGTERM and Ctrl-C between two steps, with everything saved.

In a run of one process the signals are ours. Several processes must all stop after the same step,
and it is JAX that agrees on it: a SIGTERM on any host starts its preemption protocol, and
`multihost_utils.reached_preemption_sync_point` says on every host when that step has come. A Python
handler for SIGTERM would silently take the signal away from JAX, so there is none then, and Ctrl-C
is passed on as a SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental import multihost_utils

from ringflash.exits import PREEMPTED

LAST_WORDS = f"finishing this step, saving a checkpoint, exiting with code {PREEMPTED}"


class StopRequest:
    """Whether the run was asked to stop, and by what (`reason`, such as "SIGTERM")."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._asked = 0

    @property
    def requested(self) -> bool:
        """True from the first signal on; in a run of several processes, once all have agreed."""
        return self.reason is not None

    def at(self, step: int) -> bool:
        """Whether to save and stop now. Call it once after each step, alike on every host."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.reason = "preemption notice"
            if jax.process_index() == 0:
                _say(f"preemption notice: {LAST_WORDS}")
        return self.requested

    def _receive(self, signum: int) -> None:
        """Runs in the watching thread, so at once even while the main thread compiles."""
        self._asked += 1
        if self._asked > 1:
            _say("second signal: exiting at once, nothing saved")
            os._exit(128 + signum)
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # to JAX, which tells the other hosts
            return
        self.reason = signal.Signals(signum).name
        _say(f"{self.reason}: {LAST_WORDS} (a second signal exits at once)")


@contextmanager
def stop_requested() -> Iterator[StopRequest]:
    """Within, a SIGTERM or SIGINT sets `stop.requested`; a second exits with 128 + its number.

    For the main thread. The handlers that were there before come back at the end.
    """
    stop = StopRequest()
    ours = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
    inbox, outbox = socket.socketpair()
    outbox.setblocking(False)
    watcher = threading.Thread(target=_watch, args=(inbox, stop, ours), daemon=True)
    old_fd = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
    old = {signum: signal.signal(signum, lambda *_: None) for signum in ours}
    watcher.start()
    try:
        yield stop
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(old_fd)
        outbox.close()
        watcher.join()
        inbox.close()


def _watch(inbox: socket.socket, stop: StopRequest, ours: list[signal.Signals]) -> None:
    while received := inbox.recv(64):
        for signum in received:
            if signum in ours:
                stop._receive(signum)


def _say(text: str) -> None:
    start = "\n" if os.isatty(2) else ""  # a progress bar may hold the line
    os.write(2, f"{start}{text}\n".encode())
