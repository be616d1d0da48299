"""Names of models on the Hugging Face Hub where a folder may be given, with a stand-in for huggingface_hub."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest

import jaxtrain as jt
from jaxtrain.commands import evaluate as evaluate_tasks
from jaxtrain.commands import generate as generate_command
from jaxtrain.commands import merge as merge_command
from jaxtrain.commands import transcribe
from jaxtrain.config import hub_names
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.hub import initial_params, trained_model
from jaxtrain.hub.folders import task_names

ROOT = Path(__file__).parents[2]
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 24, "hidden_size": 16,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 20,
          "max_position_embeddings": 16}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one model; returns what it was asked for."""
    snapshot, asked = tmp_path / "cache" / "snapshot", []
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (snapshot / "model.safetensors").touch()
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


def test_a_cache_with_a_tokenizer_alone_has_no_model(hub):
    (hub.snapshot / "model.safetensors").unlink()
    with pytest.raises(jt.UserError, match=r"^--config: Org/Tiny has no weights in safetensors .+ run hf download O"):
        jt.load_config("hf:Org/Tiny")
    assert hub_names.tokenizer_folder("Org/Tiny") == f"{hub.snapshot}"


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


@pytest.mark.parametrize(("read", "name", "message"), [
    (initial_params.origin, "Org/Tiny",
     "train.init_from: there is no folder Org/Tiny; write hf:Org/Tiny for a model on the Hugging Face Hub"),
    (initial_params.origin, "models/tiny.gguf",
     "train.init_from: models/tiny.gguf is a model in GGUF, which jaxtrain does not read; give"),
    (initial_params.origin, "/nowhere/at/all",
     "train.init_from: there is no folder /nowhere/at/all; give the workdir of a run, a published"),
    (initial_params.origin, "cache",
     "train.init_from: cache is neither a run's workdir with checkpoints nor a folder with a published"),
    (jt.load_config, "Org/Tiny", "--config: there is no file Org/Tiny.py; give hf:Org/Tiny for a model on the Hugging "
                                 "Face Hub, or the path of a config"),
    (jt.load_config, "model.gguf", "--config: model.gguf is a model in GGUF, which jaxtrain does not read"),
    (jt.load_config, "cache", "--config: cache is a folder; give the path of a config such as configs/gpt.py"),
    (jt.load_model, "Org/Tiny", "WORKDIR: there is no folder Org/Tiny; write hf:Org/Tiny for a model on the Hugging"),
])
def test_what_is_no_model_and_no_config_is_told_by_its_cause(hub, read, name, message):
    with pytest.raises(jt.UserError) as refused:
        read(name)
    assert f"{refused.value}".startswith(message) and not hub.asked


@pytest.mark.parametrize(("main", "words"), [
    (generate_command.main, ["--prompt=a"]), (transcribe.main, ["a.wav"]),
    (merge_command.main, ["hf:Org/Far", "--output=new"]),
    (evaluate_tasks.main, ["--tasks=python_words", f"--include={ROOT}/examples/evaluation"])])
def test_commands_take_a_model_of_the_hub_or_tell_how_to_download_it(hub, main, words, capsys, monkeypatch):
    monkeypatch.setattr(task_names, "check", lambda *_: None)
    key = "MODEL" if main is merge_command.main else "WORKDIR"
    assert main(["hf:Org/Far", *words]) == 2 and hub.asked == [("Org/Far", None, True)]
    assert capsys.readouterr().err == (
        f"{key}: Org/Far cannot be downloaded from the Hugging Face Hub (ConnectError: no route); where there is a "
        "network, run hf download Org/Far --local-dir=models/Far, and give models/Far\n")


def test_a_config_may_name_the_model_that_it_fine_tunes_as_on_the_hub(hub):
    config = jt.load_config(f"{ROOT}/configs/finetune.py:lora:hf:Org/Tiny")
    assert config.train.init_from == "hf:Org/Tiny" and config.model.embed_dim == 16 and config.lora.rank == 16
    assert trained_model.sections_of("hf:Org/Tiny")["model"]["embed_dim"] == 16


class _Hub(http.server.BaseHTTPRequestHandler):
    """The parts of the Hub's API that a download needs, with one model."""

    files = MappingProxyType({"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"weights",
                              "model.bin": b"others", "onnx/model.safetensors": b"of another program"})
    commit = "5" * 40

    def do_GET(self):
        path, headers = self.path.partition("?")[0], {}
        if path.startswith(f"/Org/Tiny/resolve/{self.commit}/"):
            found = self.files[path.split("/", 5)[5]]
            headers = {"ETag": f'"{len(found)}"', "X-Repo-Commit": self.commit}
        elif path.startswith("/api/models/Org/Tiny/tree/"):
            found = [{"type": "file", "path": name, "size": len(content), "oid": f"{len(content)}"}
                     for name, content in self.files.items()]
        elif path == "/api/models/Org/Tiny/revision/v2":
            found = {"id": "Org/Tiny", "sha": self.commit, "siblings": [{"rfilename": name} for name in self.files]}
        else:
            found, headers = {}, {"X-Error-Code": "RepoNotFound"}
        content = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(200 if found else 404)
        for name, value in {**headers, "Content-Length": f"{len(content)}"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content if self.command == "GET" else b"")

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def test_huggingface_hub_downloads_a_model_once_and_finds_it_again_without_a_network(tmp_path):
    """The package itself, in a process of its own since it reads its variables when it is imported."""
    pytest.importorskip("huggingface_hub")

    def said(name, **variables):
        code = f"from jaxtrain.config import hub_names; print(hub_names.model_folder({name!r}), end='')"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                              env={**os.environ, "PYTHONPATH": f"{ROOT}", "HF_HOME": f"{tmp_path / 'cache'}",
                                   "no_proxy": "127.0.0.1", "HF_ENDPOINT": place, **variables})
        return done.stdout or done.stderr.splitlines()[-1].partition("UserError: ")[2]

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        place = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        folder = Path(said("hf:Org/Tiny@v2"))
        gone = said("hf:Org/Gone")
        server.shutdown()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: _Hub.files[name] for name in ("config.json", "model.safetensors")}
    assert gone.startswith("WORKDIR: there is neither a folder Org/Gone nor a public model of this name")
    assert said("hf:Org/Tiny@v2", HF_HUB_OFFLINE="1") == f"{folder}"
    assert said("hf:Org/Tiny@v3", HF_HUB_OFFLINE="1") == (
        "WORKDIR: Org/Tiny is not in the cache of huggingface_hub, and HF_HUB_OFFLINE is set; where there is a "
        "network, run hf download Org/Tiny --revision=v3 --local-dir=models/Tiny, and give models/Tiny")
