"""Attention against one written from scratch, and who may influence whom."""

import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.kernels.attention import attend, choose_backend

B, T, K = 2, 12, 8
HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1)}
SEGMENTS = np.array([[1] * 4 + [2] * 5 + [3] * 3, [1] * 7 + [2] * 3 + [0] * 2])


@functools.cache
def qkv(heads, kv_heads):
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(B, T, h, K)).astype(np.float32) for h in (heads, kv_heads, kv_heads))


def naive(q, k, v, segments, window):
    """Query by query, head by head, in float64."""
    out, group = np.zeros(q.shape), q.shape[2] // k.shape[2]
    for b, t, h in itertools.product(range(B), range(T), range(q.shape[2])):
        seen = [s for s in range(t + 1) if (segments is None or segments[b, s] == segments[b, t])
                and (not window or t - s < window)]
        scores = np.array([q[b, t, h] @ k[b, s, h // group] for s in seen], np.float64) / math.sqrt(K)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ v[b, seen, h // group].astype(np.float64)
    return out


CASES = list(itertools.product(HEADS, (False, True), (0, 1, 4)))


@pytest.mark.parametrize(("heads", "packed", "window"), CASES)
def test_attention_is_the_naive_one(heads, packed, window):
    q, k, v = qkv(*HEADS[heads])
    segments = SEGMENTS if packed else None
    got = attend(q, k, v, segments_BT=segments, window=window, backend="xla")
    np.testing.assert_allclose(got, naive(q, k, v, segments, window), rtol=1e-5, atol=1e-6)


def by_head(q, k, v, mask):
    """Differentiable, with infinities and without grouping: another way to the same gradients."""
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf)), v)


@pytest.mark.parametrize(("heads", "packed", "window"), CASES)
def test_gradients_are_those_of_the_naive_one(heads, packed, window):
    q, k, v = map(jnp.asarray, qkv(*HEADS[heads]))
    segments = SEGMENTS if packed else np.zeros((B, T), int)
    i, j = np.arange(T)[:, None], np.arange(T)[None, :]
    mask = (j <= i) & ((i - j < window) if window else True) & (segments[:, :, None] == segments[:, None, :])
    pull = jnp.cos(jnp.arange(q.size)).reshape(q.shape)
    grads = [jax.jit(jax.grad(lambda q, k, v, f=f: (pull * f(q, k, v)).sum(), argnums=(0, 1, 2)))(q, k, v) for f in (
        lambda q, k, v: attend(q, k, v, segments_BT=SEGMENTS if packed else None, window=window, backend="xla"),
        lambda q, k, v: by_head(q, k, v, mask))]
    for name, got, want in zip("qkv", *grads, strict=True):
        # Who sees only itself has no gradient by its query.
        off = float(jnp.abs(got - want).max() / jnp.maximum(jnp.abs(want).max(), 1e-3))
        assert off < 1e-5, f"the gradient of {name} is off by {off:.1e} of its largest element"


@pytest.mark.parametrize("window", [0, 4])
def test_no_output_depends_on_later_tokens_other_segments_or_what_left_the_window(window):
    """Read off the Jacobian: exactly zero where a token may not look, not zero where it may."""
    q, k, v = map(jnp.asarray, qkv(*HEADS["gqa"]))
    x = jnp.zeros((B, T))  # moves all three at a position

    def outputs(x):
        q_, k_, v_ = (a + x[..., None, None] * jnp.cos(jnp.arange(a.size)).reshape(a.shape) for a in (q, k, v))
        return attend(q_, k_, v_, segments_BT=SEGMENTS, window=window, backend="xla")[..., 0].sum(-1)

    jacobian = np.asarray(jax.jacobian(outputs)(x))  # [B, T, B, T]
    for b, t, c, s in itertools.product(range(B), range(T), range(B), range(T)):
        may = b == c and s <= t and SEGMENTS[b, s] == SEGMENTS[b, t] and (not window or t - s < window)
        assert (jacobian[b, t, c, s] != 0) == may, f"output {b, t} {'ignores' if may else 'sees'} input {c, s}"


def test_scores_of_bfloat16_are_summed_and_normalised_in_float32():
    q, k, v = (jnp.bfloat16(a) for a in qkv(*HEADS["mha"]))
    got = attend(q, k, v, backend="xla").astype(jnp.float32)
    want = naive(*(np.asarray(a, np.float32) for a in (q, k, v)), None, 0)
    assert np.abs(got - want).max() < 2**-7 * np.abs(want).max(), "more is lost than by rounding to bfloat16"


BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


@pytest.mark.parametrize(("arguments", "word"), [
    (("cpu", BF16, 128, 64), "NVIDIA"), (("tpu", BF16, 128, 64), "NVIDIA"), (("gpu", F32, 128, 64), "float32"),
    (("gpu", BF16, 128, 60), "head_dim=60"), (("gpu", BF16, 128, 512), "head_dim=512"),
    (("gpu", BF16, 127, 64), "seq_len=127"),
])
def test_cudnn_refuses_by_name_what_it_cannot_do(arguments, word):
    with pytest.raises(UserError, match=word) as refusal:
        choose_backend("cudnn", *arguments)
    assert refusal.value.key == "train.attention"
    assert choose_backend("auto", *arguments) == ("splash" if arguments[0] == "tpu" else "xla")


@pytest.mark.parametrize(("capability", "chosen"), [("8.0", "xla"), ("8.9", "xla"), ("9.0", "cudnn"),
                                                    ("10.3", "cudnn")])
def test_wide_heads_need_a_newer_gpu(monkeypatch, capability, chosen):
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    assert choose_backend("auto", "gpu", BF16, 128, 256) == chosen
    assert choose_backend("auto", "gpu", BF16, 128, 128) == "cudnn" == choose_backend("auto", "cuda", BF16, 128, 256)
    if chosen == "xla":
        with pytest.raises(UserError, match=r"train.attention: .*head_dim=256 is over 128.*9\.0 or more; use 'auto'"):
            choose_backend("cudnn", "gpu", BF16, 128, 256)


def test_auto_takes_cudnn_where_it_can():
    assert choose_backend("auto", "gpu", BF16, 128, 64) == "cudnn" == choose_backend("cudnn", "gpu", BF16, 128, 64)
    assert choose_backend("xla", "gpu", BF16, 128, 64) == "xla"
