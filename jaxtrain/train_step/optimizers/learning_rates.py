"""Learning-rate schedules as they go on after the warm-up, from a config and the number of steps that are left."""

import optax

from jaxtrain.config.schema import OptimizerConfig


def constant(c: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the peak for all steps."""
    return optax.constant_schedule(c.learning_rate)


def cosine(c: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return half a cosine from the peak to `final_fraction` of it."""
    return optax.cosine_decay_schedule(c.learning_rate, steps, alpha=c.final_fraction)


def linear(c: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return a line from the peak to `final_fraction` of it."""
    return optax.linear_schedule(c.learning_rate, c.learning_rate * c.final_fraction, steps)


def wsd(c: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the peak, and then a line down in the last `decay_fraction` of the run, warm-up included."""
    decay = max(1, min(steps, round(c.decay_fraction * (steps + c.warmup_steps))))
    return optax.linear_schedule(c.learning_rate, c.learning_rate * c.final_fraction, decay,
                                 transition_begin=max(0, steps - decay))
