"""The FLOPs of training on one token, and the share of a device's peak that a run reaches (MFU)."""

import re

from jaxtrain.config.schema import ModelConfig

# Dense bfloat16 FLOP/s of one JAX device; the first pattern found in `device_kind` counts. Where the vendor gives the
# figure with 2:4 sparsity, half of it is listed.
PEAK_BF16: dict[str, float] = {
    # cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, "peak compute per chip (bf16)"
    r"TPU v4$": 275e12,
    r"TPU v5 ?(lite|e)": 197e12,
    r"TPU v5p?$": 459e12,
    r"TPU v6 ?(lite|e)": 918e12,
    r"TPU ?v?7x": 2307e12 / 2,  # a chip is two devices: two TensorCores and no megacore (docs.jax.dev, ChipVersion)
    # NVIDIA data sheets: GB200 NVL72 and GB300 NVL72 (5 PF sparse a GPU), HGX B200 and B300 (4.5 PF sparse a GPU)
    r"GB[23]00": 2500e12,
    r"B[23]00": 2250e12,
    # H100 NVL and H200 NVL (1671 sparse), H100 PCIe (1513), H100 SXM, H200 SXM and GH200 (1979)
    r"H[12]00 NVL": 835e12,
    r"H100 PCIe": 756e12,
    r"H[12]00": 989e12,
    # A100 (312), A10 (125), L40S (362), L4 (242 sparse)
    r"A100": 312e12,
    r"A10$": 125e12,
    r"L40S": 362e12,
    r"L4$": 121e12,
}


def device_peak(device_kind: str) -> float | None:
    """Return dense bfloat16 FLOP/s of a device (`jax.devices()[0].device_kind`), or None for an unlisted kind."""
    return next((peak for pattern, peak in PEAK_BF16.items() if re.search(pattern, device_kind)), None)


def flops_per_token(model: ModelConfig, matmul_params: float, seq_len: int, causal: bool) -> float:
    """Return the FLOPs of training on one token, forward and backward, without rematerialization.

    Recurrent states count as one token after the other needs them. The chunks in which they are computed need more
    (jaxtrain/models/recurrent), as does attention whose kernel computes masked pairs: that is no useful work either.

    Args:
        model: gives the layers, heads and window of the attention, and the FLOPs of states.
        matmul_params: parameters used in matrix products: including the output head, tied or not, but no input
            embedding, positions or norms, and of the experts only those that one token goes to.
        seq_len: tokens in a row.
        causal: count only the keys that a query may attend to (our headline figure), or the whole square, as is common.
    """
    def attended(window: int) -> float:
        window = min(window or seq_len, seq_len)
        # Queries 0..window-1 see half a window on average, the later ones all of it, or half of their own chunk.
        growing = window if model.chunked else seq_len
        return window - window**2 / (2 * growing) if causal and model.causal else window

    keys = sum(layers * attended(window) * model.attention_widths.get(window, model.attention_width)
               for window, layers in model.windows.items())
    # Further layers, of the kind that is not global.
    keys += model.multi_token_layers * attended(next(iter(model.windows), 0)) * model.attention_width
    return 6 * matmul_params + 6 * model.num_heads * keys + 3 * model.state_flops


def mfu(tokens_per_s: float, flops: float, peak: float) -> float:
    """Return the model FLOPs utilization for `flops` per token and the `peak` of all devices together."""
    return tokens_per_s * flops / peak
