"""Attention of layers in one stack, of which each learns from its number whether it has a sliding window.

Shape suffixes: B batch, T and S sequence, H query heads, G key/value heads, K head width.
"""

from typing import Any

import jax

from jaxtrain.base.annotations import AnyArray
from jaxtrain.models.attention import head_logits
from jaxtrain.models.attention.self_attention import attend


def attend_by_layer(everywhere: AnyArray, q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, *, window: int,
                    **how: Any) -> jax.Array:
    """Return `attend` with the window, or over all tokens in layers where `everywhere` is true."""
    def with_window(window):
        def branch(q, k, v):
            with head_logits.collected() as found:
                return attend(q, k, v, window=window, **how), found
        # By this name jaxtrain.plan tells which layers take a branch.
        return jax.named_scope(f"window_{window}")(branch)

    if not isinstance(everywhere, jax.core.Tracer):  # known, or called eagerly, which would compile a `cond` every time
        out_BTHK, found = with_window(0 if everywhere else window)(q_BTHK, k_BSGK, v_BSGK)
    else:
        out_BTHK, found = jax.lax.cond(everywhere, with_window(0), with_window(window), q_BTHK, k_BSGK, v_BSGK)
    head_logits.tell(found)
    return out_BTHK
