"""The router of experts, in float32: which experts each token goes to, with what weights, and the balance penalties.

Computations that couple tokens couple only those of one row, so that no number depends on the mesh, on micro-batches or
on a pipeline. Padding (segment 0) goes to no expert and is not counted.

Shape suffixes: B batch, T sequence, D embedding, E experts, K experts of a token, G groups of experts.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.config.model_config import Experts
from jaxtrain.kernels.functions import softmax
from jaxtrain.models.experts import given_routes, sparse_mixer
from jaxtrain.models.experts.router_product import router_product
from jaxtrain.parallel.rows import Row

F32 = jnp.float32


@dataclass(frozen=True)
class Routing:
    """The router's decision for some tokens, and its statistics per row."""

    experts_BTK: jax.Array  # the token's experts, best first
    weights_BTK: jax.Array
    kept_BTK: jax.Array  # False where an expert was full, and for padding
    penalty_B: jax.Array  # of each row, multiplied by its coefficients
    sums_B: dict[str, jax.Array]  # of each row over the tokens on this device: [B] or [B, E]


def route(c: Experts, x_BTD: jax.Array, real_BT: jax.Array, kernel_DE: jax.Array, bias_E: jax.Array | None,
          row: Row, logit_bias_E: jax.Array | None = None, expert_scale_E: jax.Array | None = None,
          given_BTK: jax.Array | None = None) -> Routing:
    """Route tokens; `real_BT` is False for padding. `given_BTK`: experts to route to; below 0: the router chooses.

    The weights of a token's experts depend on `logit_bias_E`, not on `bias_E`, and are multiplied by `expert_scale_E`.
    """
    logits_BTE = router_product(x_BTD, kernel_DE)
    logits_BTE = logits_BTE if logit_bias_E is None else logits_BTE + logit_bias_E
    scores_BTE = jax.nn.sigmoid(logits_BTE) if c.score == "sigmoid" else softmax(logits_BTE)
    if c.score == "sparse_mixer":
        experts_BTK, weights_BTK = sparse_mixer.chosen(logits_BTE, c.per_token, c.jitter)
    else:
        experts_BTK = choose(c, lax.stop_gradient(scores_BTE) + (0 if bias_E is None else lax.stop_gradient(bias_E)))
        experts_BTK = experts_BTK if given_BTK is None else given_routes.in_place_of(given_BTK, experts_BTK)
        weights_BTK = jnp.take_along_axis(scores_BTE, experts_BTK, -1)
    if c.normalized:
        weights_BTK /= weights_BTK.sum(-1, keepdims=True) + c.sum_eps
    weights_BTK *= c.scale
    if expert_scale_E is not None:
        weights_BTK *= expert_scale_E[experts_BTK]

    hits_BTE = ((experts_BTK[..., None] == jnp.arange(c.num)).any(-2) & real_BT[..., None]).astype(F32)
    kept_BTK = jnp.broadcast_to(real_BT[..., None], experts_BTK.shape)
    if c.capacity_factor:
        fits_BTE = row.before(hits_BTE) < capacity(c, row.length(real_BT.shape[1]))
        kept_BTK &= jnp.take_along_axis(fits_BTE, experts_BTK, -1)

    tokens_B = real_BT.sum(-1).astype(F32)
    length_B = jnp.maximum(row.add(tokens_B), 1)
    shares_BTE = scores_BTE / (scores_BTE.sum(-1, keepdims=True) + 1e-20) * real_BT[..., None]
    load_BE = hits_BTE.sum(1)
    even_BE = row.add(load_BE) / length_B[:, None] * (c.num / c.per_token)  # 1: an even share
    balance_B = (lax.stop_gradient(even_BE) * row.add(shares_BTE.sum(1))).sum(-1) / length_B
    log_partition_BT = jax.nn.logsumexp(logits_BTE, axis=-1) * real_BT
    z_B = row.add(jnp.square(log_partition_BT).sum(-1)) / length_B
    penalty_B = c.balance_loss * balance_B + c.z_loss * z_B
    if bias_E is not None:
        # This term is zero and adds only a gradient for the bias: how far each expert was chosen above its share. Loads
        # are thus summed over devices, micro-batches and stages like gradients; the optimizer's update rule uses them.
        penalty_B += ((bias_E - lax.stop_gradient(bias_E)) * lax.stop_gradient(even_BE - 1)).sum(-1)
    entropy_BT = -(shares_BTE * jnp.log(jnp.maximum(shares_BTE, 1e-30))).sum(-1)
    sums_B = {"tokens": tokens_B, "load": load_BE, "kept": kept_BTK.sum((1, 2)).astype(F32),
              "entropy": entropy_BT.sum(-1), "balance": balance_B * tokens_B}
    return Routing(experts_BTK, weights_BTK, kept_BTK, penalty_B, lax.stop_gradient(sums_B))


def choose(c: Experts, scores_BTE: jax.Array) -> jax.Array:
    """Return the experts with the highest scores (ties: lowest index first), from the best groups only."""
    if c.groups > 1:
        grouped_BTGE = scores_BTE.reshape(*scores_BTE.shape[:2], c.groups, -1)
        best_BTG = lax.top_k(grouped_BTGE, min(c.group_best, grouped_BTGE.shape[-1]))[0].sum(-1)
        used_BTU = lax.top_k(best_BTG, c.groups_used)[1]
        used_BTG = (used_BTU[..., None] == jnp.arange(c.groups)).any(-2)
        scores_BTE = jnp.where(used_BTG[..., None], grouped_BTGE, -jnp.inf).reshape(scores_BTE.shape)
    return lax.top_k(scores_BTE, c.per_token)[1]


def capacity(c: Experts, row: int) -> int:
    """Return how many tokens of a row of this length one expert accepts."""
    return math.ceil(min(row, c.capacity_factor * row * c.per_token / c.num))
