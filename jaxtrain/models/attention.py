"""Causal attention: one entry point with a backend per platform; an unsupported request is refused by name.

Shape suffixes: B batch, T and S sequence, H query heads, G key/value heads, R query heads per group (H = G R), K head
width.
"""

from collections.abc import Callable

import jax
import jax.extend.core
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.errors import UserError
from jaxtrain.kernels.functions import softmax
from jaxtrain.models.layers import RESIDUAL, Linear
from jaxtrain.models.rotary import Rotary
from jaxtrain.parallel import context as parallel
from jaxtrain.sharding import rules as sharding

HEADS = ("batch", "seq", "act_heads", "act_head_dim")
KV_HEADS = ("batch", "seq", "act_kv_heads", "act_head_dim")


@jax.named_scope("attention")  # jaxtrain.bench attributes step time to these scope names
def attend(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, *, segments_BT: jax.Array | None = None,
           window: int = 0, backend: str = "auto", context: str = "auto") -> jax.Array:
    """Return causal attention over keys of the same segment and, with `window`, of the last `window` tokens.

    Where a mesh shards the sequence over `context`, the tokens are in balanced order (parallel/context.py).
    """
    parts = parallel.size()
    backend = choose_backend(backend, sharding.platform(), q_BTHK.dtype, q_BTHK.shape[1], q_BTHK.shape[3], parts)
    if parts > 1:
        return parallel.attend(q_BTHK, k_BSGK, v_BSGK, segments_BT, window=window, strategy=context)
    if sharding.split_by("act_heads") != sharding.split_by("act_kv_heads"):
        # Fewer key/value heads than devices: each device takes those that its query heads attend to.
        repeats = q_BTHK.shape[2] // k_BSGK.shape[2]
        k_BSGK, v_BSGK = (sharding.constrain(jnp.repeat(x, repeats, axis=2), *HEADS) for x in (k_BSGK, v_BSGK))
    out = _BACKENDS[backend](q_BTHK, k_BSGK, v_BSGK, segments_BT, window)
    return out if backend == "cudnn" else checkpoint_name(out, "attention")  # its results are kept: `kept_results`


def kept_results(primitive: jax.extend.core.Primitive, *_, **__) -> bool:
    """Keep what cuDNN's forward kernel returns, as a policy of `jax.checkpoint`.

    Its backward kernel reads the output and the log-sum-exp of every row. A name around the call reaches only the
    output, so that for the log-sum-exp the whole kernel would run again.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"


def choose_backend(asked: str, platform: str, dtype: jnp.dtype, seq_len: int, head_dim: int, context: int = 1) -> str:
    """Return the backend that `train.attention` selects here; raises UserError if it cannot do this."""
    reasons = {
        "it runs on NVIDIA GPUs only": platform not in ("gpu", "cuda"),
        f"it computes in bfloat16 or float16, not {dtype}": dtype not in (jnp.bfloat16, jnp.float16),
        f"head_dim={head_dim} is not a multiple of 8 up to 256": head_dim % 8 or head_dim > 256,
        f"head_dim={head_dim} is over 128, which needs compute capability 9.0 or more":
            head_dim > 128 and platform == "gpu" and _compute_capability() < 9,
        f"seq_len={seq_len} is odd": seq_len % 2,
        f"it has no mask for the order of tokens under mesh.context={context}": context > 1,
    }
    refusal = next((reason for reason, applies in reasons.items() if applies), None)
    if asked == "cudnn" and refusal:
        raise UserError("train.attention", f"the cudnn backend cannot do this: {refusal}", "use 'auto' or 'xla'")
    return ("xla" if refusal else "cudnn") if asked == "auto" else asked


def _compute_capability() -> float:
    """Return the compute capability of the local GPU; unknown ones count as the newest."""
    return float(getattr(jax.local_devices()[0], "compute_capability", "inf"))


def visible(q_len: int, k_len: int, segments_BT: jax.Array | None, window: int) -> jax.Array:
    """Return which keys each query may attend to, as a mask [1 or B, T, S]."""
    behind = jnp.arange(q_len)[:, None] - jnp.arange(k_len)[None, :]
    mask = (behind >= 0)[None]
    if window:
        mask &= (behind < window)[None]
    if segments_BT is not None:
        mask &= segments_BT[:, :, None] == segments_BT[:, None, :]
    return mask


def _xla(q_BTHK, k_BSGK, v_BSGK, segments_BT, window):
    B, T, H, K = q_BTHK.shape
    S, G = k_BSGK.shape[1:3]
    R = H // G
    # Heads before sequence, so that the matmuls need no transposes inside. The R query heads that share a key head are
    # concatenated into one long sequence, which keeps the arrays four-dimensional (faster in XLA on CPU).
    q_BGNK = (q_BTHK * K**-0.5).reshape(B, T, G, R, K).transpose(0, 2, 3, 1, 4).reshape(B, G, R * T, K)
    k_BGSK, v_BGSK = k_BSGK.transpose(0, 2, 1, 3), v_BSGK.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bgnk,bgsk->bgns", q_BGNK, k_BGSK, preferred_element_type=jnp.float32)
    # Every query sees at least itself, so a large finite number masks as well as -inf and has zero gradient.
    mask_BNS = jnp.tile(jnp.where(visible(T, S, segments_BT, window), 0.0, -1e30), (1, R, 1))
    weights = softmax(scores + mask_BNS[:, None]).astype(v_BSGK.dtype)
    out_BGNK = jnp.einsum("bgns,bgsk->bgnk", weights, v_BGSK)
    return out_BGNK.reshape(B, G, R, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, H, -1)


def _cudnn(q_BTHK, k_BSGK, v_BSGK, segments_BT, window):
    def local(q, k, v, segments):
        mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
        width = v.shape[-1]  # where values are narrower than keys, the kernel needs them padded
        v = jnp.pad(v, ((0, 0),) * 3 + ((0, q.shape[-1] - width),))
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=True, implementation="cudnn",
            local_window_size=(window - 1, 0) if window else None)[..., :width]

    q_spec = sharding.activation_spec(*HEADS)
    if q_spec is None:
        return local(q_BTHK, k_BSGK, v_BSGK, segments_BT)
    segment_spec = None if segments_BT is None else sharding.activation_spec("batch", "seq")
    return sharding.manual_region(local, in_specs=(q_spec, q_spec, q_spec, segment_spec), out_specs=q_spec)(
        q_BTHK, k_BSGK, v_BSGK, segments_BT)


_BACKENDS = {"xla": _xla, "cudnn": _cudnn}


class Attention(nnx.Module):
    """Multi-head or grouped-query self-attention, with optional biases, qk-norm and rotary positions."""

    shared_by = ("act_heads", "act_kv_heads")  # output dimensions of its first matmuls

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, *, out_std: float, rngs: nnx.Rngs,
                 qkv_bias: bool = False, out_bias: bool = False, qk_norm: Callable[[], nnx.Module] | None = None,
                 window: int = 0, backend: str = "auto", context: str = "auto"):
        self.window, self.backend, self.context = window, backend, context
        kv = (dim, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), KV_HEADS
        q = (dim, heads, head_dim), ("embed", "heads", "head_dim"), HEADS
        self.q = Linear("btd,dhk->bthk", *q, bias=qkv_bias, rngs=rngs)
        self.k = Linear("btd,dgk->btgk", *kv, bias=qkv_bias, rngs=rngs)
        self.v = Linear("btd,dgk->btgk", *kv, bias=qkv_bias, rngs=rngs)
        self.out = Linear("bthk,hkd->btd", (heads, head_dim, dim), ("heads", "head_dim", "embed"), RESIDUAL,
                          bias=out_bias, std=out_std, rngs=rngs)

        # Assigned once: NNX decides at the first assignment whether an attribute holds parameters.
        self.q_norm, self.k_norm = (qk_norm(), qk_norm()) if qk_norm else (None, None)

    def project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries and keys, normalised if the model does that, and values."""
        q, k, v = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles=None) -> jax.Array:
        q, k, v = self.project(x_BTD)
        if angles is not None:
            q, k = Rotary.rotate(q, angles), Rotary.rotate(k, angles)
        return self.out(attend(q, k, v, segments_BT=segments_BT, window=self.window, backend=self.backend,
                               context=self.context))
