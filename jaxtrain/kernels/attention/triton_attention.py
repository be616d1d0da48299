"""Packed attention by kernels that Triton compiles, for NVIDIA GPUs since compute capability 8.0.

They serve A100, L40S, RTX and Blackwell, where cuDNN would compute all pairs of tokens under a mask, and what cuDNN
cannot compute at all. On CPUs Pallas interprets them.
"""


import jax
import jax.numpy as jnp

from jaxtrain.base.triton_in_pallas import has_triton
from jaxtrain.kernels.attention import packed_attention
from jaxtrain.sharding import mesh_context

PADDING = packed_attention.BLOCK  # of sequences, to a multiple; `auto` leaves shorter ones to another backend
WIDTHS = (16, 32, 64, 128, 256)  # of heads, which are padded to one of these widths: powers of two


def refusal(platform: str, dtype: jnp.dtype, seq_len: int, head_dim: int, soft_cap: float) -> str:
    """Return why it cannot compute this; "" if it can."""
    here = platform in ("gpu", "cuda") and mesh_context.compute_capability() >= 8
    reasons = {
        "it runs on NVIDIA GPUs since compute capability 8 (A100) only (and, interpreted, on CPUs)":
            platform != "cpu" and not here,
        f"JAX {jax.__version__} has no Triton in Pallas": not has_triton(),
        f"it computes in bfloat16 or float16, not {dtype}": here and dtype not in (jnp.bfloat16, jnp.float16),
        f"head_dim={head_dim} is over {WIDTHS[-1]}": head_dim > WIDTHS[-1],
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def attention(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segments_BT: jax.Array | None, window: int,
              soft_cap: float, sinks_H: jax.Array | None = None, key_segments_BS: None = None) -> jax.Array:
    """Return attention of one device's arrays."""
    assert key_segments_BS is None, "refused before"
    return packed_attention.attention("triton", WIDTHS, q_BTHK, k_BTGK, v_BTGK, segments_BT, window, soft_cap, sinks_H)


def interpretation() -> bool:
    """Return whether Pallas's interpreter runs the kernels, without a GPU."""
    return mesh_context.platform() == "cpu"
