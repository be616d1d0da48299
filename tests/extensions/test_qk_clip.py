"""QK-clip: each head's largest attention logit on any mesh, and what becomes of weights, as in plain formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.kernels.attention import tiles
from jaxtrain.parallel.largest_logits import largest_logits
from tests.numerics import reference
from tests.tiers import exhaustive, slow

RATE = 0.1
PLAIN = dict(optimizer__name="sgd", optimizer__learning_rate=RATE, optimizer__warmup_steps=0,
             optimizer__schedule="constant", optimizer__weight_decay=0.0)


def plain_largest(q, k, segments, window):
    """[B, H]: all scores at once, in float64."""
    q, k = np.float64(q), np.repeat(np.float64(k), q.shape[2] // k.shape[2], 2)
    i, j = np.indices((q.shape[1],) * 2)
    mask = (j <= i) & ((i - j < window) | (window == 0)) & (segments[:, :, None] == segments[:, None]) & (
        segments[:, :, None] > 0)
    return np.where(mask[:, None], np.einsum("bihk,bjhk->bhij", q, k) / np.sqrt(q.shape[-1]), -np.inf).max((2, 3))


@pytest.mark.parametrize("window", [0, 3])
def test_tiles_find_the_largest_of_all_scores(window, monkeypatch):
    """Sixteen tiles of 4 x 4, of which some are not visited; padding has the largest scores, and does not count."""
    monkeypatch.setattr(tiles, "SCORES", 2 * 4 * 16)
    rng = np.random.default_rng(0)
    q, k = (np.float32(rng.normal(size=(2, 16, heads, 8))) for heads in (4, 2))
    segments = np.array([[1] * 5 + [2] * 7 + [0] * 4, [1] * 3 + [2] * 13])
    q[segments == 0] *= 100
    found = jax.jit(largest_logits, static_argnums=3)(q, k, segments, window)
    np.testing.assert_allclose(found[:, 0], plain_largest(q, k, segments, window), rtol=1e-5)


@functools.cache
def initial(family):
    """Parameters whose logits are as large as those of training, with biases where there are any."""
    rng = np.random.default_rng(3)

    def one(path, x):
        name = jax.tree_util.keystr(path)
        x = x + np.float32(rng.normal(size=x.shape, scale=0.3)) if name.endswith(("q']['bias']", "k']['bias']")) else x
        return x * 8 if name.endswith(("q']['kernel']", "k']['kernel']")) else x
    return jax.tree_util.tree_map_with_path(one, reference.initial(family))


@functools.cache
def truth(family):
    """One step: its loss, the gradient's norm, each head's largest logit by layer, and parameters after plain SGD.
    """
    c, batch, logits = reference.tiny(family), reference.batch(0), []

    def attention(q, k, v, segments, window=0, sinks=None, own=reference.attention):
        logits.append(plain_largest(*(np.asarray(x) for x in (q, k)), segments, window).max(0))
        return own(q, k, v, segments, window, sinks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "attention", attention)
        reference.through(c.model, initial(family), batch, [])
    loss, grads = jax.jit(jax.value_and_grad(lambda p: reference.loss(c.model, p, batch)))(initial(family))
    if c.model.experts.bias_rate:  # the load of experts, which is no gradient
        reference.router(c.model, grads)["bias"] *= 0
    norm = float(reference.norm_of(grads))
    moved = jax.tree.map(lambda p, g: p - RATE * min(1, c.optimizer.clip_norm / norm) * g, initial(family), grads)
    return float(loss), norm, np.stack(logits), jax.device_get(moved)


def clipped(family, limit, params, logits):
    """Weights after QK-clip, layer by layer and head by head."""
    c, params = reference.tiny(family).model, jax.tree.map(np.array, params)
    for number, heads in enumerate(logits):
        first = number < c.experts.dense_layers
        a = params["first_blocks" if first else "blocks"]["layer"]["attention"]
        layer = number if first else number - c.experts.dense_layers
        gamma = np.minimum(1, limit / np.where(heads > 0, heads, 1e-9))
        if c.latent_attention:
            for h, g in enumerate(gamma):
                a["q"]["kernel"][layer, :, h, :c.head_dim] *= np.sqrt(g)
                a["q"]["kernel"][layer, :, h, c.head_dim:] *= g
                a["kv"]["kernel"][layer, :, h, :c.head_dim] *= np.sqrt(g)
            continue
        repeats = c.num_heads // c.num_kv_heads
        for group in range(c.num_kv_heads):
            mine = range(group * repeats, (group + 1) * repeats)
            of_key = np.sqrt(max(gamma[h] for h in mine))  # 1 if one of them needs no clip
            for name, index, factor in ("k", group, of_key), *(("q", h, gamma[h] / of_key) for h in mine):
                a[name]["kernel"][layer, :, index] *= factor
                if "bias" in a[name]:
                    a[name]["bias"][layer, index] *= factor
    return params


def after_a_step(family, limit, **keys):
    run = reference.build(family, optimizer__qk_clip=limit, **PLAIN, **keys)
    state = reference.start_from(run, initial(family))
    return jax.device_get(reference.compiled(run)(state, run.sharded.place(reference.batch(0))))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("family", "keys"), [
    ("llama", dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, train__accumulation=2, train__remat="full")),
    *slow(
        ("llama", dict(mesh__context=2, mesh__stage=2, mesh__tensor=2, model__num_layers=2)),
        ("gpt2", dict(mesh__fsdp=2, mesh__context=2, mesh__tensor=2, train__remat="dots")),
        ("gpt2", dict(mesh__data=2, mesh__stage=2, mesh__fsdp=2, pipeline__schedule="zb_h1", train__accumulation=2)),
        ("deepseek_v3", dict(mesh__fsdp=2, mesh__expert=2, mesh__tensor=2)),
        ("deepseek_v3", dict(mesh__stage=2, mesh__data=2, mesh__tensor=2, optimizer__zero_stage=1)),
        ("gpt_oss", dict(mesh__context=2, mesh__data=2, mesh__tensor=2, train__accumulation=4)),
        ("qwen2", dict(mesh__stage=2, mesh__context=2, mesh__fsdp=2)),
    ), *exhaustive(
        ("llama", {}), ("qwen2", dict(train__unroll=0)),
        ("gpt2", dict(mesh__context=4, mesh__data=2, mesh__context_strategy="gather")),
        ("llama", dict(mesh__data=8, optimizer__zero_stage=3)),
        ("llama", dict(mesh__stage=2, mesh__tensor=2, pipeline__schedule="interleaved", model__num_layers=2)),
    )])
def test_a_step_is_the_plain_one_with_clipped_heads(family, keys):
    loss, norm, logits, moved = truth(family)
    limit = float(np.median(logits))  # half of the heads are clipped
    state, metrics = after_a_step(family, limit, **keys)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=2e-5)
    assert float(metrics["max_attention_logit"]) == pytest.approx(logits.max(), rel=1e-5)
    measured = state.extras["attention_logits"]
    np.testing.assert_allclose(np.concatenate([measured[key] for key in ("first_blocks", "blocks") if key in measured]),
                               logits, rtol=2e-5)
    want = clipped(family, limit, moved, logits)
    got = state.params
    for tree in (got, want):
        if reference.tiny(family).model.experts.bias_rate:
            reference.router(reference.tiny(family).model, tree).pop("bias")
    error, leaf = reference.worst(got, want)
    assert error < 2e-5, f"{leaf} is off by {error:.1e}"


def test_after_the_clip_the_same_batch_has_logits_up_to_the_limit():
    """With a learning rate of next to nothing; in layers after the first, inputs have changed."""
    *_, logits, _ = truth("llama")
    limit = float(np.median(logits))
    run = reference.build("llama", optimizer__qk_clip=limit, **PLAIN | {"optimizer__learning_rate": 1e-12})
    step, batch = reference.compiled(run), run.sharded.place(reference.batch(0))
    state, _ = step(reference.start_from(run, initial("llama")), batch)
    state, _ = step(state, batch)
    first = np.asarray(state.extras["attention_logits"]["blocks"][0])
    np.testing.assert_allclose(first, np.minimum(limit, logits[0]), rtol=1e-5)


@pytest.mark.parametrize(("family", "keys", "reason"), [
    ("qwen3", {}, "queries and keys are normalised"),
    ("gemma3", {}, "queries and keys are normalised"),
    ("llama", {"lora__rank": 2}, "adapters (lora.rank) are trained"),
    ("llama", {"train__freeze": ["*attention/k*"]}, "queries or keys of blocks/layer/attention are frozen"),
    ("deepseek_v3", {"model__mtp_loss_weight": 0.3}, "ahead/block/attention is attention outside of"),
])
def test_what_cannot_be_clipped_is_refused(family, keys, reason):
    with pytest.raises(UserError, match=r"optimizer\.qk_clip") as refused:
        reference.build(family, optimizer__qk_clip=100.0, **keys)
    assert reason in str(refused.value)


def built(model, limit):
    return jt.build(jt.make_config({"model": dict(vocab_size=64, num_layers=2, embed_dim=32, max_seq_len=16) | model,
                                    "data": dict(seq_len=16, global_batch_size=4), "mesh": dict(data=1),
                                    "optimizer": dict(qk_clip=limit)}), devices=jax.devices()[:1])


def test_models_that_bound_logits_otherwise_or_have_none():
    for model, limit, reason in (
            (dict(name="olmo", clip_qkv=3.0, num_heads=4), 100.0, "clipped already"),
            (dict(name="gemma2", num_heads=4, head_dim=8, attention_cap=50.0), 100.0, "caps logits at 50"),
            (dict(name="mamba2", state_heads=4, state_head_dim=16), 100.0, "no layer of the model has attention")):
        with pytest.raises(UserError, match=reason):
            built(model, limit)


def test_with_a_soft_cap_the_limit_is_that_of_capped_logits():
    """The limit is 20 below a cap of 50: logits shrink to what the cap makes 20."""
    run = built(dict(name="gemma2", num_heads=4, head_dim=8, attention_cap=50.0), 20.0)
    clip = next(extension for extension in run.extensions if type(extension).__name__ == "QKClip")
    logits = jnp.array([[10.0, 30.0, 200.0, 21.0]])
    params = {"blocks": {"layer": {"attention": {"q": {"kernel": jnp.ones((1, 3, 4, 8))},
                                                 "k": {"kernel": jnp.ones((1, 3, 4, 8))}}}}}
    own = clip._clipped(params, {"blocks": logits}, jnp.bool_(True))["blocks"]["layer"]["attention"]
    after = logits[0] * own["q"]["kernel"][0, 0, :, 0] * own["k"]["kernel"][0, 0, :, 0]
    np.testing.assert_allclose(50 * np.tanh(after / 50), np.minimum(20, 50 * np.tanh(logits[0] / 50)), rtol=1e-5)
