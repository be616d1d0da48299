"""Attention against one written from scratch, and who may influence whom."""

import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.kernels.attention import attend, choose_backend, query_blocks, xla_attention
from jaxtrain.sharding import mesh_context

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


def drawn(length, heads, dtype=F32):
    """Queries, keys, values and sinks, and the documents of three rows: several, one, and one with padding."""
    rng, (H, G) = np.random.default_rng(0), HEADS[heads]
    arrays = [jnp.asarray(rng.normal(size=(3, length, h, K)), dtype) for h in (H, G, G)]
    documents = np.stack([np.sort(rng.integers(1, 6, length)), np.ones(length, int),
                          np.where(np.arange(length) < length // 2, 1, 0)])
    return *arrays, jnp.asarray(rng.normal(size=H), F32), documents


def outputs_and_gradients(attention, q, k, v, sinks):
    """Return the outputs and the gradients of all arguments, in float32."""
    pull = jnp.cos(jnp.arange(q.size)).reshape(q.shape)
    both = jax.jit(lambda *given: (attention(*given), jax.grad(
        lambda *given: (pull * attention(*given)).sum(), argnums=(0, 1, 2, 3))(*given)))(q, k, v, sinks)
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(both)]


@pytest.mark.parametrize(("length", "blocks", "heads", "packed", "window", "soft_cap"), [
    (131, 2, "mha", False, 0, 0.0), (259, 4, "gqa", True, 0, 5.0), (391, 6, "mqa", True, 100, 0.0)])
def test_blocks_of_queries_give_the_numbers_of_all_scores_at_once(length, blocks, heads, packed, window, soft_cap):
    *arrays, documents = drawn(length, heads)
    assert len(query_blocks.ends(length, window)) == blocks
    names = ("output", *(f"gradient of {name}" for name in ("q", "k", "v", "sinks")))
    found, whole = (outputs_and_gradients(lambda q, k, v, sinks, f=f: f(
        q, k, v, documents if packed else None, window, soft_cap, sinks, None), *arrays)
        for f in (query_blocks.attention, xla_attention.attention))
    for name, got, want in zip(names, found, whole, strict=True):
        off = np.abs(got - want).max() / np.abs(want).max()
        assert off < 2.4e-6, f"{name} is off by {off:.1e} of its largest element"


def test_blocks_lose_no_more_in_bfloat16_than_by_rounding_each_once():
    """A key's gradient is a sum over blocks, which is in float32: by their root mean squares, against float32."""
    *arrays, sinks, _ = drawn(512, "gqa", BF16)

    def errors(f):
        found = outputs_and_gradients(lambda q, k, v, sinks: f(q, k, v, None, 0, 0.0, sinks, None), *arrays, sinks)
        return np.array([np.sqrt(np.square(got - want).mean()) for got, want in zip(found, exact, strict=True)])

    exact = outputs_and_gradients(lambda q, k, v, sinks: xla_attention.attention(
        q, k, v, None, 0, 0.0, sinks, None), *(x.astype(F32) for x in arrays), sinks)
    ratios = errors(query_blocks.attention) / errors(xla_attention.attention)
    assert ratios.max() < 1.14, ratios


def test_blocks_on_a_mesh_give_the_numbers_of_one_device():
    *arrays, _, documents = drawn(130, "mha")
    arrays = [jnp.concatenate([x, x[:1]]) for x in arrays]
    documents = jnp.asarray(np.concatenate([documents, documents[:1]]))

    def both(q, k, v, documents):
        return attend(q, k, v, segments_BT=documents, backend="xla"), jax.grad(
            lambda q, k, v: jnp.sin(attend(q, k, v, segments_BT=documents, backend="xla")).sum(),
            argnums=(0, 1, 2))(q, k, v)

    alone, mesh = jax.jit(both)(*arrays, documents), jt.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    with mesh_context.use(mesh, jt.rules("fsdp_tp"), "cpu"):
        spread = [jax.device_put(x, jax.NamedSharding(mesh, jax.P("fsdp", None, "tensor"))) for x in arrays]
        split = jax.jit(both)(*spread, jax.device_put(documents, jax.NamedSharding(mesh, jax.P("fsdp"))))
    for got, want in zip(jax.tree.leaves(split), jax.tree.leaves(alone), strict=True):
        assert len(got.sharding.device_set) == 4 and got.addressable_shards[0].data.shape == (2, 130, 2, K)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_blocks_are_bounded_in_number_and_not_tiny():
    ends = {T: query_blocks.ends(T) for T in (1, 127, 128, 256, 2047, 2048, 2**20)}
    assert {T: len(found) for T, found in ends.items()} == {
        1: 1, 127: 1, 128: 2, 256: 4, 2047: 4, 2048: 8, 2**20: 8}
    assert all(found[-1] == T and found == sorted(found) for T, found in ends.items())
    assert len(query_blocks.ends(2**20, 5)) == 8 and query_blocks.ends(63, 5) == [63]


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
