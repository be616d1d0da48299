"""Answers from a server that is sent the weights: which weights answer, kills of the server, resumes, and refusals.

The server is a stand-in, and states are numbers, which it writes into its answers. The real vLLM is in
test_vllm_sampler.py.
"""

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.main import main
from jaxtrain.tuning import rollouts
from jaxtrain.tuning.samplers import remote_sampler
from jaxtrain.tuning.samplers.completions import Terms
from jaxtrain.tuning.samplers.remote_answers import RemoteAnswers
from jaxtrain.tuning.samplers.remote_sampler import RemoteSampler
from jaxtrain.tuning.samplers.vllm_routes import VllmServer
from jaxtrain.tuning.scorers import Scorers
from tests.numerics import reference
from tests.trainer.test_multiprocess import ROOT, ended, two_processes
from tests.tuning.samplers.vllm_stand_in import END, Numbers, Vllm
from tests.tuning.test_rollouts import config, files, on_four  # noqa: F401
from tests.tuning.test_staleness import (
    built,  # noqa: F401
    trained,
)

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(remote_sampler, "PAUSES_S", (0.0,))


@pytest.fixture
def server():
    found = Vllm()
    yield found
    found.kill()


def answers_of(run, server, workdir, adapters=False, timeout_s=60.0, temperature=1.0, **keys):
    """The sampler of a run, with weights that are numbers."""
    terms = Terms(keys.get("many", 6), temperature, (END,), 264, run.data.tokenizer)
    return RemoteAnswers(RemoteSampler(VllmServer.of(keys.get("url", server.url), timeout_s, 2**20), terms, timeout_s,
                                       adapters, workdir), Numbers(run, workdir / "sampler"))


def begun(run, server, workdir, **keys):
    """The data of a run that begins, whose rewards are the numbers of the states that answered."""
    data = run.data
    return rollouts.Rollouts(run, data.records, Scorers(("score",), (lambda answer, record: float(ord(answer[0])),)),
                             data.tokenizer, workdir / "rollouts", sampler=answers_of(run, server, workdir, **keys))


def same(some, others):
    for (state, batch), (other, wanted) in zip(some, others, strict=True):
        assert state == other
        for name, column in wanted.items():
            np.testing.assert_array_equal(batch[name], column, err_msg=f"{name} of state {state}")


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("staleness", "reuse", "states"), [
    (0, 1, [0, 1, 2, 3, 4, 5]), (2, 1, [0, 0, 0, 1, 2, 3]), (1, 2, [0, 0, 1, 1, 3, 3])])
def test_the_weights_of_a_step_answer(built, server, tmp_path, staleness, reuse, states, adapters):  # noqa: F811
    data = begun(built(rl__staleness=staleness, rl__reuse=reuse), server, tmp_path, adapters=adapters)
    found = trained(data, 0, 6)
    data.forget()
    assert [state for state, _ in found] == states
    for path in (tmp_path / "rollouts").iterdir():
        for line in map(json.loads, path.read_text().splitlines()):
            assert ord(line["text"][0]) - 97 == line["policy_step"] and line["end"] == [END, -0.5]
            assert line["weights"].startswith(f"step-{line['policy_step']}-")
    assert server.loads == sorted({*server.loads})  # each once
    assert len(server.answered) == len({*server.answered})  # each answer has a seed of its own
    asked = server.asked[0]
    assert asked["prompt"] in [data.prompts[n] for n in data._numbers(0)] and asked["stop_token_ids"] == [END]
    assert asked["return_token_ids"] and asked["ignore_eos"] and asked["top_k"] == 0 and asked["temperature"] == 1
    assert not [path for path in (tmp_path / "sampler").iterdir() if int(path.name.split("-")[1]) < max(states) - 1]
    batch = found[0][1]
    learnt = np.flatnonzero(batch["weights"][0])
    assert batch["sampled"][0][learnt].tolist() == [-1, -2, -0.5] and batch["targets"][0][learnt[-1]] == END


def test_steps_go_on_while_answers_are_outstanding(built, server, tmp_path):  # noqa: F811
    may = threading.Event()

    def answer(asked, said):
        assert server.number != 1 or may.wait(60)
        return said

    server.answer = answer
    data = begun(built(rl__staleness=2), server, tmp_path)
    trained(data, 0, 3)  # those of state 1 are for step 3
    assert not may.is_set() and not (tmp_path / "rollouts" / "4.jsonl").exists()
    may.set()
    data.see(3, 3)
    assert data[3]["rewards"].max() == 98
    assert {"sampler_wait_s", "sync_s", "sync_bytes", "rollout_s"} <= data.pop_fields().keys()
    data.forget()


@pytest.mark.parametrize("adapters", [False, True])
def test_a_server_that_is_killed_again_and_again_costs_its_answers_only(built, tmp_path, adapters):  # noqa: F811
    calm = Vllm()
    data = begun(built(rl__staleness=1), calm, tmp_path / "calm", adapters=adapters)
    want = trained(data, 0, 4)
    settle(data)
    calm.kill()
    left = itertools.cycle([2, 3, 1, 4])
    server = Vllm(dies_after=lambda: next(left))
    data = begun(built(rl__staleness=1), server, tmp_path / "storm", adapters=adapters)
    found = trained(data, 0, 4)
    settle(data)
    kills = server.starts - 1
    server.kill()
    assert kills >= 12
    same(found, want)
    assert sorted(path.name for path in (tmp_path / "storm" / "rollouts").iterdir()) == sorted(
        path.name for path in (tmp_path / "calm" / "rollouts").iterdir())
    told = [json.loads(line) for line in (tmp_path / "storm" / "events.jsonl").read_text().splitlines()]
    assert {event["kind"] for event in told} == {"sampler_restarted"}


def test_what_others_weights_answered_does_not_count(built, tmp_path):  # noqa: F811
    """A server that lost its weights and was sent others between two answers of a step answers all of them again."""
    server, changed = Vllm(), []

    def answer(asked, said):
        if len(server.answered) == 3 and not changed:
            changed.append(server.version)
            server.version, server.number = "default", 9
        return said

    server.answer = answer
    found = trained(begun(built(), server, tmp_path), 0, 1)
    server.kill()
    assert changed and found[0][0] == 0 and server.loads == [0, 0]
    texts = [json.loads(line)["text"] for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert {text[0] for text in texts} == {"a"}


# What a run of staleness 2 that was killed after the save of step 3 may have left.
@pytest.mark.parametrize("left", ["all", "none of the later ones", "weights alone", "nothing"])
def test_a_run_that_goes_on(built, server, tmp_path, left, capsys):  # noqa: F811
    run = built(rl__staleness=2)
    data = begun(run, server, tmp_path)
    whole = trained(data, 0, 3)
    for one in data._rounds.values():  # what answers are on record is not deleted while it is copied
        list(one.answers)
    folders = tmp_path / "before"
    shutil.copytree(tmp_path / "sampler", folders)  # those of state 2, perhaps of 1
    whole += trained_on(data, 3, 6)
    settle(data)
    for path in (tmp_path / "rollouts").iterdir():
        if (left == "none of the later ones" and int(path.stem) > 5) or (
                left in ("weights alone", "nothing") and int(path.stem) > 4):
            path.unlink()
    shutil.rmtree(tmp_path / "sampler")
    if left == "weights alone":
        shutil.copytree(folders, tmp_path / "sampler")
    server.answered.clear()
    data = begun(run, server, tmp_path)
    again = trained(data, 3, 6) if left != "nothing" else trained_on(data, 3, 6)
    settle(data)
    if left != "nothing":
        same(again, whole[3:])
    else:  # step 3 is on record; the weights of state 2 are gone
        assert [state for state, _ in again] == [1, 3, 3]
        assert "5.jsonl is missing: the model of step 3 answers in place of that of step 2" in capsys.readouterr().err
    asked = sorted({number for number, _ in server.answered})
    assert asked == {"all": [], "none of the later ones": [3, 4, 5], "weights alone": [2, 3, 4, 5],
                     "nothing": [3, 4, 5]}[left]


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 2])
def test_a_storm_over_a_run_and_its_sampler_changes_no_bit(files, tmp_path, rank):  # noqa: F811
    """The run is killed six times, after so many answers of a server that dies all the time itself."""
    keys = {"model.num_layers": 1, "model.embed_dim": 32, "model.max_seq_len": 32, "data.seq_len": 20, "train.steps": 8,
            "data.global_batch_size": 8, "train.eval_every": 0, "checkpoint.every": 1, "rl.group_size": 4,
            "rl.max_new_tokens": 6, "rl.staleness": 2, "rl.prompts": files / "prompts.jsonl", "lora.rank": rank,
            "rl.reward": f"{files / 'reward.py'}:even"}
    if rank:
        (tmp_path / "text.txt").write_text("say 1: yes, and say 2: no.\n" * 200)
        begin = {**{key: keys[key] for key in [*keys][:3]}, "data.seq_len": 20, "train.steps": 8, "data.source":
                 tmp_path / "text.txt", "train.eval_every": 0}
        assert main([f"--config={ROOT}/configs/gpt.py:tiny", f"--workdir={tmp_path / 'base'}",
                     *(f"--config.{key}={value}" for key, value in begin.items())]) == 0

    def started(flags):  # all in processes of their own, since programs of this one are compiled in another way
        return subprocess.Popen([sys.executable, "-m", "jaxtrain.main", *flags], stderr=subprocess.DEVNULL,
                                env=os.environ | {"PYTHONPATH": str(ROOT)})

    if rank:
        keys["train.init_from"] = tmp_path / "base"
    flags = [f"--config={ROOT}/configs/gpt.py:tiny", *(f"--config.{key}={value}" for key, value in keys.items())]
    calm = Vllm()
    assert started([*flags, f"--config.rl.sampler={calm.url}", f"--workdir={tmp_path / 'calm'}"]).wait() == 0
    calm.kill()
    left, answered = itertools.cycle([5, 2, 7, 3, 4]), threading.Semaphore(0)
    server = Vllm(dies_after=lambda: next(left), answer=lambda asked, said: (answered.release(), said)[1])
    flags += [f"--config.rl.sampler={server.url}", f"--workdir={tmp_path / 'storm'}"]
    for many in (3, 9, 17, 11, 6, 13):
        process = started(flags)
        assert all(answered.acquire(timeout=120) for _ in range(many))
        process.kill()
        process.wait()
    assert started(flags).wait() == 0
    deaths = server.starts - 1
    server.kill()
    assert deaths >= 12
    states = [jax.device_get(jt.load_model(tmp_path / name)[1].params) for name in ("calm", "storm")]
    assert jax.tree.all(jax.tree.map(np.array_equal, *states))
    for step in range(1, 9):  # answers for later steps may have been outstanding at the end
        ours, theirs = ((tmp_path / name / "rollouts" / f"{step}.jsonl").read_text() for name in ("calm", "storm"))
        assert len(theirs.splitlines()) == 8 and ours == theirs


@pytest.mark.exhaustive
def test_two_processes_go_on_as_one_does_and_one_of_them_asks(files, server, tmp_path):  # noqa: F811
    keys = {"model.num_layers": 1, "model.embed_dim": 32, "model.max_seq_len": 32, "data.seq_len": 20, "train.steps": 4,
            "data.global_batch_size": 8, "train.eval_every": 0, "checkpoint.every": 2, "mesh.data": 1, "mesh.fsdp": 2,
            "mesh.tensor": 2, "rl.group_size": 4, "rl.max_new_tokens": 6, "rl.staleness": 1, "rl.sampler": server.url,
            "rl.prompts": files / "prompts.jsonl", "rl.reward": f"{files / 'reward.py'}:even"}
    flags = [f"--config={ROOT}/configs/gpt.py:tiny", *(f"--config.{key}={value}" for key, value in keys.items())]
    assert main([*flags, f"--workdir={tmp_path / 'one'}"]) == 0
    asked = len(server.answered)
    with two_processes(flags, tmp_path / "two", devices=2) as started:
        said = ended(started)
    assert [process.returncode for process in started] == [0, 0], said
    assert len(server.answered) == 2 * asked == 80
    for path in (tmp_path / "one" / "rollouts").iterdir():
        ours, theirs = ([json.loads(line) for line in file.read_text().splitlines()]
                        for file in (tmp_path / "two" / "rollouts" / path.name, path))
        assert [(line["tokens"], line.get("reward"), line["policy_step"]) for line in ours] == [
            (line["tokens"], line.get("reward"), line["policy_step"]) for line in theirs]


def trained_on(data, start, stop):
    found = []
    for step in range(start, stop):
        data.see(step, step)
        batch = data[step]
        found.append((int(batch["targets"][0][np.flatnonzero(batch["weights"][0])[0]]) - 97, batch))
    return found


def settle(data):
    """Wait for the answers of later steps too, and end."""
    for one in data._rounds.values():
        list(one.answers)
    data.forget()


def changed(**keys):
    """An answer with other values in its choice."""
    def answer(asked, said):
        said["choices"][0] |= keys
        return said
    return answer


HOSTILE = {
    "wrong JSON": (lambda *_: b"{", "it "),
    "a list": (lambda *_: b"[1]", "is not of the form expected"),
    "deep": (lambda *_: b"[" * 10000, ""),
    "no choice": (lambda *_: {"choices": []}, "it has not one choice"),
    "text only": (changed(token_ids=None), "it has no token_ids, or no prompt_token_ids, though return_token_ids was"),
    "another prompt": (changed(prompt_token_ids=[1]), "its prompt_token_ids are not those of the prompt"),
    "NaN": (changed(logprobs={"token_logprobs": [float("nan"), -1.0, -1.0]}), "nan is not a log-probability"),
    "null": (changed(logprobs={"token_logprobs": [None, -1.0, -1.0]}), "None is not a log-probability"),
    "positive": (changed(logprobs={"token_logprobs": [0.5, -1.0, -1.0]}), "0.5 is not a log-probability"),
    "none": (changed(logprobs=None), "it has no log-probability of each token"),
    "few": (changed(logprobs={"token_logprobs": [-1.0]}), "it has no log-probability of each token"),
    "out of range": (changed(token_ids=[97, 264, END]), "its token 264 is outside of the vocabulary of 264"),
    "negative": (changed(token_ids=[97, -1, END]), "its token -1 is outside"),
    "texts": (changed(token_ids=["a", "b", "c"]), "its token_ids are not a list of whole numbers"),
    "stops elsewhere": (changed(token_ids=[97, 98, 99]), "it ends with token 99 after 3 for the reason 'stop'"),
    "goes on": (changed(token_ids=[END, 97, END]), "it ends with token 256 after 3"),
    "short": (changed(token_ids=[97, 98, 99], finish_reason="length"), "after 3 for the reason 'length'"),
    "long": (changed(token_ids=[97] * 7, logprobs={"token_logprobs": [-1.0] * 7}, finish_reason="length"),
             "it has 7 tokens, and max_tokens was 6"),
    "gigabytes": (lambda *_: b" " * (2**20 + 1), "answers more than 1,048,576 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_answers_that_are_of_no_use_are_told_in_one_line(built, server, tmp_path, name):  # noqa: F811
    server.answer, why = HOSTILE[name]
    data = begun(built(), server, tmp_path)
    data.see(0, 0)
    with pytest.raises(jt.UserError) as refusal:
        data[0]
    said = str(refusal.value)
    assert said.startswith("rl.sampler: ") and why in said and "\n" not in said
    assert not (tmp_path / "rollouts").exists()
    data.forget()


def test_a_server_that_hangs_or_is_down(built, server, tmp_path):  # noqa: F811
    may = threading.Event()
    server.answer = lambda asked, said: may.wait(60) and said
    data = begun(built(), server, tmp_path, timeout_s=0.3)
    data.see(0, 0)
    with pytest.raises(jt.UserError, match=r"0 of 8 answers came in 0\.3 s; check that the server is up, or raise rl"):
        data[0]
    may.set()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        data = begun(built(), server, tmp_path, timeout_s=0.3, url=f"http://127.0.0.1:{closed.getsockname()[1]}/v1")
        data.see(0, 0)
        with pytest.raises(jt.UserError, match=r"does not answer \(.*; 0 of 8 answers came in 0\.3 s"):
            data[0]


def test_a_server_without_the_routes(built, server, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(server, "replies", lambda path, *_: (404, {"detail": "Not Found"}) if "completions" not in path
                        and path != "/v1/models" else (200, {"data": []}))
    for adapters, why in ((False, r"/weight_info answers 404 Not Found: \{\"detail.*VLLM_SERVER_DEV_MODE=1"),
                          (True, r"/v1/load_lora_adapter answers 404 .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")):
        data = begun(built(), server, tmp_path, adapters=adapters)
        data.see(0, 0)
        with pytest.raises(jt.UserError, match=why):
            data[0]


def test_adapters_are_not_for_a_model_that_another_run_replaced(built, server, tmp_path):  # noqa: F811
    server.version = "step-7-abc"
    data = begun(built(), server, tmp_path, adapters=True)
    data.see(0, 0)
    with pytest.raises(jt.UserError, match=r"has weights that another run sent it \(step-7-abc\).*; start it again"):
        data[0]


def test_log_probabilities_of_another_temperature(built, server, tmp_path):  # noqa: F811
    processed = []

    def answer(asked, said):
        said["choices"][0]["logprobs"]["top_logprobs"] = [{"x": -1.0 / (asked["temperature"] if processed else 1)}]
        return said

    server.answer = answer
    for right in (False, True):
        processed += [1] * right
        data = begun(built(), server, tmp_path, temperature=0.5)
        data.see(0, 0)
        if right:
            assert data[0]["rewards"].max() == 97
        else:
            with pytest.raises(jt.UserError, match=r"those at temperature 1, not at 0\.5; start vLLM with --logp"):
                data[0]
        data.forget()


@pytest.mark.parametrize(("keys", "message"), [
    (dict(rl__sampler_timeout_s=5.0), "rl.sampler_timeout_s: it is read with rl.sampler only"),
    (dict(rl__sampler="http://h/v1", rl__sampling_rounds=2), "rl.sampling_rounds: 2 is for answers that are made on"),
    (dict(rl__sampler="http://h/v1", rl__baseline="value"), "rl.baseline: value is for answers that are made on"),
    (dict(rl__sampler="http://h/v1", rl__gather_weights=True), "rl.gather_weights: True is for answers that are made"),
    (dict(rl__correction_high=3.0), "rl.correction_high: it is read with rl.correction only"),
    (dict(rl__correction="truncate", rl__correction_low=0.1), "rl.correction_low: it is read with rl.correction=mask"),
    (dict(rl__correction="mask", rl__reuse=2), "rl.correction: it needs the policy before the step"),
])
def test_keys_that_do_not_go_together(keys, message):
    with pytest.raises(jt.UserError) as refusal:
        reference.tiny("llama", **(dict(rl__prompts="p", rl__reward="r.py:f", rl__max_new_tokens=2) | keys))
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(("url", "message"), [
    ("http://h:1", "rl.sampler: http://h:1 does not end in /v1"), ("h:1/v1", "rl.sampler: h:1/v1 is not the URL of a"),
    ("file:///v1", "rl.sampler: file:///v1 is not the URL")])
def test_urls_that_are_none(url, message):
    with pytest.raises(jt.UserError) as refusal:
        VllmServer.of(url, 1.0, 1)
    assert str(refusal.value).startswith(message)
