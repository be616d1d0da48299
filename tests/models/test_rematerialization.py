"""The results that a layer keeps change memory and no number; some layers leave their loop."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.config.load import make_config
from jaxtrain.models.decoder import Compute
from jaxtrain.models.make_model import make_model
from jaxtrain.models.rematerialization import layers_at_once
from jaxtrain.sharding import products
from tests.tiers import exhaustive, slow

SHAPE = {"model": {"name": "llama", "vocab_size": 64, "num_layers": 6, "embed_dim": 32, "num_heads": 4, "head_dim": 8,
                   "num_kv_heads": 2, "mlp_dim": 96, "max_seq_len": 64}, "data": {"seq_len": 64}}
ROWS, SEQ, MLP = 16, 64, 96


@pytest.mark.parametrize(("keys", "platform", "pipeline", "want"), [
    ({}, "gpu", False, 0), ({}, "cuda:9", False, 0), ({}, "tpu", False, 1), ({}, "cpu", False, 1), ({}, "", False, 1),
    ({}, "gpu", True, 1), ({"model.num_layers": 80}, "gpu", False, 1), ({"train.remat": "attention"}, "gpu", False, 1),
    ({"train.remat": "attention_and_dots"}, "gpu", False, 0), ({"train.remat": "full:3,dots"}, "gpu", False, 1),
    ({"train.unroll": 2}, "gpu", False, 2), ({"train.unroll": 0}, "cpu", False, 0),
    ({"train.unroll": 0, "train.remat": "full"}, "cpu", False, 1),
    ({"train.unroll": 0, "train.remat": "full"}, "tpu", True, 0),
])
def test_which_layers_leave_their_loop(keys, platform, pipeline, want):
    config = make_config(SHAPE, keys)
    assert layers_at_once(config.model, config.train, platform, pipeline) == want


@functools.cache
def traced(remat, unroll=1, fp8=False):
    """The gradient of a model on one device."""
    model = make_model(make_config(SHAPE, {}).model, Compute(remat=remat, unroll=unroll), rngs=nnx.Rngs(params=0))
    graphdef, weights = nnx.split(model)

    def loss(weights):
        return jnp.square(nnx.merge(graphdef, weights)(jnp.arange(ROWS * SEQ).reshape(ROWS, SEQ) % 64)).mean()

    with products.in_precision("fp8" if fp8 else ""):
        return jax.jit(jax.value_and_grad(loss)).trace(weights), weights


@functools.cache
def compiled(remat, unroll=1):
    """The same, compiled."""
    program, weights = traced(remat, unroll)
    return program.lower().compile(), weights


@pytest.mark.parametrize(("remat", "unroll"), [
    *slow(("full:2,attention_and_dots:1,none", 1), ("attention+mlp@host", 0), ("full:2,dots", 2)),
    *exhaustive(("full", 0), ("heads+mlp", 1), ("embed@host+mlp@host", 1))])
def test_no_policy_changes_a_number(remat, unroll):
    plain, weights = compiled("none")
    program, _ = compiled(remat, unroll)
    for want, found in zip(*(jax.tree.leaves(one(weights)) for one in (plain, program)), strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", ["attention", "recurrent_states"])
def test_kept_states_change_no_gradient(remat):
    """Two layers, one with states and one with attention, in rows of two chunks."""
    config = make_config({"model": dict(name="qwen3_5", vocab_size=64, num_layers=2, embed_dim=32, num_heads=2,
                                        layer_pattern="DA", mlp_dim=48, max_seq_len=128), "data": {"seq_len": 128}}, {})

    def gradients(remat):
        graphdef, weights = nnx.split(make_model(config.model, Compute(remat=remat), rngs=nnx.Rngs(params=0)))
        tokens = jnp.arange(2 * 128).reshape(2, 128) % 64
        return jax.jit(jax.grad(lambda w: jnp.square(nnx.merge(graphdef, w)(tokens)).mean()))(weights)

    for want, found in zip(*(jax.tree.leaves(gradients(each)) for each in ("none", remat)), strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-8)


@pytest.mark.exhaustive
def test_names_and_layers_say_what_is_kept():
    full, half, mlp = (compiled(remat)[0].memory_analysis().temp_size_in_bytes for remat in (
        "full", "full:3,mlp", "mlp"))
    kept = 2 * ROWS * SEQ * MLP * 4  # of a layer: gate and up
    assert 0.7 < (mlp - full) / (6 * kept) < 1.3
    assert 0.5 < (half - full) / (3 * kept) < 1.3


def kept(program):
    """Return the number of arrays of each shape that the forward loop keeps of a layer."""
    loop = next(one for one in program.jaxpr.eqns if one.primitive.name == "scan")
    return Counter(one.aval.shape[1:] for one in loop.outvars[1:])


@pytest.mark.slow
def test_dots_keeps_what_serves_gradients_in_place_of_a_product():
    """Rotated queries and keys, and the sum after attention, instead of the products; each norm's statistics too."""
    program, _ = traced("dots")
    tokens = ROWS * SEQ
    assert kept(program) == {(ROWS, SEQ, 32): 2,  # a layer's input, and the sum
                     (ROWS, SEQ, 4, 8): 1, (ROWS, SEQ, 2, 8): 1, (tokens, 16): 1,  # queries, keys, values
                     (tokens, MLP): 2, (tokens, 1): 2}
    assert f"{program.jaxpr}".count(" rsqrt ") == 3  # of two norms in the forward loop, and the last one
    assert kept(traced("dots", fp8=True)[0])[()] == 2 * 7  # in fp8 a scale for each factor of seven products
