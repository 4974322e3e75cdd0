"""Schedules of the learning rate: a linear warm-up, then what the name says.

None depends on the run's length, so that a longer run repeats a shorter one. Each function below gives what
follows the warm-up, counted from its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import optax

from ringflash.config import OptimizerConfig


def cosine(config: OptimizerConfig) -> optax.Schedule:
    """Half a cosine down to `final_fraction` of the peak at `decay_steps` (arXiv:1608.03983)."""
    length = config.decay_steps - config.warmup_steps
    return optax.cosine_decay_schedule(config.learning_rate, length, config.final_fraction)


def linear(config: OptimizerConfig) -> optax.Schedule:
    """A straight line down to `final_fraction` of the peak at `decay_steps`."""
    return falling(config, start=config.warmup_steps)


def wsd(config: OptimizerConfig) -> optax.Schedule:
    """Warm-up, stable, decay (arXiv:2404.06395); the decay a straight line, as in arXiv:2405.18392."""
    return falling(config, start=config.decay_start)


def falling(config: OptimizerConfig, *, start: int) -> optax.Schedule:
    """The peak up to `start`, then a straight line."""
    return optax.linear_schedule(
        config.learning_rate,
        config.learning_rate * config.final_fraction,
        transition_steps=config.decay_steps - start,
        transition_begin=start - config.warmup_steps,
    )


def constant(config: OptimizerConfig) -> optax.Schedule:
    """The peak for ever."""
    return optax.constant_schedule(config.learning_rate)


SCHEDULES: Mapping[str, Callable[[OptimizerConfig], optax.Schedule]] = {
    "cosine": cosine,
    "wsd": wsd,
    "linear": linear,
    "constant": constant,
}


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Update -> learning rate: linear warm-up, then what the name says. The first one learns already.

    Does not depend on the run's length: a longer run repeats a shorter one.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, SCHEDULES[config.schedule](config)], [warmup])
