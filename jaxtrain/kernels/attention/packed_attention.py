"""Attention within packed documents, by kernels that compute no tile of which no query sees a key.

Documents are contiguous in a row, so each query sees the keys from some token on to itself, and each key is seen by the
queries from itself to some token; both ways, from the document's first token to its last. Two integers for each token
thus say all about documents and windows. The kernels read from them which tiles to compute: there is no mask in memory,
and other documents cost nothing. `mosaic_attention` has them for H100 and H200, `triton_attention` for other GPUs.

The forward kernel keeps the output and the log-sum-exp of every row, under the name "attention", for the backward
kernels; of a rematerialised layer they are computed once where the policy keeps that name.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, K head width.
"""

import importlib
import math
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.attention import sinks
from jaxtrain.kernels.attention.xla_attention import BOTH_WAYS
from jaxtrain.kernels.traced_once import traced_once

BLOCK = 128  # sequences are padded to a multiple of what a block of threads computes
TOGETHER = 128  # up to this width of heads Mosaic has one kernel for the gradients by keys and by values
LN2 = math.log(2)  # the kernels' exponentials have the base 2, and so has their log-sum-exp


def attention(kernels: str, widths: tuple[int, ...], q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array,
              segments_BT: jax.Array | None, window: int, soft_cap: float,
              sinks_H: jax.Array | None = None) -> jax.Array:
    """Return attention of one device's arrays by the kernels of a backend; heads are padded to one of these widths.

    Values have a width of their own; where it is the wider one, Mosaic's kernels get keys padded to it.
    """
    (B, T, _, K), width = q_BTHK.shape, v_BTGK.shape[-1]
    seen = bounds(jnp.zeros((B, T), jnp.int32) if segments_BT is None else segments_BT, window, -T % BLOCK)
    q_BTHK, k_BTGK = (_padded(x, K if kernels == "triton" else max(K, width), widths) for x in (q_BTHK, k_BTGK))
    v_BTGK = _padded(v_BTGK, width, widths)
    with jax.named_scope(f"window_{window}"):  # by this name jaxtrain.plan knows what the kernels compute
        out_BTHK = _attention((kernels, window, soft_cap, K**-0.5), q_BTHK, k_BTGK, v_BTGK, *seen, sinks_H)
    return out_BTHK[:, :T, :, :width]


def _padded(x_BTHK: jax.Array, width: int, widths: tuple[int, ...]) -> jax.Array:
    """Pad tokens to whole blocks, and heads to the least of these widths that holds this one."""
    wide = min(one for one in widths if one >= width)
    return jnp.pad(x_BTHK, ((0, 0), (0, -x_BTHK.shape[1] % BLOCK), (0, 0), (0, wide - x_BTHK.shape[-1])))


def bounds(segments_BT: jax.Array, window: int, more: int = 0) -> tuple[jax.Array, jax.Array]:
    """Return the first key that each query sees, and the last query that sees each key, [B, 1, T + more].

    Both ways, both have the first and the last of each token's document, [B, 2, T + more], and in reverse. None of the
    numbers decreases in a row. The tokens behind the row form a document.
    """
    T = segments_BT.shape[1] + more
    change = segments_BT[:, 1:] != segments_BT[:, :-1]
    new_BT = jnp.pad(change, ((0, 0), (1, 0)), constant_values=True)
    new_BT = jnp.pad(new_BT, ((0, 0), (0, more))).at[:, T - more:T - more + 1].set(True)
    token = jnp.arange(T, dtype=jnp.int32)
    first_BT = lax.cummax(jnp.where(new_BT, token, 0), 1)
    ends_BT = jnp.roll(new_BT, -1, 1).at[:, -1].set(True)
    last_BT = lax.cummin(jnp.where(ends_BT, token, T), 1, reverse=True)
    if window > 0:
        first_BT, last_BT = jnp.maximum(first_BT, token - (window - 1)), jnp.minimum(last_BT, token + (window - 1))
    both = [first_BT, last_BT] if window == BOTH_WAYS else []
    return jnp.stack(both or [first_BT], 1), jnp.stack(both[::-1] or [last_BT], 1)


# ----------------------------------------------------------------------------- attention to a part of a sequence's keys

class Ranges(NamedTuple):
    """The first and the last of the given keys that each query sees, and of the queries that see each key.

    Places among the given ones, [B, T]. The last is before the first where there is none. None of the four decreases.
    """

    first_key: jax.Array
    last_key: jax.Array
    first_query: jax.Array
    last_query: jax.Array


def part(widths: tuple[int, ...], q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, ranges: Ranges, window: int,
         soft_cap: float) -> tuple[jax.Array, jax.Array]:
    """Return out [B, T, H, K] and its log-sum-exp [B, T, H] in float32, to be merged with those of other keys.

    By Mosaic's kernels: Triton's are for queries that all see a key.

    window: by which jaxtrain.plan knows how many pairs there are: of as many queries of a row and these, if it were
    their window.
    """
    (_, T, _, K), width = q_BTHK.shape, v_BTGK.shape[-1]
    q, k = (_padded(x, max(K, width), widths) for x in (q_BTHK, k_BTGK))
    v = _padded(v_BTGK, width, widths)
    with jax.named_scope(f"window_{window}"):
        out_BTHK, lse_BHT = _results(("mosaic", window, soft_cap, K**-0.5), q, k, v,
                                     _both(ranges.first_key, ranges.last_key))
    return out_BTHK[:, :T, :, :width], lse_BHT.swapaxes(1, 2)[:, :T] * LN2


def part_gradients(widths: tuple[int, ...], q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array,
                   pull_BTHK: jax.Array, lse_BTH: jax.Array, delta_BTH: jax.Array, ranges: Ranges, window: int,
                   soft_cap: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the contributions of `part` to the gradients.

    lse_BTH: the log-sum-exp over all keys; delta_BTH: for each row, the sum of the products of `pull` with the result.
    """
    (_, T, _, K), S, width = q_BTHK.shape, k_BTGK.shape[1], v_BTGK.shape[-1]
    rows = (jnp.pad(x, ((0, 0), (0, -T % BLOCK), (0, 0))).swapaxes(1, 2) for x in (lse_BTH / LN2, delta_BTH))
    q, k = (_padded(x, max(K, width), widths) for x in (q_BTHK, k_BTGK))
    arrays = q, k, *(_padded(x, width, widths) for x in (v_BTGK, pull_BTHK)), *rows
    options = "mosaic", window, soft_cap, K**-0.5
    with jax.named_scope(f"window_{window}"):
        dq = _by_queries(options, *arrays, _both(ranges.first_key, ranges.last_key))
        dk, dv = _by_keys_and_values(options, *arrays, _both(ranges.last_query, ranges.first_query))
    return dq[:, :T, :, :K], dk[:, :S, :, :K], dv[:, :S, :, :width]


def _both(*numbers_BT: jax.Array) -> jax.Array:
    """Return two numbers of each token as the kernels take them; tokens behind the row have those of the last one."""
    return jnp.stack([jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)), mode="edge") for x in numbers_BT], 1)


# ------------------------------------------------------------------------------------- the kernels, and their gradient
# jaxtrain.plan knows them by their names, and replaces these functions to trace them anywhere.

Options = tuple[str, int, float, float]  # whose kernels, the window, the soft cap on scores (0: none), and their scale


def _results(options: Options, q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array,
             first_BNT: jax.Array) -> tuple[jax.Array, jax.Array]:
    module, keywords = _kernels(options, "fwd")
    return traced_once(module.forward, q_BTHK, k_BTGK, v_BTGK, first_BNT, **keywords)


def _by_queries(options: Options, *arrays: jax.Array) -> jax.Array:
    module, keywords = _kernels(options, "dq")
    return traced_once(module.by_queries, *arrays, **keywords)


def _by_keys_and_values(options: Options, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    module, keywords = _kernels(options, "dkv")
    return traced_once(module.by_keys_and_values, *arrays, **keywords)


def _kernels(options: Options, phase: str) -> tuple[ModuleType, Mapping[str, object]]:
    """Return the module with the kernels of a phase, which imports Pallas, and what they are told."""
    backend, _, soft_cap, scale = options
    package = "jaxtrain.kernels.attention"
    interpret = importlib.import_module(f"{package}.{backend}_attention").interpretation()
    way = "forward" if phase == "fwd" else "backward"
    return importlib.import_module(f"{package}.packed.{backend}_{way}"), {
        "soft_cap": soft_cap, "scale": scale, "interpret": interpret, "name": f"{backend}_attention_{phase}"}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q_BTHK, k_BTGK, v_BTGK, first_BNT, last_BNT, sinks_H):
    return _forward(options, q_BTHK, k_BTGK, v_BTGK, first_BNT, last_BNT, sinks_H)[0]


def _forward(options, q_BTHK, k_BTGK, v_BTGK, first_BNT, last_BNT, sinks_H):
    results = _results(options, q_BTHK, k_BTGK, v_BTGK, first_BNT)
    if sinks_H is not None:
        out_BTHK, lse_BTH = sinks.added(results[0], results[1].swapaxes(1, 2) * LN2, sinks_H)
        results = out_BTHK.astype(q_BTHK.dtype), lse_BTH.swapaxes(1, 2) / LN2
    out_BTHK, lse_BHT = (checkpoint_name(x, "attention") for x in results)
    return out_BTHK, (q_BTHK, k_BTGK, v_BTGK, first_BNT, last_BNT, sinks_H, out_BTHK, lse_BHT)


def _backward(options, saved, pull_BTHK):
    q_BTHK, k_BTGK, v_BTGK, first_BNT, last_BNT, sinks_H, out_BTHK, lse_BHT = saved
    delta_BHT = jnp.einsum("bthk,bthk->bht", pull_BTHK, out_BTHK, preferred_element_type=jnp.float32)
    arrays = q_BTHK, k_BTGK, v_BTGK, pull_BTHK, lse_BHT, delta_BHT
    dsinks_H = None if sinks_H is None else sinks.gradient(
        sinks_H, lse_BHT.swapaxes(1, 2) * LN2, delta_BHT.swapaxes(1, 2))
    return (_by_queries(options, *arrays, first_BNT), *_by_keys_and_values(options, *arrays, last_BNT), None, None,
            dsinks_H)


_attention.defvjp(_forward, _backward)
