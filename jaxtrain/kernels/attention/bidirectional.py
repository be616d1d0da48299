"""Attention in which every token sees all tokens of its segment, in plain operations.

Keys and values are gathered over the devices that share a row; each device computes its own queries and heads.

Shape suffixes: B batch, T and S sequence, H heads, K head width.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.functions import softmax
from jaxtrain.sharding import rules as sharding


def whole_rows(x: jax.Array, *names: str | None) -> jax.Array:
    """Gather an array [B, T, ...] over the devices that share a row; `names` are those of its further dimensions."""
    if inside := _around():  # manual over the others, too: JAX 0.10 cannot lower its gradient among them
        spec = jax.typeof(x).sharding.spec
        x = sharding.manual_region(lambda x: lax.all_gather(x, inside, axis=1, tiled=True), spec, spec)(x)
    return sharding.constrain(x, "batch", None, *names)


def row_copies() -> int:
    """Return how many devices of a surrounding pipeline compute alike what is computed of whole rows."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in _around())


def _around() -> tuple[str, ...]:
    """Return the axes that split a row and that a surrounding pipeline has made manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in sharding.axes_over("seq") if axis not in sharding.free_axes(mesh))


@jax.named_scope("attention")
def attend_all(q_BTHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """Return attention over all keys of the same segment, before and after the query."""
    k_BSHK, v_BSHK = (whole_rows(x, "act_heads", "act_head_dim") for x in (k_BSHK, v_BSHK))
    segments_BS = whole_rows(segments_BT)
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK * q_BTHK.shape[-1] ** -0.5, k_BSHK,
                             preferred_element_type=jnp.float32)
    # Every query sees at least itself, so a large finite number masks as well as -inf and has zero gradient.
    mask_BTS = jnp.where(segments_BT[:, :, None] == segments_BS[:, None, :], 0.0, -1e30)
    weights_BHTS = softmax(scores_BHTS + mask_BTS[:, None]).astype(v_BSHK.dtype)
    out_BTHK = jnp.einsum("bhts,bshk->bthk", weights_BHTS, v_BSHK)
    return checkpoint_name(out_BTHK, "attention")
