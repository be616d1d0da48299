"""Gumbel noise of many rows, and the largest entry of each: the bits of `jax.random.gumbel` and `jnp.argmax`, sooner.

On a CPU, JAX computes Threefry (Salmon et al., 2011, doi:10.1145/2063384.2063405) by loops over whole arrays, and XLA
the index of a maximum without vectors: of 64 rows and 50,304 tokens, both took more time than the product with the
head.

Shape suffixes: B batch, V vocabulary.
"""

import jax
import jax.numpy as jnp

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def gumbel(keys_B: jax.Array, many: int) -> jax.Array:
    """Return what `jax.random.gumbel` gives for each key, [B, V] of `many` tokens."""
    if str(jax.random.key_impl(keys_B)) != "threefry2x32" or (
            not jax.config.jax_threefry_partitionable):  # pyrefly: ignore[missing-attribute]
        return jax.vmap(lambda key: jax.random.gumbel(key, (many,)))(keys_B)
    words_B2 = jax.random.key_data(keys_B)
    bits_BV = _threefry(words_B2[:, :1], words_B2[:, 1:], jnp.arange(many, dtype=jnp.uint32)[None])
    tiny = jnp.finfo(jnp.float32).tiny
    below_one = jax.lax.bitcast_convert_type((bits_BV >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(tiny, below_one * (1 - tiny) + tiny)))


def _threefry(first: jax.Array, second: jax.Array, counts: jax.Array) -> jax.Array:
    """Return 32 bits for each count below 2^32 and key of two words: twenty rounds, with the words' sum modulo 2."""
    keys = first, second, first ^ second ^ jnp.uint32(0x1BD11BDA)
    a, b = jnp.zeros_like(counts) + keys[0], counts + keys[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            a = a + b
            b = a ^ ((b << rotation) | (b >> (32 - rotation)))
        a, b = a + keys[(group + 1) % 3], b + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return a ^ b


def largest(x_BV: jax.Array) -> jax.Array:
    """Return the index of each row's largest entry, the first of equal ones."""
    x_BV = jax.lax.optimization_barrier(x_BV)  # else what makes it is computed in the loop that compares, one by one
    places_BV = jnp.where(x_BV == x_BV.max(-1, keepdims=True), jnp.arange(x_BV.shape[-1], dtype=jnp.int32),
                          x_BV.shape[-1])
    return places_BV.min(-1) % x_BV.shape[-1]  # of NaN alone the first
