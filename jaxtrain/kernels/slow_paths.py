"""Sentences about kernels that are slow on GPUs, by the choosers of the kernels themselves.

A run says them at its start for what it computes, and `jaxtrain doctor` for what usual models compute on the devices
that it finds. On CPUs nothing is said: there is no faster kernel. Call these where `mesh_context` has the platform.
"""

import jax
import jax.numpy as jnp

from jaxtrain.base.narrow_formats import BLOCKS
from jaxtrain.kernels import grouped_matmul
from jaxtrain.kernels.attention import choose_backend, cudnn_attention, triton_attention
from jaxtrain.sharding import axis_rules, mesh_context

GPUS = ("gpu", "cuda")


def attention(asked: str, dtype: jnp.dtype, seq_len: int, head_dim: int, *, strategy: str = "", parts: int = 1,
              packed: bool = True, soft_cap: float = 0.0, sinks: bool = False, windowed: bool = False) -> str:
    """Return what causal attention costs here beyond a kernel that computes only what is seen; "": nothing.

    `strategy`: how it crosses the parts of a sequence, each of which a device has; "" if rows are whole. `windowed`:
    whether some layers have a window.
    """
    platform = mesh_context.platform()
    if platform not in (*GPUS, "tpu"):
        return ""
    in_parts = strategy not in ("", "ulysses")
    backend = choose_backend(asked, platform, dtype, seq_len // parts if in_parts else seq_len, head_dim, strategy,
                             soft_cap, packed, sinks)
    wide = f" (heads of {head_dim} are over 256)" if head_dim > 256 else ""
    if backend == "xla" and strategy:
        return (f"attention over context by {strategy} has no kernel here{wide}: scores pass through memory in "
                f"float32, tile by tile")
    if backend == "xla":
        return (f"attention has no kernel here{wide}: {4e-9 * seq_len**2:.2g} GB of scores in memory for each head of "
                f"a row of {seq_len:,} tokens")
    if backend == "splash" and in_parts and windowed:
        return (f"attention with a window over context by {strategy} has no kernel on TPUs: scores of these layers "
                "pass through memory in float32, tile by tile")
    if backend == "cudnn" and packed and not in_parts and seq_len < cudnn_attention.LONG:
        other = "" if triton_attention.refusal(platform, dtype, seq_len, head_dim, soft_cap) else (
            "; train.attention=triton computes only what is seen, but no device has run it yet")
        return (f"attention of packed rows computes all pairs of tokens{wide}: twice what causal attention needs, and "
                f"a mask of {2e-9 * seq_len**2:.2g} GB for each row of {seq_len:,} tokens{other}")
    return ""


def experts(asked: str, dtype: jnp.dtype, held: int, embed: int, width: int) -> str:
    """Return what the products of so many experts of a device cost here beyond those of the rows that they have."""
    if mesh_context.platform() not in GPUS or held < 2:
        return ""
    if grouped_matmul.choose_backend("xla" if asked == "xla" else "auto", dtype, 0, embed, width) != "xla":
        return ""
    other = "; train.grouped_matmul=auto has a kernel" if grouped_matmul.choose_backend(
        "auto", dtype, 0, embed, width) != "xla" else ""
    return (f"experts on this GPU compute every row {held} times, once for each expert of a device, and mask the "
            f"results{other}")


def precision(kind: str) -> str:
    """Return that this hardware does not multiply a narrow format, which then costs more than bfloat16; "": it does."""
    platform = mesh_context.platform()
    if platform not in (*GPUS, "tpu"):
        return ""
    if kind in BLOCKS:
        from jaxtrain.sharding import block_units  # which only these formats read

        here = block_units.there()
    else:
        here = kind != "fp8" or platform == "tpu" or mesh_context.compute_capability() >= 8.9
    return "" if here else (f"train.precision={kind} has no hardware here: numbers are rounded to it and multiplied in "
                            "bfloat16, which takes longer than train.precision=bfloat16")


def narrow_experts(kind: str) -> str:
    """Return that products of routed experts in blocks have no kernel, where those of other layers have one; or ""."""
    if kind not in BLOCKS or precision(kind) or mesh_context.platform() not in GPUS:
        return ""
    return (f"routed experts in train.precision={kind} have no kernel here: numbers are rounded to it and multiplied "
            "in bfloat16; train.experts_in_bf16=true leaves out the rounding, and its time")


def usual(platform: str) -> list[str]:
    """Return the sentences for packed rows and experts of a usual size; `platform` as `mesh_context.use` takes it."""
    half = jnp.dtype(jnp.bfloat16)
    with mesh_context.use(jax.sharding.AbstractMesh((), ()), axis_rules.rules(), platform):
        found = [attention("auto", half, 8192, 128), attention("auto", half, 8192, 256),
                 experts("auto", half, 16, 2048, 768)]
    return [sentence for sentence in dict.fromkeys(found) if sentence]
