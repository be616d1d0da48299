"""Attention whose queries and keys are normalised after rotary positions have turned them, as in Hunyuan."""

from functools import partial

import jax

from jaxtrain.models.attention.kv_cache import Aux, Cache, attend_cached, kept
from jaxtrain.models.attention.rotary import Angles, Rotary
from jaxtrain.models.attention.self_attention import Attention, attend


class NormAfterRotation(Attention):
    """Grouped-query self-attention; `qk_norm` is that of turned queries and keys, and has to be given."""

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: Angles,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        assert self.q_norm is not None and self.k_norm is not None
        q, k = (norm(Rotary.rotate(project(x_BTD), angles)) for project, norm in (
            (self.q, self.q_norm), (self.k, self.k_norm)))
        v = self.v(x_BTD)
        q = q if self.score_factor == 1 else (q * self.score_factor).astype(q.dtype)
        if cache is not None and cache.entries is not None:
            return attend_cached(partial(self.returned, x_BTD), q, k, v, cache, self.window)
        y_BTHK = attend(q, k, v, segments_BT=segments_BT, window=self.window, backend=self.backend,
                        context=self.context)
        return self.returned(x_BTD, y_BTHK), kept(cache, k, v)
