"""Keys that config.json leaves out, and ways of saying things that mix: as transformers takes them."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.family import config_class
from jaxtrain.errors import UserError
from jaxtrain.hf import defaults
from jaxtrain.hf.hf_config import config_json, model_section
from tests.config import families, fuzz_published

CASES = json.loads(families.TRUTH.read_text())


@pytest.mark.parametrize("kind", families.KINDS)
def test_drawn_files_are_read_as_transformers_reads_them_or_refused(kind, tmp_path):
    cases = [case for case in CASES if case["given"]["model_type"] == kind]
    same = 0
    for case in cases:
        found = families.shape(case["given"], tmp_path)
        if not isinstance(found, str) and case["shape"] is not None:
            assert families.close(found, case["shape"]), case["given"]
            same += 1
    assert same


@pytest.mark.parametrize("kind", families.KINDS)
def test_a_file_with_nothing_but_its_type_is_that_types_default(kind, tmp_path):
    wanted = next(case["shape"] for case in CASES if case["given"] == {"model_type": kind})
    found = families.shape({"model_type": kind}, tmp_path)
    if wanted is None:  # transformers makes no model of it, for want of a width that we derive in some
        assert isinstance(found, str) or kind in ("ministral", "hunyuan_v1_dense", "nemotron")
    elif kind == "glm4_moe":  # 21 of 42 numbers would turn
        assert isinstance(found, str)
    else:
        assert families.close(found, wanted)


def section(folder: Path, **given) -> dict:
    (folder / "config.json").write_text(json.dumps(given))
    return model_section(folder)


def test_a_published_gemma_3_of_4b_is_read(tmp_path):
    """Its file leaves out most keys."""
    found = section(tmp_path, model_type="gemma3", text_config={
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024})
    model = config_class("gemma3")(**found)
    assert (model.vocab_size, model.num_heads, model.num_kv_heads, model.head_dim) == (262_208, 8, 4, 256)
    assert (model.window, model.global_every, model.rope_factor, model.rope_theta) == (1024, 6, 8.0, 1e6)


def test_a_gemma_4_with_inputs_of_layers_is_read(tmp_path):
    """A file in the form of the published ones, with the sizes of the smallest, of 4.63 billion parameters."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    found = section(tmp_path, model_type="gemma4", text_config={
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "final_logit_softcapping": 30.0, "layer_types": kinds})
    model = config_class("gemma4")(**found)
    assert model.layer_kinds == "LLLLG" * 3 + "llllg" * 4 and model.period == 35
    assert (model.per_layer_dim, model.per_layer_vocab, model.rotary_part) == (256, 262_144, 0.25)
    assert (model.global_kv_heads, model.windows) == (1, {512: 28, 0: 7})


@pytest.mark.parametrize(("kind", "name"), [("mistral", "llama"), ("ministral3", "ministral3")])
def test_the_language_model_of_mistral3_is_the_one_that_its_file_names(kind, name, tmp_path):
    text = {"model_type": kind, "tie_word_embeddings": True, "num_hidden_layers": 26}
    found = section(tmp_path, model_type="mistral3", text_config=text)
    assert (found["name"], found["num_layers"]) == (name, 26)
    with pytest.raises(UserError, match=r"text_config is of model_type='llama'; known: mistral, ministral3"):
        section(tmp_path, model_type="mistral3", text_config=text | {"model_type": "llama"})


@pytest.mark.parametrize(("family", "layers", "every"), [
    *(("gemma3", layers, 6) for layers in (1, 2, 4, 5, 6, 7)), ("gemma3", 3, 9), ("gpt_oss", 1, 2), ("gpt_oss", 1, 5)])
def test_models_of_few_layers_are_published(family, layers, every, tmp_path):
    """All of their layers are local: the number of the first global one counts for nothing."""
    model = config_class(family)(name=family, num_layers=layers, global_every=every, **(
        {"mlp_dim": 32, "expert_mlp_dim": 32} if family == "gpt_oss" else {}))
    back = config_class(family)(**section(tmp_path, **config_json(model)))
    assert back.windows == model.windows


@pytest.mark.parametrize(("given", "expected"), [
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}, "rope_theta": 9.0}, 5.0),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 9.0}, 9.0),
    ({"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 7.0}, "rope_theta": 9.0}, 9.0),
    ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 7.0}, "rope_theta": 9.0}, 7.0), ({}, 10_000.0)])
def test_the_base_that_counts_is_that_of_transformers(given, expected, tmp_path):
    assert section(tmp_path, model_type="llama", **given)["rope_theta"] == expected


@pytest.mark.parametrize(("kind", "given", "expected"), [
    ("qwen3_moe", {"use_sliding_window": True}, {"window": 4096}),
    ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 3}, {"window": 4096}),
    ("qwen3_moe", {"sliding_window": 8}, {"window": 0}),
    ("qwen2", {"use_sliding_window": True}, {"window": 4096, "global_first": 28}),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 32}, {"window": 0}),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, {"window": 4096}),
    ("mixtral", {}, {"window": 0}), ("mistral", {}, {"window": 4096}),
    ("mistral", {"sliding_window": None}, {"window": 0})])
def test_which_layers_have_a_window(kind, given, expected, tmp_path):
    found = section(tmp_path, model_type=kind, **given)
    assert {key: found[key] for key in ("window", "global_first") if key in found} == expected


def test_a_model_with_late_windows_is_published(tmp_path):
    model = config_class("qwen2")(name="qwen2", window=5, global_first=3, num_layers=4)
    assert model.windows == {5: 1, 0: 3}
    assert config_class("qwen2")(**section(tmp_path, **config_json(model))).windows == model.windows


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("draw", [fuzz_published.config_outcome, fuzz_published.header_outcome])
def test_hostile_files_are_read_or_refused_in_a_sentence(draw, seed, tmp_path):
    for n in range(50):
        end, case = draw(np.random.default_rng([seed, n]), tmp_path)
        assert end in ("read", "refused"), case


@pytest.mark.exhaustive
def test_the_table_of_defaults_is_that_of_transformers():
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from tests.config import families_truth

    assert families_truth.table() == defaults.table()
