"""A hash that changes with every bit, and reads what each device really has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.resilience.bits import hash_bits as hash_once


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "float8_e4m3fn"])
def test_every_bit_counts(dtype):
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 3))).astype(jnp.dtype(dtype))
    word = f"uint{8 * x.dtype.itemsize}"
    seen = {int(hash_once(x))}
    for place in range(x.size):
        for bit in range(8 * x.dtype.itemsize):
            other = x.copy()
            other.reshape(-1).view(word)[place] ^= np.array(1 << bit, word)
            seen.add(int(hash_once(other)))
    assert len(seen) == 1 + x.size * 8 * x.dtype.itemsize


def test_two_signs_do_not_cancel():
    """As they would in a sum of words times places: 2^31 times any odd number is 2^31."""
    x = np.ones((64,), np.float32)
    seen = set()
    for place in range(1, 64):
        other = x.copy()
        other[[0, place]] *= -1
        seen.add(int(hash_once(other)))
    assert len(seen) == 63 and int(hash_once(x)) not in seen


def test_places_count():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert len({int(hash_once(y)) for y in (x, x[::-1].copy(), x[:, ::-1].copy())}) == 3
    assert int(hash_once(x)) == int(hash_once(x.reshape(12)))
    assert int(hash_once(np.zeros((2,), bool))) != int(hash_once(np.ones((2,), bool)))
