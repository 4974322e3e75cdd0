"""What the parts of a run say through `logging`: all of it to a file, warnings to the terminal too."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def logged(workdir: Path, process: int = 0) -> Iterator[None]:
    """Within, the `ringflash` loggers append to the workdir's `log.txt`; warnings go to standard error too.

    Of a run of several processes each but the first has `logs/PROCESS.txt`, and leaves the terminal to it.
    """
    logger = logging.getLogger("ringflash")
    path = workdir / (f"logs/{process}.txt" if process else "log.txt")
    path.parent.mkdir(exist_ok=True)
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel(logging.CRITICAL + 1 if process else logging.WARNING)
    before, logger.propagate = (logger.level, logger.propagate), False
    logger.setLevel(logging.INFO)
    for handler in (file, terminal):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in (file, terminal):
            logger.removeHandler(handler)
        file.close()
        logger.level, logger.propagate = before
