"""Latent attention and mixture of experts in plain `jnp`: every expert computes every token, and a mask picks."""

import math

import jax.numpy as jnp
import numpy as np

from tests.numerics import plain_rotary


def silu_mlp(gate, up, down, h):
    g = h @ gate
    return (g / (1 + jnp.exp(-g)) * (h @ up)) @ down


def best(scores, number):
    """A mask of the highest ones, the first where they are equal."""
    chosen = jnp.argsort(-scores, axis=-1, stable=True)[..., :number]
    return (chosen[..., None] == np.arange(scores.shape[-1])).any(-2)


def choice(c, router, h, segments):
    """Scores, weights and the chosen, each [B, T, E], before any capacity; padding chooses nothing."""
    logits = h @ router["kernel"] + router.get("logit_bias", 0)
    e = jnp.exp(logits - logits.max(-1, keepdims=True))
    scores = e / e.sum(-1, keepdims=True) if c.experts.score == "softmax" else 1 / (1 + jnp.exp(-logits))
    ranked = scores + router["bias"] if c.experts.bias_rate else scores
    if c.experts.groups > 1:
        groups = ranked.reshape(*ranked.shape[:2], c.experts.groups, -1)
        allowed = best(jnp.sort(groups, -1)[..., -2:].sum(-1), c.experts.groups_used)
        ranked = jnp.where(jnp.repeat(allowed, groups.shape[-1], -1), ranked, -jnp.inf)
    hit = best(ranked, c.experts_per_token)
    weights = jnp.where(hit, scores, 0)
    if c.experts.normalized:
        weights = weights / weights.sum(-1, keepdims=True)
    return logits, scores, c.experts.scale * weights, hit & (segments > 0)[..., None]


def fits(c, hit):
    """Return those of the chosen that an expert has room for: the first of each row."""
    room = math.ceil(c.capacity_factor * hit.shape[1] * c.experts_per_token / c.num_experts)
    return hit & (jnp.cumsum(hit, 1) <= room) if c.capacity_factor else hit


def activation(c, gate, up):
    """SwiGLU, or that of gpt-oss."""
    if c.name != "gpt_oss":
        return gate / (1 + jnp.exp(-gate)) * up
    gate, up = jnp.minimum(gate, c.swiglu_limit), jnp.clip(up, -c.swiglu_limit, c.swiglu_limit)
    return gate / (1 + jnp.exp(-c.swiglu_alpha * gate)) * (up + 1)


def experts(c, m, h, segments):
    """Return the layer's result, each row's penalty, and each row's excess of load per expert."""
    logits, scores, weights, hit = choice(c, m["router"], h, segments)
    weights = jnp.where(fits(c, hit), weights, 0)
    gate, up = (jnp.einsum("btd,edf->btef", h, m[n]) + m.get(f"{n}_bias", 0) for n in ("gate", "up"))
    y = jnp.einsum("btef,efd,bte->btd", activation(c, gate, up), m["down"], weights)
    if "down_bias" in m:
        y = y + jnp.einsum("bte,ed->btd", weights, m["down_bias"])
    if c.experts.shared:
        y = y + silu_mlp(*(m["shared"][n]["kernel"] for n in ("gate", "up", "down")), h)

    real = (segments > 0).astype(jnp.float32)
    length = jnp.maximum(real.sum(1), 1)
    fraction = hit.sum(1) / (c.experts_per_token * length[:, None])
    probability = (scores / scores.sum(-1, keepdims=True) * real[..., None]).sum(1) / length[:, None]
    balance = c.num_experts * (fraction * probability).sum(-1)
    top = logits.max(-1)
    z = ((top + jnp.log(jnp.exp(logits - top[..., None]).sum(-1))) ** 2 * real).sum(1) / length
    return y, c.balance_loss * balance + c.router_z_loss * z, fraction - 1 / c.num_experts


def latent_qkv(c, a, h, positions, rms_norm, rotate):
    """Queries, keys and values of each head, by way of the latents."""
    eps = c.latent_norm_eps or c.norm_eps
    latent = rms_norm(a["q_norm"], h @ a["q_down"]["kernel"], eps) if c.q_rank else h
    q = jnp.tensordot(latent, a["q"]["kernel"], 1)
    both = h @ a["kv_down"]["kernel"]
    kv = jnp.tensordot(rms_norm(a["kv_norm"], both[..., :c.kv_rank], eps), a["kv"]["kernel"], 1)
    shared, plain, turned = both[..., None, c.kv_rank:], q[..., :c.head_dim], q[..., c.head_dim:]
    if c.rotary_width:
        turn = plain_rotary.frequencies(c, c.rope_head_dim)
        shared, turned = (rotate(x, positions, *turn) for x in (shared, turned))
    k = jnp.concatenate([kv[..., :c.head_dim], jnp.repeat(shared, c.num_heads, axis=2)], -1)
    q = plain_rotary.score_factor(c) * jnp.concatenate([plain, turned], -1)
    return q, k, kv[..., c.head_dim:]
