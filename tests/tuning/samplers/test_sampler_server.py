"""jaxtrain's own sampler as a server: its answers are generate's, whatever they are batched with; weights; refusals."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub.adapters import adapter_files
from jaxtrain.hub.generate import generate
from jaxtrain.hub.weights import published_weights
from jaxtrain.trainer.observers import Observer
from jaxtrain.tuning.samplers import served_model
from jaxtrain.tuning.samplers.sampler_server import SamplerServer
from jaxtrain.tuning.samplers.served_model import ServedModel
from tests.numerics import reference
from tests.tiers import exhaustive, slow
from tests.tiny import devices
from tests.trainer.test_multiprocess import ROOT
from tests.tuning.test_rollouts import files  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
TINY = dict(model__vocab_size=264, model__max_seq_len=32, data__seq_len=20, train__steps=6, optimizer__warmup_steps=0,
            model__num_layers=1, train__progress=False, checkpoint__every=2)
ASKED = {"max_tokens": 5, "temperature": 1.0, "stop_token_ids": [256], "seed": 7, "prompt": [115, 97, 121]}


@pytest.fixture(scope="module")
def model():
    with devices(1):
        run = jt.build(reference.tiny("llama", **TINY))
        yield run, run.init()


@pytest.fixture(scope="module")
def server(model):
    served = ServedModel(*model, "tiny", batch_size=8)
    with SamplerServer(served) as found:
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield found
        found.shutdown()
    served.close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def asked(server, route, content=None, **headers):
    """The status and the JSON of an answer."""
    body = content if isinstance(content, bytes | None) else json.dumps(content).encode()
    request = urllib.request.Request(f"{server.url[:-3]}{route}", body, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def tokens_of(server, **keys):
    status, found = asked(server, "/v1/completions", ASKED | keys)
    assert status == 200, found
    choice, = found["choices"]
    assert choice["prompt_token_ids"] == keys.get("prompt", ASKED["prompt"])
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_answers_are_generates_whatever_they_are_batched_with(model, server):
    alone = tokens_of(server)
    with ThreadPoolExecutor(8) as pool:
        several = list(pool.map(lambda n: tokens_of(server, seed=n, prompt=[115, *range(97, 97 + n)]), range(7)))
        again = pool.submit(tokens_of, server).result()
    assert again == alone and len({tuple(tokens) for tokens, _ in several}) > 3
    whole = generate(*model, [[115, *range(97, 97 + n)] for n in range(7)], max_new_tokens=5, tempered=True,
                     logprobs=True, stop=[256], batch_size=8, drawn=[(n, 0) for n in range(7)])
    for (tokens, logprobs), want in zip(several, whole, strict=True):
        assert tokens == [*want.tokens, *(want.end or ())[:1]]
        np.testing.assert_allclose(logprobs, [*want.logprobs, *(want.end or ())[1:]], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_weights_and_adapters_are_replaced(model, tmp_path, monkeypatch):
    run, state = model
    other = run.init(seed=5)
    published_weights.save(other.params, run.config.model, tmp_path, np.dtype(np.float32), 10**9)
    lora = jt.build(reference.tiny("llama", **TINY, lora__rank=2))
    begun = lora.init(seed=1)
    tuned = jax.tree_util.tree_map(lambda x: x + 0.05, begun.params)
    (tmp_path / "lora").mkdir()
    adapter_files.save(tuned, run.config.model, lora.config.lora, tmp_path / "lora", "", np.dtype(np.float32))
    served = ServedModel(run, state, "tiny")
    with SamplerServer(served) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        greedy, = generate(run, state, [ASKED["prompt"]], max_new_tokens=5, temperature=0, stop=[256])
        assert tokens_of(server, temperature=0, seed=1)[0] == [*greedy.tokens, *(greedy.end or ())[:1]]
        first = tokens_of(server)
        assert asked(server, "/weight_info") == (200, {"weight_version": "default"})
        load = {"lora_name": "one", "lora_path": str(tmp_path / "lora")}
        assert asked(server, "/v1/load_lora_adapter", load)[0] == 200
        assert [one["id"] for one in asked(server, "/v1/models")[1]["data"]] == ["tiny", "one"]
        monkeypatch.setattr(served_model, "ADAPTERS", 1)
        assert asked(server, "/v1/load_lora_adapter", load)[0] == 200  # one of the name in its place
        assert tokens_of(server, model="one")[1] != first[1] and tokens_of(server, model="tiny") == first
        assert asked(server, "/v1/load_lora_adapter", load | {"lora_name": "two"})[0] == 200
        assert [one["id"] for one in asked(server, "/v1/models")[1]["data"]] == ["tiny", "two"]  # the oldest went
        assert asked(server, "/v1/unload_lora_adapter", {"lora_name": "two"})[0] == 200
        assert asked(server, "/v1/completions", ASKED | {"model": "one"})[0] == 404
        change = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
        assert asked(server, "/collective_rpc", change) == (200, {})
        assert asked(server, "/update_weight_version", {"new_version": "step-1"})[0] == 200
        assert asked(server, "/weight_info")[1] == {"weight_version": "step-1"}
        want, = generate(run, other, [ASKED["prompt"]], max_new_tokens=5, tempered=True, logprobs=True, stop=[256],
                         drawn=[(7, 0)])
        assert tokens_of(server)[0] == [*want.tokens, *(want.end or ())[:1]]
        server.shutdown()
    served.close()


@pytest.mark.parametrize(("route", "content", "status", "why"), [
    ("/v1/completions", ASKED | {"prompt": "text"}, 400, "prompt: it, or stop_token_ids, is not a list of token ids"),
    ("/v1/completions", ASKED | {"prompt": [264]}, 400, "token ids below 264"),
    ("/v1/completions", ASKED | {"prompt": []}, 400, "max_tokens: 0 tokens of the prompt and 5 more do not fit"),
    ("/v1/completions", ASKED | {"max_tokens": 30}, 400, "do not fit into 32"),
    ("/v1/completions", ASKED | {"max_tokens": 10**400}, 400, "do not fit"),
    ("/v1/completions", ASKED | {"temperature": "1"}, 400, "temperature: 1 is not a temperature"),
    ("/v1/completions", ASKED | {"top_p": 0.5}, 400, "top_p: 0.5 is not supported"),
    ("/v1/completions", ASKED | {"seed": None}, 400, "seed: there is none"),
    ("/v1/completions", ASKED | {"model": ["x"]}, 404, "model: there is no model"),
    ("/v1/completions", b"{", 400, "Expecting"), ("/v1/completions", b"[" * 9999, 400, ""),
    ("/v1/completions", b"[]", 400, ""), ("/elsewhere", {}, 404, "there is no /elsewhere"),
    ("/collective_rpc", {"method": "shutdown"}, 400, "method: it is not reload_weights"),
    ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/none"}}, 400, "is not a folder here"),
    ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/"}}, 400, "it has neither model.saf"),
    ("/v1/unload_lora_adapter", {"lora_name": "x"}, 404, "there is no adapter"),
])
def test_requests_that_are_refused(server, route, content, status, why):
    got, found = asked(server, route, content)
    assert got == status and why in found["error"]["message"], found


def test_pages_and_other_hosts_are_not_answered(server):
    for headers in ({"Origin": "http://127.0.0.1"}, {"Host": "elsewhere.example"}):
        assert asked(server, "/v1/completions", ASKED, **headers)[0] == 403
    assert asked(server, "/health")[0] == 200


class Served:
    """The command in a process of its own."""

    def __init__(self, folder, tmp_path):
        self.folder, self.port, self.log = folder, 0, tmp_path / "sampler.log"

    def start(self):
        command = [sys.executable, "-m", "jaxtrain", "serve_sampler", f"{self.folder}", f"--port={self.port}",
                   "--config.train.precision=float32"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
                                            stdout=subprocess.PIPE, stderr=log)
        line = self.process.stdout.readline()
        assert line.startswith("rl.sampler="), self.log.read_text()
        self.url = line.strip().removeprefix("rl.sampler=")
        self.port = int(self.url.split(":")[2].removesuffix("/v1"))


@pytest.mark.parametrize("rank", [*slow(0), *exhaustive(2)])
def test_a_run_is_sampled_for_in_another_process_that_is_killed(files, tmp_path, rank):  # noqa: F811
    """The sampler is killed after the second step, and started again; mismatch is rounding where answers are new."""
    (tmp_path / "text.txt").write_text("say 1: yes, and say 2: no.\n" * 200)
    jt.train(reference.tiny("llama", **TINY, data__source=str(tmp_path / "text.txt")), tmp_path / "model")
    server = Served(tmp_path / "model", tmp_path)
    server.start()

    class Killer(Observer):
        def on_dispatch(self, step, metrics):
            if step == 2:
                server.process.kill()
                server.process.wait()
                threading.Thread(target=server.start, daemon=True).start()

    config = reference.tiny("llama", **TINY, train__init_from=str(tmp_path / "model"), lora__rank=rank,
                            data__global_batch_size=8, optimizer__learning_rate=1e-2, rl__group_size=4,
                            rl__max_new_tokens=6, rl__prompts=str(files / "prompts.jsonl"), rl__sampler=server.url,
                            rl__reward=f"{files / 'reward.py'}:even")
    try:
        jt.train(config, tmp_path / "run", observers=[Killer()])
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert len(lines) == 6 and all(line["sampler_mismatch"] < 1e-5 for line in lines)
        assert len({path.name for path in (tmp_path / "run" / "rollouts").iterdir()}) == 6
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    finally:
        server.process.kill()
        server.process.wait()


def test_flags_that_are_refused(capsys):
    from jaxtrain.commands.serve_sampler import main

    for flags, why in ((["--batch_size=0", "x"], "--batch_size: 0 is out of range"),
                       (["x", "--config.rl.clip=1"], "--config.rl.clip: the run that is sampled for says it"),
                       (["/none"], "there is no folder /none")):
        assert main(flags) == 2 and why in capsys.readouterr().err
