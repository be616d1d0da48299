"""Rotary position embeddings: their frequencies, scaled for contexts longer than the original one, and the rotation.

Pairs are (i, i + K/2), Llama's half-split convention. The ways of scaling are those of published models, by the names
that their configs have: `linear`, `ntk`, `llama3` and `yarn`. Everything here that depends on the config is computed
once, in float64, and is a constant of the program.

Shape suffixes: B batch, T sequence, H heads, K rotary width.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.decoder_config import RotaryConfig

Angles = tuple[jax.Array, jax.Array]  # cosine and sine of positions


def frequencies(width: int, theta: float) -> np.ndarray:
    """Return the angle of each pair per position, in radians: theta^(-2i/width) (RoFormer, arXiv 2104.09864)."""
    return theta ** (-np.arange(0, width, 2) / width)


def scaled_frequencies(c: RotaryConfig, width: int) -> tuple[np.ndarray, float]:
    """Return the frequencies as `model.rope_type` or LongRoPE scales them, and the factor of cosine and sine."""
    plain, factor = frequencies(width, c.rope_theta), c.rope_scaling
    if c.rope_short_factor:  # LongRoPE (arXiv 2402.13753)
        return plain / np.asarray(c.rope_long_factor if c.max_seq_len > c.rope_original_len else c.rope_short_factor), (
            c.rope_turn_factor)
    if factor == 1 or c.rope_type == "dynamic":  # which scales texts longer than max_seq_len
        return plain, 1.0
    if c.rope_type == "linear":  # position interpolation (arXiv 2306.15595)
        return plain / factor, 1.0
    if c.rope_type == "ntk":  # a base that divides the lowest frequency by the factor and keeps the highest
        return frequencies(width, c.rope_theta * factor ** (width / (width - 2))), 1.0
    kept = _kept_by_llama3(plain, c) if c.rope_type == "llama3" else _kept_by_yarn(width, c)
    return plain * (kept + (1 - kept) / factor), attention_factor(c)


def _kept_by_llama3(plain: np.ndarray, c: RotaryConfig) -> np.ndarray:
    """Return how much of each frequency is kept: all, where it has many turns in the original context."""
    turns = c.rope_original_len * plain / (2 * np.pi)
    return np.clip((turns - c.rope_low_freq_factor) / (c.rope_high_freq_factor - c.rope_low_freq_factor), 0, 1)


def _kept_by_yarn(width: int, c: RotaryConfig) -> np.ndarray:
    """Return how much of each frequency is kept (YaRN, arXiv 2309.00071): a ramp over the index of the pair.

    It falls from the pair with `rope_beta_fast` turns in the original context to that with `rope_beta_slow`. The
    paper's ramp is over turns; its authors' code and the published models have this one, whose ends are rounded
    outwards to whole pairs and bounded by the width.
    """
    def pair(turns: float) -> float:
        return width * math.log(c.rope_original_len / (turns * 2 * math.pi)) / (2 * math.log(c.rope_theta))

    first, last = pair(c.rope_beta_fast), pair(c.rope_beta_slow)
    if c.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    length = last - first or 0.001  # a step, where both are the same pair
    return 1 - np.clip((np.arange(width // 2) - first) / length, 0, 1)


def attention_factor(c: RotaryConfig) -> float:
    """Return the factor of cosine and sine, by which YaRN sharpens attention over longer contexts."""
    if c.rope_type != "yarn" or c.rope_attention_factor:
        return c.rope_attention_factor or 1.0
    if c.rope_mscale and c.rope_mscale_all_dim:
        return _mscale(c.rope_scaling, c.rope_mscale) / _mscale(c.rope_scaling, c.rope_mscale_all_dim)
    return _mscale(c.rope_scaling, 1.0)


def score_factor(c: RotaryConfig) -> float:
    """Return the factor of all attention scores that DeepSeek's models add to YaRN: mscale squared."""
    return _mscale(c.rope_scaling, c.rope_mscale_all_dim) ** 2


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1


class Rotary:
    """Rotary positions with given frequencies: the angles of a batch, and the rotation of queries and keys."""

    def __init__(self, frequency: np.ndarray, factor: float = 1.0):
        self.frequency = tuple(frequency.tolist())  # plain numbers: part of the program, not of the state
        self.factor = factor

    def angles(self, positions_BT: jax.Array) -> Angles:
        """Return cosine and sine [B, T, 1, K/2], computed once for all layers."""
        angle = positions_BT[..., None, None].astype(jnp.float32) * np.asarray(self.frequency, np.float32)
        if self.factor == 1:
            return jnp.cos(angle), jnp.sin(angle)
        return jnp.cos(angle) * self.factor, jnp.sin(angle) * self.factor

    @staticmethod
    def rotate(x_BTHK: jax.Array, angles: Angles | None) -> jax.Array:
        """Rotate queries or keys by their positions; only the first entries of a head, where there are fewer angles.

        Without angles they stay as they are.
        """
        if angles is None:
            return x_BTHK
        cos, sin = angles
        width = 2 * cos.shape[-1]
        a, b = jnp.split(x_BTHK[..., :width].astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHK.dtype)
        return turned if width == x_BTHK.shape[-1] else jnp.concatenate([turned, x_BTHK[..., width:]], axis=-1)
