"""Attention with sinks, of every backend that has them: output and all gradients of a softmax with one more score."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.kernels import attention
from tests.kernels.interpreted import interpreted, needs_mosaic  # noqa: F401 (a fixture)

B, H, G = 2, 4, 2
CASES = {"whole": (False, 0), "packed, window": (True, 20)}


@functools.cache
def arrays(T, K, packed):
    rng = np.random.default_rng(0)
    shapes = (B, T, H, K), (B, T, G, K), (B, T, G, K), (H,), (B, T, H, K)
    q, k, v, sinks, pull = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    segments = np.cumsum(rng.random((B, T)) < 0.1, 1).astype(np.int32)
    return (q, k, v, 2 * sinks), segments if packed else None, pull


def plain(q, k, v, sinks, segments, window):
    T = q.shape[1]
    behind = np.arange(T)[:, None] - np.arange(T)
    seen = ((behind >= 0) & (behind < (window or T)))[None]
    seen = seen if segments is None else seen & (segments[:, :, None] == segments[:, None, :])
    k, v = (jnp.repeat(x, H // G, axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k, precision="highest") / np.sqrt(q.shape[-1])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    column = jnp.broadcast_to(sinks[:, None, None], (B, H, T, 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], -1))[..., :-1]
    return jnp.einsum("bhts,bshk->bthk", weights, v, precision="highest")


def with_gradients(f, given, pull):
    def run(*given):
        out, back = jax.vjp(f, *given)
        return out, *back(pull)
    return jax.jit(run)(*given)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("backend", "T", "K"), [
    ("xla", 24, 8), pytest.param("splash", 200, 16, marks=pytest.mark.slow),
    pytest.param("mosaic", 200, 64, marks=(pytest.mark.slow, needs_mosaic))])
def test_numbers_are_those_of_a_softmax_with_one_more_score(backend, T, K, case, request):
    if backend == "mosaic":
        request.getfixturevalue("interpreted")
    packed, window = CASES[case]
    given, segments, pull = arrays(T, K, packed)
    found = with_gradients(lambda q, k, v, sinks: attention.attend(
        q, k, v, segments_BT=segments, window=window, sinks_H=sinks, backend=backend), given, pull)
    wanted = with_gradients(lambda *given: plain(*given, segments, window), given, pull)
    for name, got, want in zip(("output", "dq", "dk", "dv", "dsinks"), found, wanted, strict=True):
        off = float(jnp.abs(got - want).max() / jnp.abs(want).max())
        assert off < 1e-5, f"{name} is off by {off:.1e} of its largest element"


def test_cudnn_has_none_and_is_not_chosen():
    arguments = "gpu", jnp.dtype(jnp.bfloat16), 128, 64
    assert attention.choose_backend("auto", *arguments) == "cudnn"
    assert attention.choose_backend("auto", *arguments, sinks=True) == "xla"
    with pytest.raises(UserError, match="the cudnn backend cannot do this: it has no attention sinks; use 'auto'"):
        attention.choose_backend("cudnn", *arguments, sinks=True)
