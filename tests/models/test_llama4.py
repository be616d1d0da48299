"""Llama 4: chunks begin with each document, and weights multiply what experts are given, in however many passes."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain.kernels.functions import swiglu
from jaxtrain.parallel.expert_options import ExpertOptions
from jaxtrain.parallel.experts import through_experts

KEYS = {"name": "llama4", "vocab_size": 24, "num_layers": 4, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2,
        "mlp_dim": 20, "expert_mlp_dim": 6, "num_experts": 4, "experts_per_token": 2, "experts_every": 2,
        "no_rope_every": 2, "window": 3, "query_temperature_len": 2, "query_temperature": 0.5, "rope_theta": 100.0,
        "max_seq_len": 16}


def test_packed_documents_are_computed_as_each_alone():
    run = jt.build(jt.make_config({"model": KEYS, "data": {"seq_len": 12}, "mesh": {"data": 1},
                                   "train": {"precision": "float32"}}), devices=jax.devices()[:1])
    model = jax.jit(run.module(run.init()).__call__)
    tokens = np.random.default_rng(0).integers(0, 24, (1, 12))
    segments, positions = np.repeat([[1, 2]], [5, 7], 1), np.concatenate([np.arange(5), np.arange(7)])[None]
    packed = model(tokens, segments, positions)
    alone = [model(part) for part in (tokens[:, :5], tokens[:, 5:])]
    np.testing.assert_allclose(packed, jnp.concatenate(alone, 1), atol=1e-5)


def test_weighted_inputs_and_their_gradients_are_right_in_several_passes():
    rng = np.random.default_rng(1)
    x, gate, up, down = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (
        (6, 4), (3, 4, 5), (3, 4, 5), (3, 5, 4)))
    experts = jnp.asarray([[0, 1], [0, 2], [0, 1], [0, 1], [2, 0], [1, 0]])
    weights = jnp.asarray(rng.uniform(0.2, 0.9, (6, 2)), jnp.float32)

    def plain(x, weights, gate, up, down):
        given = x[:, None] * weights[..., None]
        inner = swiglu(*(jnp.einsum("nkd,nkdf->nkf", given, w[experts]) for w in (gate, up)))
        return jnp.square(jnp.einsum("nkf,nkfd->nd", inner, down[experts])).sum()

    def ours(x, weights, gate, up, down):
        y = through_experts(x, experts, weights, jnp.ones_like(experts, bool), gate, up, down,
                            options=ExpertOptions(buffer=0.5), weighted_inputs=True)
        return jnp.square(y).sum()

    arrays = x, weights, gate, up, down
    wanted, found = (jax.jit(jax.value_and_grad(f, argnums=range(5)))(*arrays) for f in (plain, ours))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
