"""Attention: one entry point with a backend per platform; an unsupported request is refused by name.

`attend` works alone on arrays; on an explicit mesh it keeps the layout of heads and rows that the rules give it.

Shape suffixes: B batch, T and S sequence, H query heads, G key/value heads, K head width.
"""

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.errors import UserError
from jaxtrain.kernels.attention import query_blocks
from jaxtrain.kernels.attention.xla_attention import BOTH_WAYS
from jaxtrain.sharding import activations, mesh_context

HEADS = ("batch", "seq", "act_heads", "act_head_dim")
KV_HEADS = ("batch", "seq", "act_kv_heads", "act_head_dim")
# Of a device's own arrays: attention(q_BTHK, k_BSGK, v_BSGK, segments_BT, window, soft_cap, sinks_H, key_segments_BS).
# Each is a module that is imported when it is asked for; it says, as `refusal`, why it cannot compute something.
BACKENDS = ("xla", "cudnn", "mosaic", "triton", "splash")
PACKED = ("mosaic", "triton")  # of those, by kernels of packed_attention.py
_GPU = ("mosaic", "cudnn", "triton")
_KERNELS = {"gpu": _GPU, "cuda": _GPU, "tpu": ("splash",)}  # of which auto chooses the first that can


def attend(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, *, segments_BT: jax.Array | None = None,
           key_segments_BS: jax.Array | None = None, window: int = 0, soft_cap: float = 0.0,
           sinks_H: jax.Array | None = None, causal: bool = True, backend: str = "auto") -> jax.Array:
    """Return attention over keys of the same segment: causal, of the last `window` tokens if given, or both ways.

    Segments that are booleans say which tokens are not padding, which comes last; what padding gets is not defined.

    Args:
        q_BTHK: queries; they are divided by the square root of K here.
        k_BSGK: keys, of as many heads or fewer (grouped-query attention).
        v_BSGK: values, which may have another width.
        segments_BT: the document of each token, in rows of several; tokens see only their own.
        key_segments_BS: that of each key, where keys are others than the queries' own tokens; booleans without
            `segments_BT`: every query sees those that are not padding.
        window: how many tokens a query looks back on, itself included; 0: all.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`; 0: they stay.
        sinks_H: the score of each head's sink (sinks.py); None: there is none.
        causal: False: tokens see later ones too.
        backend: `auto`, `xla`, `cudnn` (NVIDIA GPUs), `mosaic` (H100 and H200), `triton` (NVIDIA GPUs since A100) or
            `splash` (TPUs); the last two are interpreted on CPUs, to check their numbers.
    """
    others = (key_segments_BS is not None or k_BSGK.shape[1] != q_BTHK.shape[1]
              or (not causal and bool(activations.axes_over("seq"))))
    packed = segments_BT is not None and (causal or segments_BT.dtype != bool)
    window = window if causal else BOTH_WAYS
    backend = choose_backend(backend, mesh_context.platform(), q_BTHK.dtype, q_BTHK.shape[1],
                             max(q_BTHK.shape[3], v_BSGK.shape[3]), soft_cap=soft_cap, packed=packed,
                             sinks=sinks_H is not None, key_len=k_BSGK.shape[1] if others else 0)
    repeats = q_BTHK.shape[2] // k_BSGK.shape[2]
    by_group = backend == "xla" and not causal and repeats > 1 and bool(activations.axes_over("seq"))
    if by_group or activations.split_by("act_heads") != activations.split_by("act_kv_heads"):
        # Fewer key/value heads than devices: each device takes those that its query heads attend to. And in plain
        # operations a group's queries are one sequence, which cannot be where a mesh splits the sequence.
        along = None if others else "seq"
        k_BSGK, v_BSGK = (activations.constrain(_repeated(x, repeats), "batch", along, *HEADS[2:])
                          for x in (k_BSGK, v_BSGK))
    if backend == "xla":
        out_BTHK = query_blocks.attention(q_BTHK, k_BSGK, v_BSGK, segments_BT, window, soft_cap, sinks_H,
                                          key_segments_BS)
        return checkpoint_name(out_BTHK, "attention")
    heads, rows = activations.activation_spec(*HEADS), activations.activation_spec("batch", "seq")
    keys = (activations.activation_spec("batch", None, *HEADS[2:]), activations.activation_spec("batch", None))
    # The kernels name what policies keep themselves.
    return by_device(backend, heads, rows, window, soft_cap, keys if others else ())(
        q_BTHK, k_BSGK, v_BSGK, segments_BT, sinks_H, *(key_segments_BS,) * others)


def backend_module(name: str) -> ModuleType:
    """Return the module of a backend."""
    return importlib.import_module(f"jaxtrain.kernels.attention.{name}_attention")


def _repeated(x_BSGK: jax.Array, times: int) -> jax.Array:
    """Return each head so many times, one after the other; heads may be split over a mesh."""
    B, S, G, K = x_BSGK.shape
    return jnp.broadcast_to(x_BSGK[:, :, :, None], (B, S, G, times, K)).reshape(B, S, G * times, K)


def by_device(backend: str, heads: jax.P | None, rows: jax.P | None, window: int, soft_cap: float = 0.0,
              keys: tuple[jax.P | None, ...] = ()) -> Callable[..., jax.Array]:
    """Return a backend's attention for arrays with these specs by head and by token; None: without a mesh.

    `keys`: both specs for keys that are others than the queries' own tokens, and whose segments are then given, too.
    """
    def local(q, k, v, segments, sinks, key_segments=None):
        return backend_module(backend).attention(q, k, v, segments, window, soft_cap, sinks, key_segments)

    key_heads = keys[0] if keys else heads
    specs = (heads, key_heads, key_heads, rows, heads and jax.P(heads[2]), *keys[1:])
    return local if heads is None else activations.manual_region(local, in_specs=specs, out_specs=heads)


def choose_backend(asked: str, platform: str, dtype: jnp.dtype, seq_len: int, head_dim: int, strategy: str = "",
                   soft_cap: float = 0.0, packed: bool = False, sinks: bool = False, key_len: int = 0) -> str:
    """Return the backend that `train.attention` selects here; raises UserError if it cannot do this.

    `strategy`: how attention crosses the parts of a sequence; "" if every device has whole ones. `packed`: whether rows
    may hold several documents. For those `auto` prefers `mosaic`: with a mask cuDNN computes all pairs of tokens. It
    also takes it, or else `triton`, which no device has run yet, for what cuDNN cannot compute, such as `sinks`.
    `key_len`: how many keys there are, where they are others than the queries' own tokens.
    """
    alone = None if strategy in ("", "ulysses") else {
        "ring": ("mosaic", "cudnn", "splash"), "gather": ("cudnn",)}[strategy]

    def reason(name):
        sunk = sinks and name == "cudnn" and "it has no attention sinks"
        apart = bool(key_len) and name in PACKED and "its keys are those of the queries' own tokens"
        tiled = alone is not None and name not in alone and (
            f"mesh.context_strategy={strategy} cannot use it; ulysses can")
        refusal = partial(backend_module(name).refusal, platform, dtype, head_dim=head_dim, soft_cap=soft_cap)
        return refusal(seq_len=seq_len) or refusal(seq_len=key_len or seq_len) or sunk or tiled or apart

    if asked == "auto":
        shortest = min(seq_len, key_len or seq_len)
        able = [name for name in _KERNELS.get(platform, ())
                if shortest >= backend_module(name).PADDING and not reason(name)]
        if not packed and "cudnn" in able and strategy != "ring":
            able = [name for name in able if name not in PACKED]
        return next(iter(able), "xla")
    if asked != "xla" and (why := reason(asked)):
        raise UserError("train.attention", f"the {asked} backend cannot do this: {why}", "use 'auto' or 'xla'")
    return asked
