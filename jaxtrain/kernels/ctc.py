"""Connectionist temporal classification: the loss of a text whose places in time are not known.

Graves et al., 2006. Its probability is summed over all ways to spread the tokens over time, with blanks between.

Shape suffixes: B batch, S positions in time, V vocabulary, U tokens of a text, E = 2 U + 1 tokens with blanks around.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxtrain.sharding import activations

_NEVER = -1e30  # a log-probability; -inf would make gradients NaN


@jax.named_scope("loss_head")
def ctc_loss(logits_BSV: jax.Array, lengths_B: jax.Array, tokens_BU: jax.Array, counts_B: jax.Array,
             blank: int) -> jax.Array:
    """Return -log of each row's probability [B]; 0 where there are no positions, or too few for the text.

    Args:
        logits_BSV: of each position.
        lengths_B: how many positions are not padding.
        tokens_BU: of each text, none of them `blank`.
        counts_B: how many of those are not padding.
        blank: the token that stands for none.
    """
    rows = activations.activation_spec("batch", None, None)
    if rows is None:
        return _ctc_loss(logits_BSV, lengths_B, tokens_BU, counts_B, blank)
    by_row = jax.P(rows[0])
    return activations.manual_region(
        partial(_ctc_loss, blank=blank), in_specs=(rows, by_row, jax.P(rows[0], None), by_row),
        out_specs=by_row,
    )(activations.constrain(logits_BSV, "batch", None, None), activations.constrain(lengths_B, "batch"),
      activations.constrain(tokens_BU, "batch", None), activations.constrain(counts_B, "batch"))


def _ctc_loss(logits_BSV, lengths_B, tokens_BU, counts_B, blank):
    B, U = tokens_BU.shape
    logits_BSV = logits_BSV.astype(jnp.float32)
    tokens_BE = jnp.full((B, 2 * U + 1), blank, tokens_BU.dtype).at[:, 1::2].set(tokens_BU)
    chosen_BSE = jnp.take_along_axis(logits_BSV, jnp.broadcast_to(
        tokens_BE[:, None], (B, logits_BSV.shape[1], 2 * U + 1)), 2)
    logp_SBE = (chosen_BSE - jax.nn.logsumexp(logits_BSV, -1, keepdims=True)).transpose(1, 0, 2)
    # A token may follow the one before it without a blank between, unless they are the same.
    skips_BE = (tokens_BE != blank) & (tokens_BE != jnp.pad(tokens_BE, ((0, 0), (2, 0)), constant_values=blank)[:, :-2])

    def back(x_BE, places):
        return jnp.pad(x_BE, ((0, 0), (places, 0)), constant_values=_NEVER)[:, :x_BE.shape[1]]

    def step(alpha_BE, inputs):
        logp_BE, number = inputs
        ways = alpha_BE, back(alpha_BE, 1), jnp.where(skips_BE, back(alpha_BE, 2), _NEVER)
        new_BE = jax.nn.logsumexp(jnp.stack(ways), 0) + logp_BE
        return jnp.where((number < lengths_B)[:, None], new_BE, alpha_BE), None

    start_BE = jnp.where(jnp.arange(2 * U + 1) < 2, logp_SBE[0], _NEVER)
    alpha_BE, _ = jax.lax.scan(step, start_BE, (logp_SBE[1:], jnp.arange(1, len(logp_SBE))))
    ends_B2 = 2 * counts_B[:, None] - jnp.array([0, 1])
    last_B2 = jnp.where(ends_B2 >= 0, jnp.take_along_axis(alpha_BE, jnp.maximum(ends_B2, 0), 1), _NEVER)
    same_BU = (tokens_BU[:, 1:] == tokens_BU[:, :-1]) & (jnp.arange(1, U) < counts_B[:, None])
    fits_B = (counts_B + same_BU.sum(1) <= lengths_B) & (lengths_B > 0)
    # Where it does not fit, the sum is replaced before the logarithm, so that its gradient is 0 and not NaN.
    return -jax.nn.logsumexp(jnp.where(fits_B[:, None], last_B2, 0.0), -1) * fits_B
