"""The layer of `state_space`: what is remembered decays, and is written and read, as each token says.

Shape suffixes: B batch, T sequence, D embedding, H heads, K head width, N state.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.models.layers import INSIDE, RESIDUAL, Linear, RMSNorm, param
from jaxtrain.sharding import activations

HEADS = ("batch", "seq", "act_heads", "act_head_dim")


class StateSpaceLayer(nnx.Module):
    """A norm, a convolution, a selective state space and a gate, added to the residual stream."""

    def __init__(self, c, *, rngs):
        (d, h, k, n), heads = (c.embed_dim, c.num_heads, c.head_dim, c.state_dim), ("heads", "head_dim")
        self.norm = RMSNorm(d, c.norm_eps, rngs=rngs)
        self.x, self.gate = (Linear("btd,dhk->bthk", (d, h, k), ("embed", *heads), HEADS, rngs=rngs) for _ in range(2))
        self.write, self.read = (Linear("btd,dn->btn", (d, n), ("embed", None), (*INSIDE[:2], None), std=d**-0.5,
                                        rngs=rngs) for _ in range(2))
        self.dt = Linear("btd,dh->bth", (d, h), ("embed", "heads"), HEADS[:3], bias=True, rngs=rngs)
        self.conv = param(rngs, (c.conv_width, h, k), (None, *heads), std=c.conv_width**-0.5)
        self.decay, self.skip = (param(rngs, (h,), ("heads",), std=0, value=value) for value in (0.0, 1.0))
        self.out = Linear("bthk,hkd->btd", (h, k, d), (*heads, "embed"), RESIDUAL, rngs=rngs,
                          std=0.02 / (2 * c.num_layers) ** 0.5)

    def __call__(self, x_BTD, segments_BT, angles, cache=None):
        if cache is not None:
            raise UserError("model.name", "state_space generates no text yet", "set train.sample_tokens=0")
        if segments_BT is None:
            segments_BT = jnp.zeros(x_BTD.shape[:2], jnp.int32)
        u_BTD = activations.constrain(self.norm(x_BTD), *INSIDE)
        x_BTHK = jax.nn.silu(convolved(self.x(u_BTD), activations.gather(self.conv[...], None, "heads", "head_dim"),
                                       segments_BT))
        decay_H, skip_H = (activations.gather(p[...], "heads").astype(jnp.float32) for p in (self.decay, self.skip))
        y_BTHK = state_space(x_BTHK, jax.nn.softplus(self.dt(u_BTD).astype(jnp.float32)), -jnp.exp(decay_H),
                             self.write(u_BTD), self.read(u_BTD), segments_BT) + x_BTHK * skip_H[:, None]
        return x_BTD + self.out((y_BTHK * jax.nn.silu(self.gate(u_BTD))).astype(x_BTD.dtype)), {}


def convolved(x_BTHK, kernel_WHK, segments_BT):
    """Return weighted sums of each token and those before it in its document."""
    def back(a, by):
        return jnp.pad(a, ((0, 0), (by, 0), *((0, 0),) * (a.ndim - 2)))[:, :a.shape[1]]

    together = [(back(segments_BT + 1, by) == segments_BT + 1)[..., None, None] for by in range(len(kernel_WHK))]
    return sum(jnp.where(same, back(x_BTHK, by), 0) * kernel_WHK[by] for by, same in enumerate(together))


def state_space(x_BTHK, dt_BTH, decay_H, write_BTN, read_BTN, segments_BT):
    """Return what is read of states, which begin anew in each document; all of it in float32."""
    first_BT = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    keep_BTH = jnp.where(first_BT[..., None], 0.0, jnp.exp(dt_BTH * decay_H))
    new_BTHKN = jnp.einsum("bthk,btn->bthkn", x_BTHK * dt_BTH[..., None], write_BTN.astype(jnp.float32))

    def after(one, two):
        return one[0] * two[0], one[1] * two[0][..., None, None] + two[1]

    _, state_BTHKN = jax.lax.associative_scan(after, (keep_BTH, new_BTHKN), axis=1)
    return jnp.einsum("bthkn,btn->bthk", state_BTHKN, read_BTN.astype(jnp.float32))
