"""Dropout of adapters and noise on embeddings, against plain formulas; the numbers are hashes, computed here again."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.models import layer_place, training_noise
from jaxtrain.models.layers import Linear
from jaxtrain.models.lora import Adapter
from jaxtrain.sharding import mesh_context

SEED, STEP, ROWS, LENGTH, WIDTH = 5, 9, 4, 6, 8
M = 2**32 - 1


def mixed(x: int) -> int:
    """MurmurHash3's finalizer, in Python's integers."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & M
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & M
    return x ^ (x >> 16)


def bits_of(row: int, place: int, seed: int = SEED, step: int = STEP) -> int:
    return mixed((mixed((mixed(mixed(seed + 1) ^ step) + row) & M) + place) & M)


def uniform(token: int, name: str, feature: int) -> float:
    own = mixed((token + zlib.crc32(name.encode())) & M)
    return (mixed(feature * 0x9E3779B9 & M ^ own) >> 8) / 2**24


def batch(alpha: float = 0.0, rows: int = ROWS):
    made = {"tokens": jnp.zeros((rows, LENGTH), jnp.int32)}
    return training_noise.added_to(made, SEED, jnp.int32(STEP), alpha, WIDTH)


def test_bits_depend_on_seed_step_and_place():
    want = [[bits_of(row, place) for place in range(LENGTH)] for row in range(ROWS)]
    np.testing.assert_array_equal(batch()[training_noise.BITS], want)
    assert len(set(np.ravel(want))) == ROWS * LENGTH
    np.testing.assert_array_equal(batch(rows=2)[training_noise.BITS], want[:2], "other rows count")


def test_noise_on_embeddings_is_neftunes():
    alpha, x = 5.0, jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32)
    noise = [[[2 * uniform(bits_of(row, place), "embed", d) - 1 for d in range(WIDTH)] for place in range(LENGTH)]
             for row in range(ROWS)]
    want = np.asarray(x) + np.array(noise) * alpha / np.sqrt(LENGTH * WIDTH)
    np.testing.assert_allclose(training_noise.on_embeddings(x, batch(alpha)), want, atol=1e-6)
    for plain in (batch(), {"tokens": x}):
        assert training_noise.on_embeddings(x, plain) is x


@pytest.mark.parametrize("layer", [0, 3])
def test_an_adapter_has_dropout_of_its_input(layer):
    """The loss and gradients of x W + scale x' A B, where x' is x with zeros in places and more elsewhere."""
    rng, rate = np.random.default_rng(1), 0.4
    linear = Linear("btd,df->btf", (WIDTH, 5), ("embed", "mlp"), ("batch", "seq", "act_mlp"),
                    rngs=nnx.Rngs(params=0))
    linear.adapter = Adapter(linear, "mlp/up", LoraConfig(rank=2, alpha=6.0, dropout=rate), rngs=nnx.Rngs(params=1))
    linear.adapter.up.set_value(jnp.asarray(rng.normal(size=(2, 5)), jnp.float32))
    x, target = (jnp.asarray(rng.normal(size=shape), jnp.float32)
                 for shape in ((ROWS, LENGTH, WIDTH), (ROWS, LENGTH, 5)))
    graphdef, params = nnx.split(linear)

    def loss(params, given):
        with training_noise.of(given), layer_place.in_stack(layer, layer):
            return jnp.square(nnx.merge(graphdef, params)(x) - target).sum()

    kept = np.array([[[uniform(bits_of(row, place) ^ mixed(layer + 1), "mlp/up", d) >= rate for d in range(WIDTH)]
                      for place in range(LENGTH)] for row in range(ROWS)])
    assert 0.5 < kept.mean() < 0.7

    def plain(params, mask):
        adapter, high = params["adapter"], jax.lax.Precision.HIGHEST
        y = jnp.matmul(jnp.matmul(x * mask, adapter["down"][...], precision=high), adapter["up"][...], precision=high)
        return jnp.square(jnp.matmul(x, params["kernel"][...], precision=high) + 3.0 * y - target).sum()

    for given, mask in ((batch(), kept / (1 - rate)), ({}, np.ones_like(x))):
        (got, gradient), (want, wanted) = (jax.value_and_grad(f)(params, beside)
                                           for f, beside in ((loss, given), (plain, mask)))
        assert float(got) == pytest.approx(float(want), rel=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-4), gradient, wanted)


def test_layers_and_parameters_have_masks_of_their_own():
    x = jnp.ones((ROWS, LENGTH, 4096))

    def mask(name, layer):
        with training_noise.of(batch()), layer_place.in_stack(layer, layer):
            return np.asarray(training_noise.dropout(x, 0.25, name)) > 0

    one, *others = (mask(name, layer) for name, layer in (("q", 0), ("k", 0), ("q", 1)))
    assert one.mean() == pytest.approx(0.75, abs=0.005)
    for other in others:  # neither equal nor related
        assert (one & other).mean() == pytest.approx(0.75**2, abs=0.007)
    assert (one[:, 1:] & one[:, :-1]).mean() == pytest.approx(0.75**2, abs=0.007)
    assert (one[1:] & one[:-1]).mean() == pytest.approx(0.75**2, abs=0.007)


def test_noise_reaches_inputs_of_layers_through_embeddings_alone():
    """As in transformers, which adds it to what the embedding layer returns."""
    config = jt.make_config({"model": dict(
        name="gemma4", num_layers=2, embed_dim=WIDTH, num_heads=2, num_kv_heads=2, head_dim=4, mlp_dim=8, vocab_size=16,
        max_seq_len=LENGTH, layer_pattern="LG", per_layer_dim=4), "data": {"seq_len": LENGTH}})
    run = jt.build(config, devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), run.abstract.all_params)
    given = batch(5.0) | {"positions": jnp.zeros((ROWS, LENGTH), jnp.int32)}
    with mesh_context.use(run.mesh, run.sharded.rules):
        both, model = run.objective.begin(params, given), run.model.merge(params)
        embeddings = training_noise.on_embeddings(model.embed(given["tokens"]), given)
        np.testing.assert_array_equal(both[..., :WIDTH], embeddings)
        np.testing.assert_array_equal(both[..., WIDTH:], model.inputs(given["tokens"], embeddings))
