"""The fingerprint is the same wherever the bits lie, and another as soon as one of them is."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import fingerprint

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint8", "int8", "bool"]
SHAPES = [(), (1,), (7,), (5, 3), (8, 16), (2, 8, 4), (0, 3), (3, 1, 1)]


pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # NumPy's, of scalars that overflow


def made(dtype, shape, seed=0):
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return (bits & 1).astype(bool)[..., 0] if dtype == "bool" else bits.view(dtype)[..., 0]


def of_device(x):
    return fingerprint.total([fingerprint.read(fingerprint.on_device({"x": x}))])["x"]


def of_host(x):
    return fingerprint.text(fingerprint.of_piece(x, (0,) * x.ndim, x.shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_device_and_host_agree(dtype):
    flat = {str(shape): made(dtype, shape) for shape in SHAPES}
    placed = {path: jnp.asarray(x) for path, x in flat.items()}
    found = fingerprint.total([fingerprint.read(fingerprint.on_device(placed))])
    assert found == {path: of_host(x) for path, x in flat.items()}


def test_64_bits():
    with jax.enable_x64(True):
        for dtype in ("float64", "int64"):
            x = made(dtype, (5, 3))
            assert of_device(jnp.asarray(x)) == of_host(x)
            assert of_host(x) != of_host((x.view(np.uint64) ^ np.uint64(1 << 50)).view(dtype))


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_any_sharding(mode):
    x = made("bfloat16", (8, 16, 4))
    for sizes in ((8, 1), (2, 4), (1, 2)):
        mesh = jax.make_mesh(sizes, ("a", "b"), axis_types=(mode, mode), devices=jax.devices()[:sizes[0] * sizes[1]])
        for spec in (P(), P("a", "b"), P(("a", "b")), P(None, "b", None)):
            with jax.set_mesh(mesh):
                assert of_device(jax.device_put(x, NamedSharding(mesh, spec))) == of_host(x)


def test_pieces_add_up():
    x = made("float32", (6, 5, 8))
    for cut in ((3, 5, 8), (6, 2, 8), (4, 3, 5), (1, 1, 1), (6, 5, 3)):
        total = (0, 0)
        for i in range(0, 6, cut[0]):
            for j in range(0, 5, cut[1]):
                for k in range(0, 8, cut[2]):
                    piece = x[i:i + cut[0], j:j + cut[1], k:k + cut[2]]
                    total = fingerprint.add(total, fingerprint.of_piece(piece, (i, j, k), x.shape))
        assert fingerprint.text(total) == of_host(x)


def test_long_rows(monkeypatch):
    x = made("int8", (3, 50))
    whole = of_host(x), fingerprint.of_piece(x[:, 7:40], (0, 7), x.shape)
    monkeypatch.setattr(fingerprint, "_PIECE", 8)
    assert (of_host(x), fingerprint.of_piece(x[:, 7:40], (0, 7), x.shape)) == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_every_bit_counts(dtype):
    x = made(dtype, (5, 3))
    found = {of_host(x)}
    for bit in range(8 * x.nbytes):
        flipped = np.frombuffer(x.tobytes(), np.uint8).copy()
        flipped[bit // 8] ^= 1 << bit % 8
        found.add(of_host(flipped.view(x.dtype).reshape(x.shape)))
    assert len(found) == 8 * x.nbytes + 1


def test_order_and_sign_of_zero_count():
    x = np.float32([1, 2, 3, 0])
    assert len({of_host(x), of_host(x[[1, 0, 2, 3]]), of_host(-x), of_host(x * np.float32([1, 1, 1, -1]))}) == 4


def test_places_beyond_32_bits():
    """A piece far inside an array that no host holds; device places wrap in the same way."""
    shape = (5, 1 << 31)
    piece = np.arange(8, dtype=ml_dtypes.bfloat16).reshape(2, 4)
    ones = [fingerprint.of_piece(piece[i:i + 1], (2 + i, 9), shape) for i in range(2)]
    assert fingerprint.add(*ones) == fingerprint.of_piece(piece, (2, 9), shape)
