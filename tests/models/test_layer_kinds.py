"""The variations of published families: biases on queries, keys and values alone, and experts in some layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.models.make_model import make_model
from jaxtrain.observe import flops_per_token
from jaxtrain.train_step.report import matmul_parameters
from jaxtrain.train_step.state import Skeleton
from tests.numerics import reference


def differs(family, **keys):
    """Return the distance of the model's logits from the plain model's, where no parameter has its initial value."""
    c, b = reference.tiny(family, **keys).model, reference.batch(0, rows=4)
    model = make_model(c, rngs=nnx.Rngs(params=0))
    params, rng = Skeleton.of(model).params(), np.random.default_rng(0)
    params = jax.tree.map(lambda p: p + 0.1 * rng.standard_normal(p.shape).astype(np.float32), params)

    def both(params):
        x_BTD = reference.last_norm(c, params, reference.through(c, params, b, []))
        head = params["embed"]["table"].T if c.tied_embeddings else params["output"]["kernel"]
        return Skeleton.of(model).merge(params)(b["tokens"], b["segments"], b["positions"]), x_BTD @ head

    got, want = jax.jit(both).lower(params).compile({"xla_backend_optimization_level": 0})(params)
    counts = b["segments"] > 0  # padding sees nothing that the reference computes alike
    return float(jnp.abs(got - want)[counts].max() / jnp.abs(want[counts]).max())


@pytest.mark.exhaustive  # tests/numerics has both on meshes
@pytest.mark.parametrize(("family", "keys"), [
    ("qwen2", {}), ("alternating", dict(model__num_layers=3, model__dense_layers=1, model__experts_every=2))])
def test_logits_are_those_of_the_plain_model(family, keys):
    assert differs(family, **keys) < 1e-5


def names(run):
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
            for path, leaf in jax.tree_util.tree_flatten_with_path(run.abstract.params)[0]}


def test_qwen2_has_biases_on_queries_keys_and_values_alone():
    biases = {name: shape for name, shape in names(reference.build("qwen2")).items() if name.endswith("bias")}
    assert biases == {f"blocks/layer/attention/{name}/bias": (2, heads, 4)
                      for name, heads in (("q", 16), ("k", 8), ("v", 8))}


@pytest.mark.parametrize(("layers", "dense", "every"), [(6, 0, 2), (7, 1, 3), (4, 0, 4), (5, 2, 1)])
def test_every_nth_layer_has_experts(layers, dense, every):
    """The count is that of decoder_sparse_step of Qwen's models and interleave_moe_layer_step of Llama 4."""
    run = reference.build("mixtral", model__num_layers=layers, model__dense_layers=dense, model__experts_every=every,
                          model__mlp_dim=48)
    having = [(layer - dense + 1) % every == 0 and layer >= dense for layer in range(layers)]
    assert run.config.model.stacked_layers == dense + sum(having)
    shapes = names(run)
    mlp = sum(shape[0] for name, shape in shapes.items() if name.endswith("mlp/up/kernel"))
    routers = sum(shape[0] for name, shape in shapes.items() if name.endswith("router/kernel"))
    assert (mlp, routers) == (layers - sum(having), sum(having))


def test_dense_layers_between_those_with_experts_count_their_own_matrices():
    """2 of 4 layers have 2 of 8 experts of width 24 at work, and a router; the other 2 an MLP of width 48."""
    run = reference.build("mixtral", model__num_layers=4, model__experts_every=2, model__mlp_dim=48)
    attention, head = 32 * 4 * (8 + 8 + 8 + 8), 32 * 64
    active = 4 * attention + 2 * (2 * 3 * 32 * 24 + 32 * 8) + 2 * 3 * 32 * 48 + head
    assert matmul_parameters(run.abstract, run.layout, run.config.model) == active
    assert flops_per_token(run.config.model, 0, 16, causal=False) == 12 * 4 * 8 * 4 * 16


@pytest.mark.parametrize(("family", "keys", "message"), [
    ("mixtral", dict(model__experts_every=0), "model.experts_every: 0 "),
    ("mixtral", dict(model__num_layers=5, model__experts_every=2),
     "model.experts_every: 2 does not divide the 5 layers after model.dense_layers=0"),
    ("mixtral", dict(model__num_experts=0, model__balance_loss=0.0, model__router_z_loss=0.0, model__experts_every=2),
     "model.experts_every: the model has no experts"),
    ("llama", dict(model__experts_every=2), "model.experts_every: llama has no such key"),
    ("qwen2", dict(model__global_every=2), "model.global_every: qwen2 has no such key")])
def test_wrong_keys_are_refused(family, keys, message):
    with pytest.raises(jt.UserError, match=message):
        reference.tiny(family, **keys)


def test_stages_hold_whole_groups():
    """Four layers of which every second has experts are two groups: chunks beyond those are refused."""
    keys = dict(model__num_layers=4, model__experts_every=2, mesh__stage=2, pipeline__schedule="interleaved")
    with pytest.raises(jt.UserError, match=r"pipeline\.chunks: 3 chunks on a stage are more than there are layers"):
        reference.build("mixtral", pipeline__chunks=3, **keys)
