"""Sums over one mesh axis whose messages are compressed: collectives for a manual region, and the bytes they move.

What one device loses it remembers, and adds to what it sends next (codecs.py): what all devices have remembered, plus
what they were given, is what they got plus what they remember then.

- Exact arrays, and the values of random-k, are summed by one all-reduce.
- Integers: each device sends to each other one its part of the array, which that one sums and sends to all again. The
  owner remembers what the second rounding loses. So a device receives each value twice, however many devices there are.
- Top-k: every device gets the messages of all, and adds them up in the same order.
- PowerSGD: both factors are summed, one after the other.

Arrays of one kind travel in one message. Shape suffixes: P peers on the axis, N blocks, B values in a block.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.base.annotations import PyTree
from jaxtrain.parallel.compression.codecs import (
    F32,
    Codec,
    Payload,
    PowerSGD,
    Quantized,
    RandomK,
    State,
    TopK,
    from_blocks,
    in_blocks,
    orthonormal,
)

Arrays = list[jax.Array]
States = list[State]


def all_reduce(codecs: Sequence[Codec], given: Arrays, states: States, axis: str) -> tuple[Arrays, States]:
    """Return the sums of arrays over a mesh axis, each by its codec, and the next states.

    To be called where the axis is manual; every device of it gets the same bits.
    """
    sums, after = list(given), list(states)
    for kind, together in _KINDS.items():
        here = [i for i, codec in enumerate(codecs) if isinstance(codec, kind) and (kind is not Codec
                                                                                     or type(codec) is Codec)]
        if here:
            found = together(*([part[i] for i in here] for part in (codecs, given, states)), axis)
            for i, total, state in zip(here, *found, strict=True):
                sums[i], after[i] = total, state
    return sums, after


def hierarchical_all_reduce(codec: Codec, x: jax.Array, state: State, inner: str,
                            across: str) -> tuple[jax.Array, State]:
    """Return the sum of an array over two mesh axes: only what crosses `across` is compressed.

    Each device of `inner` gets the sum of one part of the array, sums that over `across`, and gathers all parts. The
    state is that of a part, of `part_shape`.
    """
    parts = lax.axis_size(inner)
    part = lax.psum_scatter(in_blocks(x.astype(F32), 1, parts).reshape(-1), inner, tiled=True)
    (total,), (state,) = all_reduce([codec], [part], [state], across)
    return from_blocks(lax.all_gather(total, inner, tiled=True), x.shape), state


def part_shape(shape: Sequence[int], parts: int) -> tuple[int]:
    """Return the shape of the part of an array that one of this many devices sums."""
    return (-(-math.prod(shape) // parts),)


def received(codecs: Sequence[Codec], shapes: Sequence[tuple[int, ...]], peers: int) -> dict[str, int]:
    """Return the bytes of the results on one device, by kind of collective, of `all_reduce` of these arrays."""
    found: Counter = Counter()
    for codec, shape in zip(codecs, shapes, strict=True):
        if isinstance(codec, Quantized):
            blocks = peers * -(-math.prod(shape) // (codec.block * peers))
            size = codec.size((blocks * codec.block,))
            found.update({"all-to-all": size, "all-gather": size})
        elif isinstance(codec, TopK):
            found["all-gather"] += peers * codec.size(shape)
        elif isinstance(codec, RandomK):
            found["all-reduce"] += codec.size(shape) - 4  # without the count
        else:
            found["all-reduce"] += codec.size(shape)
    return dict(found)


# --------------------------------------------------------------------------------------------------------- by kind
def _exact(codecs: Sequence[Codec], given: Arrays, states: States, axis: str) -> tuple[Arrays, States]:
    return _summed([x.astype(F32) for x in given], axis), states


def _quantized(codecs: Sequence[Quantized], given: Arrays, states: States, axis: str) -> tuple[Arrays, States]:
    peers, me = lax.axis_size(axis), lax.axis_index(axis)
    wanted = [in_blocks(x.astype(F32) + state["error"], codec.block, peers)
              for codec, x, state in zip(codecs, given, states, strict=True)]
    sent = [codec.narrow(x_NB) for codec, x_NB in zip(codecs, wanted, strict=True)]
    by_peer = jax.tree.map(lambda a: a.reshape(peers, -1, *a.shape[1:]), sent)
    mine = _as_one(by_peer, lambda bytes_PX: lax.all_to_all(bytes_PX, axis, 0, 0))
    summed = [codec.wide(payload).sum(0) for codec, payload in zip(codecs, mine, strict=True)]
    again = [codec.narrow(x_NB) for codec, x_NB in zip(codecs, summed, strict=True)]
    all_of_them = _as_one(jax.tree.map(lambda a: a[None], again),
                          lambda bytes_1X: lax.all_gather(bytes_1X, axis, tiled=True))
    sums, after = [], []
    for codec, x, x_NB, payload, total, second, whole in zip(codecs, given, wanted, sent, summed, again, all_of_them,
                                                             strict=True):
        lost = (x_NB - codec.wide(payload)).reshape(peers, *total.shape)
        lost = lost.at[me].add(total - codec.wide(second))  # by the second rounding, of the part that is summed here
        sums.append(from_blocks(codec.wide(whole), x.shape))
        after.append({"error": from_blocks(lost, x.shape)})
    return sums, after


def _top_k(codecs: Sequence[TopK], given: Arrays, states: States, axis: str) -> tuple[Arrays, States]:
    sent, after = _encoded(codecs, given, states)
    everyone = _as_one(jax.tree.map(lambda a: a[None], sent), lambda x: lax.all_gather(x, axis, tiled=True))

    def add(sums, payloads):
        return [total + codec.decode(payload, total.shape)
                for codec, total, payload in zip(codecs, sums, payloads, strict=True)], None
    # One after the other: additions at places that several name have one order then.
    return lax.scan(add, [jnp.zeros(x.shape, F32) for x in given], everyone)[0], after


def _random_k(codecs: Sequence[RandomK], given: Arrays, states: States, axis: str) -> tuple[Arrays, States]:
    sent, after = _encoded(codecs, given, states)
    values = _summed([payload["values"] for payload in sent], axis)
    return [codec.decode({"values": value, "count": payload["count"]}, x.shape)
            for codec, value, payload, x in zip(codecs, values, sent, given, strict=True)], after


def _power_sgd(codecs: Sequence[PowerSGD], given: Arrays, states: States, axis: str) -> tuple[Arrays, States]:
    wanted = [(x.astype(F32) + state["error"]).reshape(codec.matrices(x.shape))
              for codec, x, state in zip(codecs, given, states, strict=True)]
    lefts = _summed([codec.projected(x, state["right"])
                     for codec, x, state in zip(codecs, wanted, states, strict=True)], axis)
    lefts = [orthonormal(left) for left in lefts]
    own = [codec.right(x, left) for codec, x, left in zip(codecs, wanted, lefts, strict=True)]
    rights = _summed(own, axis)
    sums, after = [], []
    for codec, x, x_SMN, left, mine, right in zip(codecs, given, wanted, lefts, own, rights, strict=True):
        sums.append(codec.decode({"left": left, "right": right}, x.shape))
        lost = x_SMN.reshape(x.shape) - codec.decode({"left": left, "right": mine}, x.shape)
        after.append({"error": lost, "right": right})
    return sums, after


_KINDS: dict[type[Codec], Callable[..., tuple[Arrays, States]]] = {
    Codec: _exact, Quantized: _quantized, TopK: _top_k, RandomK: _random_k, PowerSGD: _power_sgd}


def _encoded(codecs: Sequence[Codec], given: Arrays, states: States) -> tuple[list[Payload], States]:
    both = [codec.encode(x, state) for codec, x, state in zip(codecs, given, states, strict=True)]
    return [payload for payload, _ in both], [state for _, state in both]


# ------------------------------------------------------------------------------------------------------- as one message
def _summed(given: Arrays, axis: str) -> Arrays:
    """Return the sums over the axis, by one all-reduce."""
    total = lax.psum(jnp.concatenate([x.reshape(-1) for x in given]), axis)
    ends = np.cumsum([x.size for x in given])
    return [part.reshape(x.shape) for part, x in zip(jnp.split(total, ends[:-1]), given, strict=True)]


def _as_one(tree: PyTree, move: Callable[[jax.Array], jax.Array]) -> PyTree:
    """Return arrays [rows, ...] whose bytes, side by side, a collective has moved: it returns [other rows, bytes]."""
    leaves, treedef = jax.tree.flatten(tree)
    moved = move(jnp.concatenate([_to_bytes(leaf) for leaf in leaves], 1))
    ends = np.cumsum([_to_bytes_size(leaf) for leaf in leaves])
    return treedef.unflatten([_from_bytes(part, leaf) for part, leaf in zip(
        jnp.split(moved, ends[:-1], axis=1), leaves, strict=True)])


def _to_bytes_size(leaf: jax.Array) -> int:
    return leaf.size // leaf.shape[0] * leaf.dtype.itemsize


def _to_bytes(leaf: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(leaf, jnp.uint8).reshape(leaf.shape[0], -1)


def _from_bytes(part: jax.Array, like: jax.Array) -> jax.Array:
    shape = (part.shape[0], *like.shape[1:])
    size = like.dtype.itemsize
    return lax.bitcast_convert_type(part.reshape(*shape, *((size,) if size > 1 else ())), like.dtype)
