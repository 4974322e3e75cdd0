"""Exit codes, and the exceptions that carry them: a stop says why.

The launch files restart a run on 42, 124 and 127-255 only. An exception that is none of these is a
fault of ours: it shows its traceback and ends in 1.
"""

from __future__ import annotations

DONE = 0
UNEQUAL = 1
CONFIG_FAULT = 3
DATA_FAULT = 4
DIVERGED = 5
PREEMPTED = 42
HANG = 124
INTERRUPTED = 130


def restarts(code: int) -> bool:
    """Whether the same command, started again, may go further: preempted, hung, or crashed (127 and up)."""
    return code in (PREEMPTED, HANG) or code >= 127 or code < 0


class Stop(Exception):
    """An expected end of a run: told in plain lines, without a traceback."""

    code: int

    def lines(self) -> list[str]:
        """What to tell the user, one line each."""
        told = [" ".join(str(argument).split()) for argument in self.args]
        return told or [type(self).__name__]


class ConfigFault(Stop, ValueError):
    """The configuration or the arguments are wrong; one argument per fault. Do not restart."""

    code = CONFIG_FAULT


class DataFault(Stop):
    """The data is broken, or there is no more of it."""

    code = DATA_FAULT


class Diverged(Stop):
    """The loss or the gradients are no longer finite."""

    code = DIVERGED


class Preempted(Stop):
    """Asked to stop; what was done is saved. Start the same command again."""

    code = PREEMPTED


class Missing(Stop):
    """A process of the run did not come, or another waited for it in vain."""

    code = HANG


class Unequal(Stop):
    """`ringflash check` found two ways that ought to agree, and do not."""

    code = UNEQUAL
