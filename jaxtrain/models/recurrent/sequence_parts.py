"""The parts of rows that a device holds, each a row of its own, and what a part needs to know of those before it.

A recurrence runs through a row in order. Where mesh axis `context` cuts rows, in balanced order, device i of n holds
parts i and 2n-1-i of 2n (parallel/context.py). A mixer takes them as [2B, T / 2n, ...]: two rows whose beginnings lie
elsewhere. Without such an axis a row is the one part of itself.

All functions but `on_own_rows` are for use inside it. `n` is the number of devices that share a row.

Shape suffixes: P parts of a row, B batch, T sequence, H heads, G groups of heads.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.parallel.cut_rows import AXIS, size
from jaxtrain.sharding import activations, axis_rules
from jaxtrain.sharding.axis_rules import Names

TOKENS: Names = ("batch", "seq")
HEADS: Names = ("batch", "seq", "act_heads")
STATE: Names = ("batch", "act_heads", None, None)


def on_own_rows(local: Callable, names: tuple[Names, ...], out_names: tuple[Names, ...]) -> Callable:
    """Wrap `local(n, *arrays)`: each device computes it for its own rows and heads. Arrays may be None.

    Without an explicit mesh it is called as it is, with n = 1.
    """
    def call(*arrays):
        if activations.activation_spec() is None:
            return local(1, *arrays)
        laid_out = [None if x is None else activations.constrain(x, *own)
                    for x, own in zip(arrays, names, strict=True)]
        specs, out_specs = ([activations.activation_spec(*own) for own in side] for side in (names, out_names))
        return activations.manual_region(partial(local, size()), tuple(specs), tuple(out_specs))(*laid_out)

    return call


def for_all_heads(x_BTGK: jax.Array, heads: int) -> jax.Array:
    """Repeat what groups of heads share until `act_heads` splits it as it splits the heads."""
    here, groups = activations.split_by("act_heads"), x_BTGK.shape[2]
    split = axis_rules.shards(here, jax.sharding.get_abstract_mesh())
    if groups % split == 0:
        return x_BTGK
    assert heads % math.lcm(groups, split) == 0, "the heads divide over the devices"
    whole = activations.constrain(x_BTGK, *TOKENS, None, None)
    return activations.constrain(jnp.repeat(whole, math.lcm(groups, split) // groups, axis=2), *HEADS, None)


def apart(n: int, x: jax.Array) -> jax.Array:
    """Make a row [B, T, ...] of each part."""
    return x if n == 1 else x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:])


def together(n: int, x: jax.Array) -> jax.Array:
    """Undo `apart`."""
    return x if n == 1 else x.reshape(x.shape[0] // 2, 2 * x.shape[1], *x.shape[2:])


def numbers(n: int) -> tuple[jax.Array | int, ...]:
    """Return which parts of a row this device holds."""
    return (0,) if n == 1 else (lax.axis_index(AXIS), 2 * n - 1 - lax.axis_index(AXIS))


def gather(n: int, x: jax.Array) -> jax.Array:
    """Return what all devices have of each of their parts, [P, B, ...] in the order of the sequence."""
    if n == 1:
        return x[None]
    pairs = lax.all_gather(x.reshape(-1, 2, *x.shape[1:]), AXIS)
    return jnp.concatenate([pairs[:, :, 0], pairs[::-1, :, 1]])


def own(n: int, x_PB: jax.Array) -> jax.Array:
    """Return this device's parts of [P, B, ...]: the inverse of `gather`."""
    parts = jnp.stack([lax.dynamic_index_in_dim(x_PB, part, keepdims=False) for part in numbers(n)], 1)
    return parts.reshape(-1, *x_PB.shape[2:])


def document_starts(n: int, rows: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    """Return which tokens of `rows`, [B, T, ...] by part, begin a document: those whose segment is another.

    The first token of a whole row does not: it goes on with the state that the row is given, which may be none.
    """
    if segments_BT is None:
        return jnp.zeros(rows.shape[:2], bool)
    segments_BT = apart(n, segments_BT)
    last_PB = gather(n, segments_BT[:, -1])
    first_PB = gather(n, segments_BT[:, 0])
    before_B1 = own(n, jnp.concatenate([first_PB[:1], last_PB[:-1]]))[:, None]
    return segments_BT != jnp.concatenate([before_B1, segments_BT[:, :-1]], 1)


def with_tokens_before(n: int, x: jax.Array, count: int, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return rows [B, T, ...] behind the `count` tokens before each, and the last `count` tokens of the whole row.

    `first`: those before the whole row [B, count, ...]. Only the ends of parts are gathered.
    """
    size = min(count, x.shape[1])
    ends_PB = gather(n, x[:, x.shape[1] - size:])
    # Ends shorter than `count` are whole parts, so that in a row they have no gaps.
    line = jnp.concatenate([first, *ends_PB], 1)
    before = jnp.stack([lax.dynamic_slice_in_dim(line, part * size, count, 1) for part in numbers(n)], 1)
    return (jnp.concatenate([before.reshape(-1, *before.shape[2:]), x], 1),
            lax.slice_in_dim(line, line.shape[1] - count, None, axis=1))
