"""The parts that every optimizer is made of, which a function of each optimizer puts together."""

from dataclasses import dataclass
from typing import Any

import optax

from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.train_step.optimizers.matrices import is_matrix, map_names


@dataclass(frozen=True)
class OptimizerParts:
    """The parts that an optimizer is made of: what a config says of it, and the parameters that it updates."""

    optimizer: OptimizerConfig  # the section of the config
    axes: Any  # the logical names of each parameter: a tree of tuples, structured like the parameters
    schedule: optax.Schedule
    by_width: list[optax.GradientTransformation]  # what muP multiplies steps by

    @property
    def decay(self) -> optax.GradientTransformation:
        """Weight decay, of matrices alone."""
        return optax.add_decayed_weights(self.optimizer.weight_decay, map_names(is_matrix, self.axes))

    def scaled_by(self, scale: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return the optimizer whose steps are gradients scaled like this, with weight decay and the learning rate.

        Decay is scaled by the learning rate, but not by width: what a step takes off a weight is the same in all
        widths.
        """
        return optax.chain(scale, *self.by_width, self.decay, optax.scale_by_learning_rate(self.schedule))
