"""Tokens looked up in a table of which each device holds a part, without gathering the table.

The table lies over mesh axes by rows (vocabulary) and by columns (width). Token ids are small: each device
gets those of all devices that share the columns, looks up its own columns for them, and sends each device
the columns of its tokens. Rows that another device holds count as zero and are added up at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ringflash.shards import add, gather, mapped, names_of, place, swap

Array = jax.Array


def make_lookup(mesh: Mesh, *, axes: P, split: P, dtype: str) -> Callable[[Array, Array], Array]:
    """lookup(table_VD, tokens_BT) -> x_BTD in `dtype`, batch and time on the mesh axes `axes`.

    split: the mesh axes of the table's rows and columns; those of the columns are among `axes`, or None.
    An id outside the table gives zeros. The table's gradient is added up in fp32.
    """
    rows, columns = (names_of(part, mesh) for part in split)
    tokens_over = tuple(name for part in axes for name in names_of(part, mesh))
    others = tuple(name for name in tokens_over if name not in columns)
    assert set(columns) <= set(tokens_over), "devices with the same tokens would send them twice"
    wide = P(*axes, None)

    def forward(table: Array, tokens: Array) -> Array:
        ids_SBT = gather(tokens[None], columns)
        x_SBTD = lax.map(lambda ids: found(table, own(ids, table)).astype(dtype), ids_SBT)
        return add(swap(x_SBTD, columns, cut=0, join=3)[0], rows)

    def own(ids: Array, table: Array) -> Array:
        """Row numbers in this device's part, and one past its end for those it does not hold."""
        here = ids - place(rows) * len(table)
        return jnp.where((here >= 0) & (here < len(table)), here, len(table))

    def found(table: Array, numbers: Array) -> Array:
        return table.at[numbers].get(mode="fill", fill_value=0)

    def lookup(table_VD: Array, tokens_BT: Array) -> Array:
        @jax.custom_vjp
        def of_table(table: Array) -> Array:
            return mapped(forward, mesh, (split, axes), wide)(table, tokens_BT)

        def local(tokens: Array, dx: Array, empty: Array) -> Array:
            ids_SBT = gather(tokens[None], columns)
            dx_SBTD = swap(dx[None], columns, cut=3, join=0)

            def put(grad: Array, one: tuple[Array, Array]) -> tuple[Array, None]:
                ids, dx = one
                return grad.at[own(ids, grad)].add(dx.astype(grad.dtype), mode="drop"), None

            return add(lax.scan(put, empty, (ids_SBT, dx_SBTD))[0], others)

        def backward(_: None, dx: Array) -> tuple[Array]:
            empty = jnp.zeros(table_VD.shape, jnp.float32)
            run = mapped(local, mesh, (axes, wide, split), split)
            return (run(tokens_BT, dx, empty).astype(table_VD.dtype),)

        of_table.defvjp(lambda table: (of_table(table), None), backward)
        return of_table(table_VD)

    return lookup
