"""The key-value cache of generation: what attention keeps of earlier tokens, so that a step computes one token only.

Layers without attention keep a state in their place, which is as large however long the text is: arrays [B, ?, ?, ?]
under `STATE`, of which a step returns the next ones.

An entry is an array [B, G, S, K] of one layer; entries of all layers are stacked and scanned like parameters. A row's
text begins in its first slot, and its next token is written behind its last one: in a slot of its own, or in the same
slot in all rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import PyTree
from jaxtrain.kernels.attention import cached_attention
from jaxtrain.models.attention import cache_pages

CACHE = "cache"  # the auxiliary value under which a layer returns its keys and values of the tokens that it was given
STATE = "state"  # the key of entries that have no slots
Aux = dict[str, Any]  # the auxiliary values of a layer, or stacked of several: penalties, sums, entries of a cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The entries of all layers, or of one; without entries (a prompt's pass) layers only return theirs."""

    entries: Any = None
    slot: jax.Array | None = None  # of the token that is computed, or of that of each row [B]
    in_place: bool = field(default=False, metadata={"static": True})  # layers return all entries, with the token's
    table_BW: jax.Array | None = None  # which pages rows have, where entries are pages (cache_pages.py)

    def of(self, name: str) -> "Cache":
        """Return the part of a layer or a stack with this name."""
        return replace(self, entries=None if self.entries is None else self.entries.get(name))

    def visible(self, slots: int, window: jax.Array | int = 0) -> jax.Array:
        """Return which of the earlier slots the token attends to [B, S].

        `window` is a number, or an array of one, or of one for each row [B, 1]; 0: all.
        """
        assert self.slot is not None
        back_BS = jnp.expand_dims(self.slot, -1) - jnp.arange(slots)  # tokens ago; 0: where the token itself will be
        return jnp.atleast_2d((back_BS > 0) & ((back_BS < window) | (jnp.asarray(window) == 0)))

    def read(self, new: PyTree) -> tuple[PyTree, PyTree]:
        """Return the entries of a layer that its token attends to, and what the layer returns, from the token's own.

        In place, the token's are written before anything is read, though it does not see its own slot: XLA copies an
        array that is read before it is written.
        """
        if self.table_BW is not None:
            return with_slots(partial(cache_pages.gathered, self.table_BW), self.entries), new
        if not self.in_place:
            return self.entries, new
        whole = self.extended(new)
        return jax.tree.map(lambda held: held if held.ndim == 4 else held[:, None], whole), whole

    def extended(self, new: PyTree) -> PyTree:
        """Return the entries with those of the token that was computed in its slot."""
        slot = self.slot
        assert slot is not None
        new = in_place(new) if self.in_place else new
        if self.table_BW is not None:
            return with_slots(partial(cache_pages.written, self.table_BW, slot), self.entries, new)
        if slot.ndim == 0:
            return with_slots(lambda before, one: jax.lax.dynamic_update_slice_in_dim(before, one, slot, -2),
                              self.entries, new)
        return with_slots(partial(_written, slot, 0 if self.in_place else -4), self.entries, new)


def _written(slot_B: jax.Array, axis: int, before: jax.Array, one: jax.Array) -> jax.Array:
    """Return entries with those of a token in each row's slot; on a mesh every device writes to its own."""
    def local(slot_B, before, one):
        return jax.vmap(lambda slot, before, one: jax.lax.dynamic_update_slice_in_dim(before, one, slot, -2),
                        (0, axis, axis), axis % before.ndim)(slot_B, before, one)

    return cache_pages.locally(local, (before, one), slot_B)


def with_slots(f: Callable[..., jax.Array], entries: PyTree, *others: PyTree) -> PyTree:
    """Apply a function to the entries that have slots; of those that have none, return the last tree's."""
    return jax.tree_util.tree_map_with_path(lambda path, *each: f(*each) if _has_slots(path) else each[-1], entries,
                                            *others)


def split(entries: PyTree) -> tuple[PyTree, PyTree]:
    """Return the entries that have slots, and those that have none."""
    def part(slots: bool) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda path, x: x if _has_slots(path) == slots else None, entries)

    return part(True), part(False)


def joined(slotted: PyTree, states: PyTree) -> PyTree:
    """Return all entries, of which `split` made these parts."""
    return jax.tree.map(lambda one, other: other if one is None else one, slotted, states, is_leaf=lambda x: x is None)


def slots_of(entries: PyTree) -> int:
    """Return how many slots the entries have; 0: none has any."""
    leaves = jax.tree_util.tree_leaves_with_path(entries)
    return next((leaf.shape[-2] for path, leaf in leaves if _has_slots(path)), 0)


def _has_slots(path: tuple[Any, ...]) -> bool:
    return all(getattr(key, "key", None) != STATE for key in path)


def in_place(entries: PyTree) -> PyTree:
    """Return entries of layers as a CPU has them, which changes them in place.

    In float32, which it multiplies: anything else would be converted at every token. Without the dimension of heads if
    there is one: XLA multiplies without it, and so would copy the entries.
    """
    return with_slots(lambda kept: (kept[:, 0] if kept.shape[1] == 1 else kept).astype(jnp.float32), entries)


def entry(x_BTGK: jax.Array) -> jax.Array:
    """Return keys or values as the cache has them, [B, G, T, K]: then products with them need no transposes."""
    return x_BTGK.transpose(0, 2, 1, 3)


def kept(cache: Cache | None, k_BTGK: jax.Array, v_BTGK: jax.Array) -> Aux:
    """Return the auxiliary value of a layer: its entries of the cache where there is one."""
    return {} if cache is None else {CACHE: {"keys": entry(k_BTGK), "values": entry(v_BTGK)}}


def attend_cached(out: Callable[[jax.Array], jax.Array], q_B1HK: jax.Array, k_B1GK: jax.Array, v_B1GK: jax.Array,
                  cache: Cache, window: jax.Array | int, sinks_H: jax.Array | None = None,
                  soft_cap: float = 0.0) -> tuple[jax.Array, Aux]:
    """Return what a layer does for one token per row, which attends to the cache and to itself."""
    own = {"keys": entry(k_B1GK), "values": entry(v_B1GK)}
    before, new = cache.read(own)
    visible_BS = cache.visible(before["keys"].shape[-2], window)
    return out(cached_attention.attend(q_B1HK, own["keys"], own["values"], before["keys"], before["values"],
                                       visible_BS, q_B1HK.shape[-1]**-0.5, sinks_H, soft_cap)), {CACHE: new}
