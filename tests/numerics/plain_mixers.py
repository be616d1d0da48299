"""Layers with a state in plain `jnp`: token after token, and a state that is empty where a document begins."""

import jax
import jax.numpy as jnp
import numpy as np


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0)


def convolved(p, x, segments):
    """A sum over the tokens of a document that a kernel reaches; its last entry is for the token itself."""
    kernel = p["kernel"]
    width, T = kernel.shape[0], x.shape[1]
    total = jnp.zeros_like(x) + p.get("bias", 0)
    for back in range(min(width, T)):
        earlier = np.maximum(np.arange(T) - back, 0)
        seen = (segments == segments[:, earlier]) & (np.arange(T) >= back)
        total = total + kernel[width - 1 - back] * x[:, earlier] * seen[..., None, None]
    return silu(total)


def begins(segments):
    """Return which tokens are the first of a document."""
    return segments != jnp.concatenate([segments[:, :1] - 1, segments[:, :-1]], 1)


def unit(x):
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def delta(q, k, v, g, beta, segments):
    """The delta rule: a state decays, and what it holds for a key is replaced by the value, as far as beta says."""
    heads, first = v.shape[2], begins(segments)
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))

    def token(state, at):
        q, k, v, g, beta, first = at
        state = jnp.where(first[:, None, None, None], 0, state) * jnp.exp(g)[..., None]
        state = state + (beta[..., None] * k)[..., None] * (v - (k[..., None] * state).sum(-2))[..., None, :]
        return state, (q[..., None] * state).sum(-2)

    begin = jnp.zeros((v.shape[0], heads, k.shape[-1], v.shape[-1]))
    g = jnp.broadcast_to(g if g.ndim == 4 else g[..., None], k.shape)
    _, y = jax.lax.scan(token, begin, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, g, beta, first)))
    return jnp.moveaxis(y, 0, 1)


def delta_net(c, a, h, segments, rms_norm):
    """Gated DeltaNet, or Kimi delta attention where decays and gates come through narrow projections."""
    narrow = "step_down" in a
    q, k, v = (convolved(a[f"{n}_conv"], jnp.tensordot(h, a[n]["kernel"], 1), segments) for n in "qkv")
    step, gate = (jnp.tensordot(h @ a[f"{n}_down"]["kernel"] if narrow else h, a[n]["kernel"], 1)
                  for n in ("step", "gate"))
    rate = jnp.exp(a["decay"]["rate"])
    g = -(rate[:, None] if narrow else rate) * softplus(step + a["decay"]["bias"])
    beta = sigmoid(jnp.tensordot(h, a["beta"]["kernel"], 1))
    y = delta(unit(q) / np.sqrt(q.shape[-1]), unit(k), v, g, beta, segments)
    y = rms_norm(a["norm"], y, c.norm_eps) * (sigmoid(gate) if narrow else silu(gate))
    return jnp.tensordot(y, a["out"]["kernel"], 2)


def mamba2(c, a, h, segments):
    """Mamba-2: a state decays, and a token adds the product of its input with B; C reads it."""
    x, B, C = (convolved(a[f"{n}_conv"], jnp.tensordot(h, a[n]["kernel"], 1), segments) for n in ("x", "B", "C"))
    B, C = (jnp.repeat(y, x.shape[2] // y.shape[2], axis=2) for y in (B, C))
    dt = softplus(jnp.tensordot(h, a["dt"]["kernel"], 1) + a["decay"]["bias"])
    decay = jnp.exp(-dt * jnp.exp(a["decay"]["rate"]))

    def token(state, at):
        x, B, C, dt, decay, first = at
        state = jnp.where(first[:, None, None, None], 0, state) * decay[..., None, None]
        state = state + B[..., None] * (dt[..., None] * x)[..., None, :]
        return state, (C[..., None] * state).sum(-2)

    begin = jnp.zeros((*x.shape[:1], *x.shape[2:3], B.shape[-1], x.shape[-1]))
    each = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), (x, B, C, dt, decay, begins(segments)))
    y = jnp.moveaxis(jax.lax.scan(token, begin, each)[1], 0, 1) + a["skip"][:, None] * x
    y = y * silu(jnp.tensordot(h, a["gate"]["kernel"], 1))
    groups = y.reshape(*y.shape[:2], c.state_groups, -1)
    y = (groups / jnp.sqrt((groups**2).mean(-1, keepdims=True) + c.norm_eps)).reshape(y.shape) * a["norm"]["scale"]
    return jnp.tensordot(y, a["out"]["kernel"], 2)
