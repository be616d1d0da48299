"""Pieces of a state in files: cut in one way, put together in any other, and never without a word if damaged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint.local import pieces
from jaxtrain.checkpoint.local.pieces import Damaged

LEAVES = {"a": ((8, 12), jnp.float32), "b": ((16,), jnp.bfloat16), "c": ((), jnp.int32), "d": ((4, 2, 8), jnp.bool_)}


def mesh(*shape):
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], devices=jax.devices()[: int(np.prod(shape))])


def placed(mesh, specs):
    rng = np.random.default_rng(0)
    return {path: jax.device_put(np.asarray(rng.integers(0, 100, shape)).astype(dtype), NamedSharding(mesh, P(*spec)))
            for (path, (shape, dtype)), spec in zip(LEAVES.items(), specs, strict=True)}


def written(path, flat):
    wanted = pieces.owned(flat, 0)
    names = [(leaf, flat[leaf].shape, bounds) for leaf, bounds, _ in wanted]
    pieces.write(path, {"step": 3}, names, pieces.to_host(flat, wanted))
    return path


def put_together(path, abstract):
    read = pieces.reader(path)
    header = pieces.read_header(read)
    return {leaf: pieces.assemble(shape, [(piece, lambda piece=piece: pieces.read_piece(read, header, piece))
                                          for piece in header.pieces if piece.path == leaf])
            for leaf, shape in abstract.items()}


def abstract(flat):
    return {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for path, x in flat.items()}


CUTS = [(mesh, specs) for mesh, specs in [
    ((8,), [("x",), ("x",), (), (None, None, "x")]), ((2, 4), [("x", "y"), (("x", "y"),), (), ("y", "x")]),
    ((2, 2), [(None, "y"), ("y",), (), ("x",)]), ((1,), [(), (), (), ()])]]


@pytest.mark.parametrize("there", range(len(CUTS)))
@pytest.mark.parametrize("here", range(len(CUTS)))
def test_any_cut_from_any_other(tmp_path, here, there):
    (one, specs), (other, other_specs) = CUTS[here], CUTS[there]
    flat = placed(mesh(*one), specs)
    path = written(tmp_path / "file", flat)
    assert pieces.check(path).about == {"step": 3}
    wanted = abstract(placed(mesh(*other), other_specs))
    found = put_together(path, wanted)
    for leaf, value in flat.items():
        assert found[leaf].sharding == wanted[leaf].sharding and found[leaf].dtype == value.dtype
        np.testing.assert_array_equal(np.asarray(found[leaf]), np.asarray(value))


def test_each_byte_is_written_once(tmp_path):
    flat = placed(mesh(2, 4), [("x",), (), (), ("y",)])
    header = pieces.check(written(tmp_path / "file", flat))
    assert sum(piece.size for piece in header.pieces) == sum(leaf.nbytes for leaf in flat.values())


def test_what_is_on_the_host_stays_when_the_state_is_donated():
    x = {"x": jnp.arange(1024.0)}
    found = pieces.to_host(x, pieces.owned(x, 0))
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    for _ in range(3):
        x["x"] = step(x["x"])
    x["x"].block_until_ready()
    np.testing.assert_array_equal(found[0], np.arange(1024.0))


@pytest.mark.parametrize("where", [0, 20, 40, 100, -1])
def test_a_flipped_bit_is_found(tmp_path, where):
    path = written(tmp_path / "file", placed(mesh(2), [("x",), (), (), ()]))
    content = bytearray(path.read_bytes())
    content[where] ^= 4
    path.write_bytes(content)
    with pytest.raises(Damaged):
        pieces.check(path)


@pytest.mark.parametrize("size", [0, 10, 60, -1])
def test_a_cut_off_file_is_found(tmp_path, size):
    path = written(tmp_path / "file", placed(mesh(2), [("x",), (), (), ()]))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(Damaged):
        pieces.check(path)


def test_a_longer_file_is_found(tmp_path):
    path = written(tmp_path / "file", placed(mesh(2), [("x",), (), (), ()]))
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(Damaged, match="length"):
        pieces.check(path)


def test_what_is_not_there_is_not_made_up(tmp_path):
    flat = placed(mesh(2), [("x",), (), (), ()])
    path = written(tmp_path / "file", flat)
    read = pieces.reader(path)
    header = pieces.read_header(read)
    half = next(piece for piece in header.pieces if piece.path == "a")
    with pytest.raises(Damaged, match="48 of 96"):
        pieces.assemble(jax.ShapeDtypeStruct((8, 12), jnp.float32, sharding=NamedSharding(mesh(1), P())),
                        [(half, lambda: np.zeros(half.box))])
