"""A scorer on loopback: what it is asked, what is tried again, and what is refused."""

import base64
import contextlib
import http.server
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import jaxtrain as jt
from jaxtrain.redaction import redacted
from jaxtrain.tuning import remote_rewards
from jaxtrain.tuning.remote_rewards import RemoteRewards
from tests.tuning.test_rollouts import config, files, on_four  # noqa: F401

pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
ANSWERS, RECORDS = ["a", "bb", "\ud800é", ""], [{"prompt": "p", "number": n} for n in (1, 2, 3, 4)]


def right(_, asked):
    """Return the rewards of the other tests' function."""
    return 200, {"rewards": [sum(map(ord, answer)) % 2 + 0.1 * record["number"]
                             for answer, record in zip(asked["answers"], asked["records"], strict=True)]}


@contextlib.contextmanager
def scorer(answer=right):
    """A server whose `answer(handler, asked)` returns a status and a body; yields its address, and what it was asked.
    """
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers, content))
            status, body = answer(self, content)
            if status:
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}/score", asked
        finally:
            server.shutdown()


@pytest.fixture
def pauses(monkeypatch):
    found = []
    monkeypatch.setattr(time, "sleep", found.append)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return found


def refusal(url, timeout_s=10.0):
    with pytest.raises(jt.UserError) as caught:
        RemoteRewards(url, timeout_s)(ANSWERS, RECORDS)
    return str(caught.value)


def test_a_scorer_is_asked_in_parts(pauses, monkeypatch):
    monkeypatch.setattr(remote_rewards, "MOST", 3)
    with scorer() as (place, asked):
        found = RemoteRewards(f"http://me:s%40cret@{place}?key=1", 10)(ANSWERS, RECORDS)
    assert found == right(None, {"answers": ANSWERS, "records": RECORDS})[1]["rewards"] and pauses == []
    assert [content for _, _, content in asked] == [{"answers": ANSWERS[:3], "records": RECORDS[:3]},
                                                    {"answers": ANSWERS[3:], "records": RECORDS[3:]}]
    path, headers, _ = asked[0]
    assert path == "/score?key=1" and headers["Content-Type"] == "application/json"
    assert base64.b64decode(headers["Authorization"].removeprefix("Basic ")) == b"me:s@cret"


@pytest.mark.parametrize("failures", [(429, 503, None), ("cut", "chunk")])
def test_what_may_pass_is_tried_again_after_growing_pauses(pauses, failures):
    left = iter(failures)

    def answer(handler, asked):
        status = next(left, 200)
        if status is None:
            return None, None  # the connection is closed
        if status in ("cut", "chunk"):
            handler.send_response(200)
            handler.send_header(*(("Content-Length", "100") if status == "cut" else ("Transfer-Encoding", "chunked")))
            handler.end_headers()
            handler.wfile.write(b'19\r\n' * (status == "chunk") + b'{"rewards": [1, 2, 3, 4]}')
            return None, None
        return right(handler, asked) if status == 200 else (status, {})

    with scorer(answer) as (place, asked):
        found = RemoteRewards(f"http://{place}", 10)(ANSWERS, RECORDS)
    assert found == right(None, asked[0][2])[1]["rewards"] and pauses == [1, 2, 4][:len(failures)]


@pytest.mark.parametrize(("begin", "again"), [
    (b"", b""), (b"HTTP/1.1 200 OK\r\n\r\n", b" "), (b"", b"H"), (b"HTTP/1.1 200 ", b"K"),
    (b"HTTP/1.1 200 OK\r\nX: ", b"x"), (b"HTTP/1.1 200 OK\r\n", b"X: x\r\n"), (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
], ids=["nothing", "body", "status", "reason", "header", "headers", "continue", "chunks"])
def test_a_request_has_a_time_limit(pauses, begin, again):
    """Whatever part of the answer comes a little at a time, one deadline is for all of it, and the call is cut off."""
    over, begun, cut = threading.Event(), [], threading.Semaphore(0)

    def answer(handler, asked):
        begun.append(handler)  # on a busy machine, the time of a try may be over before its request is sent
        handler.close_connection = True
        try:
            handler.wfile.write(begin)
            while not over.wait(0.03):
                handler.wfile.write(again)
                if not again and not handler.connection.recv(1):
                    raise ConnectionError
        except OSError:
            cut.release()
        return None, None

    rescue = threading.Timer(60, over.set)  # a client without a limit fails the test too
    with scorer(answer) as (place, _):
        try:
            rescue.start()
            said = refusal(f"http://me:secret@{place}?sig=secret", 0.1)
            assert all(cut.acquire(timeout=60) for _ in tuple(begun))
        finally:
            rescue.cancel()
            over.set()
    assert pauses == [1, 2, 4] and "secret" not in said
    place = redacted(f"http://me:secret@{place}?sig=secret")
    assert said == (f"rl.reward: {place} does not answer (timed out), in 4 tries of at most 0.1 s; check that "
                    "the scorer is up, or raise rl.reward_timeout_s")


def test_a_scorer_that_is_down(pauses):
    with scorer() as (place, _):
        pass
    assert "does not answer ([Errno" in refusal(f"http://{place}") and len(pauses) == 3


@pytest.mark.parametrize(("status", "body", "message"), [
    (404, {}, "URL answers 404 Not Found; check the URL and the format that its server accepts"),
    (302, {}, "URL answers 302 Found; check the URL and the format that its server accepts"),
    (200, {"rewards": [1, 2, 3]}, "URL gives 3 rewards for 4 answers; let it give one for each"),
    (200, b"[1, 2", "what URL answers cannot be read (Expecting ',' delimiter"),
    (200, b"\xff", "what URL answers cannot be read ('utf-8' codec"),
    (200, {"scores": [1]}, "what URL answers cannot be read (is not of the form expected: it has no 'rewards')"),
    (200, {"rewards": [1, 2, 3, "4"]}, "what URL answers cannot be read (is not of the form expected: rewards.3 is "),
    (200, {"rewards": [1, 2, 3, True]}, "what URL answers cannot be read (is not of the form expected: rewards.3 is "),
    (200, {"rewards": [1, 2, 3, float("nan")]}, "URL gives nan for the answer ''; let it give numbers below 1e30"),
    (200, {"rewards": [10**400, 2, 3, 4]}, "URL gives 10000000000000000000 for the answer 'a'; let it give numbers"),
    (200, b" " * (2**20 + 1), "URL answers more than 1,048,576 bytes; let it answer what is asked only"),
])
def test_answers_of_another_form_are_told_in_one_line(pauses, status, body, message):
    def answer(handler, _):
        if status == 302:
            handler.send_response(302)
            handler.send_header("Location", "/other")
            handler.end_headers()
            return None, None
        return status, body

    with scorer(answer) as (place, asked):
        said = refusal(f"http://{place}")
    assert said.replace(f"http://{place}", "URL").startswith(f"rl.reward: {message}")
    assert len(asked) == 1 and pauses == []


@pytest.mark.parametrize(("url", "message"), [
    ("http://", "http:// is not the URL of a scorer; write http://HOST:PORT/PATH, with special characters percent"),
    ("ftp://host/x", "ftp://host/x is not the URL of a scorer; "),
    ("http://host:port/x", "http://host:port/x is not the URL of a scorer; "),
    ("http://[::1/x", "http://[::1/x is not the URL of a scorer; "),
    ("http://host/a b", "http://host/a b is not the URL of a scorer; "),
    ("http://.host/x", "http://.host/x is not the URL of a scorer; "),
    ("http://host/é", "http://host/é is not the URL of a scorer; "),
    ("http://***@host/x", "the credentials of http://***@host/x are not written down; give the whole URL again"),
])
def test_a_url_is_checked_when_the_run_is_built(files, url, message):  # noqa: F811
    with pytest.raises(jt.UserError) as caught:
        jt.build(config(files, rl__reward=url))
    assert str(caught.value).startswith(f"rl.reward: {message}")


@pytest.mark.parametrize(("keys", "message"), [
    (dict(rl__reward_timeout_s=5.0), "rl.reward_timeout_s: it is read with rl.reward=URL, rl.teacher=URL or rl."),
    (dict(rl__reward="http://h/", rl__reward_timeout_s=0.0), "rl.reward_timeout_s: 0.0 is "),
    (dict(rl__reward="http://h/", rl__reward_timeout_s=3601.0), "rl.reward_timeout_s: 3601.0"),
    (dict(rl__reward="http://h/", rl__reward_timeout_s=30.0),
     "rl.reward_timeout_s: 4 tries of 30 s take longer than resilience.hang_floor=120 s, after which a run "
     "counts as hung; set resilience.hang_floor=254, or allow less time"),
])
def test_the_time_limit_is_checked(files, keys, message):  # noqa: F811
    with pytest.raises(jt.UserError) as caught:
        jt.build(config(files, **keys))
    assert str(caught.value).startswith(message)


def test_the_example_is_a_scorer(pauses):
    script = Path(__file__).parents[2] / "examples/reinforce/scorer.py"
    with subprocess.Popen([sys.executable, script, "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            url = server.stdout.readline().decode().strip()
            assert RemoteRewards(url, 10)(["3", "4"], [{"prompt": "1+2=", "sum": 3}] * 2) == [1, 0]
        finally:
            server.kill()


@pytest.mark.slow
def test_a_run_learns_from_a_scorer_as_from_a_function_and_goes_on(files, tmp_path, monkeypatch):  # noqa: F811
    import shutil

    import jax
    import numpy as np

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    want = jt.train(config(files), tmp_path / "function")
    with scorer() as (place, asked):
        keys = dict(rl__reward=f"http://me:s3cret@{place}")
        jt.train(config(files, **keys), tmp_path / "scorer")
        shutil.rmtree(tmp_path / "scorer" / "checkpoints" / "6")
        with pytest.raises(jt.UserError, match=r"holds a run with rl\.reward=http://\*\*\*@127"):
            jt.train(config(files, rl__reward=f"http://me:s3cret@{place}/x"), tmp_path / "scorer")
        keys = dict(rl__reward=f"http://me:s3cret2@{place}", rl__reward_timeout_s=25.0)
        found = jt.train(config(files, **keys), tmp_path / "scorer")
    assert jax.tree.all(jax.tree.map(np.array_equal, *map(jax.device_get, (want, found))))
    assert len(asked) == 9
    leaks = [path for path in (tmp_path / "scorer").rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert leaks == []
