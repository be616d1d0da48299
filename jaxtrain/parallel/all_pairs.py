"""Losses of all pairs of two sides of a batch that is spread over devices, without their matrix as a whole.

Each device keeps its part of one side, images say, while the parts of the other go round; it sees a block of the
matrix at a time. The backward pass sends them round once more, together with their gradients, so that what a device
holds grows with its own part alone. The n-th of one side belongs to the n-th of the other. All of this runs inside a
manual region.

Shape suffixes: M and N parts of both sides, E embedding.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.base.annotations import PyTree
from jaxtrain.sharding import activations

Axes = tuple[str, ...]
Similarity = tuple[jax.Array, jax.Array]  # what products of vectors are multiplied by, and what is added then


def all_pairs(kind: str, x_BSE: jax.Array, y_BSE: jax.Array, there_BS: jax.Array, similarity: Similarity) -> jax.Array:
    """Return the sum over pairs of a loss of LOSSES; those that are not `there` do not count.

    Its places are split over all devices that share rows or places of rows.
    """
    return _region(lambda axes, *args: _total(kind, axes, *args), x_BSE, y_BSE, there_BS, similarity)


def count_matched(x_BSE: jax.Array, y_BSE: jax.Array, there_BS: jax.Array, labels_BS: jax.Array) -> jax.Array:
    """Return for how many of one side the nearest of the other has its own label; it has no gradient."""
    return _region(_matched, *lax.stop_gradient((x_BSE, y_BSE)), there_BS, labels_BS)


def _region(f: Callable, x_BSE: jax.Array, y_BSE: jax.Array, there_BS: jax.Array, more: PyTree) -> jax.Array:
    """Return the sum over devices of `f(axes, x_ME, y_ME, there_M, more)` of their parts."""
    def local(x, y, there, more):
        axes = tuple(dict.fromkeys((*activations.axes_over("batch"), *activations.axes_over("block_seq"))))
        parts = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]), there.reshape(-1)
        more = jax.tree.map(lambda a: a if a.ndim == 0 else a.reshape(-1), more)
        total = f(axes, *parts, more)
        return lax.psum(total, axes) if axes else total

    spec = activations.activation_spec("batch", "block_seq")
    if spec is None:
        return local(x_BSE, y_BSE, there_BS, more)
    placed = (activations.constrain(a, *(("batch", "block_seq", None)[:a.ndim])) for a in (x_BSE, y_BSE, there_BS))
    specs = jax.tree.map(lambda a: jax.P(*spec[:a.ndim]), more)
    more = jax.tree.map(lambda a: activations.constrain(a, *(("batch", "block_seq")[:a.ndim])), more)
    return activations.manual_region(local, in_specs=(spec, spec, spec, specs), out_specs=jax.P())(*placed, more)


def _around(body: Callable, here: PyTree, passing: PyTree, axes: Axes) -> tuple[PyTree, PyTree]:
    """Apply `body(here, passing, is_own) -> (here, passing)` to what each device passes on, until it is back there."""
    n = lax.axis_size(axes) if axes else 1
    following = [(i, (i + 1) % n) for i in range(n)]

    def turn(state, number):
        here, passing = body(*state, number == 0)
        passed = jax.tree.map(lambda a: lax.ppermute(a, axes, following), passing) if n > 1 else passing
        return (here, passed), None

    return lax.scan(turn, (here, passing), jnp.arange(n))[0]


def _logits(x_ME: jax.Array, y_NE: jax.Array, similarity: Similarity) -> jax.Array:
    scale, bias = similarity
    return scale * jnp.einsum("me,ne->mn", x_ME, y_NE, preferred_element_type=jnp.float32) + bias


# ------------------------------------------------------------------------------------------------------- both losses
# Of each: forward(axes, x_ME, y_ME, there_M, similarity) -> (the device's share, statistics of x and y), and
# block(x_ME, y_NE, there_M, there_N, similarity, statistics of x, of y, is_own) -> a number whose sum over all blocks
# has the gradient of the loss, with the statistics as constants.

def _sigmoid_forward(axes: Axes, x_ME, y_ME, there_M, similarity) -> tuple[jax.Array, tuple]:
    def body(total, passing, own):
        return total + _sigmoid_block(x_ME, passing[0], there_M, passing[1], similarity, (), (), own), passing

    return _around(body, jnp.zeros(()), (y_ME, there_M), axes)[0], ((), ())


def _sigmoid_block(x_ME, y_NE, there_M, there_N, similarity, _, __, own) -> jax.Array:
    """-log sigmoid of the logit of each pair that belongs together, and of minus that of each other pair."""
    sign_MN = jnp.where(own & jnp.eye(len(x_ME), dtype=bool), 1.0, -1.0)
    return (there_M[:, None] * there_N * jax.nn.softplus(-sign_MN * _logits(x_ME, y_NE, similarity))).sum()


def _softmax_forward(axes: Axes, x_ME, y_ME, there_M, similarity) -> tuple[jax.Array, tuple]:
    """The mean of both cross-entropies, by the running maxima and sums of exponentials of both directions."""
    def body(here, passing, own):
        logits_MN = _logits(x_ME, passing[0], similarity)
        rows = _running(here, jnp.where(passing[1] > 0, logits_MN, -1e30))
        columns = _running(passing[2], jnp.where(there_M[:, None] > 0, logits_MN, -1e30).T)
        return rows, (*passing[:2], columns)

    begin = jnp.full_like(there_M, -1e30), jnp.zeros_like(there_M)
    rows, (_, _, columns) = _around(body, begin, (y_ME, there_M, begin), axes)
    rows_M, columns_M = (peak + jnp.log(jnp.maximum(total, 1e-30)) for peak, total in (rows, columns))
    scale, bias = similarity
    own_M = scale * (x_ME * y_ME).sum(-1) + bias
    return (there_M * ((rows_M + columns_M) / 2 - own_M)).sum(), (rows_M, columns_M)


def _running(before: tuple[jax.Array, jax.Array], logits_MN: jax.Array) -> tuple[jax.Array, jax.Array]:
    peak_M = jnp.maximum(before[0], logits_MN.max(1))
    return peak_M, before[1] * jnp.exp(before[0] - peak_M) + jnp.exp(logits_MN - peak_M[:, None]).sum(1)


def _softmax_block(x_ME, y_NE, there_M, there_N, similarity, rows_M, columns_N, own) -> jax.Array:
    logits_MN, both_MN = _logits(x_ME, y_NE, similarity), there_M[:, None] * there_N
    shares_MN = jnp.exp(jnp.where(both_MN > 0, logits_MN - rows_M[:, None], -1e30))
    shares_MN += jnp.exp(jnp.where(both_MN > 0, logits_MN - columns_N, -1e30))
    matched_MN = jnp.where(own & jnp.eye(len(x_ME), dtype=bool), logits_MN, 0)
    return (both_MN * (shares_MN / 2 - matched_MN)).sum()


LOSSES = {"sigmoid": (_sigmoid_forward, _sigmoid_block), "softmax": (_softmax_forward, _softmax_block)}


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _total(kind: str, axes: Axes, x_ME, y_ME, there_M, similarity) -> jax.Array:
    """Return one device's share of the loss."""
    return LOSSES[kind][0](axes, x_ME, y_ME, there_M, similarity)[0]


def _forward(kind: str, axes: Axes, *args) -> tuple[jax.Array, tuple]:
    total, statistics = LOSSES[kind][0](axes, *args)
    return total, (*args, statistics)


def _backward(kind: str, axes: Axes, saved: tuple, d_total: jax.Array) -> tuple:
    x_ME, y_ME, there_M, similarity, (of_x, of_y) = saved

    def body(here, passing, own):
        y_NE, there_N, of_y, dy_NE = passing
        _, pull = jax.vjp(lambda x, y, s: LOSSES[kind][1](x, y, there_M, there_N, s, of_x, of_y, own),
                          x_ME, y_NE, similarity)
        dx, dy, ds = pull(d_total)
        return jax.tree.map(jnp.add, here, (dx, ds)), (y_NE, there_N, of_y, dy_NE + dy)

    zeros = jax.tree.map(jnp.zeros_like, (x_ME, similarity))
    (dx, ds), (_, _, _, dy) = _around(body, zeros, (y_ME, there_M, of_y, jnp.zeros_like(y_ME)), axes)
    return dx, dy, jnp.zeros_like(there_M), ds


_total.defvjp(_forward, _backward)


def _matched(axes: Axes, x_ME, y_ME, there_M, labels_M) -> jax.Array:
    def body(best, passing, own):
        y_NE, there_N, labels_N = passing
        scores_MN = jnp.where(there_N > 0, jnp.einsum("me,ne->mn", x_ME, y_NE), -1e30)
        at_M, peak_M = scores_MN.argmax(1), scores_MN.max(1)
        return (jnp.maximum(best[0], peak_M), jnp.where(peak_M > best[0], labels_N[at_M], best[1])), passing

    begin = jnp.full_like(there_M, -1e30), jnp.zeros_like(labels_M)
    (_, found_M), _ = _around(body, begin, (y_ME, there_M, labels_M), axes)
    return (there_M * (found_M == labels_M)).sum()
