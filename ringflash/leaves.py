"""The leaves of a tree by name, and how those of two trees differ."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

SHOWN = 3


def difference(found: Any, wanted: Any) -> str | None:
    """One line on the first leaves whose name, shape or dtype differ, or None where all agree.

    Leaves are anything with shape and dtype. Containers of other types that lead to the same names
    are the same, since a tree that comes back from a file has only dicts and lists.
    """
    ours, theirs = _described(wanted), _described(found)
    names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    if not names:
        return None
    faults = [
        f"{name}: found {theirs.get(name, 'nothing')}, wanted {ours.get(name, 'nothing')}"
        for name in names[:SHOWN]
    ]
    if len(names) > SHOWN:
        faults.append(f"and {len(names) - SHOWN} more")
    return "; ".join(faults)


def _described(tree: Any) -> dict[str, str]:
    """Each leaf's dotted name and what it is: float32[8,16]. A PRNG key counts as its data."""
    described = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        described[name] = f"{np.dtype(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"
    return described
