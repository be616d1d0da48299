"""Packed attention by Mosaic GPU kernels, for NVIDIA GPUs of compute capability 9.0 (H100, H200)."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.kernels.attention import packed_attention
from jaxtrain.sharding import mesh_context

INTERPRET: Any = None  # tests: parameters of Pallas's interpreter, with which the kernels run anywhere
PADDING = packed_attention.BLOCK  # of sequences, to a multiple; `auto` leaves shorter ones to another backend
NARROWEST, WIDTHS = 64, (64, 128, 192, 256)  # of heads, which are padded to one of these widths


def refusal(platform: str, dtype: jnp.dtype, seq_len: int, head_dim: int, soft_cap: float) -> str:
    """Return why it cannot compute this; "" if it can."""
    here = platform in ("gpu", "cuda") and 9 <= mesh_context.compute_capability() < 10
    reasons = {
        "it runs on NVIDIA GPUs of compute capability 9 (H100, H200) only": not INTERPRET and not here,
        "CUDA 12.8 and 12.9.0 are known to compile causal kernels wrongly": here and 12080 <= _cuda_version() < 12091,
        f"it needs JAX 0.11 or newer, and this is {jax.__version__}": jax.__version_info__ < (0, 11),
        f"it computes in bfloat16 or float16, not {dtype}": not INTERPRET and dtype not in (jnp.bfloat16, jnp.float16),
        f"head_dim={head_dim} is not {NARROWEST} to {WIDTHS[-1]}": not NARROWEST <= head_dim <= WIDTHS[-1],
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


@cache
def _cuda_version() -> int:
    """Return the version of the CUDA that is installed, such as 12080, or 0: the wheel's own kernel asks for it, too.
    """
    from jax._src.lib import cuda_versions

    return 0 if cuda_versions is None else cuda_versions.cuda_runtime_get_version()


def attention(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segments_BT: jax.Array | None, window: int,
              soft_cap: float, sinks_H: jax.Array | None = None, key_segments_BS: None = None) -> jax.Array:
    """Return attention of one device's arrays."""
    assert key_segments_BS is None, "refused before"
    return packed_attention.attention("mosaic", WIDTHS, q_BTHK, k_BTGK, v_BTGK, segments_BT, window, soft_cap, sinks_H)


def interpretation() -> object:
    """Return the parameters of Pallas's interpreter; None: a GPU runs the kernels."""
    return INTERPRET
