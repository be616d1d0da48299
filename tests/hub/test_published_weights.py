"""Published weights: the logits and gradients that transformers computes, and the same bytes on the way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config.published import model_section
from jaxtrain.hub import published_weights, safetensors_files
from jaxtrain.sharding import rules as sharding
from tests.hub import published

SLOW = pytest.mark.slow
QUICK = ("llama_head_dim",)
ALL = [pytest.param(name, marks=() if name in QUICK else SLOW) for name in published.CASES]


def built(folder, **mesh) -> jt.Run:
    config = {"model": model_section(folder), "data": {"seq_len": 8, "global_batch_size": 8},
              "mesh": mesh or {"data": 1}}
    devices = jax.devices()[:int(np.prod([*mesh.values()]))]
    return jt.build(jt.make_config(config), devices=devices)


def loaded(folder, **mesh):
    run = built(folder, **mesh)
    return run, published_weights.load(folder, run.config.model, run.abstract.params)


@pytest.mark.parametrize("name", ALL)
def test_logits_and_all_gradients_are_those_of_transformers(name, tmp_path):
    case = published.truth()[name]
    run, params = loaded(published.write(tmp_path / "in", case))
    tokens = jnp.asarray(published.TOKENS)

    @jax.jit
    def both(params):
        def loss(params):
            logits = run.model.merge(params)(tokens)
            named = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)
            return -named.mean(), logits
        return jax.value_and_grad(loss, has_aux=True)(params)

    with sharding.use(run.mesh, run.rules):
        (loss, logits), gradients = both(params)
    wanted = np.asarray(case["logits"]).reshape(logits.shape)
    assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert float(loss) == pytest.approx(case["loss"], rel=1e-5)
    (tmp_path / "gradients").mkdir()
    published_weights.save(gradients, run.config.model, tmp_path / "gradients", np.float32, 10**6)
    found = {name: published.projections(name, tensor.view())
             for name, tensor in safetensors_files.tensors_of(tmp_path / "gradients").items()}
    assert found.keys() - case["gradients"].keys() <= {n for n in found if n.endswith("e_score_correction_bias")}
    for name, wanted in case["gradients"].items():  # a projection is about as large as the norm
        assert np.abs(np.subtract(found[name], wanted)).max() <= 1e-4 * max(wanted[0], 1e-6), name


@pytest.mark.parametrize("name", ALL)
def test_what_is_exported_has_the_same_bytes_from_any_mesh(name, tmp_path):
    folder = published.write(tmp_path / "in", published.truth()[name])
    out = tmp_path / "out"
    out.mkdir()
    run, params = loaded(folder, fsdp=4, tensor=2)
    assert all(leaf.sharding == wanted.sharding for leaf, wanted in
               zip(jax.tree.leaves(params), jax.tree.leaves(run.abstract.params), strict=True))
    published_weights.save(params, run.config.model, out, np.float32, 4000)
    before, after = map(safetensors_files.tensors_of, (folder, out))
    assert len(list(out.glob("*.safetensors"))) > 1
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert np.array_equal(tensor.view(), after[name].view()), name
