"""Draw a token from each prediction of a language-model head, of which devices may hold parts of the vocabulary.

Shape suffixes: N tokens, V the columns on this device.
"""

import jax
import jax.numpy as jnp
from jax import lax


def drawn(logits_NV: jax.Array, keys: tuple[jax.Array, ...], first: jax.Array | int,
          axes: tuple[str, ...]) -> jax.Array:
    """Return a token for each prediction, as `hub.sampling.choose` draws it with these keys at temperature 1.

    Args:
        keys: the two words of each token's key, and how many columns of the vocabulary are drawn from.
        first: the first column on this device.
        axes: the mesh axes over which columns are split.
    """
    size = logits_NV.shape[1]
    low_N, high_N, known_N = keys

    def noise(low: jax.Array, high: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(jnp.stack([low, high]))
        return lax.dynamic_slice_in_dim(jax.random.gumbel(key, (size * lax.psum(1, axes) if axes else size,)), first,
                                        size)

    columns = first + jnp.arange(size)
    scores_NV = jnp.where(columns < known_N[:, None], logits_NV + jax.vmap(noise)(low_N, high_N), -jnp.inf)
    best_N = scores_NV.max(-1)
    best_N = lax.pmax(best_N, axes) if axes else best_N
    at_N = jnp.where(scores_NV == best_N[:, None], columns, jnp.iinfo(jnp.int32).max).min(-1)
    return lax.pmin(at_N, axes) if axes else at_N
