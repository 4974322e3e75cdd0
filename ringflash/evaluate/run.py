"""`ringflash eval`: the perplexity of the newest checkpoint of a workdir."""

from __future__ import annotations

from pathlib import Path

import jax

from ringflash.checkpoint import Checkpoints
from ringflash.config import Config
from ringflash.evaluate import report
from ringflash.exits import ConfigFault
from ringflash.observe.log import logged
from ringflash.observe.table import table
from ringflash.optimizer import averaged
from ringflash.processes import is_first
from ringflash.run import put_together, restore
from ringflash.train import show


def evaluate(config: Config, workdir: Path) -> None:
    """Score the held-out documents; prints the table and writes `eval/<step>.json`."""
    with logged(workdir, jax.process_index()):
        parts = put_together(config)
        table("ringflash eval", parts.description)
        checkpoints = Checkpoints(workdir, keep=config.checkpoint.keep)
        try:
            restored = restore(config, parts, checkpoints)
        finally:
            checkpoints.close()
        if restored is None:
            raise ConfigFault(f"{workdir} holds no checkpoint to evaluate")
        params = averaged(restored.state.params, restored.state.opt_state)
        scores = parts.score(params, restored.step)
        rows = parts.eval_rows
        if not is_first():
            return
        report.write(workdir, restored.step, scores, rows.document_names, rows.fingerprint)
        show(scores, None, restored.step)
