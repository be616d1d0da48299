"""Muon (Jordan et al., kellerjordan.github.io/posts/muon) for hidden matrices, and Adam for all other parameters.

optax's own would correct the momentum's bias, would give Nesterov's momentum to Adam, and computes in float32 with
matrices that are split over devices. With muP the rule for the matrices is that of the spectral norm (Yang, Simon and
Bernstein, arXiv 2310.17813): that of a step grows as sqrt(outputs / inputs).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.base.annotations import PyTree
from jaxtrain.errors import UserError
from jaxtrain.sharding import mesh_context
from jaxtrain.train_step.optimizers import mup
from jaxtrain.train_step.optimizers.matrices import Dimensions, by_path, is_matrix, map_names
from jaxtrain.train_step.optimizers.newton_schulz import orthogonalized
from jaxtrain.train_step.optimizers.optimizer_parts import Growth, OptimizerParts, rules

RMS = 0.2  # of the elements of an update, as AdamW's have it, so that both have one learning rate (arXiv 2502.16982)
LEAST = 1e-8  # added to roots by which is divided
HEADS = ("heads", "kv_heads")


def _step_factor(names: tuple, shape: tuple[int, ...], growth: Growth) -> float:
    if muon_dimensions(names) is None:
        return mup.adam_step(names, shape, growth)
    inputs, outputs = mup.fans(names, growth)
    rows, columns = mup.sides(names, shape)  # steps have the spectral norm 0.2 sqrt(larger side)
    return math.sqrt(outputs / inputs * max(rows / inputs, columns / outputs) / max(rows, columns))


@rules(_step_factor, whole_matrices=True, exchanged="jaxtrain.train_step.optimizers.muon_exchange:exchanged")
def muon(parts: OptimizerParts) -> optax.GradientTransformation:
    """Return Muon."""
    c, axes = parts.optimizer, parts.axes
    if c.split_heads and parts.by_width:
        raise UserError("optimizer.split_heads", "no rule is known here for how steps of single heads go with the "
                        "width of a model (model.mup_base)", "leave one of them out")
    matrices = map_names(lambda names: muon_dimensions(names) is not None, axes)
    return parts.scaled_by(optax.chain(
        optax.masked(optax.trace(c.momentum, nesterov=True), matrices),
        optax.masked(optax.scale_by_adam(c.b1, c.b2, c.eps), jax.tree.map(lambda matrix: not matrix, matrices)),
        scale_by_orthogonality(parts)))  # with_update_rules


class NeuronState(NamedTuple):
    """The mean square of each neuron's updates (NorMuon); None where a parameter is not a hidden matrix."""

    by_neuron: PyTree  # the dimensions that the mean is over have size 1


def scale_by_orthogonality(parts: OptimizerParts) -> optax.GradientTransformation:
    """Return what makes the momentum of hidden matrices orthogonal, and leaves all other updates as they are."""
    c, names_of = parts.optimizer, by_path(parts.axes)
    dimensions = {path: found for path, names in names_of.items() if (found := muon_dimensions(names, c.split_heads))}

    def turned(updates: optax.Updates) -> dict[tuple, jax.Array]:
        """Return the orthogonal matrices of the parameters' momentum, by path, in float32."""
        flat, _ = jax.tree_util.tree_flatten_with_path(updates, is_leaf=_is_masked)
        own = {path: x for path, x in flat if is_matrix_of(path, x)}
        stacks = orthogonalized([as_stack(x, dimensions[path]) for path, x in own.items()], c.eps,
                                dtype_of(c.orthogonal_dtype))
        # Widened only when they are back: the compiler would exchange them in float32.
        narrow = jax.lax.optimization_barrier([from_stack(stack, dimensions[path], x.shape)
                                               for (path, x), stack in zip(own.items(), stacks, strict=True)])
        return {path: back.astype(jnp.float32) * RMS * math.sqrt(max(stack.shape[1:]))
                for path, back, stack in zip(own, narrow, stacks, strict=True)}

    def is_matrix_of(path: tuple, x: jax.Array | optax.MaskedNode) -> bool:
        return path in dimensions and not isinstance(x, optax.MaskedNode)

    def update(updates: optax.Updates, params: PyTree) -> optax.Updates:
        found = turned(updates)
        return jax.tree.map_with_path(lambda path, x: found[path].astype(x.dtype) if path in found else x, updates,
                                      is_leaf=_is_masked)

    if not c.normalize_neurons:
        return optax.stateless(update)

    def init(params: PyTree) -> NeuronState:
        return NeuronState(jax.tree.map_with_path(
            lambda path, x: jnp.zeros([1 if i in dimensions[path].rows else n for i, n in enumerate(x.shape)],
                                      jnp.float32) if is_matrix_of(path, x) else None, params, is_leaf=_is_masked))

    def normalizing(updates: optax.Updates, state: PyTree,
                    params: PyTree = None) -> tuple[optax.Updates, NeuronState]:
        flat, treedef = jax.tree_util.tree_flatten_with_path(updates, is_leaf=_is_masked)
        found = turned(updates)
        both = [by_neuron(found[path], square, dimensions[path], c.b2) if path in found else (x, square)
                for (path, x), square in zip(flat, treedef.flatten_up_to(state.by_neuron), strict=True)]
        updates, squares = (treedef.unflatten(each) for each in zip(*both, strict=True))
        return updates, NeuronState(squares)

    return optax.GradientTransformation(init, normalizing)


def dtype_of(asked: str) -> jnp.dtype:
    """Return the dtype in which matrices are made orthogonal."""
    if asked == "auto":
        asked = "float32" if mesh_context.platform() == "cpu" else "bfloat16"
    return jnp.dtype(asked)


def by_neuron(x: jax.Array, square: jax.Array, own: Dimensions, b2: float) -> tuple[jax.Array, jax.Array]:
    """Return an update in which each neuron's part is divided by the root of its mean square, and the latter: NorMuon
    (arXiv 2510.05491). A neuron has the weights of one output, over all inputs: the rows of a kernel.
    """
    square = b2 * square + (1 - b2) * jnp.mean(jnp.square(x), own.rows, keepdims=True)
    x = x / (jnp.sqrt(square) + LEAST)
    norm = jnp.sqrt(jnp.mean(jnp.square(x), own.rows + own.columns, keepdims=True))
    return RMS * x / (norm + LEAST), square


def muon_dimensions(names: tuple, split_heads: bool = False) -> Dimensions | None:
    """Return the dimensions of the matrices that are orthogonalized, with heads flattened, or None to use Adam.

    A side without a name is the model's input, as of the embedding of patches, or its output.

    `split_heads`: each head of the projections to queries, keys and values, and of that of the output, is a matrix.
    """
    if not is_matrix(names) or not {None, "vocab", "positions"}.isdisjoint(names):
        return None
    found = Dimensions.of(names)
    heads = tuple(i for i, name in enumerate(names) if name in HEADS and "head_dim" in names)
    if not split_heads or not heads:
        return found
    rows, columns = (tuple(i for i in side if i not in heads) for side in (found.rows, found.columns))
    return Dimensions(found.stacked + heads, rows, columns)


def as_stack(x: jax.Array, own: Dimensions) -> jax.Array:
    """Return the matrices of a parameter as [matrices, rows, columns]."""
    sizes = [math.prod(x.shape[i] for i in side) for side in (own.stacked, own.rows, own.columns)]
    return x.transpose(own.stacked + own.rows + own.columns).reshape(sizes)


def from_stack(stack: jax.Array, own: Dimensions, shape: tuple[int, ...]) -> jax.Array:
    """Return the parameter that `as_stack` took apart."""
    order = own.stacked + own.rows + own.columns
    return stack.reshape([shape[i] for i in order]).transpose([order.index(i) for i in range(len(order))])


def _is_masked(x: object) -> bool:
    return isinstance(x, optax.MaskedNode)
