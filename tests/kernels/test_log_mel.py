"""Log-mel frames on the device, in pieces: the numbers of the host's, and one program for files of any length."""

import jax
import numpy as np
import pytest

from jaxtrain.data.prepare_sequences import audio
from jaxtrain.kernels import log_mel

RNG = np.random.default_rng(0)


def sound(samples):
    """A tone that comes and goes over noise 60 decibels below it."""
    at = np.arange(samples)
    return (0.5 * np.sin(at * 0.2) * (np.sin(at / 3000) > 0) + 5e-4 * RNG.normal(size=samples)).astype(np.float32)


@pytest.mark.parametrize("samples", [0, 159, 160, 199, 400, 16_000, 500_123])
def test_frames_of_a_file_are_those_of_the_host(samples):
    """Whatever its length: nothing but its ends is mirrored."""
    given = sound(samples)
    found, wanted = log_mel.log_mel_of_file(given), audio.log_mel(given)
    assert found.shape == wanted.shape and found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=2e-4)


def test_frames_do_not_depend_on_the_length_of_pieces():
    padded = sound(20_000)
    whole = log_mel.logs_of(padded, 40, 1000)
    for piece in (1, 7, 64):
        np.testing.assert_allclose(log_mel.logs_of(padded, 40, piece), whole, atol=1e-5)


def test_clipping_is_by_the_loudest_of_the_whole_file():
    """Not by that of a piece: silence in a piece of its own is 8 decades below a tone in another one."""
    given = np.concatenate([np.sin(np.arange(16_000) * 0.2), np.zeros(2 * log_mel.PIECE * audio.HOP)])
    found = log_mel.log_mel_of_file(given.astype(np.float32))
    assert found[-1].max() == found.min() == pytest.approx(found.max() - 2)


def test_files_of_any_length_are_one_program():
    log_mel.log_mel_of_file(sound(1_000), 20)
    programs = log_mel._logs_program._cache_size()
    for samples in (480, 5_000, 700_000):
        log_mel.log_mel_of_file(sound(samples), 20)
    assert log_mel._logs_program._cache_size() == programs


def test_products_with_waves_are_the_transform():
    """An accelerator multiplies, and a CPU transforms."""
    windows = sound(audio.WINDOW * 9).reshape(1, 9, -1)
    multiplied, transformed = (np.asarray(jax.jit(power)(windows)) for power in (
        log_mel._multiplied, log_mel._transformed))
    np.testing.assert_allclose(multiplied, transformed, rtol=1e-4, atol=1e-5 * transformed.max())
