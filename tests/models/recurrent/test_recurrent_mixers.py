"""Mixers with a state: the numbers of a loop over tokens in float64, on one device and over several, and their memory.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.models.recurrent import gated_delta, short_convolution
from jaxtrain.sharding import activations, mesh_context
from tests.models.recurrent import over_time
from tests.models.recurrent.over_time import MIXERS, B, K, T, V
from tests.numerics.reference import QUICKLY

TOLERANCE = 2e-6


def single(x):
    """Return arrays as the mixers get them."""
    return jax.tree.map(lambda x: x.astype(np.float32 if x.dtype == np.float64 else np.int32), x)


@pytest.mark.parametrize("name", MIXERS)
def test_chunks_have_the_numbers_of_a_loop_over_tokens(name):
    """Output, last state and all gradients; of documents together, behind a state."""
    run = jax.jit(functools.partial(over_time.with_gradients, over_time.whole(name)))
    got = run.lower(*single(over_time.drawn(name))).compile(QUICKLY)(*single(over_time.drawn(name)))
    assert over_time.worst(got, over_time.truth(name)) < TOLERANCE


def in_order(n):
    chunks = np.arange(T).reshape(2 * n, -1)
    return np.concatenate([chunks[[i, 2 * n - 1 - i]].ravel() for i in range(n)])


@pytest.mark.parametrize("sizes", [dict(data=2, context=2, tensor=2), dict(context=4, tensor=2)], ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_rows_cut_over_devices_have_them_too(name, sizes):
    mixer, (arrays, segments, state, pulls) = MIXERS[name], single(over_time.drawn(name))
    mesh, turn = jt.make_mesh(**sizes), in_order(sizes["context"])
    cut = lambda names: names[1:2] == ("seq",)

    def put(x, names):
        with mesh_context.use(mesh, jt.rules()):
            spec = activations.activation_spec(*names)
        return jax.device_put(x[:, turn] if cut(names) else x, NamedSharding(mesh, spec))

    args = (tuple(map(put, arrays, mixer.names)), put(segments, ("batch", "seq")), put(state, mixer.state),
            (put(pulls[0], over_time.HEADS), put(pulls[1], mixer.state)))
    with mesh_context.use(mesh, jt.rules()):
        run = jax.jit(functools.partial(over_time.with_gradients, over_time.whole(name)))
        got = run.lower(*args).compile(QUICKLY)(*args)
    names = (over_time.HEADS, mixer.state, *mixer.names, mixer.state)
    got = [np.asarray(x)[:, np.argsort(turn)] if cut(own) else x for x, own in zip(got, names, strict=True)]
    assert over_time.worst(got, over_time.truth(name)) < TOLERANCE
