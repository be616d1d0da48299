"""Rounding to 4 bits with zeros, after inputs are scaled so that what large ones meet is rounded less.

This is AWQ (arXiv 2306.00978): a weight times the scale of its input, and the input over it, give the same product; the
scales are a power of the inputs' sizes, the power that changes least what the layers make of a text. The inputs are
divided where they come from, in the norm or the layer before. Of the text only second moments are needed.
"""

from collections.abc import Mapping, Sequence

import numpy as np

MOST = 15  # of numbers in 4 bits without a sign
WORD = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbouring outputs lies in each 4 bits of a word, the lowest first
POWERS = 20
_ROWS = 512  # of matrices, on which powers are tried
# What is before, and what reads it: within a layer.
READERS: Mapping[str, tuple[str, ...]] = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.up_proj": ("mlp.down_proj",),
    "self_attn.v_proj": ("self_attn.o_proj",),  # where each head of values has one of queries
}


def input_scales(matrices: Sequence[np.ndarray], group: int, moments: np.ndarray) -> np.ndarray:
    """Return by how much to multiply the columns of matrices [out, in] that read the same inputs.

    `moments` is the sum over inputs x of x x^T.
    """
    matrix = np.concatenate(matrices).astype(np.float32)
    matrix = matrix[::-(-len(matrix) // _ROWS)]
    sizes = np.sqrt(np.maximum(np.diag(moments), 0)).astype(np.float32)
    sizes = np.maximum(sizes, 1e-4 * sizes.max() + 1e-12)
    best, least = np.ones(len(sizes), np.float32), np.inf
    for power in range(POWERS):
        scales = sizes ** (power / POWERS)
        scales /= np.sqrt(scales.max() * scales.min())
        error = restored(*rounded(matrix * scales, group), group) / scales - matrix
        changed = float(((error @ moments) * error).sum())
        if changed < least:
            best, least = scales, changed
    return best


def rounded(matrix: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a matrix's [out, in] numbers, 0 to 15, and the zeros and float16 scales of its groups [out, groups]."""
    groups = matrix.astype(np.float32).reshape(len(matrix), -1, group)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scales = np.maximum((high - low) / MOST, 1e-5).astype(np.float16)
    step = scales.astype(np.float32)
    zeros = np.clip(np.rint(-low / step), 0, MOST)
    numbers = np.clip(np.rint(groups / step[..., None]) + zeros[..., None], 0, MOST)
    return numbers.reshape(matrix.shape).astype(np.uint8), zeros.astype(np.uint8), scales


def restored(numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """Return the matrix that numbers stand for."""
    return (numbers - zeros.repeat(group, 1).astype(np.float32)) * scales.astype(np.float32).repeat(group, 1)


def packed(numbers: np.ndarray) -> np.ndarray:
    """Return numbers [rows, outputs] in words of 32 bits, in the order that kernels read."""
    eights = numbers.reshape(len(numbers), -1, len(WORD))[..., list(WORD)].astype(np.uint32)
    return (eights << (4 * np.arange(len(WORD), dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)
