"""The parts that every optimizer is made of, which a function of each optimizer puts together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import optax

from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.train_step.optimizers.matrices import is_matrix, map_names

Growth = Mapping[str, float]  # how many times as wide as in muP's base each logical axis is; those that it lacks: once
StepFactor = Callable[[tuple, tuple[int, ...], Growth], float]  # from a parameter's logical names and its shape


Optimizer = TypeVar("Optimizer")


def rules(step_factor: StepFactor, *, whole_matrices: bool = False,
          exchanged: str = "") -> Callable[[Optimizer], Optimizer]:
    """Return a decorator of an optimizer that another rule of muP than Adam's holds for.

    Args:
        step_factor: what its steps are multiplied by in a model that is wider than the base.
        whole_matrices: it computes with a whole matrix, not with each element by itself.
        exchanged: "module:function" of what devices exchange for it (muon_exchange.py), for the planner.
    """
    def with_rules(optimizer: Optimizer) -> Optimizer:
        vars(optimizer).update(step_factor=step_factor, whole_matrices=whole_matrices, exchanged=exchanged)
        return optimizer
    return with_rules


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
