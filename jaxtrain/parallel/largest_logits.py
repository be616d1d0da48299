"""The largest attention logit of each row and head, exactly, with the logits of one tile in memory at a time.

It is a product of its own: kernels do not return it. Padding (segment 0) does not count.

Shape suffixes: B batch, T and S sequence, H query heads, G key/value heads, K head width, P parts of a sequence.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels.attention import HEADS, tiles
from jaxtrain.kernels.attention.tiles import Scoring, Tokens
from jaxtrain.parallel import cut_rows
from jaxtrain.sharding import activations


def largest_logits(q_BTHK: jax.Array, k_BSGK: jax.Array, segments_BT: jax.Array | None, window: int) -> jax.Array:
    """Return the largest logits of causal attention [B, P, H] in float32, before a soft cap.

    Args:
        q_BTHK: queries as attention gets them; they are divided by the square root of K here.
        k_BSGK: keys.
        segments_BT: the document of each token, or whether it is not padding; None: a row is one document.
        window: how many tokens a query looks back on; 0: all.
    """
    scoring, n = Scoring(window), cut_rows.size()
    segments_BT = None if segments_BT is None else segments_BT.astype(jnp.int32)
    if activations.split_by("act_heads") != activations.split_by("act_kv_heads"):
        # Fewer key heads than devices: each device takes those that its query heads attend to.
        k_BSGK = activations.constrain(jnp.repeat(k_BSGK, q_BTHK.shape[2] // k_BSGK.shape[2], axis=2), *HEADS)

    def local(q: jax.Array, k: jax.Array, segments: jax.Array | None) -> jax.Array:
        if n > 1:
            from jaxtrain.parallel.context import largest_across

            return largest_across(q, k, segments, scoring)[:, None]
        own = Tokens(jnp.arange(q.shape[1]), segments)
        return tiles.largest(q, k, own, own, scoring, own=True)[:, None]

    if activations.activation_spec() is None:
        return local(q_BTHK, k_BSGK, segments_BT)
    batch, seq, heads = map(activations.split_by, ("batch", "seq", "act_heads"))
    by_head = P(batch, seq, heads)
    found = activations.manual_region(local, (by_head, by_head, P(batch, seq)), by_head)(q_BTHK, k_BSGK, segments_BT)
    return activations.constrain(found, "batch", "seq", None)  # of all heads: an empty slot of a stage has no layout
