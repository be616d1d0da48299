"""The states between the chunks of a recurrence, on one device or over mesh axis `context`.

A chunk of tokens maps the state [K, V] that it begins with to the one that it ends with: an affine map, which is known
before any state is (Martin and Cundy, 2018; arXiv 1709.04057). A scan applies those of a part of a row one by one.

Where `context` cuts rows, each part composes its maps into one, all parts' maps are gathered, and every device applies
those before its own parts (as LASP-2 does for linear attention; Sun et al., 2025; arXiv 2502.07563): one exchange,
whose size does not depend on the length of the rows, and no part waits for the one before. The backward pass does the
same in the other direction, with the transposed maps.

Shape suffixes: N chunks, P parts of a row, B batch, H heads, C tokens of a chunk, K and V the sides of a state, X is K
or 1.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.remat_policies import STATES
from jaxtrain.models.recurrent import sequence_parts as parts
from jaxtrain.parallel.cut_rows import AXIS

SAVED = STATES  # what the backward pass keeps besides its inputs


class ChunkMaps(NamedTuple):
    """The map of each chunk: S becomes decay S - write^T (read S) + added; without `read` and `write`, decay S + added.
    """

    decay_NBHX: jax.Array
    added_NBHKV: jax.Array | None  # None in the backward pass
    read_NBHCK: jax.Array | None = None
    write_NBHCK: jax.Array | None = None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def states(n: int, maps: ChunkMaps, initial_BHKV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the state that each chunk begins with [N, B, H, K, V], and the last one of whole rows.

    `n` devices share a row: `maps` are then of their parts (sequence_parts.py), `initial_BHKV` of whole rows.
    """
    return _forward(n, maps, initial_BHKV)[0]


def _forward(n, maps, initial):
    if n == 1:
        move = None
        last, begins = lax.scan(_next, initial, maps)
    else:
        move, added = _composed(maps)
        last, firsts = lax.scan(_apply, initial, (parts.gather(n, move), parts.gather(n, added)))
        move, (_, begins) = checkpoint_name(move, SAVED), lax.scan(_next, parts.own(n, firsts), maps)
    begins = checkpoint_name(begins, SAVED)
    return (begins, last), (maps._replace(added_NBHKV=None), begins, move)  # no gradient needs what is added


def _backward(n, saved, gradients):
    (maps, begins, move), (dbegins, dlast) = saved, gradients
    if n == 1:
        dinitial, dends = lax.scan(_before, dlast, (maps, dbegins), reverse=True)
    else:
        back = jnp.swapaxes(move, -1, -2) if move.ndim == dlast.ndim else move
        own, _ = lax.scan(_before, jnp.zeros_like(begins[0]), (maps, dbegins), reverse=True)
        dinitial, ends = lax.scan(_apply, lax.psum(dlast, AXIS), (parts.gather(n, back), parts.gather(n, own)),
                                  reverse=True)
        dinitial = jnp.where(lax.axis_index(AXIS) == 0, dinitial, 0)  # the sum over devices, which all have the same
        _, dends = lax.scan(_before, parts.own(n, ends), (maps, dbegins), reverse=True)
    return _gradients(maps, begins, dends), dinitial


states.defvjp(_forward, _backward)


def named(y_BTHV: jax.Array, last_BHKV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the results of a recurrence, by the name by which `train.remat` may keep the first.

    With it and the states of chunks kept, a layer's backward pass computes what is within chunks once, and scans once.
    """
    return checkpoint_name(y_BTHV, SAVED), last_BHKV


def _next(state, chunk: ChunkMaps):
    """Return the state after a chunk, and the one before it."""
    new = chunk.decay_NBHX[..., None] * state + chunk.added_NBHKV
    if chunk.read_NBHCK is not None:
        new -= jnp.einsum("bhck,bhcv->bhkv", chunk.write_NBHCK, chunk.read_NBHCK @ state)
    return new, state


def _before(dend, at):
    """Return the gradient of the state before a chunk, and of the one after it."""
    chunk, dbegin = at
    new = chunk.decay_NBHX[..., None] * dend + dbegin
    if chunk.read_NBHCK is not None:
        new -= jnp.einsum("bhck,bhcv->bhkv", chunk.read_NBHCK, chunk.write_NBHCK @ dend)
    return new, dend


def _gradients(maps, begins, dends):
    """Return the gradients of the maps, from the states before the chunks and the gradients of those after."""
    ddecay = (begins * dends).sum(-1)
    ddecay = ddecay.sum(-1, keepdims=True) if maps.decay_NBHX.shape[-1] == 1 else ddecay
    if maps.read_NBHCK is None:
        return ChunkMaps(ddecay, dends)
    return ChunkMaps(ddecay, dends, -jnp.einsum("nbhcv,nbhkv->nbhck", maps.write_NBHCK @ dends, begins),
                     -jnp.einsum("nbhcv,nbhkv->nbhck", maps.read_NBHCK @ begins, dends))


def _composed(maps):
    """Return the one map of all chunks: S becomes move S + added, with factors [B, H, X] or a matrix [B, H, K, K]."""
    added = maps.added_NBHKV
    if maps.read_NBHCK is None:
        return maps.decay_NBHX.prod(0), lax.scan(_next, jnp.zeros_like(added[0]), maps)[0]
    size = added.shape[-2]
    # What becomes of zero, and beside it of each state with a single one.
    both = maps._replace(added_NBHKV=jnp.pad(added, [(0, 0)] * 4 + [(0, size)]))
    begin = jnp.broadcast_to(jnp.eye(size, added.shape[-1] + size, added.shape[-1]), both.added_NBHKV.shape[1:])
    end, _ = lax.scan(_next, begin, both)
    return end[..., added.shape[-1]:], end[..., :added.shape[-1]]


def _apply(state, part):
    """Return the state after a part of the row, and the one before it."""
    move, added = part
    return (move @ state if move.ndim == state.ndim else move[..., None] * state) + added, state
