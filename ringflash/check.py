"""`ringflash check`: one batch of a config, computed in many ways that must agree, and a leak probe.

Each way changes one thing of the config: the mesh, the strategy, the layout, the kernel, what the backward
keeps, how documents are packed in rows, in how many parts the batch is summed. The labels, the documents
and the parameters are the same, so loss and gradients must be, up to rounding. Of a run in stages the last
one is checked.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ringflash.assemble import make_data
from ringflash.attention import LAYOUTS, ROW_LAYOUTS, STRATEGIES, order_rows
from ringflash.build import batch_losses, grads_of, make_model
from ringflash.config import Config, MeshConfig, device_count
from ringflash.data.batch import Batch, concatenate, padding_rows, reorder, unpacked
from ringflash.exits import Unequal
from ringflash.loss import counted
from ringflash.mesh import BATCH_AXES, extent, make_mesh, put, shardings
from ringflash.model.presets import REMAT
from ringflash.stages import stages_of

# Largest relative difference allowed, of the loss and of a gradient leaf's largest entry.
TOLERANCE = {"float32": (1e-5, 1e-4), "bfloat16": (1e-2, 1e-1)}
# Of products in 8 bits, whatever the dtype: what is rounded to the other side is off by a whole step.
IN_8_BITS = (1e-2, 2e-1)
MOST_DOCUMENTS = 32  # rows that the batch may grow to where each document has its own
PROBED = 32  # batches looked through for a row with two documents


@dataclass(frozen=True)
class Way:
    """A way to compute the batch: a config, and what is done to the batch first."""

    name: str
    config: Config
    pieces: Callable[[Batch], list[Batch]] = lambda batch: [batch]


@dataclass(frozen=True)
class Answer:
    """Loss in nats per target, and the gradients on the host."""

    loss: float
    grads: dict[str, np.ndarray]


def check(config: Config) -> None:
    """Print how far each way is from the config as it stands; raises Unequal if one is too far."""
    devices, config = jax.devices(), stages_of(config)[-1].config
    batch, packed = first_batch(config)
    base = answer(Way("as configured", config), batch, devices)
    plain = config.model.matmul == "plain"
    loss_limit, grad_limit = TOLERANCE[config.model.dtype] if plain else IN_8_BITS
    print(
        f"as configured: loss {base.loss:.6f}, allowed off by {loss_limit:g}, gradients {grad_limit:g}"
    )
    failed = []
    for way in ways(config, batch, len(devices)):
        try:
            found = answer(way, batch, devices)
        except ValueError as error:
            print(f"{way.name:<28} cannot serve: {error}", flush=True)
            continue
        loss_off = abs(found.loss - base.loss) / abs(base.loss)
        grad_off, leaf = worst(found, base)
        print(f"{way.name:<28} loss {loss_off:.1e}  gradients {grad_off:.1e} ({leaf})", flush=True)
        if not (loss_off <= loss_limit and grad_off <= grad_limit):
            failed.append(way.name)
    if packed:
        failed += leaks(config, batch, devices)
    else:
        print(f"no leak probe: none of {PROBED} batches has two documents in its first row")
    if failed:
        raise Unequal(f"differs too much: {', '.join(failed)}")


def first_batch(config: Config) -> tuple[Batch, bool]:
    """The first batch, as it was read, with two documents in its first row; or the first of all."""
    found = list(itertools.islice(plain_data(config), PROBED))
    packed = [batch for batch in found if batch.segment_ids_BT[0].max() > 0]
    return (packed or found)[0], bool(packed)


def plain_data(config: Config) -> Iterator[Batch]:
    """The training batches as they are read: no layout has moved a token."""
    plain = dataclasses.replace(
        config,
        mesh=MeshConfig(1, 1, 1, 1),
        attention=dataclasses.replace(config.attention, layout="contiguous"),
    )
    data, _ = make_data(plain, [make_mesh(plain.mesh, jax.devices()[:1])])
    return data


def ways(config: Config, batch: Batch, devices: int) -> Iterator[Way]:
    """Every way but the config's own."""

    def changed(section: str, **leaves: Any) -> Config:
        part = dataclasses.replace(getattr(config, section), **leaves)
        return dataclasses.replace(config, **{section: part})

    for mesh in meshes(config, devices):
        if mesh != config.mesh:
            sizes = " ".join(f"{k}={v}" for k, v in dataclasses.asdict(mesh).items() if v != 1)
            strategy = dataclasses.replace(config.attention, strategy="ring")
            way = dataclasses.replace(config, mesh=mesh, attention=strategy)
            yield Way(f"mesh {sizes or 'of one device'}", way)
    context = make_mesh(config.mesh, jax.devices()[: device_count(config.mesh, devices)]).shape[
        "context"
    ]
    halves = f"ulysses:2*ring:{context // 2}" if context % 2 == 0 else "ring"
    for strategy_name in dict.fromkeys([*STRATEGIES, halves]):
        if strategy_name != config.attention.strategy:
            yield Way(f"strategy {strategy_name}", changed("attention", strategy=strategy_name))
    for layout in [*LAYOUTS, *ROW_LAYOUTS]:
        if layout != config.attention.layout:
            yield Way(f"layout {layout}", changed("attention", layout=layout))
    if config.attention.kernel != "reference" and config.seq_len <= 8192:
        yield Way("kernel reference", changed("attention", kernel="reference"))
    for remat in REMAT:
        if remat != config.model.remat:
            yield Way(f"remat {remat}", changed("model", remat=remat))
    for parts in (1, 2, 4):
        if parts != config.accumulation:
            yield Way(f"accumulation {parts}", dataclasses.replace(config, accumulation=parts))
    if len(batch.tokens_BT) > 1:
        yield Way("one row at a time", config, split_rows)
    alone = unpacked(batch)
    if len(batch.tokens_BT) < len(alone.tokens_BT) <= MOST_DOCUMENTS:
        yield Way("one document a row", config, lambda b: split_rows(unpacked(b)))


def meshes(config: Config, devices: int) -> Iterator[MeshConfig]:
    """Meshes of all devices that this config's sizes divide over, and those of fewer with a ring alone."""
    runs = 2 if config.attention.layout == "zigzag" else 1
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    for context, tensor, data, fsdp in itertools.product(sizes, repeat=4):
        alone = data * fsdp * tensor == 1
        if (
            (alone or context * data * fsdp * tensor == devices)
            and config.seq_len % (runs * context) == 0
            and config.global_batch_size % (data * fsdp * config.accumulation) == 0
            and config.model.kv_heads % tensor == 0
            and config.model.mlp_width % tensor == 0
        ):
            yield MeshConfig(data, fsdp, context, tensor)


def split_rows(batch: Batch) -> list[Batch]:
    """The rows of a batch, one by one."""
    rows = range(len(batch.tokens_BT))
    return [jax.tree.map(lambda x, row=row: x[row : row + 1], batch) for row in rows]


def begun(config: Config, devices: list[jax.Device]) -> tuple[Any, Any, Any]:
    """The mesh on as many devices as it takes, the model's structure, and its first parameters."""
    mesh = make_mesh(config.mesh, devices[: device_count(config.mesh, len(devices))])
    graph, init = make_model(config, mesh)
    return mesh, graph, jax.jit(init, out_shardings=shardings(jax.eval_shape(init), mesh))()


def answer(way: Way, batch: Batch, devices: list[jax.Device]) -> Answer:
    """Loss and gradients of the whole batch, summed over the way's pieces."""
    config = way.config
    mesh, graph, params = begun(config, devices)

    run = jax.jit(grads_of(config, graph, mesh, jax.tree.map(lambda x: x.sharding, params)))
    count = max(1, int(counted(batch.targets_BT, batch.loss_mask_BT).sum()))
    loss, all_grads = 0.0, None
    for piece in way.pieces(batch):
        sums, grads = run(params, laid_out(config, mesh, piece))
        loss += float(sums.total)
        host = jax.tree.map(lambda g: np.asarray(g, np.float64) / count, grads)
        all_grads = host if all_grads is None else jax.tree.map(np.add, all_grads, host)
    leaves = jax.tree_util.tree_leaves_with_path(all_grads)
    named = {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in leaves}
    return Answer(loss / count, named)


def laid_out(config: Config, mesh: Any, piece: Batch) -> Batch:
    """A piece on the mesh in the config's layout, filled up with padding rows."""
    missing = -len(piece.tokens_BT) % (extent(BATCH_AXES, mesh) * config.accumulation)
    piece = concatenate([piece, padding_rows(missing, seq_len=piece.tokens_BT.shape[1])])
    order_BT = order_rows(
        config.attention.layout, piece.positions_BT, piece.segment_ids_BT, mesh.shape["context"]
    )
    return put(reorder(piece, order_BT), mesh)


def worst(found: Answer, base: Answer) -> tuple[float, str]:
    """The largest relative difference of a gradient leaf, and which leaf."""
    off = {
        name: float(np.abs(found.grads[name] - g).max() / max(np.abs(g).max(), 1e-30))
        for name, g in base.grads.items()
    }
    leaf = max(off, key=lambda name: off[name])
    return off[leaf], leaf


def leaks(config: Config, batch: Batch, devices: list[jax.Device]) -> list[str]:
    """Change one document's tokens, and the last half of a row: nothing else, nothing before may move."""
    plain = dataclasses.replace(config.attention, layout="contiguous")
    config = dataclasses.replace(config, attention=plain)
    mesh, graph, params = begun(config, devices)

    @jax.jit
    def losses_of(params: Any, batch: Batch) -> jax.Array:
        return batch_losses(graph, config.loss, mesh, params, batch)

    def losses(batch: Batch) -> np.ndarray:
        return np.asarray(losses_of(params, laid_out(config, mesh, batch)))[: len(batch.tokens_BT)]

    segments = batch.segment_ids_BT
    one = np.zeros(segments.shape, bool)
    one[0] = segments[0] == 0
    late = np.zeros(segments.shape, bool)
    late[:, segments.shape[1] // 2 :] = True
    before, failed = losses(batch), []
    for name, touched, watched in (
        ("another document", one, ~one & (segments >= 0)),
        ("the future", late, ~late & (segments >= 0)),
    ):
        tokens_BT = np.where(touched, (batch.tokens_BT + 1) % 256, batch.tokens_BT)
        moved = np.abs(losses(dataclasses.replace(batch, tokens_BT=tokens_BT)) - before)
        seen, own = float(moved[watched].max()), float(moved[touched & batch.loss_mask_BT].max())
        print(f"leak probe: {name} changed: others moved by {seen:g} nats, itself by {own:.3g}")
        if seen > 0.0 or own == 0.0:
            failed.append(f"leak probe ({name})")
    return failed
