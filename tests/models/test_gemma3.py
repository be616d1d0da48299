"""Gemma 3 on meshes that its alternating layers could trouble: the numbers of the plain model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.models.gemma3 import Gemma3Config
from jaxtrain.models.make_model import make_model
from jaxtrain.models.sandwich_layers import scaled_embed
from jaxtrain.observe import flops_per_token
from tests.composition import fuzz

# Every second of five layers is global. Two stages hold layers 0 to 2, and 3, 4 and an empty slot: both kinds of layer.
# Layer 3 is global, and layer 0, in the same slot of the other stage, is local.
CASES = [
    {"mesh.stage": 2, "mesh.tensor": 2, "mesh.fsdp": 2, "pipeline.schedule": "zb_h1", "train.remat": "attention"},
    {"mesh.context": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.context_strategy": "ring", "train.remat": "full"},
    {"mesh.context": 2, "mesh.tensor": 4, "mesh.context_strategy": "ulysses", "train.accumulation": 2},
    {"mesh.stage": 2, "mesh.context": 2, "mesh.data": 2, "pipeline.schedule": "zb_v", "optimizer.zero_stage": 2},
    {"mesh.tensor": 4, "mesh.fsdp": 2, "model.num_kv_heads": 1, "mesh.overrides.kv_heads": "none",
     "mesh.overrides.act_kv_heads": "none"},  # as configs/gemma3_1b.py says
]


@pytest.mark.parametrize("keys", [
    pytest.param(case, marks=pytest.mark.exhaustive if i != 3 else pytest.mark.slow)
    for i, case in enumerate(CASES)], ids=str)
def test_any_mesh_gives_the_numbers_of_the_plain_model(keys):
    fuzz.check({f"mesh.{axis}": 1 for axis in fuzz.AXES} | {
        "family": "gemma3", "packing": True, "data.global_batch_size": fuzz.ROWS, "data.seq_len": fuzz.SEQ,
        "model.max_seq_len": fuzz.SEQ, "model.num_layers": 5, "train.precision": "float32"} | keys)


TINY = dict(vocab_size=32, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=1, mlp_dim=32, window=3)


def logits(tokens, **fields):
    c = Gemma3Config(**TINY, **fields)
    made = jax.jit(lambda tokens: make_model(c, rngs=nnx.Rngs(params=0))(tokens)).lower(tokens)
    return np.asarray(made.compile({"xla_backend_optimization_level": 0})(tokens))


@pytest.mark.slow
def test_a_global_layer_sees_what_local_layers_do_not():
    tokens = np.arange(12)[None] % 32
    other = tokens.copy()
    other[0, 0] = 31
    near = logits(tokens, global_every=3), logits(other, global_every=3)  # two local layers: four tokens back
    np.testing.assert_array_equal(near[0][0, 5:], near[1][0, 5:])
    assert np.abs(near[0][0, 4] - near[1][0, 4]).max() > 0
    far = logits(tokens, global_every=2), logits(other, global_every=2)
    assert (np.abs(far[0] - far[1])[0].max(-1) > 0).all()


@pytest.mark.parametrize("dtype, factor", [("float32", 1152**0.5), ("bfloat16", 34.0)])
def test_embeddings_are_multiplied_by_a_factor_of_their_own_dtype(dtype, factor):
    """The square root of 1152 is 33.94, which bfloat16 rounds to 34; the products of a factor in float32 differ."""
    embed = scaled_embed(8, 1152, rngs=nnx.Rngs(params=0))
    table = embed.table[...].astype(dtype)
    embed.table = nnx.Param(table, **embed.table.get_metadata())
    got, want = embed(jnp.arange(8)[None])[0], table * jnp.asarray(factor, dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)


def test_windows_count_in_flops():
    c = Gemma3Config(num_layers=26, num_heads=4, num_kv_heads=1, head_dim=256, embed_dim=1152, window=512)
    assert c.windows == {512: 22, 0: 4}
    keys = 22 * 512 + 4 * 4096
    assert flops_per_token(c, 0, 4096, causal=False) == 6 * 4 * 2 * 256 * keys


@pytest.mark.parametrize("field", ["window", "global_every"])
def test_local_layers_need_a_window(field):
    with pytest.raises(jt.UserError, match=f"model.{field}"):
        Gemma3Config(**{field: 0})
