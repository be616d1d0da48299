"""A hash that changes with every bit, and reads what each device really has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.resilience.corruption.device_hashes import DeviceHashes
from jaxtrain.sharding.bit_sums import bit_sums
from jaxtrain.sharding.host_memory import HOST


@jax.jit
def hash_once(x):
    return bit_sums(x, [0] * x.ndim, x.shape)[0]


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
    """They would in a sum of words times places: 2^31 times any odd number is 2^31."""
    x = np.ones((64,), np.float32)
    seen = set()
    for place in range(1, 64):
        other = x.copy()
        other[[0, place]] *= -1
        seen.add(int(hash_once(other)))
    assert len(seen) == 63 and int(hash_once(x)) not in seen


def test_parts_give_parts_of_the_sum():
    x = np.asarray(jax.random.normal(jax.random.key(0), (5, 3, 4)))
    parts = [int(bit_sums(jnp.asarray(x[at:stop]), (at, 0, 0), x.shape)[0]) for at, stop in ((0, 1), (1, 4), (4, 5))]
    assert sum(parts) % 2**32 == int(hash_once(x))


@pytest.mark.slow
def test_arrays_in_the_hosts_memory_hash_alike():
    """Layers and other arrays are tested, spread over devices by either dimension."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    specs = {"a": P(None, "fsdp"), "b": P("fsdp", "tensor"), "c": P(), "d": P(None, "tensor", None), "e": P("tensor")}
    shapes = {"a": (3, 8), "b": (8, 4), "c": (6,), "d": (5, 4, 3), "e": (2,)}
    values = {key: np.asarray(jax.random.normal(jax.random.key(i), shapes[key])) for i, key in enumerate(shapes)}

    def placed(*away):
        return {key: jax.device_put(values[key], NamedSharding(mesh, spec, memory_kind=HOST if key in away else None))
                for key, spec in specs.items()}

    here = placed()
    want = np.asarray(DeviceHashes(here)(here))
    assert want.shape == (8, 5) and len(np.unique(want[:, 1])) == 8
    for away in ("a", "bd", "abcde"[:4], "ce"):
        tree = placed(*away)
        np.testing.assert_array_equal(DeviceHashes(tree)(tree), want)


def test_places_count():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert len({int(hash_once(y)) for y in (x, x[::-1].copy(), x[:, ::-1].copy())}) == 3
    assert int(hash_once(x)) == int(hash_once(x.reshape(12)))
    assert int(hash_once(np.zeros((2,), bool))) != int(hash_once(np.ones((2,), bool)))
