"""Rows in the programs of generation: they are taken, given room, and given their next tokens.

Shape suffixes: B batch, R rows of new prompts, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.hub.sampling import choose, penalized
from jaxtrain.sharding import axis_rules

State = dict[str, Any]
OF_ROWS = ("entries", "logits", "seen")  # what a state has of rows, and has moved with them; `seen`: with a penalty


def apart_layers(stacks: dict[str, PyTree]) -> dict[str, PyTree]:
    """Return lists of layers in place of stacks."""
    return {name: [jax.tree.map(lambda w, n=n: w[n], stack) for n in range(len(jax.tree.leaves(stack)[0]))]
            for name, stack in stacks.items() if stack}


def together(apart: dict[str, PyTree]) -> dict[str, PyTree]:
    """Return stacks in place of lists of layers."""
    return {name: jax.tree.map(lambda *layers: jnp.stack(layers), *each) for name, each in apart.items()}


def whole(w: jax.Array) -> jax.Array:
    """Return an array that only those axes split that split a product."""
    kept = (tuple(axis for axis in axis_rules.axes_of(part) if axis in ("tensor", "expert"))
            for part in jax.typeof(w).sharding.spec)
    return jax.reshard(w, P(*kept))


def of_rows(state: State) -> State:
    """Return what a state has of rows, without what the host says of them."""
    return {name: state[name] for name in OF_ROWS if name in state}


def to_the_front(kept: jax.Array, begins_R: jax.Array) -> jax.Array:
    """Return entries of stacked layers of texts that end in the last slot, as they are if they begin in the first."""
    return jax.vmap(lambda x, begin: jnp.roll(x, -begin, -2), (-4, 0), -4 + kept.ndim)(kept, begins_R)


def with_room(kept: jax.Array, slots: int) -> jax.Array:
    """Return entries with so many slots."""
    more = slots - kept.shape[-2]
    return jnp.pad(kept, [(0, 0)] * (kept.ndim - 2) + [(0, more), (0, 0)]) if more > 0 else kept[..., :slots, :]


def pick(rows: State, shared: State, *, filters: bool, penalizes: bool) -> tuple[State, jax.Array]:
    """Choose a token per row and note it, unless the row is finished or the token finishes it."""
    rows = dict(rows)
    limits_B, seeds_B = rows.pop("limits"), rows.pop("seeds")
    logits_BV = rows.pop("logits")
    adjusted_BV = penalized(logits_BV, rows["seen"], shared["repetition_penalty"]) if penalizes else logits_BV
    adjusted_BV = jnp.where(jnp.arange(logits_BV.shape[1]) < shared["known"], adjusted_BV, -jnp.inf)
    keys_B = jax.vmap(lambda words, count: jax.random.fold_in(jax.random.wrap_key_data(words[:2]), words[2] + count))(
        seeds_B, rows["count"].astype(jnp.uint32))
    token_B = choose(adjusted_BV, keys_B, shared, filters)
    tempered_BV = logits_BV / shared["logprob_temperature"]
    said_B = jnp.take_along_axis(jax.nn.log_softmax(tempered_BV), token_B[:, None], -1)[:, 0]
    done_B = rows["done"] | (token_B[:, None] == shared["stops"][None]).any(-1)
    ends_B = done_B & ~rows["done"]
    rows["end"] = jnp.where(ends_B, token_B, rows["end"])
    rows["end_logprob"] = jnp.where(ends_B, said_B, rows["end_logprob"])
    token_B = jnp.where(done_B, 0, token_B)
    for name, new_B in (("tokens", token_B), ("logprobs", said_B)):
        rows[name] = jax.lax.dynamic_update_slice_in_dim(rows[name], new_B[:, None], shared["step"], 1)
    if penalizes:
        rows["seen"] |= (jnp.arange(logits_BV.shape[1]) == token_B[:, None]) & ~done_B[:, None]
    rows["count"] += ~done_B
    rows["done"] = done_B | (rows["count"] >= limits_B)
    return rows, token_B
