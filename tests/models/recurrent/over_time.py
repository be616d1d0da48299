"""Mixers with a state, one token after another in float64, and arrays to compare them with.

Letters: B rows, T tokens, H heads in G groups, K and V the sides of a state, W the width of a kernel.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.models.recurrent import gated_delta, kimi_delta, short_convolution, state_space

B, T, H, K, V, W = 2, 304, 4, 8, 12, 4
HEADS, GROUPS = ("batch", "seq", "act_heads", None), ("batch", "seq", None, None)
BY_HEAD, STATE = HEADS[:3], ("batch", "act_heads", None, None)


class Mixer(NamedTuple):
    whole: callable
    step: callable
    token: callable  # (state, *arrays of a token): the new state, and y
    names: tuple  # of the arrays, but for segments and the state
    state: tuple  # the names of the state


def _delta(state, q, k, v, g, beta):
    q, k = (jnp.repeat(x, H // x.shape[1], axis=1) for x in (q, k))
    state = jnp.exp(g.reshape(B, H, -1, 1)) * state
    error = v - jnp.einsum("bhk,bhkv->bhv", k, state)
    state += jnp.einsum("bh,bhk,bhv->bhkv", beta, k, error)
    return state, jnp.einsum("bhk,bhkv->bhv", q, state)


def _space(state, x, dt, a, b, c):
    b, c = (jnp.repeat(x, H // x.shape[1], axis=1) for x in (b, c))
    state = jnp.exp(dt * a)[..., None, None] * state + jnp.einsum("bh,bhn,bhp->bhnp", dt, b, x)
    return state, jnp.einsum("bhn,bhnp->bhp", c, state)


def _window(state, x, kernel, bias):
    state = jnp.concatenate([state, x[:, None]], 1)
    return state[:, 1:], (state * kernel).sum(1) + bias


def _convolve(x, kernel, bias, segments=None, state=None):
    return short_convolution.short_convolution(x, kernel, bias, segments, state, channels=HEADS[2:])


MIXERS = {
    "gated_delta": Mixer(gated_delta.gated_delta_rule, gated_delta.gated_delta_step, _delta,
                         (HEADS, HEADS, HEADS, BY_HEAD, BY_HEAD), STATE),
    "kimi_delta": Mixer(kimi_delta.kimi_delta_attention, kimi_delta.kimi_delta_step, _delta,
                        (HEADS, HEADS, HEADS, HEADS, BY_HEAD), STATE),
    "state_space": Mixer(state_space.state_space, state_space.state_space_step, _space,
                         (HEADS, BY_HEAD, ("act_heads",), GROUPS, GROUPS), STATE),
    "short_convolution": Mixer(_convolve, short_convolution.short_convolution_step, _window,
                               (HEADS, (None, *HEADS[2:]), HEADS[2:]), ("batch", None, *HEADS[2:])),
}


@functools.cache
def drawn(name):
    """The arrays of a mixer in float64, segments, a state, and what pulls on the output and on the last state.

    Decays are from next to none to 3000 powers of e. The first row has documents of all lengths, some of which begin
    where meshes cut it; the second is one document, which forgets little.
    """
    rng = np.random.default_rng(7)

    def normal(*shape):
        return rng.normal(size=shape)

    keys = normal(B, T, 2, K)
    decay = -np.exp(3 * normal(B, T, H, K) - 1) * np.array([1, 1e-3])[:, None, None, None]
    steps = np.exp(normal(B, T, H)) * np.array([1, 1e-3])[:, None, None]
    delta = (normal(B, T, 2, K), keys / np.linalg.norm(keys, axis=-1, keepdims=True), normal(B, T, H, V))
    arrays = {
        "gated_delta": (*delta, decay[..., 0], rng.random((B, T, H))),
        "kimi_delta": (*delta, decay, rng.random((B, T, H))),
        "state_space": (normal(B, T, H, V), steps, -np.exp(normal(H)), normal(B, T, 1, K), normal(B, T, 1, K)),
        "short_convolution": (normal(B, T, H, V), normal(W, H, V), normal(H, V))}[name]
    state = normal(B, W - 1, H, V) if name == "short_convolution" else normal(B, H, K, V)
    starts = rng.random(T) < 0.04
    starts[[38, 76, 152, 228, 229, 231]] = True
    segments = np.stack([np.cumsum(starts) + 1, np.full(T, 3)])
    segments[0, -9:] = 0
    return arrays, segments, state, (normal(B, T, H, V), normal(*state.shape))


def by_token(mixer, arrays, segments, state):
    """Return y and the last state, token by token."""
    cut = [names[1:2] == ("seq",) for names in mixer.names]

    def token(state, at):
        goes_on, *given = at
        given = iter(given)
        state = state * goes_on.reshape(-1, *(1,) * (state.ndim - 1))
        return mixer.token(state, *(next(given) if own else x for own, x in zip(cut, arrays, strict=True)))

    goes_on = jnp.concatenate([jnp.ones((B, 1), bool), segments[:, 1:] == segments[:, :-1]], 1)
    state, y = lax.scan(token, state, [jnp.moveaxis(x, 1, 0) for x in (
        goes_on, *(x for own, x in zip(cut, arrays, strict=True) if own))])
    return jnp.moveaxis(y, 0, 1), state


def with_gradients(f, arrays, segments, state, pulls):
    """Return y, the last state, and the gradients of all arrays and of the state."""
    out, back = jax.vjp(lambda arrays, state: f(arrays, segments, state), arrays, state)
    arrays, state = back(pulls)
    return *out, *arrays, state


@functools.cache
def truth(name):
    """Return y, the last state and all gradients in float64."""
    arrays, segments, state, pulls = drawn(name)
    with jax.enable_x64(True):
        found = jax.jit(functools.partial(with_gradients, functools.partial(by_token, MIXERS[name])))(
            arrays, segments, state, pulls)
        return [np.asarray(x) for x in found]


def whole(name):
    """Return the mixer as a function of arrays, segments and state."""
    return lambda arrays, segments, state: MIXERS[name].whole(*arrays, segments, state)


def single(tree):
    """Return arrays as mixers get them: in float32."""
    return jax.tree.map(lambda x: x.astype(np.float32 if x.dtype == np.float64 else np.int32), tree)


def tokens(name, arrays, part):
    """Return some tokens of a mixer's arrays."""
    return tuple(x[:, part] if names[1:2] == ("seq",) else x
                 for x, names in zip(arrays, MIXERS[name].names, strict=True))


def worst(got, want):
    """Return the largest error of several arrays, each relative to its largest element."""
    return max(float(np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max())
               for a, b in zip(got, want, strict=True))
