"""Published weights: adapters, parts of tensors, what is refused, and files."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.config.family import entries
from jaxtrain.hf.hf_config import model_section
from jaxtrain.hub.adapters import adapter_files
from jaxtrain.hub.weights import published_weights, safetensors_files
from jaxtrain.models.lora import without_adapters
from jaxtrain.run import abstract_model
from tests.hub import published
from tests.hub.published_models import built, loaded
from tests.numerics import plain_lora


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_adapters_of_experts_are_added_to_what_is_exported(name, tmp_path):
    """Both forms are tested: tensors that hold one expert, and tensors that hold all of them."""
    folder = published.write(tmp_path / "in", published.truth(name))
    config = {"model": model_section(folder), "data": {"seq_len": 8}, "mesh": {"data": 1},
              "lora": {"rank": 2, "alpha": 6.0, "experts": True}}
    run = jt.build(jt.make_config(config), devices=jax.devices()[:1])
    params = jax.device_put(plain_lora.at_random(jax.device_get(run.init().all_params)), jax.tree.map(
        lambda leaf: leaf.sharding, abstract_model(run)))
    (tmp_path / "out").mkdir()
    published_weights.save(params, run.config.model, tmp_path / "out", np.float32, 10**6, run.config.lora)
    plain = built(folder, data=1)
    found = published_weights.load(tmp_path / "out", plain.config.model, plain.abstract.params)
    wanted = plain_lora.merged(jax.device_get(params), 3.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), jax.device_get(found), wanted)
    assert "adapter" in params["blocks"]["layer"]["mlp"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", "glm4"])
def test_adapters_of_fused_matrices_are_added_to_what_is_exported_and_no_adapters_of_their_own(name, tmp_path):
    folder = published.write(tmp_path / "in", published.truth(name))
    run = jt.build(jt.make_config({
        "model": model_section(folder), "data": {"seq_len": 8}, "mesh": {"data": 1},
        "lora": {"rank": 2, "alpha": 6.0}}), devices=jax.devices()[:1])
    params = jax.device_put(plain_lora.at_random(jax.device_get(run.init().all_params)), jax.tree.map(
        lambda leaf: leaf.sharding, abstract_model(run)))
    (tmp_path / "out").mkdir()
    published_weights.save(params, run.config.model, tmp_path / "out", np.float32, 10**6, run.config.lora)
    plain = built(folder, data=1)
    found = published_weights.load(tmp_path / "out", plain.config.model, plain.abstract.params)
    wanted = plain_lora.merged(jax.device_get(params), 3.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), jax.device_get(found), wanted)
    with pytest.raises(jt.UserError, match="in place of several of our layers, and adapters of such cannot be written"):
        adapter_files.adapter_entries(run.config.model, flatten(params), True)


def test_any_slice_is_that_of_the_whole(tmp_path):
    """Parameters have every kind of layout: stacked, split into heads, fused, transposed, and with rotary pairs."""
    rng = np.random.default_rng(0)
    for name in ("gpt2", "deepseek_v3"):
        run = built(folder := published.write(tmp_path / name, published.truth(name)))
        tensors = safetensors_files.tensors_of(folder)
        known = {entry.ours: entry for entry in entries(run.config.model)}
        for path, leaf in flatten(run.abstract.params).items():
            read = partial(published_weights.read, tensors, known[path], leaf.shape, np.float32)
            whole = read(tuple(slice(None) for _ in leaf.shape))
            bounds = [sorted(rng.integers(0, size + 1, 2)) for size in leaf.shape]
            index = tuple(slice(*map(int, pair)) for pair in bounds)
            np.testing.assert_array_equal(read(index), whole[index], path)


@pytest.mark.slow
def test_a_host_holds_no_more_than_a_part_of_a_shard(tmp_path, monkeypatch):
    """Whatever dimension the parts are of, the array is the same, and nothing larger is read for it at once."""
    folder = published.write(tmp_path, published.truth("mixtral"))
    run = jt.build(jt.make_config({"model": model_section(folder), "data": {"seq_len": 8, "global_batch_size": 8},
                                   "mesh": {"fsdp": 2, "expert": 2, "data": 1, "tensor": 2},
                                   "lora": {"rank": 1, "quantize": "nf4"}}))
    wanted = without_adapters(abstract_model(run))
    filled, sizes = published_weights.placed, []
    monkeypatch.setattr(published_weights, "placed", lambda leaf, read: jax.make_array_from_callback(
        leaf.shape, leaf.sharding, read))
    whole = published_weights.load(folder, run.config.model, wanted)

    def placed(leaf, read):
        def measured(index):
            sizes.append((piece := read(index)).nbytes)
            return piece
        return filled(leaf, measured)

    monkeypatch.setattr(published_weights, "placed", placed)
    for part in (200, 16):  # several layers or experts, and rows of a matrix of one
        monkeypatch.setattr(published_weights, "PART", part)
        sizes.clear()
        found = published_weights.load(folder, run.config.model, wanted)
        jax.tree.map(np.testing.assert_array_equal, found, whole)
        assert jax.tree.map(lambda leaf: leaf.sharding, found) == jax.tree.map(lambda leaf: leaf.sharding, whole)
        assert max(sizes) <= part


@pytest.mark.parametrize(("changes", "reason"), [
    ({"model.num_layers": 3}, "it has no tensor model.layers.2."),
    ({"model.num_layers": 1}, "it has model.layers.1.input_layernorm.weight, for which model.name=llama has no"),
    ({"model.mlp_dim": 24}, "tensor model.layers.0.mlp.down_proj.weight has the shape [16, 20] where the model needs "
                            "[16, 24]"),
    ({"model.name": "seed_oss", "model.attention_bias": True}, "it has no tensor model.layers.0.self_attn.k_proj.bias"),
    ({"model.tied_embeddings": True}, "its lm_head.weight is not the embedding table, and model.tied_embeddings is"),
    ({"model.mtp_loss_weight": 0.1}, "no published tensor holds the parameter ahead/"),
])
def test_weights_of_another_model_are_refused_by_name(tmp_path, changes, reason):
    folder = published.write(tmp_path, published.truth("llama"))
    config = jt.make_config({"model": model_section(folder), "data": {"seq_len": 8}, "mesh": {"data": 1}}, changes)
    run = jt.build(config, devices=jax.devices()[:1])
    with pytest.raises(jt.UserError) as refusal:
        published_weights.load(folder, config.model, run.abstract.params)
    assert reason in f"{refusal.value}"


def test_a_tensor_that_is_left_over_is_refused_by_name(tmp_path):
    case = published.truth("llama")
    more = dict(case, tensors=case["tensors"] | {"model.layers.0.self_attn.sinks": [4]})
    with pytest.raises(jt.UserError, match=r"it has model.layers.0.self_attn.sinks, for which model.name=llama has no"):
        loaded(published.write(tmp_path, more))


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_names_may_lack_the_prefix_or_have_that_of_a_multimodal_model(tmp_path, prefix):
    case = published.truth("llama_head_dim")
    renamed = {name.replace("model.", prefix): shape for name, shape in case["tensors"].items()}
    loaded(published.write(tmp_path, dict(case, tensors=renamed)))


def test_a_multimodal_gemma_4_is_read_without_its_encoders_and_keys_that_no_layer_reads(tmp_path):
    case = published.truth("gemma4_small")
    text = case["config"]
    more = {f"model.language_model.layers.{layer}.self_attn.{name}": shape for layer in (3, 5) for name, shape in (
        ("k_proj.weight", [12, 16]), ("v_proj.weight", [12, 16]), ("k_norm.weight", [6]))}
    more |= {f"model.{part}.weight": [4, 4] for part in ("vision_tower.a", "embed_vision.a", "audio_tower.a",
                                                         "embed_audio.a")}
    renamed = {name.replace("model.", "model.language_model."): shape for name, shape in case["tensors"].items()}
    nested = {"model_type": "gemma4", "tie_word_embeddings": True, "text_config": text}
    loaded(published.write(tmp_path / "whole", {"config": nested, "tensors": renamed | more}))
    unknown = {"model.language_model.layers.0.self_attn.k_norm.bias": [6]}
    with pytest.raises(jt.UserError, match=r"it has model.layers.0.self_attn.k_norm.bias, for which model.name=gemma4"):
        loaded(published.write(tmp_path / "other", {"config": nested, "tensors": renamed | unknown}))


def test_what_is_published_in_float32_stays_so(tmp_path):
    """The bias that evens out expert load has steps that bfloat16 would lose."""
    run, params = loaded(published.write(tmp_path / "in", published.truth("deepseek_v3_plain")))
    params["blocks"]["layer"]["mlp"]["router"]["bias"] += 1e-3 / 7
    (tmp_path / "out").mkdir()
    published_weights.save(params, run.config.model, tmp_path / "out", jnp.dtype("bfloat16"), 10**6)
    tensors = safetensors_files.tensors_of(tmp_path / "out")
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert {name for name, kind in kinds.items() if kind == "F32"} == {
        name for name in kinds if name.endswith("e_score_correction_bias")}
    bias = next(tensors[name].view() for name in kinds if kinds[name] == "F32")
    np.testing.assert_array_equal(bias, params["blocks"]["layer"]["mlp"]["router"]["bias"][0])


@pytest.mark.parametrize(("name", "table"), [("gpt2", "transformer.wte.weight"),
                                             ("llama_head_dim", "model.embed_tokens.weight")])
def test_a_tied_head_may_be_repeated_and_not_differ(name, table, tmp_path):
    case, plain = published.truth(name), published.weight
    more = dict(case, tensors=case["tensors"] | {"lm_head.weight": case["tensors"][table]})

    def repeated(name, shape, last=0):
        if name != "lm_head.weight":
            return plain(name, shape)
        head = plain(table, shape)
        head[-1] += last
        return head

    loaded(published.write(tmp_path / "same", more, weight=repeated))
    with pytest.raises(jt.UserError, match=r"its lm_head.weight is not the embedding table"):
        loaded(published.write(tmp_path / "other", more, weight=partial(repeated, last=1)))


def test_a_tensor_is_in_the_file_that_the_index_says(tmp_path):
    run, params = loaded(published.write(tmp_path, published.truth("llama_head_dim")))
    files = published_weights.save(params, run.config.model, tmp_path, np.float32, 4000)
    (tmp_path / safetensors_files.SINGLE).unlink()
    index = json.loads((tmp_path / safetensors_files.INDEX).read_text())
    first = next(iter(index["weight_map"]))
    for change in ({first: files[-1]}, {}):
        listed = {name: file for name, file in index["weight_map"].items() if name != first} | change
        (tmp_path / safetensors_files.INDEX).write_text(json.dumps({"weight_map": listed}))
        with pytest.raises(jt.UserError, match=rf"{files[0]}: {safetensors_files.INDEX} does not list its tensor "):
            loaded(tmp_path)
