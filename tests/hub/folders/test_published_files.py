"""The small files of a published model: kept by a run, and exported again as they were."""

import json

import pytest

from jaxtrain.config.family import config_class
from jaxtrain.data.tokenizers import tokenizer_folder
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.hf.hf_config import config_json, model_section
from jaxtrain.hub.folders import published_files
from jaxtrain.hub.release import exported_config, exported_tokenizer, model_card

MORE = {"_name_or_path": "Org/Tiny", "pad_token_id": 3, "bos_token_id": 0, "eos_token_id": 1, "unk_token_id": 2,
        "transformers_version": "5.24.0", "initializer_range": 0.02, "torch_dtype": "float16",
        "quantization_config": None, "auto_map": {"AutoModel": "code.Model"},
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
CONFIG = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 4, "hidden_size": 16,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 20,
          "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "sliding_window": None, "hidden_act": "silu", **MORE}
GENERATION = {"eos_token_id": [1, 2], "pad_token_id": 3, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
TOKENIZER_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": {"content": "<unk>"},
                    "add_bos_token": False, "model_max_length": 64, "chat_template": "{{ messages }}"}


def vocabulary(*tokens):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE({token: n for n, token in enumerate(tokens)}, []))
    made.add_special_tokens([token for token in tokens if token.startswith("<")])
    return made.to_str()


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "Tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    (folder / "tokenizer.json").write_text(vocabulary("<s>", "</s>", "<unk>", "<pad>", "a"))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    for name in ("LICENSE", "README.md", "model.safetensors", "model.safetensors.index.json", "code.py"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def workdir(base, tmp_path):
    """The workdir of a run that began with it, as far as an export of its small files reads it."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "config.json").write_text(json.dumps({"model": model_section(base), "train": {"init_from": f"{base}"}}))
    words = load_tokenizer(f"{base}")
    tokenizer_folder.save(words, work / "tokenizer")
    published_files.keep(work, base, words)
    return work


def exported(workdir, to, section=None, reward=False, dtype="bfloat16"):
    to.mkdir()
    base = published_files.folder_of(workdir)
    model = config_class("llama")(**(section or model_section(base)))
    described = config_json(model, reward)
    exported_tokenizer.write(workdir, to, base, described, model)
    exported_config.write(to, base, described, dtype, reward)
    return {path.name: json.loads(path.read_text()) for path in to.iterdir() if path.suffix == ".json"}


def test_what_training_did_not_change_is_exported_as_it_was(base, workdir, tmp_path):
    for path in [*base.iterdir()]:  # it may be gone by then
        path.rename(tmp_path / path.name)
    found = exported(workdir, tmp_path / "out")
    assert found["config.json"] == {key: value for key, value in CONFIG.items() if key not in (
        "quantization_config", "auto_map")} | {"torch_dtype": "bfloat16"}
    assert found["generation_config.json"] == GENERATION and found["tokenizer_config.json"] == TOKENIZER_CONFIG
    for name in ("tokenizer.json", "special_tokens_map.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*found, "LICENSE"}


@pytest.mark.parametrize(("keys", "changed", "gone"), [
    ({"vocab_size": 8}, {"vocab_size": 8}, ()),
    ({"rope_theta": 9.0}, {"rope_theta": 9.0}, ("rope_parameters",)),
    ({"window": 5}, {"sliding_window": 5, "architectures": ["MistralForCausalLM"]}, ()),
    ({"rope_scaling": 2.0, "rope_type": "linear"}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
     ("rope_parameters",))])
def test_a_key_that_the_run_has_otherwise_is_written_and_the_others_are_kept(base, workdir, tmp_path, keys, changed,
                                                                               gone):
    section = model_section(base) | keys
    found = exported(workdir, tmp_path / "out", section)["config.json"]
    assert {key: found.get(key) for key in changed} == changed and not any(found.get(key) for key in gone)
    assert {key: found[key] for key in ("pad_token_id", "initializer_range")} == {
        "pad_token_id": 3, "initializer_range": 0.02}
    assert config_class("llama")(**model_section(tmp_path / "out")) == config_class("llama")(**section)


def test_a_reward_model_is_published_as_a_classifier_that_pads_as_before(workdir, tmp_path):
    found = exported(workdir, tmp_path / "out", reward=True)["config.json"]
    assert found["architectures"] == ["LlamaForSequenceClassification"] and found["model_type"] == "llama"
    assert found["id2label"] == {"0": "reward"} and found["pad_token_id"] == 3


def test_a_chat_template_that_tuning_changed_wins(workdir, tmp_path):
    pytest.importorskip("jinja2")
    template = "{% for message in messages %}{{ message.content }}{{ '<unk>' }}{% endfor %}"
    (workdir / "tokenizer" / "chat.json").write_text(json.dumps({"template": template, "special_tokens": {}}))
    found = exported(workdir, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template
    assert found["tokenizer_config.json"] == {
        key: value for key, value in TOKENIZER_CONFIG.items() if key != "chat_template"}
    assert found["generation_config.json"] == GENERATION  # <unk> ended texts before, too


def test_texts_that_end_otherwise_end_so_elsewhere(base, workdir, tmp_path):
    tokenizer_folder.save(load_tokenizer(f"{base}", "<pad>", "<s>"), workdir / "tokenizer")
    found = exported(workdir, tmp_path / "out")
    assert found["generation_config.json"] == GENERATION | {"eos_token_id": [1, 2, 3], "bos_token_id": 0,
                                                            "unk_token_id": 2}
    assert found["tokenizer_config.json"] == TOKENIZER_CONFIG | {"eos_token": "<pad>", "add_bos_token": True}
    assert load_tokenizer(f"{tmp_path / 'out'}").bos == 0


def test_what_a_model_says_of_tokens_is_left_out_for_data_of_other_tokens(base, workdir, tmp_path):
    (tmp_path / "other.json").write_text(vocabulary("<|endoftext|>", "a", "b", "c"))
    words = load_tokenizer(f"{tmp_path / 'other.json'}")
    published_files.keep(workdir, base, words)
    (workdir / "tokenizer" / "tokenizer_record.json").unlink()
    tokenizer_folder.save(words, workdir / "tokenizer")
    found = exported(workdir, tmp_path / "out")
    assert (found["config.json"]["eos_token_id"], found["config.json"].get("pad_token_id")) == (0, None)
    assert found["generation_config.json"]["eos_token_id"] == 0 and found["generation_config.json"]["top_p"] == 0.9
    assert found["tokenizer_config.json"]["eos_token"] == found["tokenizer_config.json"]["pad_token"] == "<|endoftext|>"


def test_a_run_that_goes_on_from_a_run_has_the_files_of_the_first_model(base, workdir, tmp_path):
    second = tmp_path / "second"
    published_files.keep(second, workdir)
    assert {path.name: path.read_bytes() for path in (second / "published").iterdir()} == {
        path.name: path.read_bytes() for path in published_files.small_files(base)}


def test_texts_without_a_context_begin_as_transformers_begins_them(base, workdir):
    """With the token that the tokenizer names, although it puts it in front of no text."""
    for folder in (base, workdir):
        assert load_tokenizer(f"{base}").bos is None
        assert published_files.prefix_of(folder, load_tokenizer(f"{base}")) == 0
    (base / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizerFast"}))
    (base / "special_tokens_map.json").unlink()
    assert published_files.prefix_of(base, load_tokenizer(f"{base}")) == 0
    (base / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    assert published_files.prefix_of(base, words := load_tokenizer(f"{base}")) == words.eod


@pytest.mark.parametrize(("origin", "name"), [
    ({}, ""), ({"folder": "/models/base-7b"}, "base-7b"),
    ({"folder": "/runs/adapters", "base": {"folder": "/models/base-7b"}}, "base-7b"),
    ({"workdir": "/runs/sft", "step": 3, "began_with": {"folder": "/models/base-7b"}}, "base-7b"),
    ({"folder": "/cache/hub/models--Org--Tiny-1B/snapshots/0123abcd"}, "Org/Tiny-1B")])
def test_the_base_model_is_the_published_one(origin, name):
    assert model_card.base_model(origin) == name
