"""`ringflash check --steps=10`: the losses of the first steps of a run, made in many ways that must agree.

The ways are those of `check` that train on the same batches with the same kernel: other meshes, strategies,
layouts, remat policies and accumulation. A fault that one gradient hides, in the optimizer or in how its
state lies, is seen a few steps later.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax

from ringflash.build import build
from ringflash.check import IN_8_BITS, TOLERANCE, Way, laid_out, plain_data, ways
from ringflash.config import Config, device_count
from ringflash.data.batch import Batch
from ringflash.exits import Unequal
from ringflash.mesh import make_mesh
from ringflash.stages import stages_of


def curves(config: Config, steps: int) -> None:
    """Print how far each way's losses are from the config's own, at most; raises Unequal for one too far."""
    devices, config = jax.devices(), stages_of(config)[-1].config
    batches = list(itertools.islice(plain_data(config), steps))
    base = curve(config, batches, devices)
    limit = (TOLERANCE[config.model.dtype] if config.model.matmul == "plain" else IN_8_BITS)[0]
    print(
        f"{len(base)} steps as configured: loss {base[0]:.6f} to {base[-1]:.6f}, allowed off by {limit:g}",
        flush=True,
    )
    failed = []
    for way in ways(config, batches[0], len(devices)):
        if not trains_alike(way, config):
            continue
        try:
            found = curve(way.config, batches, devices)
        except ValueError as error:
            print(f"{way.name:<28} cannot serve: {error}", flush=True)
            continue
        off = max(abs(a - b) / abs(b) for a, b in zip(found, base, strict=True))
        print(f"{way.name:<28} losses {off:.1e}", flush=True)
        if not off <= limit:
            failed.append(way.name)
    if failed:
        raise Unequal(f"the loss curve differs too much: {', '.join(failed)}")


def trains_alike(way: Way, config: Config) -> bool:
    """Whether its batch is the config's, not taken apart first, and its kernel too: `check` compares kernels.

    A dense kernel takes so long a step that XLA holds the simulated devices, which wait for each other,
    for hung.
    """
    return way.pieces is Way.pieces and way.config.attention.kernel == config.attention.kernel


def curve(config: Config, batches: Sequence[Batch], devices: Sequence[jax.Device]) -> list[float]:
    """The loss of each step, in nats per target, from the first parameters on."""
    mesh = make_mesh(config.mesh, devices[: device_count(config.mesh, len(devices))])
    built = build(config, mesh)
    state, losses = built.init(), []
    for batch in batches:
        state, metrics = built.step(state, laid_out(config, mesh, batch))
        # Simulated devices share their threads: none may begin the next step while another is in this one.
        state = jax.block_until_ready(state)
        losses.append(float(metrics["train/loss"]))
    return losses
