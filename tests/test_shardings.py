"""Where every leaf of the state lies, for each shipped configuration, as it was last looked at by a person.

`python tests/test_shardings.py` writes the files anew.
"""

import dataclasses
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh

from ringflash import config
from ringflash.build import make_model
from ringflash.mesh import AXES, shardings
from ringflash.optimizer import make_optimizer
from ringflash.step import init_state

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "shardings"
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem != "base")


def dump(path):
    """A line for each leaf: name, shape, dtype, the mesh axes of each dim, what one device has."""
    cfg = config.resolve(config.load(str(path)))
    mesh = AbstractMesh(dataclasses.astuple(cfg.mesh), AXES)
    optimizer = make_optimizer(cfg.optimizer)
    _, init_params = make_model(cfg, mesh)
    state = jax.eval_shape(lambda: init_state(init_params(), optimizer))
    lines = []
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (where, leaf), placed in zip(leaves, jax.tree.leaves(shardings(state, mesh)), strict=True):
        name = jax.tree_util.keystr(where, simple=True, separator=".")
        spec = ", ".join("+".join(a) if isinstance(a, tuple) else str(a) for a in placed.spec)
        lines.append(
            f"{name}  {list(leaf.shape)} {leaf.dtype}  over ({spec})"
            f"  a device {list(placed.shard_shape(leaf.shape))}"
        )
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_leaves_lie_where_they_did(path):
    told = (
        "a parameter or its optimizer state would lie elsewhere: memory and traffic of every run"
        " change, and checkpoints are read in other pieces. If that is meant:"
        " python tests/test_shardings.py"
    )
    assert dump(path) == (GOLDEN / f"{path.stem}.txt").read_text(), told


def test_no_golden_file_is_of_nothing():
    assert {file.stem for file in GOLDEN.glob("*.txt")} == {path.stem for path in CONFIGS}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in CONFIGS:
        (GOLDEN / f"{each.stem}.txt").write_text(dump(each))
