"""Log-mel frames on the device: the numbers of data/prepare_sequences/audio.py, in float32.

A file goes through one program in pieces of equal length, so that its memory and its compilation are those of a piece.

Shape suffixes: B batch, N samples, M frames, W samples of a window, F frequencies, C mels.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.base.annotations import AnyArray
from jaxtrain.data.prepare_sequences.audio import HOP, MELS, WINDOW, mel_filters

PIECE = 3_000  # frames: 30 seconds
DECADES = 8  # below the loudest, where frames are clipped


def log_mel(samples_BN: jax.Array, mels: int = MELS) -> jax.Array:
    """Return the frames [B, N // 160, mels] of samples at 16 kHz, clipped 8 decades below the loudest of each row."""
    around = (WINDOW // 2, WINDOW // 2)
    logs_BMC = _logs(jnp.pad(samples_BN.astype(jnp.float32), ((0, 0), around), mode="reflect"), mels)
    logs_BMC = logs_BMC[:, :samples_BN.shape[1] // HOP]
    return clipped(logs_BMC, logs_BMC.max((1, 2), keepdims=True))


def log_mel_of_file(samples: np.ndarray, mels: int = MELS) -> np.ndarray:
    """Return the frames [n // 160, mels] of the [n] samples of a file, as audio.log_mel does on the host."""
    frames = len(samples) // HOP
    if not frames:
        return np.zeros((0, mels), np.float32)
    logs = logs_of(np.pad(samples.astype(np.float32, copy=False), WINDOW // 2, mode="reflect"), mels)[:frames]
    loudest = logs.max()
    for at in range(0, frames, PIECE):  # in place
        logs[at:at + PIECE] = clipped(logs[at:at + PIECE], loudest)
    return logs


def logs_of(padded: np.ndarray, mels: int = MELS, piece: int = PIECE) -> np.ndarray:
    """Return log10 of the bands [M, mels] of each whole window of samples, `piece` frames at a time."""
    frames = max(0, (len(padded) - WINDOW) // HOP + 1)
    logs = np.empty((frames, mels), np.float32)
    for at in range(0, frames, piece):
        part = padded[at * HOP:(at + piece - 1) * HOP + WINDOW]
        whole = np.zeros((1, (piece - 1) * HOP + WINDOW), np.float32)
        whole[0, :len(part)] = part
        logs[at:at + piece] = np.asarray(_logs_program(whole, mels)[0])[:frames - at]
    return logs


def clipped(logs: AnyArray, loudest: AnyArray) -> AnyArray:
    """Return the features of frames of log10, in a file or up to now as loud as `loudest`."""
    return ((jnp if isinstance(logs, jax.Array) else np).maximum(logs, loudest - DECADES) + 4) / 4


def _logs(padded_BN: jax.Array, mels: int) -> jax.Array:
    rows, length = padded_BN.shape
    frames = (length - WINDOW) // HOP + 1
    parts = jnp.pad(padded_BN, ((0, 0), (0, HOP)))[:, :(frames + 2) * HOP].reshape(rows, frames + 2, HOP)
    windows_BMW = jnp.concatenate([parts[:, :-2], parts[:, 1:-1], parts[:, 2:, :WINDOW - 2 * HOP]], 2)
    power_BMF = jax.lax.platform_dependent(windows_BMW, cpu=_transformed, default=_multiplied)
    return jnp.log10(jnp.maximum(_product(power_BMF, mel_filters(mels).astype(np.float32)), 1e-10))


_logs_program = partial(jax.jit, static_argnums=1)(_logs)


def _transformed(windows_BMW: jax.Array) -> jax.Array:
    spectrum_BMF = jnp.fft.rfft(windows_BMW * _hann().astype(np.float32))
    return jnp.square(spectrum_BMF.real) + jnp.square(spectrum_BMF.imag)


def _multiplied(windows_BMW: jax.Array) -> jax.Array:
    """Return the power by products with matrices of cosines and sines.

    Accelerators multiply faster than they transform windows of 400, which is not a power of 2.
    """
    turns = 2 * np.pi * (np.arange(WINDOW)[:, None] * np.arange(WINDOW // 2 + 1) % WINDOW) / WINDOW
    real_BMF, imaginary_BMF = (_product(windows_BMW, (_hann()[:, None] * wave(turns)).astype(np.float32))
                               for wave in (np.cos, np.sin))
    return jnp.square(real_BMF) + jnp.square(imaginary_BMF)


def _hann() -> np.ndarray:
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)


def _product(x: jax.Array, matrix: np.ndarray) -> jax.Array:
    return jnp.matmul(x, matrix, precision="highest")
