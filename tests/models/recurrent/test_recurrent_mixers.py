"""Mixers with a state: the numbers of a loop over tokens in float64, on one device and over several, and their memory.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.sharding import activations, mesh_context
from tests.models.recurrent import over_time
from tests.models.recurrent.over_time import HEADS, MIXERS, B, H, K, T, V, single, tokens
from tests.numerics.reference import QUICKLY
from tests.tiers import exhaustive, slow

TOLERANCE = 2e-6


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile(QUICKLY)(*args)


def gradients(name):
    return functools.partial(over_time.with_gradients, over_time.whole(name))


@pytest.mark.parametrize("name", MIXERS)
def test_chunks_have_the_numbers_of_a_loop_over_tokens(name):
    """Output, last state and all gradients; of documents in one row, behind a state."""
    got = compiled(gradients(name), *single(over_time.drawn(name)))
    assert over_time.worst(got, over_time.truth(name)) < TOLERANCE


class Placed:
    """The arrays of a mixer on a mesh that cuts rows, in balanced order."""

    def __init__(self, name, sizes):
        self.mesh, n = jt.make_mesh(**sizes), sizes["context"]
        chunks = np.arange(T).reshape(2 * n, -1)
        self.turn = np.concatenate([chunks[[i, 2 * n - 1 - i]].ravel() for i in range(n)])
        mixer, (arrays, segments, state, pulls) = MIXERS[name], single(over_time.drawn(name))
        self.names = (HEADS, mixer.state, *mixer.names, mixer.state)  # of what `with_gradients` returns
        self.args = (tuple(map(self.put, arrays, mixer.names)), self.put(segments, ("batch", "seq")),
                     self.put(state, mixer.state), tuple(map(self.put, pulls, self.names[:2])))

    def put(self, x, names):
        with mesh_context.use(self.mesh, jt.rules()):
            spec = activations.activation_spec(*names)
        return jax.device_put(x[:, self.turn] if names[1:2] == ("seq",) else x, NamedSharding(self.mesh, spec))

    def run(self, f):
        with mesh_context.use(self.mesh, jt.rules()):
            return compiled(f, *self.args)

    def back(self, found):
        return [np.asarray(x)[:, np.argsort(self.turn)] if names[1:2] == ("seq",) else x
                for x, names in zip(found, self.names, strict=True)]


TWO, FOUR = dict(data=2, context=2, tensor=2), dict(context=4, tensor=2)


@pytest.mark.parametrize(("name", "sizes"), [
    ("gated_delta", TWO), ("state_space", TWO), ("state_space", FOUR), ("short_convolution", TWO),
    ("short_convolution", FOUR), *slow(("kimi_delta", FOUR)),
    *exhaustive(("gated_delta", FOUR), ("kimi_delta", TWO))], ids=str)
def test_rows_cut_over_devices_have_them_too(name, sizes):
    placed = Placed(name, sizes)
    assert over_time.worst(placed.back(placed.run(gradients(name))), over_time.truth(name)) < TOLERANCE


@pytest.mark.parametrize("name", ["state_space", "short_convolution", *slow("gated_delta", "kimi_delta")])
def test_inside_a_pipeline(name):
    """Axes made manual around it, and only one stage computes; gradients of what rows share are summed around it."""
    placed = Placed(name, dict(stage=2, context=2, tensor=2))
    cut = [names[1:2] == ("seq",) for names in placed.names]
    specs = [P(None, "context") if own else P() for own in cut]

    def stages(arrays, segments, state, pulls):
        def mixes(arrays, state):
            y, last = over_time.whole(name)(arrays, segments, state)
            return lax.cond(lax.axis_index("stage") == 1, lambda: (y, last), lambda: (jnp.zeros_like(y), 0 * last))

        out, back = jax.vjp(mixes, arrays, state)
        darrays, dstate = back((pulls[0], pulls[1] / 2))  # each of 2 devices has the last state
        return [x[None] if own else x[None, None] for own, x in zip(cut, (*out, *darrays, dstate), strict=True)]

    outer = jax.shard_map(stages, in_specs=(tuple(specs[2:-1]), P(None, "context"), P(), tuple(specs[:2])),
                          out_specs=[P("stage", None, "context") if own else P("stage", "context") for own in cut],
                          axis_names={"data", "fsdp", "stage", "context", "expert"}, check_vma=False)
    found = [np.asarray(x)[1] for x in placed.run(outer)]
    shared = [x if own else x[0] if i == 1 else x.sum(0) for i, (own, x) in enumerate(zip(cut, found, strict=True))]
    assert over_time.worst(placed.back(shared), over_time.truth(name)) < TOLERANCE


@pytest.mark.parametrize("name", MIXERS)
def test_a_prompt_and_steps_of_one_token_give_what_a_whole_row_gives(name):
    """Called eagerly. The prompt is padded on the left, as in generation, and computed in two parts."""
    padding, first, prompt, end = 9, 11, 33, 38
    arrays = single(over_time.drawn(name)[0])
    want, last = MIXERS[name].whole(*tokens(name, arrays, slice(padding, end)))
    segments = np.broadcast_to(np.arange(end) >= padding, (B, end)).astype(np.int32)
    _, state = MIXERS[name].whole(*tokens(name, arrays, slice(0, first)), segments[:, :first])
    y, state = MIXERS[name].whole(*tokens(name, arrays, slice(first, prompt)), segments[:, first:prompt], state)
    found = [y]
    for t in range(prompt, end):
        y, state = MIXERS[name].step(*tokens(name, arrays, slice(t, t + 1)), state)
        found.append(y)
    got = jnp.concatenate(found, 1)
    assert over_time.worst((got, state), (np.asarray(want)[:, first - padding:], np.asarray(last))) < TOLERANCE


@pytest.mark.parametrize("name", MIXERS)
def test_bfloat16_is_computed_in_float32(name):
    arrays, segments, *_ = over_time.drawn(name)
    half = [jnp.asarray(x, jnp.bfloat16) for x in tokens(name, arrays, slice(0, 100))]
    y, _ = MIXERS[name].whole(*half, segments[:, :100].astype(np.int32))
    want, _ = MIXERS[name].whole(*[x.astype(np.float32) for x in half], segments[:, :100].astype(np.int32))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(np.float32), want, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("name", ["gated_delta", "kimi_delta", "state_space"])
def test_memory_grows_with_the_length_of_a_row_alone(name):
    """The compiled gradient has no array with all pairs of tokens, and what it keeps are inputs and states by chunk."""
    long = 4096

    def longer(x):
        shape = tuple(long if size == T else size for size in x.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    args = jax.tree.map(longer, single(over_time.drawn(name)))
    text = jax.jit(gradients(name)).lower(*args).compile(QUICKLY).as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\b[fsu]\d+\[([\d,]+)\]", text)}
    assert (B, long, H, V) in shapes
    assert not [shape for shape in shapes if sum(size >= long for size in shape) > 1]
    assert max(map(math.prod, shapes)) < B * H * long * 128

    arrays, segments, state, _ = args
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(over_time.whole(name), *args)[1], arrays, segments,
                                          state))
    assert sum(x.size for x in kept) < 1.01 * sum(
        x.size for x in jax.tree.leaves(args[:3])) + B * H * long // 64 * K * V
