"""Adapters in PEFT's format: the logits that PEFT computes, the same tensors on the way back, and merged weights."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.commands import adapters
from jaxtrain.config.family import entries
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.hf import hf_config
from jaxtrain.hub import initial_params, trained_model
from jaxtrain.hub.adapters import adapter_files, adapter_merge
from jaxtrain.hub.weights import published_weights, safetensors_files
from jaxtrain.models import lora
from jaxtrain.run import abstract_model
from jaxtrain.sharding import mesh_context
from jaxtrain.train_step import partition
from tests.hub import multi_token, published
from tests.hub.adapters import published_adapters
from tests.hub.adapters.published_adapters import loaded, truth, written
from tests.numerics import plain_lora, reference

SLOW = pytest.mark.slow
QUICK = ("latents",)
ALL = [pytest.param(name, marks=() if name in QUICK else SLOW) for name in published_adapters.CASES]
# What these compute, they do with DoRA too.
COMPUTED = [pytest.param(each.values[0], marks=pytest.mark.exhaustive) if each.values[0] in ("llama", "gpt2") else each
            for each in ALL]


def logits_of(run, params) -> np.ndarray:
    with mesh_context.use(run.mesh, run.sharded.rules):
        return np.asarray(jax.jit(lambda params: run.model.merge(params)(jnp.asarray(published.TOKENS)))(params))


def check(logits, name):
    wanted = np.asarray(truth()[name]["logits"]).reshape(logits.shape)
    assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("name", COMPUTED)
def test_logits_are_those_of_peft(name, tmp_path):
    _, run, params = loaded(tmp_path, name)
    check(logits_of(run, params), name)


@pytest.mark.parametrize("name", ALL)
def test_what_is_written_are_the_same_adapters_from_any_mesh(name, tmp_path):
    base, run, params = loaded(tmp_path, name, fsdp=4, tensor=2)
    (out := tmp_path / "out").mkdir()
    adapter_files.save(params, run.config.model, run.config.lora, out, "../base", np.dtype(np.float32))
    before, after = (safetensors_files.tensors_of(folder, adapter_files.WEIGHTS)
                     for folder in (tmp_path / "adapters", out))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        if "c_attn.lora_" not in key or "magnitude" in key:  # which is of three blocks, and read again below
            np.testing.assert_allclose(after[key].view(), tensor.view(), rtol=1e-6 if "magnitude" in key else 0)
    wanted, again = (adapter_files.keys(folder, run.config.model) for folder in (tmp_path / "adapters", out))
    assert LoraConfig(**wanted) == LoraConfig(**again) == run.config.lora and wanted["targets"] == again["targets"]
    both = adapter_files.load_with_base(out, run.config.model, run.config.lora, abstract_model(run))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, both)
    said = json.loads((out / adapter_files.CONFIG).read_text())
    names = [key.removeprefix("base_model.model.") for key in after if key.endswith(adapter_files.DOWN)]
    modules = {name.removesuffix(".weight") for name in safetensors_files.tensors_of(base)}
    assert {name.removesuffix(f".{adapter_files.DOWN}") for name in names} == {
        name for name in modules if any(name == end or name.endswith(f".{end}") for end in said["target_modules"])}


@pytest.mark.parametrize("name", COMPUTED)
def test_merged_weights_compute_the_same(name, tmp_path):
    base, folder = written(tmp_path, name)
    (base / "tokenizer.json").write_text("{}")
    assert adapters.main(["merge", f"{base}", f"{folder}", f"--output={tmp_path / 'out'}", "--dtype=float32"]) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert record["adapters"] == [{"folder": f"{folder}", "weight": 1.0}] and "config.json" in record["sha256"]
    run = jt.build(jt.make_config({"model": trained_model.sections_of(tmp_path / "out")["model"],
                                   "data": {"seq_len": 8}, "mesh": {"data": 1}}), devices=jax.devices()[:1])
    check(logits_of(run, trained_model.load(tmp_path / "out", run)[0]), name)


@pytest.mark.parametrize(("target", "path"), [
    ("self_attn.q_proj", "attention/q"), ("mlp.down_proj", "mlp/down"), ("shared_experts.up_proj", "mlp/shared/up"),
    ("shared_expert.gate_proj", "mlp/shared/gate"), ("shared_mlp.down_proj", "mlp/shared/down"),
    ("feed_forward.w2", "mlp/down"), ("mamba.in_proj", "attention/dt"), ("conv.out_proj", "attention/out")])
def test_peft_names_a_layer_by_its_module(target, path):
    c = jt.make_config({"lora": {"rank": 1, "targets": [target]}}).lora
    assert lora.is_target(f"blocks/layer/{path}", c, {})
    other = "mlp/down" if path.startswith("mlp/shared") else "attention/k"
    assert not lora.is_target(f"blocks/layer/{other}", c, {})


@pytest.mark.parametrize("name", published_adapters.CASES)
def test_targets_by_pefts_names_are_the_layers_that_peft_adapts(name, tmp_path):
    base, folder = written(tmp_path, name)
    model = jt.make_config({"model": trained_model.sections_of(base)["model"], "data": {"seq_len": 8}}).model
    wanted = LoraConfig(**adapter_files.keys(folder, model))
    config = jt.make_config({"lora": {"rank": 1, "targets": published_adapters.CASES[name][1]["target_modules"]}})
    linears = {adapter_files._linear(entry) for entry in entries(model) if adapter_files._is_linear(entry)}
    modules = lora.published_modules(model)
    found = [{path for path in linears if lora.is_target(path, c, modules)} for c in (config.lora, wanted)]
    assert found[0] == found[1] and found[0]


def test_the_same_name_is_another_layer_in_another_model():
    """Layers of two kinds have one path here and two names there; a name that a model lacks is that of most models."""
    hybrid = {"blocks/layer/layer_0/attention/out": {"attention.o_proj"},
              "blocks/layer/layer_1/attention/out": {"attention.dense"}, "inputs/project": {"model.whole"}}
    for target, path in (("o_proj", "blocks/layer/layer_0/attention/out"), ("whole", "inputs/project"),
                         ("attention.dense", "blocks/layer/layer_1/attention/out")):
        c = LoraConfig(rank=1, targets=[target])
        assert [path for path in hybrid if lora.is_target(path, c, hybrid)] == [path]
    others = LoraConfig(rank=1, targets=["out_proj"])
    assert sum(lora.is_target(path, others, hybrid) for path in hybrid) == 2


@pytest.mark.parametrize(("name", "targets"), [
    ("bailing_hybrid", {"f_proj": "attention/step", "g_proj": "attention/gate", "dense": "attention/out"}),
    ("gemma4_inputs", {"per_layer_input_gate": "own_input/gate", "per_layer_projection": "own_input/out",
                       "per_layer_model_projection": "inputs/project"}),
    ("starcoder2", {"mlp.c_proj": "mlp/down", "c_fc": "mlp/up"}), ("phi3", {"gate_up_proj": "mlp/gate"})])
def test_a_module_is_the_layers_that_its_tensors_become(name, targets, tmp_path):
    """The tensors of a published folder have the names that PEFT knows modules by."""
    folder = published.write(tmp_path, case := published.truth(name))
    model = jt.make_config({"model": hf_config.model_section(folder), "data": {"seq_len": 8}}).model
    modules = lora.published_modules(model)
    for target, end in targets.items():
        found = [path for path in modules if lora.is_target(path, LoraConfig(rank=1, targets=[target]), modules)]
        layers = {entry.theirs.format(layer=layer) for entry in entries(model) for layer in entry.layers or [None]
                  if entry.ours.removesuffix("/kernel") in found and entry.ours.endswith("/kernel")}
        assert any(path.endswith(end) for path in found)
        assert layers == {tensor for tensor in case["tensors"] if tensor.endswith(f".{target}.weight")}


def test_several_adapters_are_added_each_times_its_weight(tmp_path):
    base, folder = written(tmp_path, "gpt2")
    adapter_merge.merge(base, [(folder, 0.5), (folder, -2.0)], tmp_path / "out", "float32")
    plain, found = (safetensors_files.tensors_of(where) for where in (base, tmp_path / "out"))
    theirs = safetensors_files.tensors_of(folder, adapter_files.WEIGHTS)
    assert plain.keys() == found.keys()
    for key, tensor in plain.items():
        stem = f"base_model.model.{key.removesuffix('weight')}"
        a, b = (theirs[stem + end].view() if stem + end in theirs else None
                for end in (adapter_files.DOWN, adapter_files.UP))
        more = 0 if a is None else -1.5 * 4 / 2 * (b @ a).T
        np.testing.assert_allclose(found[key].view(), tensor.view() + more, rtol=1e-5, atol=1e-6, err_msg=key)
    assert sum(f"base_model.model.{key.removesuffix('weight')}{adapter_files.UP}" in theirs for key in plain) == 4


def test_adapters_of_another_model_of_the_same_shape_are_told(tmp_path, capsys):
    base, folder = written(tmp_path, "llama")
    other = published.write(tmp_path / "other", published.truth("llama_head_dim"))
    for where, told in ((base, False), (other, True)):
        adapter_merge.merge(where, [(folder, 1.0)], tmp_path / f"from {where.name}")
        assert ("warning: the adapters in" in capsys.readouterr().err) is told
        kept = {tensor.dtype for tensor in safetensors_files.tensors_of(tmp_path / f"from {where.name}").values()}
        assert kept == {"F32"}  # as it was


def test_a_multimodal_folder_keeps_its_names_and_a_column_of_zeros_gives_numbers(tmp_path):
    case, prefix = published.truth("llama"), "model.language_model."
    base, folder = tmp_path / "base", published_adapters.write(tmp_path / "adapters", truth()["llama, dora"])
    published.write(base, case)
    tensors = {name: np.array(tensor.view()) for name, tensor in safetensors_files.tensors_of(base).items()}
    tensors["model.layers.0.mlp.up_proj.weight"][3] = 0
    renamed = {name.replace("model.", prefix): tensor for name, tensor in tensors.items()}
    safetensors_files.write(base / safetensors_files.SINGLE, {name: x.shape for name, x in renamed.items()},
                            dict.fromkeys(renamed, np.float32), iter(renamed.values()))
    adapter_merge.merge(base, [(folder, 1.0)], tmp_path / "out", "float32")
    found = safetensors_files.tensors_of(tmp_path / "out")
    assert found.keys() == renamed.keys() and all(np.isfinite(tensor.view()).all() for tensor in found.values())
    assert not np.array_equal(found[f"{prefix}layers.1.mlp.up_proj.weight"].view(), renamed[
        f"{prefix}layers.1.mlp.up_proj.weight"])


def test_a_store_keeps_every_version(tmp_path, capsys, monkeypatch):
    base, folder = written(tmp_path, "queries and values")
    for version in (1, 2):
        assert adapters.main(["add", f"{tmp_path / 'store'}", f"{folder}", "--name=style"]) == 0
        assert capsys.readouterr().out.strip() == f"{tmp_path / 'store' / 'style' / str(version)}"
    assert adapters.main(["list", f"{tmp_path / 'store'}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and "style/2  rank 2  alpha 8, rank-stabilized  " in said[1] and f"for {base}" in said[1]
    assert adapters.main(["list", f"{tmp_path / 'store'}", "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["rank"], one["alpha"], one["rank_stabilized"]) for one in said] == [(2, 8, True)] * 2
    assert adapter_files.base_of(tmp_path / "store" / "style" / "2").resolve() == base.resolve()
    assert not [*Path(tmp_path / "store" / "style").glob("*.partial")]
    shutil.copytree(folder, left := tmp_path / "store" / "style" / f"{os.getpid()}.partial")  # by one that was killed
    (left / "more").touch()
    assert adapters.main(["add", f"{tmp_path / 'store'}", f"{folder}", "--name=style"]) == 0
    assert not left.exists() and not (tmp_path / "store" / "style" / "3" / "more").exists()

    def half_copied(_, to):
        to.mkdir()
        raise OSError("no room")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no room"):
        patch.setattr(shutil, "copytree", half_copied)
        adapters.main(["add", f"{tmp_path / 'store'}", f"{folder}", "--name=style"])
    assert not left.exists()
    shutil.copytree(folder, left)
    capsys.readouterr()
    assert adapters.main(["list", f"{tmp_path / 'store'}"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3, "what was not finished is none"
    assert adapters.main(["add", f"{tmp_path / 'store'}", f"{folder}", "--name=../out"]) == 2
    assert "--name: '../out' is not a plain name; use letters, digits and - _ ." in capsys.readouterr().err
    path = tmp_path / "store" / "style" / "1" / adapter_files.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bias": "all"}))
    assert adapters.main(["list", f"{tmp_path / 'store'}"]) == 0
    assert "style/1  cannot be used here: bias='all' cannot be expressed\n" in capsys.readouterr().out


def test_the_origin_of_a_run_names_the_adapters_and_their_model(tmp_path):
    base, folder = written(tmp_path, "llama")
    found = initial_params.origin(f"{folder}")
    assert found["sha256"].keys() == {adapter_files.CONFIG, adapter_files.WEIGHTS}
    assert Path(found["base"]["folder"]).resolve() == base.resolve() and "config.json" in found["base"]["sha256"]


@pytest.mark.parametrize(("said", "keys", "reason"), [
    ({"bias": "all"}, {}, "bias='all' cannot be expressed"),
    ({"peft_type": "IA3"}, {}, "peft_type='IA3' cannot be expressed"),
    ({"init_lora_weights": "pissa_niter_4"}, {}, "init_lora_weights='pissa_niter_4' has changed the weights of the m"),
    ({"r": "three"}, {}, "is not of the form expected: r is not a whole number"),
    ({"base_model_name_or_path": "some/model"}, {}, "base_model_name_or_path='some/model' is not a folder here"),
    ({"rank_pattern": {"q_proj": 2}}, {}, "its layers have different ranks or scales (rank_pattern, alpha_pattern), a"),
    ({"alpha_pattern": {"attn.c_attn": 5}}, {}, "its layers have different ranks or scales (rank_pattern, alpha_"),
    ({}, {"rank": 4}, "have rank 3 and are multiplied by 2, this run's rank 4 and 1.5; set --config.lora.rank=3 --con"),
    ({}, {"dora": True}, "lora.dora: True is not what the adapters in "),
    ({}, {"targets": ["*/attention/*"]}, "it has model.layers.0.mlp.down_proj.lora_A.weight, for which this run has n"),
    ({"r": 2, "lora_alpha": 4}, {"rank": 2, "alpha": 4.0}, "layers.0.self_attn.k_proj.lora_A.weight has the shape [3"),
])
def test_what_cannot_be_read_is_told_in_one_line(tmp_path, said, keys, reason):
    base, folder = written(tmp_path, "llama")
    path = folder / adapter_files.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    config = jt.make_config({"model": trained_model.sections_of(base)["model"], "data": {"seq_len": 8},
                             "lora": {"rank": 3, "alpha": 6.0} | keys, "mesh": {"data": 1}})
    run = jt.build(config, devices=jax.devices()[:1])
    with pytest.raises(jt.UserError) as refusal:
        adapter_files.load_with_base(folder, config.model, config.lora, abstract_model(run))
    assert reason in f"{refusal.value}"


def test_one_adapter_for_queries_keys_and_values_is_refused_where_each_has_its_own(tmp_path):
    """GPT-2's has rank 6 here, with values outside the three blocks that adapters of rank 2 have."""
    case = truth()["gpt2"]
    fused = {name: [6 if size == 2 else size for size in shape] if "c_attn" in name else shape
             for name, shape in case["tensors"].items()}
    base = published.write(tmp_path / "base", published.truth("gpt2"))
    folder = published_adapters.write(tmp_path / "adapters", case | {"tensors": fused})
    keys = adapter_files.keys(folder, trained_model.model_of(trained_model.sections_of(base), {}, "data").config.model)
    run = jt.build(jt.make_config({"model": trained_model.sections_of(base)["model"], "data": {"seq_len": 8},
                                   "lora": keys, "mesh": {"data": 1}}), devices=jax.devices()[:1])
    with pytest.raises(jt.UserError, match=r"has rank 6 for queries, keys and values together; set .*lora.rank=6"):
        adapter_files.load_with_base(folder, run.config.model, run.config.lora, abstract_model(run))


@pytest.mark.parametrize(("change", "message"), [
    (lambda case: case | {"tensors": case["tensors"] | {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": [
        3, 16], "base_model.model.model.layers.9.mlp.up_proj.lora_B.weight": [20, 3]}},
     "it adapts model.layers.9.mlp.up_proj.weight, which the model does not have"),
    (lambda case: case | {"tensors": {name: shape for name, shape in case["tensors"].items() if "lora_B" not in name}},
     "is not one of a pair lora_A [rank, in], lora_B [out, rank]"),
    (lambda case: case | {"tensors": {name: [shape[0] + 1, shape[1]] if "lora_B" in name else shape
                                      for name, shape in case["tensors"].items()}}, "of the shape ["),
])
def test_adapters_of_another_model_are_not_merged(tmp_path, change, message):
    base = published.write(tmp_path / "base", published.truth("llama_head_dim"))
    folder = published_adapters.write(tmp_path / "adapters", change(truth()["llama"]))
    with pytest.raises(jt.UserError) as refusal:
        adapter_merge.merge(base, [(folder, 1.0)], tmp_path / "out", "float32")
    assert message in f"{refusal.value}" and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("said", "kept", "message"), [
    ({}, lambda name: "q_proj.lora_magnitude" not in name, "self_attn.q_proj has plain LoRA, and by use_dora=True"),
    ({"use_dora": False}, lambda name: "magnitude" not in name or "o_proj" in name,
     r"layers.0.self_attn.o_proj has DoRA, and by use_dora=False"),
    ({"use_dora": False}, lambda _: True, r"layers.0.mlp.down_proj has DoRA, and by use_dora=False")])
def test_dora_of_some_layers_alone_is_refused(tmp_path, said, kept, message):
    case = truth()["llama, dora"]
    base = published.write(tmp_path / "base", published.truth("llama"))
    folder = published_adapters.write(tmp_path / "adapters", {
        "config": case["config"] | said, "tensors": {name: x for name, x in case["tensors"].items() if kept(name)}})
    for attempt in (lambda: jt.load_model(folder),
                    lambda: adapter_merge.merge(base, [(folder, 1.0)], tmp_path / "out")):
        with pytest.raises(jt.UserError, match=message):
            attempt()
    assert not [*tmp_path.glob("out*")]


@SLOW
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_dora_beside_a_layer_that_looks_ahead_is_written_without_that_layer(family, tmp_path):
    """Published models have no such layer."""
    run, rng = reference.build(family, model__mtp_loss_weight=0.3, lora__rank=3, lora__dora=True, **(
        {"model__window": 0} if family == "qwen3" else {"model__norm_eps": 1e-6})), np.random.default_rng(0)
    whole = jax.tree.map(lambda leaf: jax.device_put(0.3 * rng.standard_normal(leaf.shape, np.float32), leaf.sharding),
                         abstract_model(run))
    assert [path for path in flatten(whole) if path.startswith("ahead/") and path.endswith("/magnitude")]
    for name in ("base", "adapters"):
        (tmp_path / name).mkdir()
    published_weights.save(lora.without_adapters(whole), run.config.model, tmp_path / "base", np.dtype("float32"),
                           2**40)
    (tmp_path / "base" / "config.json").write_text(json.dumps(hf_config.config_json(run.config.model)))
    adapter_files.save(whole, run.config.model, run.config.lora, tmp_path / "adapters", "../base", np.dtype("float32"))
    plain, state = jt.load_model(tmp_path / "adapters", {"mesh.data": 8})
    assert plain.config.lora.dora and not plain.config.model.mtp_loss_weight
    wanted = logits_of(run, whole)
    found = np.asarray(jax.jit(lambda tokens: plain.module(state)(tokens))(jnp.asarray(published.TOKENS)))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_adapters_alone_are_no_config(tmp_path):
    _, folder = written(tmp_path, "llama")
    with pytest.raises(jt.UserError, match=r"it has adapters: give that of their model, and --config.train.init_from="):
        jt.load_config(f"hf:{folder}")


@pytest.mark.parametrize(("changes", "reason"), [
    ({"head_dim": "x"}, "head_dim='x' is not a whole number or null"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is more than 10,000"),
    ({"rope_scaling": [1]}, "rope_scaling=[1] is not an object or null")])
def test_a_damaged_config_of_their_model_is_told_in_one_line(tmp_path, changes, reason):
    base, folder = written(tmp_path, "llama")
    (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | changes))
    for attempt in (lambda: jt.load_model(folder), lambda: trained_model.sections_of(folder),
                    lambda: adapter_merge.merge(base, [(folder, 1.0)], tmp_path / "out")):
        with pytest.raises(jt.UserError) as refusal:
            attempt()
        assert reason in f"{refusal.value}" and "\n" not in f"{refusal.value}"


def further_tokens(folder: Path, source: Path, **keys) -> jt.Run:
    """A run with adapters, and a layer that predicts further tokens, which begins with a folder."""
    model = hf_config.model_section(folder) | {"mtp_loss_weight": 0.3}
    config = {"model": model, "lora": {"rank": 2, "alpha": 6.0} | keys, "data": {"seq_len": 8}, "mesh": {"data": 1},
              "train": {"init_from": f"{source}"}}
    return jt.build(jt.make_config(config), devices=jax.devices()[:1])


@pytest.mark.slow
def test_adapters_of_layers_for_further_tokens_are_said_to_be_left_out_and_begin_anew(tmp_path, capsys):
    """PEFT 0.21 leaves out what a file has of such layers, which transformers' models lack."""
    run = further_tokens(folder := multi_token.write(tmp_path / "in", "glm4_moe"), folder)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype(np.float32), leaf.sharding),
                          abstract_model(run))
    (out := tmp_path / "out").mkdir()
    capsys.readouterr()
    adapter_files.save(params, run.config.model, run.config.lora, out, f"{folder}", np.dtype(np.float32))
    assert capsys.readouterr().err.startswith("the adapters of layers that predict further tokens are left out, since")
    assert not [name for name in safetensors_files.tensors_of(out, adapter_files.WEIGHTS) if "layers.3." in name]
    again = further_tokens(folder, out).init().all_params
    assert f"{out} has no adapters of layers that predict further tokens: they begin anew" in capsys.readouterr().err
    before, after = (flatten(lora.adapters(jax.device_get(each))) for each in (params, again))
    for path, x in after.items():
        if not path.startswith("ahead/"):
            np.testing.assert_array_equal(x, before[path], path)
        elif path.endswith("/up"):
            assert not x.any(), path
    (whole := tmp_path / "whole").mkdir()
    published_weights.save(params, run.config.model, whole, np.float32, 10**6, run.config.lora)
    name = "model.layers.3.self_attn.o_proj.weight"
    merged = plain_lora.merged(jax.device_get(params), 3.0)["ahead"]["block"]["attention"]["out"]["kernel"]
    np.testing.assert_allclose(safetensors_files.tensors_of(whole)[name].view().T, merged.reshape(-1, 16), rtol=1e-5,
                               atol=1e-6)


def test_adapters_of_layers_for_further_tokens_alone_are_not_written(tmp_path):
    run = further_tokens(folder := multi_token.write(tmp_path / "in", "glm4_moe"), folder, targets=["ahead/*"])
    with pytest.raises(jt.UserError, match=r"are of layers that predict further tokens.*write the whole model"):
        adapter_files.save(run.init().all_params, run.config.model, run.config.lora, tmp_path, f"{folder}",
                           np.dtype(np.float32))


def test_an_adapter_of_what_makes_inputs_of_layers_is_written_and_read(tmp_path):
    """Gemma 4's `per_layer_model_projection`, a linear layer outside of all layers."""
    folder = published.write(tmp_path / "base", published.truth("gemma4_inputs"))
    config = {"model": hf_config.model_section(folder), "lora": {"rank": 2, "dora": True, "targets": ["*"]},
              "data": {"seq_len": 8}, "mesh": {"data": 1}}
    run, rng = jt.build(jt.make_config(config), devices=jax.devices()[:1]), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype(np.float32), leaf.sharding),
                          abstract_model(run))
    params = partition.merge(published_weights.load(folder, run.config.model, lora.without_adapters(params)),
                             lora.adapters(params))
    (out := tmp_path / "out").mkdir()
    adapter_files.save(params, run.config.model, run.config.lora, out, "../base", np.dtype(np.float32))
    module = "per_layer_model_projection"
    assert f"base_model.model.model.{module}.{adapter_files.DOWN}" in safetensors_files.tensors_of(
        out, adapter_files.WEIGHTS)
    assert module in json.loads((out / adapter_files.CONFIG).read_text())["target_modules"]
    assert adapter_files.keys(out, run.config.model)["targets"] == ["*"]
    again = adapter_files.load_with_base(out, run.config.model, run.config.lora, abstract_model(run))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, again)


@pytest.mark.parametrize(("name", "place"), [("gemma3", "model.language_model."), ("qwen3_5", "model.")])
def test_adapters_of_a_multimodal_folder_have_the_names_of_the_model_that_peft_adapts(name, place, tmp_path):
    """AutoModelForCausalLM makes the whole model of Gemma's, and the language model alone of Qwen's."""
    published.write(tmp_path / "base", json.loads((Path(published.__file__).parent / "wrapper_truth.json").read_text())[
        name])
    config = {"model": hf_config.model_section(tmp_path / "base"), "lora": {"rank": 2, "targets": ["*mlp/up"]},
              "data": {"seq_len": 8}, "mesh": {"data": 1}}
    run, rng = jt.build(jt.make_config(config), devices=jax.devices()[:1]), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype(np.float32), leaf.sharding),
                          abstract_model(run))
    (out := tmp_path / "out").mkdir()
    adapter_files.save(params, run.config.model, run.config.lora, out, "../base", np.dtype(np.float32))
    written = safetensors_files.tensors_of(out, adapter_files.WEIGHTS)
    assert all(key.startswith(f"base_model.model.{place}layers.") for key in written)
    again = lora.adapters(adapter_files.load_with_base(out, run.config.model, run.config.lora, abstract_model(run)))
    jax.tree.map(np.testing.assert_array_equal, again, lora.adapters(params))
