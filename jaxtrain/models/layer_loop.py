"""The loop over the layers of a stack: scanned, unrolled, or several at a time, of which each may be of a known kind.

A layer may differ from others by its number alone, such as by a window. What decides this is known when the loop is
written down, not when it runs, wherever the layers of an iteration are always the same kinds: in a loop without
iterations, or in one over a pattern that repeats. Then no branch is left in the compiled program.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import PyTree

# (the activation, what the layer has of arrays of all layers, the number of a layer of its kind; None: not known) ->
# the activation, and what the loop stacks
Step = Callable[[jax.Array, PyTree, int | None], tuple[jax.Array, PyTree]]


def is_eager(tree: PyTree) -> bool:
    """Return whether all arrays have values, as in a notebook, and none is being traced."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def in_turn(step: Step, x: jax.Array, given: PyTree) -> tuple[jax.Array, PyTree]:
    """Return what `loop` returns, layer by layer: outside of `jax.jit`, a scan would be compiled at every call."""
    each = []
    for number in range(len(jax.tree.leaves(given)[0])):
        x, aux = step(x, jax.tree.map(lambda a, number=number: a[number], given), None)
        each.append(aux)
    return x, jax.tree.map(lambda *parts: jnp.stack(parts), *each)


def loop(step: Step, x: jax.Array, given: PyTree, unroll: int,
         kinds: Sequence[Hashable] = (), first: int = 0) -> tuple[jax.Array, PyTree]:
    """Apply layers, `unroll` of them in an iteration (0: all).

    kinds: of each layer; none: they are not known, and nor are numbers. Layers of one kind are computed alike.
    first: the number of the first layer.
    """
    if not kinds:
        return _scan(lambda x, one: step(x, one, None), x, given, unroll)
    period, parts = period_of(kinds), []
    runs = [len([*run]) for _, run in itertools.groupby(kinds)]
    if 1 < period <= len(kinds) // 2:
        whole = len(kinds) // period * period
        runs = [whole, *[1] * (len(kinds) - whole)]
    for count, some in zip(runs, split(given, runs), strict=True):
        each = period if count % period == 0 else 1
        x, aux = _by_period(step, x, some, unroll, range(first, first + each))
        parts.append(aux)
        first += count
    return x, joined(parts)


def split(given: PyTree, counts: Sequence[int]) -> list[PyTree]:
    """Return so many layers each of arrays of all of them.

    Split, not indexed: gradients are then concatenated, and not each padded to the size of all and added.
    """
    if len(counts) == 1:
        return [given]
    leaves, tree = jax.tree.flatten(given)
    return [tree.unflatten(part) for part in zip(*(jax.lax.split(leaf, counts) for leaf in leaves), strict=True)]


def joined(parts: Sequence[PyTree]) -> PyTree:
    """Return what parts of a loop stack, one behind the other."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts) if len(parts) > 1 else parts[0]


def period_of(kinds: Sequence[Hashable]) -> int:
    """Return after how many layers their kinds begin anew."""
    return next(n for n in range(1, len(kinds) + 1) if all(a == b for a, b in zip(kinds, kinds[n:], strict=False)))


def _by_period(step: Step, x: jax.Array, given: PyTree, unroll: int, numbers: range) -> tuple[jax.Array, PyTree]:
    """Scan over groups of layers that are like those with these numbers."""
    if (each := len(numbers)) == 1:
        return _scan(lambda x, one: step(x, one, numbers[0]), x, given, unroll)

    def several(x, given):
        stacked = []
        for number, one in zip(numbers, split(given, (1,) * each), strict=True):
            x, aux = step(x, jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, (0,)), one), number)
            stacked.append(aux)
        return x, jax.tree.map(lambda *parts: jnp.stack(parts), *stacked)

    folded = jax.tree.map(lambda a: a.reshape(-1, each, *a.shape[1:]), given)
    x, told = _scan(several, x, folded, unroll if unroll in (0, 1) else max(1, unroll // each))
    return x, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), told)


def _scan(step: Callable, x: jax.Array, given: PyTree, unroll: int) -> tuple[jax.Array, PyTree]:
    """Scan over any number of layers with `unroll` layers per iteration (0: all).

    lax.scan's own unrolling reshapes the residuals of the backward pass, and JAX 0.10 cannot reshape a `reduced` type.
    """
    layers = len(jax.tree.leaves(given)[0])  # of the stack, or of a pipeline stage's part of it
    if unroll in (0, 1) or unroll >= layers:
        return jax.lax.scan(step, x, given, unroll=layers if unroll != 1 else 1)
    groups = layers // unroll

    def several(x, given):
        return jax.lax.scan(step, x, given, unroll=unroll)

    def fold(a):
        return a[:groups * unroll].reshape(groups, unroll, *a.shape[1:])

    x, told = jax.lax.scan(several, x, jax.tree.map(fold, given))
    x, rest = jax.lax.scan(step, x, jax.tree.map(lambda a: a[groups * unroll:], given), unroll=unroll)
    return x, jax.tree.map(lambda a, b: jnp.concatenate([a.reshape(-1, *a.shape[2:]), b]), told, rest)
