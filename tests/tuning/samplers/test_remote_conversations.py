"""Conversations whose answers come from a server: `rl.sampler` and `rl.environment` at once."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.tuning import rollouts
from jaxtrain.tuning.environments.loading import environment_of
from jaxtrain.tuning.scorers import FromEnvironment, Scorers
from tests.trainer.test_multiprocess import ROOT
from tests.tuning.samplers.test_remote_sampler import answers_of, quick, server, settle  # noqa: F401
from tests.tuning.samplers.vllm_stand_in import END, Vllm
from tests.tuning.test_environments import config
from tests.tuning.test_rollouts import on_four  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")
# Counts what it is told; with a folder, its process dies before the first reply to each answer, or hangs for ever.
COUNTS = '''
import os, signal, time
from pathlib import Path

FOLDER = Path(__file__).parent / "deaths"

def hang(where):
    if (FOLDER / f"hang in {where}").exists():
        (FOLDER / "hangs").touch()
        time.sleep(3000)

class Counts:
    def reset(self, record, seed):
        self.said, self.turns, self.seed = [], record["turns"], seed
        hang("reset")
        return f"begin {seed % 7}"

    def step(self, answer):
        self.said.append(answer)
        hang("step")
        if FOLDER.exists():
            try:
                (FOLDER / f"{self.seed}-{'-'.join(self.said)}").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return f"heard {len(self.said)}", len(self.said) * (answer[1] == "b") / 4, len(self.said) == self.turns
'''


@pytest.fixture
def files(tmp_path):
    (tmp_path / "counts.py").write_text(COUNTS)
    lines = [{"prompt": f"task {n}", "turns": 1 + n % 3} for n in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def begun(run, server, workdir):  # noqa: F811
    data = run.data
    return rollouts.Rollouts(run, data.records, Scorers(("environment",), (FromEnvironment(),)), data.tokenizer,
                             workdir / "rollouts", environment=environment_of(run.config),
                             sampler=answers_of(run, server, workdir, many=4))


def trained(data, start, stop):
    found = []
    for step in range(start, stop):
        data.see(step, step)
        found.append(data[step])
    return found


def same(some, others):
    for batch, wanted in zip(some, others, strict=True):
        for name, column in wanted.items():
            np.testing.assert_array_equal(batch[name], column, err_msg=name)


def records(workdir):
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()]
            for path in (workdir / "rollouts").iterdir()}


@pytest.fixture
def run(files):
    return jt.build(config(files, rl__staleness=1), devices=jax.devices()[:1])


def test_turns_are_answered_by_the_weights_of_the_step(run, server, files):  # noqa: F811
    data = begun(run, server, files)
    found = trained(data, 0, 3)
    fields = data.pop_fields()
    settle(data)
    assert fields["environment_s"] > 0 and fields["rollout_s"] > 0 and fields["turns"] >= 1
    assert len(server.answered) == len({*server.answered})  # each answer has a seed of its own
    told = records(files)
    assert {1, 2, 3} == {sum("reward" in turn for turn in line["turns"]) for one in told.values() for line in one}
    asked = {tuple(one["prompt"]) for one in server.asked}
    for line in itertools.chain(*told.values()):
        tokens, at = [*line["begin"], *line["tokens"]], len(line["begin"])
        for turn in line["turns"]:
            if "reward" in turn:  # an answer is what the server gave to all tokens before it
                assert tuple(tokens[:at]) in asked
                assert tokens[at:at + 3] == [97 + line["policy_step"], tokens[at + 1], END]
                assert line["logprobs"][at - len(line["begin"]):][:3] == [-1.0, -2.0, -0.5]
            at += turn["tokens"]
        assert at == len(tokens) and line["weights"].startswith(f"step-{line['policy_step']}-")
    learnt = found[0]["targets"][found[0]["weights"] > 0].reshape(-1, 3)
    assert (learnt[:, 0] == 97).all() and (learnt[:, 2] == END).all()

    again = begun(run, server, files)  # a run that goes on reads them
    many = len(server.answered)
    same(trained(again, 1, 3), found[1:])
    settle(again)
    assert len(server.answered) == many


def test_kills_of_the_server_and_of_environments_change_nothing(run, server, files):  # noqa: F811
    data = begun(run, server, files / "calm")
    want = trained(data, 0, 3)
    settle(data)
    (files / "deaths").mkdir()
    left = itertools.cycle([2, 3, 1, 4])
    dying = Vllm(dies_after=lambda: next(left))
    data = begun(run, dying, files / "storm")
    found = trained(data, 0, 3)
    settle(data)
    kills = dying.starts - 1
    dying.kill()
    assert kills >= 12 and len([*(files / "deaths").iterdir()]) >= 12
    same(found, want)
    assert records(files / "storm") == records(files / "calm")


@pytest.mark.parametrize("where", ["step", "reset"])
def test_it_ends_at_once_while_an_environment_hangs(server, files, where):  # noqa: F811
    """Also with answers of a later step outstanding, and none of its processes is started again."""
    (files / "deaths").mkdir()
    (files / "deaths" / f"hang in {where}").touch()
    run = jt.build(config(files, rl__staleness=1, rl__reward_timeout_s=1000.0, resilience__hang_floor=1e5),
                   devices=jax.devices()[:1])
    data = begun(run, server, files)
    data.see(0, 0)

    def ask():
        with contextlib.suppress(BaseException):
            data[0]

    asking, ending = (threading.Thread(target=one, daemon=True) for one in (ask, data.forget))
    asking.start()
    while not (files / "deaths" / "hangs").exists():
        assert asking.is_alive()
        time.sleep(0.01)
    ending.start()
    ending.join(60)
    asking.join(60)
    assert not ending.is_alive() and not asking.is_alive() and not (files / "rollouts").exists()
    assert data.environment._workers == [None] * len(data.environment._workers)


@pytest.mark.exhaustive
def test_a_storm_over_a_run_its_sampler_and_its_environments_changes_no_bit(files):
    """The run is killed four times, and its server and the environment's processes all the time."""
    keys = {"model.num_layers": 1, "model.embed_dim": 32, "model.max_seq_len": 96, "data.seq_len": 96, "train.steps": 6,
            "data.global_batch_size": 8, "train.eval_every": 0, "checkpoint.every": 1, "rl.group_size": 4,
            "rl.max_new_tokens": 6, "rl.staleness": 1, "rl.prompts": files / "prompts.jsonl",
            "rl.environment": f"{files / 'counts.py'}:Counts"}

    def started(flags):
        return subprocess.Popen([sys.executable, "-m", "jaxtrain.main", *flags], stderr=subprocess.DEVNULL,
                                env=os.environ | {"PYTHONPATH": str(ROOT)})

    flags = [f"--config={ROOT}/configs/gpt.py:tiny", *(f"--config.{key}={value}" for key, value in keys.items())]
    calm = Vllm()
    assert started([*flags, f"--config.rl.sampler={calm.url}", f"--workdir={files / 'calm'}"]).wait() == 0
    calm.kill()
    (files / "deaths").mkdir()
    left, answered = itertools.cycle([5, 2, 7, 3, 4]), threading.Semaphore(0)
    dying = Vllm(dies_after=lambda: next(left), answer=lambda asked, said: (answered.release(), said)[1])
    flags += [f"--config.rl.sampler={dying.url}", f"--workdir={files / 'storm'}"]
    for many in (3, 19, 11, 25):
        process = started(flags)
        assert all(answered.acquire(timeout=120) for _ in range(many))
        process.kill()
        process.wait()
    assert started(flags).wait() == 0
    deaths = dying.starts - 1
    dying.kill()
    assert deaths >= 12 and len([*(files / "deaths").iterdir()]) >= 12
    states = [jax.device_get(jt.load_model(files / name)[1].params) for name in ("calm", "storm")]
    assert jax.tree.all(jax.tree.map(np.array_equal, *states))
    told = [records(files / name) for name in ("calm", "storm")]
    for step in range(1, 7):  # answers for later steps may have been outstanding at the end
        assert len(told[1][f"{step}.jsonl"]) == 8 and told[0][f"{step}.jsonl"] == told[1][f"{step}.jsonl"]
