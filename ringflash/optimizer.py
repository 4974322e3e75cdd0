"""AdamW with linear warm-up and a cosine schedule, as an optax chain."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ringflash.config import OptimizerConfig


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Step -> learning rate. Does not depend on the run's length: a longer run repeats a shorter one."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        end_value=config.learning_rate * config.final_fraction,
    )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW (arXiv:1711.05101); norm scales are not decayed."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )


def decayed(params: Any) -> Any:
    """True for matrices, False for norm scales; layers are stacked, so the name tells, not the rank."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any("scale" in str(key) for key in path), params
    )
