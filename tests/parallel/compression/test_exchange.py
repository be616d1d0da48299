"""Compressed sums are those of the plain simulation, equal on all devices, and move as many bytes as the formula says.

A mesh of 4 x 2: `data` is the slow axis, `fsdp` the one inside.
"""

from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.parallel.compression import codecs, exchange
from jaxtrain.plan import hlo
from tests.parallel.compression.plain_exchange import Devices
from tests.tiers import exhaustive, slow

PEERS, INNER, STEPS = 4, 2, 3
SHAPES = [(3, 40, 24), (7,), (1300,)]
METHODS = {"exact": {}, "int8": {"block": 32}, "int4": {"block": 16}, "top_k": {"ratio": 0.05, "block": 500},
           "random_k": {"ratio": 0.1}, "power_sgd": {"rank": 2}}

# int4 sends what int8 does, in half the bytes; random_k what top_k does, without the places.
BY_TIER = ["int8", *slow("exact", "top_k", "power_sgd"), *exhaustive("int4", "random_k")]


def codecs_of(method):
    return [codecs.for_shape(codecs.make(method, METHODS[method], stacked=int(len(shape) > 2)), shape)
            for shape in SHAPES]


def mesh():
    return jt.make_mesh(data=PEERS, fsdp=INNER, devices=jax.devices()[:PEERS * INNER])


@cache
def compiled(method):
    """Takes one array and one state a device; those that share `fsdp` have the same."""
    own = codecs_of(method)

    def on_device(given, states):
        first = jax.tree.map(lambda x: x[0], (given, states))
        return jax.tree.map(lambda x: x[None], exchange.all_reduce(own, *first, "data"))

    states = [codec.begin(shape) for codec, shape in zip(own, SHAPES, strict=True)]
    states = jax.tree.map(lambda x: np.broadcast_to(x, (8, *x.shape)), states)
    given = [np.zeros((8, *shape), np.float32) for shape in SHAPES]
    return compile_it(on_device, given, states), states


def compile_it(on_device, *arguments):
    """A function of what each of the 8 devices has of these arrays, compiled."""
    whole = P(("data", "fsdp"))
    where = NamedSharding(mesh(), whole)
    step = jax.jit(jax.shard_map(on_device, mesh=mesh(), in_specs=whole, out_specs=whole, check_vma=False))
    return step.lower(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
                                    arguments)).compile()


def given(step):
    """The array of each peer: they have a part in common."""
    rng = np.random.default_rng(step)
    return [rng.normal(size=(1, *shape)).astype(np.float32) + rng.normal(size=(PEERS, *shape)).astype(np.float32)
            for shape in SHAPES]


@pytest.mark.parametrize("method", BY_TIER)
def test_a_sum_is_that_of_the_plain_simulation(method):
    step, states = compiled(method)
    plain = [Devices(codec, shape, PEERS, np.asarray(state["right"][0]) if "right" in state else None)
             for codec, shape, state in zip(codecs_of(method), SHAPES, states, strict=True)]
    for count in range(STEPS):
        arrays = given(count)
        put = jax.device_put([np.repeat(x, INNER, 0) for x in arrays], step.input_shardings[0][0])
        sums, states = step(put, jax.device_put(states, step.input_shardings[0][1]))
        for got, x, devices, state in zip(sums, arrays, plain, states, strict=True):
            got, want = np.asarray(got), devices.summed(list(x))
            np.testing.assert_array_equal(got, np.broadcast_to(got[:1], got.shape), "devices have different bits")
            np.testing.assert_allclose(got[0], want, atol=3e-5)
            if "error" in state:
                np.testing.assert_allclose(np.asarray(state["error"])[::INNER], devices.errors, atol=3e-5)


@pytest.mark.parametrize("method", BY_TIER)
def test_the_bytes_are_those_of_the_formula(method):
    moved = {}
    for one in hlo.collectives(compiled(method)[0].as_text()):
        assert not one.joins("fsdp", {"data": PEERS, "fsdp": INNER})
        moved[one.kind] = moved.get(one.kind, 0) + one.bytes
    assert moved == exchange.received(codecs_of(method), SHAPES, PEERS)


@pytest.mark.parametrize("method", [*slow("int8"), *exhaustive("exact", "top_k")])  # whose sums are tested above
def test_what_crosses_is_compressed_and_what_stays_inside_is_not(method):
    """The hierarchical sum: its parts are summed in full precision inside, and exchanged across by the codec."""
    size = 4000
    codec = codecs.make(method, METHODS[method])
    part = exchange.part_shape((size,), INNER)

    def on_device(x, state):
        total, state = exchange.hierarchical_all_reduce(codec, x[0], jax.tree.map(lambda a: a[0], state), "fsdp",
                                                        "data")
        return total[None], jax.tree.map(lambda a: a[None], state)

    states = jax.tree.map(lambda a: np.broadcast_to(a, (8, *a.shape)), codec.begin(part))
    x = np.random.default_rng(0).normal(size=(8, size)).astype(np.float32)
    program = compile_it(on_device, x, states)
    sums, _ = program(*jax.device_put((x, states), program.input_shardings[0]))
    inside = x.reshape(PEERS, INNER, size).sum(1).reshape(PEERS, INNER, -1)
    want = np.concatenate([Devices(codec, part, PEERS).summed(list(inside[:, i])) for i in range(INNER)])
    np.testing.assert_allclose(np.asarray(sums), np.broadcast_to(want, (8, size)), atol=3e-5)
    moved = {"data": {}, "fsdp": {}}
    for one in hlo.collectives(program.as_text()):
        axes = [axis for axis in moved if one.joins(axis, {"data": PEERS, "fsdp": INNER})]
        assert len(axes) == 1, one
        moved[axes[0]][one.kind] = moved[axes[0]].get(one.kind, 0) + one.bytes
    assert moved == {"data": exchange.received([codec], [part], PEERS),
                     "fsdp": {"reduce-scatter": 4 * part[0], "all-gather": 4 * size}}
