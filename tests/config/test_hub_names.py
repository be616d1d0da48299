"""Names of models on the Hugging Face Hub where a folder may be given, with a stand-in for huggingface_hub."""

import json
import sys
from types import SimpleNamespace

import pytest

import jaxtrain as jt
from jaxtrain.config import hub_names
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.hub import initial_params

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 24, "hidden_size": 16,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 20,
          "max_position_embeddings": 16}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one model; returns what it was asked for."""
    snapshot, asked = tmp_path / "cache" / "snapshot", []
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)

    def download(name, **how):
        asked.append((name, how["revision"], "*.safetensors" in how["allow_patterns"]))
        errors = {"Org/Gated": "GatedRepoError", "Org/Gone": "RepositoryNotFoundError", "Org/Far": "ConnectError"}
        if name in errors:
            raise type(errors[name], (Exception,), {})("no route\nto the host")
        return f"{snapshot}"

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
    return SimpleNamespace(asked=asked, snapshot=snapshot)


def test_a_config_begins_with_a_model_of_the_hub(hub):
    config = jt.load_config("hf:Org/Tiny@v2")
    assert config.train.init_from == f"{hub.snapshot}" and config.model.embed_dim == 16
    assert hub.asked == [("Org/Tiny", "v2", True)]


def test_parameters_and_tokenizers_are_those_of_the_hub(hub):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"<|endoftext|>": 0, "a": 1}, []))
    made.add_special_tokens(["<|endoftext|>"])
    made.save(f"{hub.snapshot / 'tokenizer.json'}")
    assert initial_params.source_and_step("hf:Org/Tiny@main") == (hub.snapshot, None)
    for name in ("Org/Tiny", "hf:Org/Tiny"):
        assert load_tokenizer(name).vocab_size == 2
    assert hub.asked == [("Org/Tiny", "main", True), ("Org/Tiny", None, False), ("Org/Tiny", None, False)]


def test_a_folder_here_comes_before_a_name(hub, tmp_path):
    (tmp_path / "Org" / "Tiny").mkdir(parents=True)
    (tmp_path / "Org" / "Tiny" / "config.json").write_text(json.dumps(CONFIG))
    assert jt.load_config("hf:Org/Tiny").train.init_from == "Org/Tiny" and not hub.asked
    assert not hub_names.is_name("Org/Other")  # a mistyped path is not looked for elsewhere


@pytest.mark.parametrize(("name", "message"), [
    ("Org/Gated", "--config: Org/Gated is gated on the Hugging Face Hub; accept its terms at https://huggingface.co/Org"),
    ("Org/Gone", "--config: there is neither a folder Org/Gone nor a public model of this name on the Hugging Face"),
    ("Org/Far", "--config: Org/Far cannot be downloaded from the Hugging Face Hub (ConnectError: no route); where "
                "there is a network, run hf download Org/Far --local-dir=models/Far, and give hf:models/Far"),
    ("Org/Far@v1", "--config: Org/Far cannot be downloaded from the Hugging Face Hub (ConnectError: no route); where "
                   "there is a network, run hf download Org/Far --revision=v1 --local-dir=models/Far, and give"),
    ("a/b/c", "--config: there is no folder a/b/c; give a folder that is there, or hf:ORG/NAME"),
    ("../up", "--config: there is no folder ../up"), ("Org/..", "--config: there is no folder Org/.."),
    ("Org/model.Q4.gguf", "--config: Org/model.Q4.gguf is a model in GGUF, which jaxtrain does not read; give the fo")])
def test_why_there_is_no_model_is_told(hub, name, message):
    with pytest.raises(jt.UserError) as refused:
        jt.load_config(f"hf:{name}")
    assert f"{refused.value}".startswith(message)
    assert len(hub.asked) == name.startswith(("Org/G", "Org/F"))


def test_without_the_package_the_extra_and_the_command_are_named(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(jt.UserError, match=r"needs the package huggingface_hub; run pip install -e '\.\[hub\]' in "
                                           r"jaxtrain's folder, or run hf download Org/Tiny --local-dir=models/Tiny"):
        jt.load_config("hf:Org/Tiny")


@pytest.mark.parametrize(("source", "message"), [
    ("Org/Tiny", "train.init_from: there is no folder Org/Tiny; write hf:Org/Tiny for a model on the Hugging Face Hub"),
    ("models/tiny.gguf", "train.init_from: models/tiny.gguf is a model in GGUF, which jaxtrain does not read; give"),
    ("/nowhere/at/all", "train.init_from: there is no folder /nowhere/at/all; give the workdir of a run, a published"),
    ("cache", "train.init_from: cache is neither a run's workdir with checkpoints nor a folder with a published")])
def test_what_cannot_be_begun_with_is_told_by_its_cause(hub, source, message):
    with pytest.raises(jt.UserError) as refused:
        initial_params.origin(source)
    assert f"{refused.value}".startswith(message)


@pytest.mark.parametrize(("config", "message"), [
    ("Org/Tiny", "give hf:Org/Tiny for a model on the Hugging Face Hub, or the path of a config"),
    ("model.gguf", "--config: model.gguf is a model in GGUF, which jaxtrain does not read"),
    ("cache", "cache is a folder; give the path of a config such as configs/gpt.py")])
def test_what_is_no_config_is_told_by_its_cause(hub, config, message):
    with pytest.raises(jt.UserError) as refused:
        jt.load_config(config)
    assert message in f"{refused.value}"
