"""PiSSA: adapters begin with the values that PEFT gives them, and the model begins as the one that is adapted."""

import json
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.hf.hf_config import model_section
from jaxtrain.hub import trained_model
from jaxtrain.hub.adapters import adapter_files, adapter_merge, principal_components
from jaxtrain.hub.weights import published_weights, safetensors_files
from jaxtrain.models import lora
from jaxtrain.run import abstract_model
from tests.hub import published
from tests.hub.adapters import published_adapters
from tests.numerics import plain_lora


def built(folder, train__frozen_dtype="", train__trainable=(), **keys):
    base, adapters = published_adapters.PRINCIPAL
    published.write(folder, published.truth(base))
    config = {"model": model_section(folder), "data": {"seq_len": 8, "global_batch_size": 8},
              "train": {"init_from": f"{folder}", "frozen_dtype": train__frozen_dtype,
                                                          "trainable": [*train__trainable]},
              "mesh": {"fsdp": 4, "tensor": 2},
              "lora": {"rank": adapters["r"], "alpha": float(adapters["lora_alpha"]), "init": "pissa", **keys}}
    return jt.build(jt.make_config(config))


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("principal") / "base"
    run = built(folder)
    return folder, run, run.init()


def test_they_begin_as_pefts(begun, tmp_path):
    _, run, state = begun
    params = jax.device_get(state.all_params)
    assert {path.rpartition("/")[2] for path in flatten(state.params)} == {"down", "up"}
    products = flatten(plain_lora.merged(_without_starts(params), lora.scale(run.config.lora)))
    plain = flatten(lora.without_adapters(params))
    found = published_of(run, [products[path] - x for path, x in plain.items()], tmp_path)
    truth = json.loads(published_adapters.TRUTH.read_text())["principal"]
    assert len(truth) == 14
    for name, wanted in truth.items():
        matrix = found[f"{name}.weight"]
        along = published.weight(name, (matrix.shape[1],))
        np.testing.assert_allclose(matrix @ along, wanted, atol=1e-5 * np.abs(wanted).max(), err_msg=name)


def published_of(run, arrays, folder):
    """The tensors, by their published names, of a model with these arrays as its parameters."""
    abstract = lora.without_adapters(abstract_model(run))
    leaves = [jax.device_put(x, leaf.sharding) for x, leaf in zip(arrays, jax.tree.leaves(abstract), strict=True)]
    published_weights.save(jax.tree.unflatten(jax.tree.structure(abstract), leaves), run.config.model, folder,
                           np.float32, 10**9)
    return tensors(folder)


def tensors(folder):
    return {name: tensor.view() for name, tensor in safetensors_files.tensors_of(folder).items()}


def _without_starts(tree):
    return {key: _without_starts(x) if isinstance(x, dict) else x for key, x in tree.items() if key not in lora.STARTS}


def test_the_model_begins_as_the_one_that_is_adapted(begun):
    folder, run, state = begun
    plain, of_plain = jt.load_model(folder, {"mesh.data": 8})
    found, wanted = (jax.jit(lambda x, each=each, of=of: each.module(of)(x))(jnp.asarray(published.TOKENS))
                     for each, of in ((run, state), (plain, of_plain)))
    np.testing.assert_array_equal(found, wanted)


def test_what_is_frozen_may_rest_in_fewer_bits(tmp_path):
    """Then what is trained begins with the same rounded numbers, so that the difference is 0."""
    run = built(tmp_path / "base", train__frozen_dtype="bfloat16")
    state = run.init()
    for path, start in flatten(state.frozen).items():
        if path.endswith(lora.STARTS):
            own = flatten(state.params)[path.replace("start_", "")]
            assert start.dtype == jnp.bfloat16 and own.dtype == jnp.float32 and np.array_equal(own, start)


def moved(run, state):
    """The parameters, with adapters as after some steps."""
    rng = np.random.default_rng(0)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(x + rng.normal(0, 0.02, x.shape).astype(np.float32), x.sharding)
        if lora.is_adapter(name := jax.tree_util.keystr(path, simple=True, separator="/"))
        and not lora.is_start(name) else x, state.all_params)


def test_what_is_exported_is_plain_lora_of_twice_the_rank(begun, tmp_path):
    base, run, state = begun
    params = moved(run, state)
    for name in ("adapters", "whole"):
        (tmp_path / name).mkdir()
    adapter_files.save(params, run.config.model, run.config.lora, tmp_path / "adapters", f"{base}", np.dtype("float32"))
    said = json.loads((tmp_path / "adapters" / adapter_files.CONFIG).read_text())
    assert (said["r"], said["lora_alpha"]) == (6, 12)
    adapter_merge.merge(base, [(tmp_path / "adapters", 1.0)], tmp_path / "merged", "float32")
    published_weights.save(params, run.config.model, tmp_path / "whole", np.float32, 10**9, run.config.lora)
    wanted = plain_lora.merged(jax.device_get(params), lora.scale(run.config.lora))
    others = [tensors(tmp_path / name) for name in ("merged", "whole")]
    for name, x in published_of(run, jax.tree.leaves(wanted), tmp_path).items():
        for other in others:
            np.testing.assert_allclose(other[name], x, atol=1e-6, err_msg=name)


def test_low_ranks_of_large_matrices_are_exact():
    weight = np.random.default_rng(0).standard_normal((300, 420)).astype(np.float32)
    down, up = principal_components.factors(weight, 8, 0.5)
    left, values, right = np.linalg.svd(weight.astype(np.float64))
    np.testing.assert_allclose(0.5 * down @ up, left[:, :8] * values[:8] @ right[:8], atol=1e-5)
    np.testing.assert_allclose(np.square(down).sum(0), values[:8] / 0.5, rtol=1e-5)


@pytest.mark.parametrize("weight", [np.zeros((300, 300)), np.outer(np.ones(300), np.ones(400)), np.eye(300)])
def test_degenerate_matrices_are_factorized(weight):
    down, up = principal_components.factors(weight, 4, 1.0)
    error = np.linalg.norm(weight - down @ up)
    assert error == pytest.approx(np.sqrt(np.square(np.linalg.svd(weight)[1][4:]).sum()), abs=1e-4)


def test_a_run_is_read_without_what_it_began_with(begun):
    """As by export, generate and evaluate."""
    _, run, _ = begun
    found = trained_model.model_of(asdict(run.config), {}, "data")
    assert found.config.lora == run.config.lora and not found.config.train.init_from


def test_what_adapters_begin_with_is_never_trained(tmp_path):
    run = built(tmp_path / "base", train__trainable=["blocks/*", "embed/*"])
    assert not [path for path in flatten(run.abstract.params) if path.endswith(lora.STARTS)]
    assert "embed/table" in flatten(run.abstract.params)


def test_a_matrix_in_use_begins_as_the_weight(begun):
    """As DeepSeek's latents use it in generation."""
    _, run, state = begun
    layer = run.module(state, jnp.bfloat16).blocks.layer.attention.out
    one = jax.tree.map(lambda x: x[0], nnx.state(layer))
    nnx.update(layer, one)
    np.testing.assert_array_equal(layer.matrix(jnp.bfloat16), layer.kernel.get_value())


@pytest.mark.parametrize(("keys", "message"), [
    ({"rank": 40}, "lora.rank: 40 is more than the "), ({"quantize": "nf4"}, "lora.init: pissa is not for adapters "),
])
def test_mistakes(tmp_path, keys, message):
    with pytest.raises(jt.UserError) as refusal:
        built(tmp_path / "base", **keys).init()
    assert f"{refusal.value}".startswith(message)


def test_as_plain_keeps_the_scale_of_rank_stabilized_ones():
    c = LoraConfig(rank=4, alpha=3.0, rank_stabilized=True, init="pissa")
    assert lora.scale(lora.as_plain({}, c)[1]) == pytest.approx(lora.scale(c))
