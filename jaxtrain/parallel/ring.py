"""Ring attention: blocks of keys and values circulate; every device works on one while the next is in transit.

A device's tokens are an early and a late chunk of a sequence, in the order of their positions. Of another device's
block it sees the early chunk with all its queries, or all of the block with its late queries: half of all pairs.

Blocks are computed in tiles (kernels/attention/tiles.py), by plain operations or by cuDNN, or as a whole by jaxtrain's
own kernels (kernels/attention/packed_attention.py), which read from two numbers of each token what it sees.

Shape suffixes: B batch, T tokens of a device, H query heads, G key/value heads, K head width.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.base.annotations import PyTree
from jaxtrain.kernels.attention import mosaic_attention, packed_attention, tiled
from jaxtrain.kernels.attention.tiles import Pull, Scoring, Tokens, merge
from jaxtrain.parallel.balanced import unbalance
from jaxtrain.parallel.cut_rows import AXIS, balanced_order

Result = tuple[jax.Array, jax.Array]  # out [B, T, H, K] and its log-sum-exp [B, T, H], in float32


def forward(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, scoring: Scoring) -> Result:
    """Return attention of this device's queries to all keys of their rows."""
    n, me = lax.axis_size(AXIS), lax.axis_index(AXIS)
    block = _block(q, segments, scoring)
    following = _next((k, v, segments))
    result = block.own(q, k, v)

    def visit(result, given, hop):
        return block.added(result, (me - hop) % n, q, *given)

    return _rounds(visit, result, following)


def backward(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, pull: Pull,
             scoring: Scoring) -> tuple[jax.Array, ...]:
    """Return the gradients by this device's queries, keys and values."""
    n, me = lax.axis_size(AXIS), lax.axis_index(AXIS)
    block = _block(q, segments, scoring)
    following = _next((k, v, segments))
    dq, *dkv = block.own_gradients(q, k, v, pull)

    def visit(carry, given, hop):
        # Gradients of a block travel one hop behind it.
        k, v, segments = given
        return block.added_gradients((carry[0], _next(carry[1])), (me - hop) % n, q, k, v, segments, pull)

    dq, dkv = _rounds(visit, (dq, dkv), following)
    return dq, *_next([g.astype(x.dtype) for g, x in zip(dkv, (k, v), strict=True)])  # to their owners, cast as needed


def _next(tree: PyTree) -> PyTree:
    """Return what the previous device in the ring sent."""
    n = lax.axis_size(AXIS)
    return jax.tree.map(lambda x: lax.ppermute(x, AXIS, [(i, (i + 1) % n) for i in range(n)]), tree)


def _rounds(visit: Callable, carry: PyTree, block: PyTree) -> PyTree:
    """Fold `visit(carry, block, hop)` over the blocks of all other devices, sending each on before working on it."""
    def hop(state, i):
        carry, block = state
        following = _next(block)
        return (visit(carry, block, i), following), None

    n = lax.axis_size(AXIS)
    (carry, block), _ = lax.scan(hop, (carry, block), jnp.arange(1, n - 1))
    return visit(carry, block, n - 1)


def _block(q: jax.Array, segments: jax.Array | None, scoring: Scoring) -> "_Tiles | Ranges":
    n, T = lax.axis_size(AXIS), q.shape[1]
    if scoring.kernel != "mosaic":
        return _Tiles(n, T, segments, scoring)
    whole = (jnp.zeros((len(q), n * T), jnp.int32) if segments is None else
             unbalance(lax.all_gather(segments, AXIS, axis=1, tiled=True), n))
    return ranges_of(whole, n, scoring)


# --------------------------------------------------------------------------------------------------------- tiles

class _Tiles(NamedTuple):
    """Blocks in tiles, of which those are computed in which a query may see a key."""

    n: int
    T: int
    segments: jax.Array | None
    scoring: Scoring

    def own(self, q, k, v):
        mine = self._tokens()
        return tiled.forward(q, k, v, mine, mine, self.scoring, own=True)

    def added(self, result, source, q, k, v, segments):
        mine, theirs = self._tokens(), Tokens(balanced_order(source, self.n, self.T), segments)

        def work(a, b):
            part = tiled.forward(q[:, a], k[:, b], v[:, b], mine.part(a), theirs.part(b), self.scoring)
            return _put(result, a, merge(_take(result, a), part))

        return self._seen(source, work)

    def own_gradients(self, q, k, v, pull):
        mine = self._tokens()
        return tiled.backward(q, k, v, pull, mine, mine, self.scoring, own=True)

    def added_gradients(self, so_far, source, q, k, v, segments, pull):
        mine, theirs = self._tokens(), Tokens(balanced_order(source, self.n, self.T), segments)
        dq, dkv = so_far

        def work(a, b):
            ddq, *ddkv = tiled.backward(q[:, a], k[:, b], v[:, b], _take(pull, a), mine.part(a), theirs.part(b),
                                        self.scoring)
            add = partial(jax.tree.map, jnp.add)
            return _put(dq, a, add(_take(dq, a), ddq)), _put(dkv, b, add(_take(dkv, b), ddkv))

        return self._seen(source, work)

    def _tokens(self):
        return Tokens(balanced_order(lax.axis_index(AXIS), self.n, self.T), self.segments)

    def _seen(self, source: jax.Array, work: Callable[[slice, slice], PyTree]) -> PyTree:
        """Apply `work(queries, keys)` to the visible part of another device's block."""
        early, late, every = slice(0, self.T // 2), slice(self.T // 2, self.T), slice(0, self.T)
        return lax.cond(source < lax.axis_index(AXIS), lambda: work(every, early), lambda: work(late, every))


def _take(x: PyTree, part: slice) -> PyTree:
    return jax.tree.map(lambda x: x[:, part], x)


def _put(x: PyTree, part: slice, new: PyTree) -> PyTree:
    return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, part.start, axis=1), x, new)


# ----------------------------------------------------------------------------------------------- jaxtrain's own kernels

def ranges_of(segments: jax.Array, n: int, scoring: Scoring) -> "Ranges":
    """Return the blocks of n devices of rows with these documents."""
    first, last = packed_attention.bounds(segments, scoring.window)
    return Ranges(n, segments.shape[1] // n, (first[:, 0], last[:, 0]), scoring)


class Ranges(NamedTuple):
    """Whole blocks, of which the kernels compute what the numbers of tokens say that is seen.

    The positions that a query sees are those from one to another, whatever documents and windows there are. As a device
    has its tokens in the order of their positions, so are their places among them.
    """

    n: int
    T: int
    seen: tuple[jax.Array, jax.Array]  # of each token of whole rows: the first that it sees, the last that sees it
    scoring: Scoring

    def own(self, q, k, v):
        """Return attention to the device's own keys."""
        out, lse = self._part(lax.axis_index(AXIS), q, k, v)
        return out.astype(jnp.float32), lse

    def added(self, result, source, q, k, v, segments):
        """Add attention to the keys of another device."""
        del segments  # each device has those of whole rows
        return merge(result, self._part(source, q, k, v))

    def own_gradients(self, q, k, v, pull):
        """Return the contributions of the device's own keys to the gradients."""
        return tuple(x.astype(jnp.float32) for x in self._gradients(lax.axis_index(AXIS), q, k, v, pull))

    def added_gradients(self, so_far, source, q, k, v, segments, pull):
        """Add those of the keys of another device."""
        del segments
        dq, *dkv = self._gradients(source, q, k, v, pull)
        return so_far[0] + dq, [old + new for old, new in zip(so_far[1], dkv, strict=True)]

    def _part(self, source, q, k, v):
        return packed_attention.part(mosaic_attention.WIDTHS, q, k, v, self.ranges(lax.axis_index(AXIS), source),
                                     self._window(), self.scoring.soft_cap)

    def _gradients(self, source, q, k, v, pull):
        return packed_attention.part_gradients(mosaic_attention.WIDTHS, q, k, v, pull.pull, pull.lse, pull.delta,
                                               self.ranges(lax.axis_index(AXIS), source), self._window(),
                                               self.scoring.soft_cap)

    def _window(self):
        """Return the window that would show as many pairs of a block as are seen on average."""
        return -(-self.scoring.window // self.n)

    def ranges(self, me: jax.Array | int, source: jax.Array | int) -> packed_attention.Ranges:
        """Return which of a device's queries see which of another's keys."""
        mine, theirs = (balanced_order(device, self.n, self.T) for device in (me, source))
        (first, last), rows = self.seen, len(self.seen[0])
        return packed_attention.Ranges(
            self._before(first[:, mine], source), self._before(mine + 1, source, rows) - 1,
            self._before(theirs, me, rows), self._before(last[:, theirs] + 1, me) - 1)

    def _before(self, positions: jax.Array, device: jax.Array | int, rows: int = 0) -> jax.Array:
        """Return how many tokens of a device are before these positions, [B, T]; `rows`: as often."""
        chunk = self.T // 2
        early, late = (jnp.clip(positions - number * chunk, 0, chunk) for number in (device, 2 * self.n - 1 - device))
        return jnp.broadcast_to(early + late, (rows, self.T)) if rows else early + late
