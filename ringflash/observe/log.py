"""What the parts of a run say through `logging`: all of it to `log.txt`, warnings to the terminal too."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Within, the `ringflash` loggers append to `path`; warnings also go to standard error."""
    logger = logging.getLogger("ringflash")
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel(logging.WARNING)
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
