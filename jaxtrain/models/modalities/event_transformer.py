"""Events of users: a causal transformer over the sum of what each event's columns say.

An event is embedded as the sum of a vector for each of its categories and a projection of its numbers: sines of the
logarithm of the time since the event before, and the logarithm of each other number's size, with its sign.

Shape suffixes: B users, T events, D embedding, N numbers and sines.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config.modality_families import EventsConfig
from jaxtrain.models.attention.rotary import Rotary, frequencies
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Block, Compute, Decoder
from jaxtrain.models.heads.scalar_head import VALUE, ScalarHead
from jaxtrain.models.layers import RESIDUAL, Embed, Head, Linear, RMSNorm, SwiGLU

ELAPSED = "elapsed"  # the column of every corpus of events
PERIODS = 2.0 ** np.arange(-2, 6)  # of the sines, in units of the logarithm: from a factor of 1.3 in time to e^32


class EventEmbed(Embed):
    """The embedding of an event; the predicted category's table serves as the output head when it is tied."""

    def __init__(self, c: EventsConfig, *, rngs: nnx.Rngs):
        super().__init__(c.vocabulary, c.embed_dim, rngs=rngs)
        self.predicted, self.numbers = c.predict, tuple(c.numbers)
        self.others = tuple(name for name in c.categories if name != c.predict)
        for i, name in enumerate(self.others):
            setattr(self, f"category_{i}", Embed(c.rows(name), c.embed_dim, rngs=rngs))
        self.project = Linear("btn,nd->btd", (2 * len(PERIODS) + len(c.numbers), c.embed_dim), (None, "embed"),
                              RESIDUAL, bias=True, rngs=rngs)

    def __call__(self, columns: Mapping[str, jax.Array]) -> jax.Array:  # pyrefly: ignore[bad-override]
        x_BTD = super().__call__(columns[self.predicted])
        for i, name in enumerate(self.others):
            x_BTD = x_BTD + getattr(self, f"category_{i}")(columns[name])
        numbers_BTN = of_numbers(columns[ELAPSED], *(columns[name] for name in self.numbers))
        return x_BTD + self.project(numbers_BTN.astype(x_BTD.dtype))


def log_time(elapsed_BT: jax.Array) -> jax.Array:
    """Return log(1 + elapsed time)."""
    return jnp.log1p(jnp.maximum(elapsed_BT.astype(jnp.float32), 0))


def of_numbers(elapsed_BT: jax.Array, *numbers: jax.Array) -> jax.Array:
    """Return what is projected of an event's elapsed time and its other numbers, in float32."""
    angles = log_time(elapsed_BT)[..., None] * np.asarray(2 * np.pi / PERIODS, np.float32)
    sizes = [(jnp.sign(x_BT) * jnp.log1p(jnp.abs(x_BT)))[..., None] for x_BT in numbers]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles), *sizes], axis=-1)


def event_transformer(c: EventsConfig, compute: Compute, *, rngs: nnx.Rngs) -> Decoder:
    """Build a decoder whose "tokens" are the columns of events, by name."""
    out_std = 0.02 / (2 * c.num_layers) ** 0.5

    def norm(rngs: nnx.Rngs) -> RMSNorm:
        return RMSNorm(c.embed_dim, c.norm_eps, rngs=rngs)

    def block(rngs: nnx.Rngs) -> Block:
        attention = partial(Attention, c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, out_std=out_std,
                            window=c.window, backend=compute.attention, context=compute.context, rngs=rngs)
        mlp = partial(SwiGLU, c.embed_dim, c.mlp_dim, out_std=out_std, rngs=rngs)
        return Block(partial(norm, rngs), attention, mlp)

    model = Decoder(EventEmbed(c, rngs=rngs), block, c.num_layers, norm(rngs),
                    rotary=Rotary(frequencies(c.head_dim, c.rope_theta)),
                    head=None if c.tied_embeddings else Head(c.vocabulary, c.embed_dim, rngs=rngs),
                    compute=compute, rngs=rngs)
    if c.time_loss:
        model.value_head = ScalarHead(VALUE, c.embed_dim, rngs=rngs)
    return model
