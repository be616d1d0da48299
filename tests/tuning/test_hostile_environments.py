"""Environments that hang, die, say too much or what is no answer: one sentence each, and never a hang."""

import http.server
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

import jaxtrain as jt
from jaxtrain.tuning import http_service
from jaxtrain.tuning.environments import worker_pool
from jaxtrain.tuning.environments.protocol import Asked
from jaxtrain.tuning.environments.served import Served
from jaxtrain.tuning.environments.worker_pool import WorkerPool

HOSTILE = '''
import os, signal, subprocess, sys, time
from pathlib import Path

class Fine:
    def reset(self, record, seed):
        return "begin"

    def step(self, answer):
        return "go on", 0.5, False

class Hangs(Fine):
    def step(self, answer):
        subprocess.Popen(["sleep", "1000"])
        Path(__file__).with_suffix(f".{os.getpid()}").touch()
        time.sleep(1000)

class Dies(Fine):
    def step(self, answer):
        os._exit(3)

class Killed(Fine):
    def step(self, answer):
        os.kill(os.getpid(), signal.SIGSEGV)

class Exits(Fine):
    def step(self, answer):
        sys.exit(0)

class Fills(Fine):
    def step(self, answer):
        return "x" * 2**34, 0.0, False

class Says(Fine):
    def step(self, answer):
        return "x" * 2**21, 0.0, False

class Prints(Fine):
    def step(self, answer):
        print("x" * 10**6)
        os.write(1, b"x" * 10**6)
        os.write(0, b"x")

class Nan(Fine):
    def step(self, answer):
        return "", float("nan"), True

class Wrong(Fine):
    def step(self, answer):
        return 5

class Odd(Fine):
    def step(self, answer):
        return {"a": 1}, 0.0, False

class Silent(Fine):
    def step(self, answer):
        return "", 0.0, False

class NoJson(Fine):
    def step(self, answer):
        return object(), 0.0, False

class Divides(Fine):
    def step(self, answer):
        return 1 / 0

class Ends(Fine):
    def reset(self, record, seed):
        return None

class Loads:
    raise SystemExit(4)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "hostile.py"
    path.write_text(HOSTILE.replace("class Loads:\n    raise SystemExit(4)\n", ""))
    return path


def asked(*answers):
    return Asked("1", {"prompt": "a"}, 1, list(answers))


@pytest.mark.parametrize(("name", "message"), [
    ("Dies", "FILE:Dies ended its process with status 3 at the answer 'a', in 3 tries; correct it, allow more"),
    ("Killed", "FILE:Killed was ended by SIGSEGV at the answer 'a', in 3 tries; "),
    ("Exits", "at the answer 'a', FILE:Exits fails (SystemExit: 0); correct it"),
    ("Fills", "at the answer 'a', FILE:Fills takes more memory than rl.environment_memory_gib allows; correct"),
    ("Says", "at the answer 'a', FILE:Says says 2,097,152 characters, and 1,048,576 are the most; correct it"),
    ("Prints", "at the answer 'a', FILE:Prints fails (OSError: "),
    ("Nan", "FILE:Nan gives the reward nan after the answer 'a'; let it give numbers below 1e30"),
    ("Wrong", "at the answer 'a', FILE:Wrong fails (TypeError: step gives int, not a tuple of "),
    ("Odd", "what FILE:Odd answers is not of the form expected: observation is not "),
    ("Silent", "FILE:Silent says nothing after the answer 'a' and is not done; let it give text"),
    ("NoJson", "at the answer 'a', FILE:NoJson fails (TypeError: Object of type object is not JSON serializable)"),
    ("Divides", "at the answer 'a', FILE:Divides fails (ZeroDivisionError: division by zero); correct it"),
])
def test_what_an_environment_may_do_to_its_process(file, name, message):
    pool = WorkerPool(f"{file}:{name}", {}, 1, timeout_s=60.0, memory=2**32)
    with pytest.raises(jt.UserError) as refusal:
        pool.turns([asked("a")])
    assert f"{refusal.value}".replace(str(file), "FILE").startswith(f"rl.environment: {message}")
    assert pool._workers == [None]


def test_one_that_hangs_is_ended_with_all_that_it_started(file, monkeypatch):
    monkeypatch.setattr(worker_pool, "TRIES", 2)
    pool = WorkerPool(f"{file}:Hangs", {}, 2, timeout_s=0.5, memory=0)
    with pytest.raises(jt.UserError, match=r"rl\.environment: \S*Hangs takes longer than rl\.reward_timeout_s=0\.5 s "
                       r"at the answer 'a', in 2 tries; correct it"):
        pool.turns([asked("a"), Asked("2", {}, 2, [])])
    started = [int(path.suffix[1:]) for path in file.parent.glob("hostile.[0-9]*")]
    assert started
    for pid in started:  # nothing is left of the group that was killed
        until = time.monotonic() + 20
        while any(_group(other) == pid for other in os.listdir("/proc") if other.isdecimal()):
            assert time.monotonic() < until, "a process that an environment started is still there"
            time.sleep(0.01)


def _group(pid):
    """The process group of a process that runs, or None."""
    try:
        rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if rest[0] == "Z" else int(rest[2])


def test_one_that_ends_as_it_is_loaded(tmp_path):
    (tmp_path / "a.py").write_text("raise SystemExit(4)\n")
    pool = WorkerPool(f"{tmp_path}/a.py:A", {}, 1, 60.0, 0)
    with pytest.raises(jt.UserError, match=r"rl\.environment: .*a\.py:A cannot be loaded \(SystemExit: 4\); correct"):
        pool.tasks()
    (tmp_path / "a.py").write_text("import os\nos._exit(1)\n")
    with pytest.raises(jt.UserError, match=r"rl\.environment: .*a\.py:A ended its process with status 1 as it is load"):
        pool.tasks()


def test_conversations_go_on_where_they_were_whoever_is_asked(file):
    pool = WorkerPool(f"{file}:Fine", {}, 2, 60.0, 0)
    first = pool.turns([Asked(f"{n}", {}, 0, []) for n in range(5)])
    assert [turn.observation for turn in first] == ["begin"] * 5
    later = pool.turns([Asked(f"{n}", {}, 0, ["a", "b"]) for n in reversed(range(5))])  # an answer was not asked about
    assert [(turn.observation, turn.reward, turn.done) for turn in later] == [("go on", 0.5, False)] * 5
    pool.release(["0", "3"])
    assert {id for worker in pool._workers for id in worker.known} == {"1", "2", "4"}
    pool.end()
    assert pool.turns([Asked("1", {}, 0, ["a"])])[0].observation == "go on"
    pool.end()


class Server(http.server.BaseHTTPRequestHandler):
    reply = b""
    seen: list = []  # noqa: RUF012

    def do_POST(self):
        self.seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.reply)))
        self.end_headers()
        self.wfile.write(self.reply)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}/"
        found.shutdown()
        thread.join()


@pytest.mark.parametrize(("reply", "message"), [
    (b"{", "what URL answers cannot be read ("), (b"[]", "what URL answers cannot be read ("),
    (b'{"turns": []}', "URL gives 0 turns for 1 conversations; let it give one for each"),
    (b'{"turns": [{"observation": 3}]}', "what URL answers is not of the form expected: observation is not "),
    (b'{"turns": [{"observation": "a", "reward": true}]}', "what URL answers is not of the form expected: reward is "),
    (b'{"turns": [{"observation": "", "reward": NaN, "done": true}]}', "URL gives the reward nan after the answer"),
    (b'{"turns": [{"observation": [{"role": "user"}]}]}', "URL says "),
    (b'{"turns": [' + b"[" * 10**5, "what URL answers cannot be read ("),
    (b" " * (2**24 + 1), "URL answers more than 16,777,216 bytes; let it answer what is asked only"),
])
def test_what_a_server_may_answer(server, monkeypatch, reply, message):
    monkeypatch.setattr(Server, "reply", reply)
    with pytest.raises(jt.UserError) as refusal:
        Served(server, 60.0).turns([asked("a")])
    assert f"{refusal.value}".replace(server, "URL").startswith(f"rl.environment: {message}")


def test_a_server_gets_all_that_its_answer_depends_on(server, monkeypatch):
    monkeypatch.setattr(Server, "reply", b'{"turns": [{"observation": "x", "reward": 1, "done": true}]}')
    Server.seen.clear()
    turn, = Served(server, 60.0).turns([asked("a")])
    assert (turn.observation, turn.reward, turn.done) == ("x", 1.0, True)
    assert Server.seen == [{"conversations": [{"id": "1", "record": {"prompt": "a"}, "seed": 1, "answers": ["a"]}]}]


def test_a_closed_port(monkeypatch):
    monkeypatch.setattr(http_service, "PAUSE_S", 0.0)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
    with pytest.raises(jt.UserError, match=r"rl\.environment: \S+ does not answer \(.*refused.*\), in 4 tries of at"):
        Served(url, 5.0).turns([asked()])
