"""Log-mel frames on the device: the numbers of data/prepare_sequences/audio.py, in float32.

Shape suffixes: B batch, N samples, M frames, W samples of a window, F frequencies, C mels.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.data.prepare_sequences.audio import HOP, MELS, WINDOW, mel_filters


def log_mel(samples_BN: jax.Array, mels: int = MELS) -> jax.Array:
    """Return the frames [B, N // 160, mels] of samples at 16 kHz, clipped 8 decades below the loudest of each row.

    The spectrum is two products with matrices of cosines and sines: accelerators multiply faster than they transform
    windows of 400, which is not a power of 2.
    """
    frames = samples_BN.shape[1] // HOP
    padded_BN = jnp.pad(samples_BN.astype(jnp.float32), ((0, 0), (WINDOW // 2, WINDOW // 2)), mode="reflect")
    at_MW = np.arange(frames)[:, None] * HOP + np.arange(WINDOW)
    cosines_WF, sines_WF = _fourier()
    real_BMF, imaginary_BMF = (_product(padded_BN[:, at_MW], matrix) for matrix in (cosines_WF, sines_WF))
    bands_BMC = _product(jnp.square(real_BMF) + jnp.square(imaginary_BMF), mel_filters(mels).astype(np.float32))
    logs_BMC = jnp.log10(jnp.maximum(bands_BMC, 1e-10))
    return (jnp.maximum(logs_BMC, logs_BMC.max((1, 2), keepdims=True) - 8) + 4) / 4


def _fourier() -> tuple[np.ndarray, np.ndarray]:
    """Return a Hann window times cosines, and times sines, of each frequency [W, F]."""
    at = np.arange(WINDOW)
    turns = 2 * np.pi * (at[:, None] * np.arange(WINDOW // 2 + 1) % WINDOW) / WINDOW
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * at / WINDOW))[:, None]
    return (hann * np.cos(turns)).astype(np.float32), (hann * np.sin(turns)).astype(np.float32)


def _product(x: jax.Array, matrix: np.ndarray) -> jax.Array:
    return jnp.matmul(x, matrix, precision="highest")
