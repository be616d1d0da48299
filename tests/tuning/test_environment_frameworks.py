"""Environments of verifiers and OpenEnv, in a Python that has them: JAXTRAIN_ENVIRONMENTS_PYTHON, or this one."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

import jaxtrain as jt
from jaxtrain.tuning.environments.openenv_adapter import action_of, said
from jaxtrain.tuning.environments.protocol import Asked
from jaxtrain.tuning.environments.verifiers_adapter import message_of
from jaxtrain.tuning.environments.worker_pool import WorkerPool

PYTHON = os.environ.get("JAXTRAIN_ENVIRONMENTS_PYTHON", sys.executable)
GAME = '''
import verifiers.v1 as vf

__all__ = ["GameTaskset", "GameEnv"]


class GameData(vf.TaskData):
    right: str


class GameTask(vf.Task[GameData]):
    """A task."""


class GameConfig(vf.TasksetConfig):
    """Options."""


class GameEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GameTaskset(vf.Taskset[GameTask, GameConfig]):
    def load(self):
        return [GameTask(GameData(prompt=f"guess {n}", right=f"{n}"), self.config.task) for n in range(3)]


class GameEnv(vf.Env[GameEnvConfig]):
    async def run(self, task, agents):
        won = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for turn in range(3):
                if segment.last_reply == task.data.right:
                    won = 1.0 - turn / 4
                    break
                if segment.last_reply == "fail":
                    raise ValueError("the game is broken")
                segment = await interaction.turn(f"not {segment.last_reply}")
        interaction.trace.record_reward("won", won)
'''
SUMS = '''
import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsTask(vf.Task):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "4")


class SumsConfig(vf.TasksetConfig):
    """Options."""


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        return [SumsTask(vf.TaskData(prompt="2+2", system_prompt="Add."), self.config.task)]
'''


def needs(package):
    """Skip a test where the framework is not installed."""
    asks = f"import importlib.util as u, sys; sys.exit(u.find_spec('{package}') is None)"
    found = subprocess.run([PYTHON, "-c", asks])
    if found.returncode:
        pytest.skip(f"{PYTHON} has no {package}: pip install -e '.[environments]', or name one that has it in "
                    "JAXTRAIN_ENVIRONMENTS_PYTHON")


def pool(named):
    return WorkerPool(named, {}, 1, 120.0, 0, PYTHON)


def played(environment, record, *answers):
    """Return what is said to each answer, from the beginning on, with rewards and ends."""
    found = [environment.turns([Asked("a", record, 3, list(answers[:n]))])[0] for n in range(len(answers) + 1)]
    return [(turn.observation, turn.reward, turn.done) for turn in found]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, in which workers find modules."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def user(text):
    return [{"role": "user", "content": text}]


@pytest.mark.exhaustive
def test_an_environment_of_verifiers_with_turns_of_its_own(folder):
    needs("verifiers")
    (folder / "game_v1.py").write_text(GAME)
    game = pool("verifiers:game-v1")
    assert game.tasks() == [{"task": 0}, {"task": 1}, {"task": 2}]
    told = played(game, {"task": 1}, "0", "1")
    assert told == [(user("guess 1"), 0, False), (user("not 0"), 0, False), ([], 0.75, True)]
    assert played(game, {"task": 2}, "9", "9", "9", "9")[-1] == ([], 0.0, True)
    again, = game.turns([Asked("b", {"task": 1}, 3, ["0", "1"])])  # all of it is played again
    assert (again.observation, again.reward, again.done) == ([], 0.75, True)
    with pytest.raises(jt.UserError, match=r"rl\.environment: at the answer 'fail', verifiers:game-v1 fails \(Runtime"
                       r"Error: the episode fails \(EnvError: .*the game is broken"):
        game.turns([Asked("c", {"task": 0}, 3, ["fail"])])
    game.end()


@pytest.mark.exhaustive
def test_a_task_of_verifiers_with_a_reward_function(folder):
    needs("verifiers")
    (folder / "sums.py").write_text(SUMS)
    sums = pool("verifiers:sums")
    begin, end = played(sums, {"task": 0}, "4")
    assert begin == ([{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2"}], 0, False)
    assert end == ([], 2.0, True)
    assert played(sums, {"task": 0}, "5")[-1] == ([], 0.0, True)
    sums.end()


@pytest.fixture
def server(folder):
    """A server of the environment that OpenEnv's own `init` writes."""
    needs("openenv")
    subprocess.run([PYTHON, "-m", "openenv.cli", "init", "echo_env"], check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{some.getsockname()[1]}"
    process = subprocess.Popen([PYTHON, "-m", "uvicorn", "server.app:app", "--port", url.rpartition(":")[2]],
                               cwd=folder / "echo_env", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{url}/schema", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until, "the server does not start"
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.exhaustive
def test_an_environment_of_openenv_by_url_by_class_and_through_verifiers(folder, server):
    def echo(text, size):
        return {"echoed_message": text, "message_length": size}

    for named in (f"openenv:{server}", "openenv:echo_env.server.echo_env_environment:EchoEnvironment"):
        environment = pool(named)
        told = played(environment, {}, "hello", '{"message": "b"}')
        assert [(json.loads(text), reward, done) for text, reward, done in told] == [
            (echo("Echo Env environment ready!", 0), 0, False), (echo("hello", 5), 0.5, False),
            (echo("b", 1), 0.1, False)]
        environment.end()
    needs("verifiers")
    (folder / "env.toml").write_text(f'[env.taskset]\nid = "openenv"\nbase_url = "{server}"\n')
    environment = pool(f"verifiers:{folder}/env.toml")
    told = played(environment, {"task": 0}, "hello")
    assert [json.loads(messages[0]["content"])["observation"]["echoed_message"] for messages, _, _ in told] == [
        "Echo Env environment ready!", "hello"]
    environment.end()


def test_answers_as_actions():
    schema = {"properties": {"metadata": {"type": "object"}, "message": {"type": "string"}}, "required": ["message"]}
    assert action_of("hi", schema) == {"message": "hi"} == action_of('{"message": "hi"}', schema)
    assert action_of("3", {"properties": {"column": {"type": "integer"}}}) == {}
    assert said({"text": "a", "metadata": {}, "done": False, "reward": 1}) == "a"
    assert said({"text": "a", "size": 1}) == '{"text": "a", "size": 1}'


def test_calls_of_tools():
    found = message_of('Let us see. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    assert found["content"] == "Let us see." and found["tool_calls"][0]["function"] == {
        "name": "add", "arguments": '{"a": 1}'}
    assert message_of("<tool_call>{</tool_call>") == {"role": "assistant", "content": "<tool_call>{</tool_call>"}


@pytest.mark.parametrize("named", ["verifiers:a", "openenv:a:B"])
def test_a_framework_that_is_missing(named, tmp_path):
    """Workers look for it in their own Python."""
    (tmp_path / f"{named.partition(':')[0]}.py").write_text("raise ImportError\n")
    environment = WorkerPool(named, {}, 1, 60.0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [f"{tmp_path}", *sys.path])
        with pytest.raises(jt.UserError, match=r"rl\.environment: .*:NAME needs the package .*; run pip install -e "
                           r"'\.\[environments\]'"):
            environment.tasks()
