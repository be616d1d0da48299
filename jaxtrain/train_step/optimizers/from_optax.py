"""The optimizers that are optax's own: AdamW, Lion and SGD."""

import optax

from jaxtrain.train_step.optimizers import mup
from jaxtrain.train_step.optimizers.optimizer_parts import Growth, OptimizerParts, rules


def adamw(parts: OptimizerParts) -> optax.GradientTransformation:
    """Return AdamW."""
    c = parts.optimizer
    return parts.scaled_by(optax.scale_by_adam(c.b1, c.b2, c.eps))


def lion(parts: OptimizerParts) -> optax.GradientTransformation:
    """Return Lion."""
    return parts.scaled_by(optax.scale_by_lion(parts.optimizer.b1, parts.optimizer.b2))


def _sgd_step(names: tuple, shape: tuple[int, ...], growth: Growth) -> float:
    inputs, outputs = mup.fans(names, growth)
    return outputs / inputs


@rules(_sgd_step)
def sgd(parts: OptimizerParts) -> optax.GradientTransformation:
    """Return SGD with momentum, of which weight decay is a part."""
    return optax.chain(*parts.by_width, parts.decay, optax.sgd(parts.schedule, momentum=parts.optimizer.b1))
