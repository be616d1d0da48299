"""Pooling of token vectors into one vector a segment: by attention, as a mean, or the last token's.

Segments are numbered from 1 on within a row. Results have as many places as `slots` says, of which those after the
last segment mean nothing.

Shape suffixes: B batch, T sequence, S segments of a row, D embedding, H heads, K head width.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.kernels.functions import softmax
from jaxtrain.models.layers import INSIDE, RESIDUAL, GeluMLP, LayerNorm, Linear, param
from jaxtrain.models.vision.encoder import GELUS
from jaxtrain.parallel.cut_rows import whole_rows
from jaxtrain.sharding import activations, axis_rules


def slots(count: int) -> int:
    """Return the number of places for this many segments: the devices that share a row divide it."""
    parts = axis_rules.shards(activations.split_by("block_seq"), jax.sharding.get_abstract_mesh())
    return -(-count // parts) * parts


def members(segments_BT: jax.Array, count: int) -> jax.Array:
    """Return which tokens belong to each segment, as booleans [B, S, T], whole on the devices that share a row."""
    return whole_rows(segments_BT)[:, None, :] == jnp.arange(1, slots(count) + 1)[None, :, None]


def mean(x_BTD: jax.Array, segments_BT: jax.Array, count: int) -> jax.Array:
    """Return the mean over each segment."""
    own_BST = members(segments_BT, count).astype(jnp.float32)
    own_BST /= jnp.maximum(own_BST.sum(2, keepdims=True), 1)
    return _weighted(own_BST, x_BTD)


def last(x_BTD: jax.Array, segments_BT: jax.Array, positions_BT: jax.Array, count: int) -> jax.Array:
    """Return the vector of each segment's last token, in whatever order the tokens of a row are."""
    own_BST = members(segments_BT, count)
    at_BST = jnp.where(own_BST, whole_rows(positions_BT)[:, None, :], -1)
    return _weighted((own_BST & (at_BST == at_BST.max(2, keepdims=True))).astype(jnp.float32), x_BTD)


def chosen(x_BTD: jax.Array, segments_BT: jax.Array, is_it_BT: jax.Array, count: int) -> jax.Array:
    """Return the vector of the one token of each segment that `is_it_BT` says."""
    own_BST = members(segments_BT, count) & whole_rows(is_it_BT)[:, None, :]
    return _weighted(own_BST.astype(jnp.float32), x_BTD)


def _weighted(weights_BST: jax.Array, x_BTD: jax.Array) -> jax.Array:
    x_BTD = whole_rows(x_BTD, "act_embed")
    y_BSD = jnp.einsum("bst,btd->bsd", weights_BST, x_BTD, preferred_element_type=jnp.float32)
    return activations.constrain(y_BSD.astype(x_BTD.dtype), *RESIDUAL)


class AttentionPool(nnx.Module):
    """A learned query that attends to each segment, then an MLP, as at the end of SigLIP's encoder of images."""

    def __init__(self, dim: int, heads: int, mlp_dim: int, eps: float, *, rngs: nnx.Rngs, kind: str = "tanh",
                 projected: bool = False):
        """`projected`: the query is a vector as wide as a token's, with a projection of its own, as published."""
        shape, axes = (dim, heads, dim // heads), ("embed", "heads", "head_dim")
        laid_out = ("batch", "seq", "act_heads", "act_head_dim")
        # The same for all, so that it needs no projection.
        self.query = param(rngs, *((shape[:1], axes[:1]) if projected else (shape[1:], axes[1:])))
        self.q = Linear("btd,dhk->bthk", shape, axes, laid_out, bias=True, rngs=rngs) if projected else None
        self.k, self.v = (Linear("btd,dhk->bthk", shape, axes, laid_out, bias=True, rngs=rngs) for _ in range(2))
        self.out = Linear("bthk,hkd->btd", (*shape[1:], dim), (*axes[1:], "embed"), RESIDUAL, bias=True, rngs=rngs)
        self.norm = LayerNorm(dim, eps, rngs=rngs)
        self.mlp = GeluMLP(dim, mlp_dim, out_std=0.02, rngs=rngs, kind=GELUS[kind])

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array, count: int) -> jax.Array:
        """Return a vector for each segment."""
        k_BTHK, v_BTHK = (whole_rows(project(x_BTD), "act_heads", "act_head_dim") for project in (self.k, self.v))
        query_HK = self._query() * k_BTHK.shape[-1] ** -0.5
        scores_BHT = jnp.einsum("hk,bthk->bht", query_HK, k_BTHK, preferred_element_type=jnp.float32,
                                out_sharding=activations.activation_spec("batch", "act_heads", None))
        mask_BST = jnp.where(members(segments_BT, count), 0.0, -1e30)
        weights_BHST = softmax(scores_BHT[:, :, None] + mask_BST[:, None]).astype(v_BTHK.dtype)
        y_BSHK = jnp.einsum("bhst,bthk->bshk", weights_BHST, v_BTHK)
        y_BSD = self.out(activations.constrain(y_BSHK, "batch", "seq", "act_heads", "act_head_dim"))
        return y_BSD + self.mlp(activations.constrain(self.norm(y_BSD), *INSIDE))

    def _query(self) -> jax.Array:
        """Return the query of each head."""
        if self.q is None:
            return activations.gather(self.query[...], "heads", "head_dim")
        query_D = activations.gather(self.query[...], "embed")
        assert self.q.bias is not None
        kernel_DHK, bias_HK = self.q.matrix(query_D.dtype), activations.gather(self.q.bias[...], *self.q.bias_axes)
        return jnp.einsum("d,dhk->hk", query_D, kernel_DHK) + bias_HK
