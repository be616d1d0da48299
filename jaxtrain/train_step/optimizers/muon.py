"""Muon (Jordan et al., kellerjordan.github.io/posts/muon) for hidden matrices, and Adam for all other parameters.

optax's own would correct the momentum's bias, and would give Nesterov's momentum to Adam. With muP the rule for the
matrices is that of the spectral norm (Yang, Simon and Bernstein, arXiv 2310.17813): that of a step grows as
sqrt(outputs / inputs).
"""

import math
from typing import Any

import jax
import optax

from jaxtrain.train_step.optimizers import mup
from jaxtrain.train_step.optimizers.matrices import Dimensions, is_matrix, map_names
from jaxtrain.train_step.optimizers.optimizer_parts import Growth, OptimizerParts, rules


def _step_factor(names: tuple, shape: tuple[int, ...], growth: Growth) -> float:
    if muon_dimensions(names) is None:
        return mup.adam_step(names, shape, growth)
    inputs, outputs = mup.fans(names, growth)
    rows, columns = mup.sides(names, shape)  # steps have the spectral norm 0.2 sqrt(larger side)
    return math.sqrt(outputs / inputs * max(rows / inputs, columns / outputs) / max(rows, columns))


@rules(_step_factor, whole_matrices=True)
def muon(parts: OptimizerParts) -> optax.GradientTransformation:
    """Return Muon."""
    c, axes = parts.optimizer, parts.axes
    dimensions = map_names(muon_dimensions, axes)
    matrices = map_names(lambda names: muon_dimensions(names) is not None, axes)

    def orthogonal(momentum, dimensions):
        if dimensions is None or isinstance(momentum, optax.MaskedNode):
            return momentum
        # 0.2: updates as large as AdamW's, so that both have one learning rate (arXiv 2502.16982).
        whole = optax.contrib.muon(-1.0, beta=0.0, nesterov=False, eps=c.eps, consistent_rms=0.2,
                                   muon_weight_dimension_numbers=dimensions)
        return whole.update(momentum, whole.init(momentum), momentum)[0]

    return parts.scaled_by(optax.chain(
        optax.masked(optax.trace(c.momentum, nesterov=True), matrices),
        optax.masked(optax.scale_by_adam(c.b1, c.b2, c.eps), jax.tree.map(lambda matrix: not matrix, matrices)),
        optax.stateless(lambda momenta, params: jax.tree.map(
            orthogonal, momenta, dimensions, is_leaf=lambda x: isinstance(x, optax.MaskedNode)))))  # with_update_rules


def muon_dimensions(names: tuple) -> Any:
    """Return how a parameter is orthogonalized (hidden matrices, heads flattened), or None to use Adam.

    A side without a name is the model's input, as of the embedding of patches, or its output.
    """
    if not is_matrix(names) or not {None, "vocab", "positions"}.isdisjoint(names):
        return None
    found = Dimensions.of(names)
    return optax.contrib.MuonDimensionNumbers(reduction_axis=found.rows, output_axis=found.columns)
