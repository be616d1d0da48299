"""Rotary positions from their published formulas, pair by pair, in float64."""

import math

import numpy as np


def frequencies(c, width):
    """Return the angle of each pair per position, and the factor of cosine and sine."""
    out = []
    for i in range(width // 2):
        plain = 1.0 / c.rope_theta ** (2 * i / width)
        if c.rope_scaling == 1:
            out.append(plain)
        elif c.rope_type == "linear":
            out.append(plain / c.rope_scaling)
        elif c.rope_type == "ntk":
            out.append(1.0 / (c.rope_theta * c.rope_scaling ** (width / (width - 2))) ** (2 * i / width))
        else:
            out.append({"llama3": llama3, "yarn": yarn}[c.rope_type](c, width, i, plain))
    return np.array(out), attention_factor(c)


def llama3(c, width, i, plain):
    """Meta's release of Llama 3.1: three cases by wavelength, the middle one interpolated."""
    wavelength = 2 * math.pi / plain
    if wavelength < c.rope_original_len / c.rope_high_freq_factor:
        return plain
    if wavelength > c.rope_original_len / c.rope_low_freq_factor:
        return plain / c.rope_scaling
    smooth = c.rope_original_len / wavelength - c.rope_low_freq_factor
    smooth /= c.rope_high_freq_factor - c.rope_low_freq_factor
    return (1 - smooth) * plain / c.rope_scaling + smooth * plain


def yarn(c, width, i, plain):
    """The code of YaRN's authors: interpolated by where the pair is between two others."""
    def pair(turns):  # solved for i: turns = original / (2 pi theta^(2i/width))
        return width / 2 * math.log(c.rope_original_len / (2 * math.pi * turns)) / math.log(c.rope_theta)

    low, high = pair(c.rope_beta_fast), pair(c.rope_beta_slow)
    if c.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = min(1.0, max(0.0, (i - low) / (high - low if high > low else 0.001)))
    return plain * (1 - ramp) + plain / c.rope_scaling * ramp


def attention_factor(c):
    if c.rope_scaling == 1 or c.rope_type != "yarn":
        return 1.0
    if c.rope_attention_factor:
        return c.rope_attention_factor
    if c.rope_mscale:
        return mscale(c, c.rope_mscale) / mscale(c, c.rope_mscale_all_dim)
    return mscale(c, 1)


def mscale(c, weight):
    return 0.1 * weight * math.log(c.rope_scaling) + 1.0


def score_factor(c):
    """Return the factor of all scores in DeepSeek's models."""
    return mscale(c, c.rope_mscale_all_dim) ** 2 if c.rope_mscale_all_dim else 1.0
