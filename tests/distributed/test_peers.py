"""The end of one process is reported to the others by name: connections on loopback, within this process."""

import ast
import contextlib
import os
import random
import socket
import threading
import time
from pathlib import Path

import jax
import pytest

from jaxtrain.config.load import make_config
from jaxtrain.distributed import exit_codes, peers
from jaxtrain.distributed import processes as distributed
from jaxtrain.distributed.authentication import opened
from jaxtrain.distributed.peers import Peers
from jaxtrain.errors import UserError
from jaxtrain.observe import events
from tests.tiny import ROOT, closed_while_it_drips, free_address


class Store(dict):
    """JAX's key-value store, as far as it is used."""

    def key_value_set(self, key, value):
        self[key] = value

    def blocking_key_value_get(self, key, milliseconds):
        end = time.monotonic() + milliseconds / 1000
        while key not in self and time.monotonic() < end:
            time.sleep(0.01)
        return self[key]

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.items() if key.startswith(folder)]

    def wait_at_barrier(self, name, milliseconds):
        pass


class Run:
    """A run of some processes that know each other; `ends` are their exit statuses."""

    def __init__(self, processes=3, timeout=30):
        self.ends, self.peers, store = {}, {}, Store()

        def join(i):
            self.peers[i] = Peers(i, processes, "localhost", store, timeout=timeout,
                                  leave=lambda status: self.ends.setdefault(i, status))

        threads = [threading.Thread(target=join, args=(i,)) for i in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def die(self, process):
        """Close the connections of a process as the kernel does when it is killed."""
        with self.peers[process]._lock:  # all at once: the dead tell nobody of what they see of it
            for line in list(self.peers[process]._lines.values()):
                with contextlib.suppress(OSError):  # the other end may be closed already
                    line.connection.shutdown(socket.SHUT_RDWR)
        self.peers[process]._ended.set()

    def ended(self, processes):
        end = time.monotonic() + 60
        while not set(processes) <= set(self.ends) and time.monotonic() < end:
            time.sleep(0.01)
        return self.ends


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(peers, "_PATIENCE", 0.3)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_process_ends_all_by_name(victim, tmp_path, capfd):
    run = Run()
    for one in run.peers.values():
        one.workdir = tmp_path
    run.die(victim)
    others = {0, 1, 2} - {victim}
    ended = run.ended(others)  # what is left of the victim, in this one process, may end as well
    assert {other: ended[other] for other in others} == dict.fromkeys(others, exit_codes.RESTART)
    said = capfd.readouterr().err
    for other in others:
        assert f"process {victim} ({socket.gethostname()}) is gone: process {other} ends, to be started again" in said
    found = events.events(tmp_path)  # one of them is enough; nobody is left to say that another one wrote it
    assert found and {(event["kind"], event["peer"]) for event in found} == {("peer_lost", victim)}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_silent_process_ends_all_by_name(victim, capfd):
    """A stopped process looks like this: its connections are open, and nothing comes through them."""
    run = Run(timeout=2)
    others = {0, 1, 2} - {victim}
    with run.peers[victim]._lock:  # its thread waits here with the next sign of life, and receives nothing either
        ended = run.ended(others)
    assert {ended.get(other) for other in others} == {exit_codes.RESTART}
    assert f"process {victim} ({socket.gethostname()}) is gone (silent for " in capfd.readouterr().err


@pytest.mark.parametrize("first", [0, 1])
def test_a_run_that_ends_well_ends_nobody(first, capfd):
    run = Run()
    for process in sorted(run.peers, key=lambda i: i != first):
        run.peers[process].close()
        run.die(process)
    time.sleep(0.5)
    assert run.ends == {} and capfd.readouterr().err == ""


@pytest.mark.parametrize("status, expected", [(1, exit_codes.RESTART), (exit_codes.MISTAKE, exit_codes.MISTAKE)])
def test_a_failure_is_told_with_its_reason(status, expected, capfd):
    run = Run()
    run.peers[1].fail(status, "OSError: the disk is on fire")
    run.die(1)
    assert run.ended({0, 2}) == {0: expected, 2: expected}
    said = capfd.readouterr().err
    assert f"process 1 ({socket.gethostname()}) failed (OSError: the disk is on fire): process 2 ends" in said


def test_who_lost_a_connection_waits_until_its_reason_is_named(capfd):
    run = Run()
    run.peers[1].fail(1, "OSError: the disk is on fire")
    run.peers[0].wait_for_news(0.05)  # less than it takes the thread that heard
    assert run.ends[0] == exit_codes.RESTART and "failed (OSError: the disk is on fire)" in capfd.readouterr().err


@pytest.mark.slow
def test_the_same_failure_everywhere_is_told_by_each(monkeypatch, capfd):
    monkeypatch.setattr(peers, "_PATIENCE", 2.0)
    run = Run()
    for one in run.peers.values():
        one.fail(exit_codes.MISTAKE, "the same mistake")
    time.sleep(3)
    assert run.ends == {} and capfd.readouterr().err == ""


def test_all_write_down_a_hang(capfd):
    run, heard = Run(), []
    for one in run.peers.values():
        one.on_hang = heard.append  # returns None: it was not at it
    run.peers[2].hang("no progress for 99 seconds")
    assert run.ended({0, 1}) == {0: exit_codes.RESTART, 1: exit_codes.RESTART}
    assert heard == [f"process 2 ({socket.gethostname()}) saw no progress for 99 seconds"] * 2


@pytest.mark.parametrize(("address", "where"), [
    ("127.0.0.1:8476", "127.0.0.1"), ("[::1]:8476", "::1"), ("localhost:8476", "localhost"),
    (f"{socket.gethostname()}:8476", ""), ("198.51.100.7:8476", ""), ("", "")])
def test_others_reach_a_port_only_where_processes_look_for_it(address, where):
    if where == "::1" and not socket.has_ipv6:
        pytest.skip("there is no IPv6 here")
    assert peers.interface(address) == where


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
def test_the_coordination_service_of_one_host_cannot_be_reached_from_others(forked):
    code = """
import sys
from jaxtrain.distributed import processes
processes.initialize(sys.argv[1], 2, int(sys.argv[2]))
print([line.split()[1] for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}") if line.split()[3] == "0A"])
"""
    address = free_address()
    started = [forked.start(["-c", code, address, f"{i}"], ROOT, {**os.environ, "XLA_FLAGS": ""}) for i in range(2)]
    try:
        out, err = started[0].communicate(timeout=120)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert out, err
    port = f"{int(address.rpartition(':')[2]):04X}"
    (found,) = [found for found in ast.literal_eval(out) if found.endswith(f":{port}")]
    assert found in (f"0100007F:{port}", f"0000000000000000FFFF00000100007F:{port}")  # 127.0.0.1, as IPv6 too


@pytest.fixture
def waiting():
    """Process 0 that waits for process 1, its port, and a function that lets that one come."""
    store, joined = Store(), []
    first = threading.Thread(target=lambda: joined.append(Peers(0, 2, "localhost", store, 60, leave=joined.append)))
    first.start()
    port, _ = opened("peers", store.blocking_key_value_get("jaxtrain/peers", 9000))

    def come():
        assert joined == []
        Peers(1, 2, "localhost", store, 60, leave=joined.append)
        first.join(timeout=60)
        assert len(joined) == 1

    return port, come


def test_strangers_at_the_port_are_nobody(waiting):
    """However many they are, silent or not, the processes of the run find each other beside them."""
    port, come = waiting
    with contextlib.ExitStack() as held:
        for number in range(8):
            stranger = held.enter_context(socket.create_connection(("localhost", port)))
            if number % 2:
                stranger.sendall(b"{")  # and nothing more
        for words in (b"GET / HTTP/1.1\n\n", b'{"process": 1, "nonce": "x", "code": "wrong", "host": "x"}\n', b"[]\n",
                      b"null\n", b"", b"\xff" * 9000, b"[" * 4000 + b"\n"):
            with socket.create_connection(("localhost", port)) as stranger, contextlib.suppress(OSError):
                stranger.sendall(words)
        come()


def test_a_greeting_of_a_byte_now_and_then_is_closed(waiting, monkeypatch):
    monkeypatch.setattr(peers, "GREETING_S", 0.2)
    port, come = waiting
    with socket.create_connection(("localhost", port)) as stranger:
        assert closed_while_it_drips(stranger)
    come()


@pytest.mark.slow
def test_two_hundred_random_greetings(waiting):
    port, come = waiting
    rng = random.Random(3)
    known = [b'{"nonce": "', b'"code": ', b"process", b"[", b"{", b"]", b"}", b"\n", b"null", b"1e999", b"-1", b'"']
    with contextlib.ExitStack() as held:
        for _ in range(200):
            stranger = held.enter_context(socket.create_connection(("localhost", port)))
            words = b"".join(rng.choice([*known, rng.randbytes(rng.randrange(50))]) for _ in range(rng.randrange(200)))
            with contextlib.suppress(OSError):
                stranger.sendall(words)
        come()


# ------------------------------------------------------------------------------------------------------- distributed.py
@pytest.mark.parametrize("text, broken", [
    ("INTERNAL: Gloo all-reduce failed: [external/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:1", True),
    ("UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats)", True),
    ("DEADLINE_EXCEEDED: Barrier timed out. Id: save", True),
    ("INTERNAL: NCCL operation ncclAllReduce failed: remote process exited or there was a network error", True),
    ("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes", False),
])
def test_echoes_of_a_lost_process_are_recognised(text, broken):
    assert distributed.broken(jax.errors.JaxRuntimeError(text)) == broken
    try:
        try:
            raise jax.errors.JaxRuntimeError(text)
        except Exception as error:
            raise RuntimeError("saving failed") from error
    except RuntimeError as error:
        assert distributed.broken(error) == broken


def test_an_error_of_ones_own_is_no_echo():
    assert not distributed.broken(ValueError("barrier height: 3"))
    assert distributed.broken(ValueError("UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer"))


def agree_as(monkeypatch, store, process, **keys):
    for name, value in {"client": store, "process_id": process, "num_processes": 2}.items():
        monkeypatch.setattr(jax._src.distributed.global_state, name, value)
    distributed.agree(make_config({}, keys))


def test_processes_that_disagree_are_refused_in_all(monkeypatch):
    store = Store()
    agree_as(monkeypatch, store, 0)
    agree_as(monkeypatch, store, 1, **{"data.cache_dir": "/elsewhere", "train.progress": False})  # each as it likes
    expected = (r"optimizer.learning_rate: process 0 has .*, process 1 \(.*\) has 0.5; start all processes with the "
                "same command")
    with pytest.raises(UserError, match=expected):
        agree_as(monkeypatch, store, 1, **{"optimizer.learning_rate": 0.5})
    with pytest.raises(UserError, match=expected):
        agree_as(monkeypatch, store, 0)


def test_versions_that_differ_are_refused(monkeypatch):
    store = Store()
    agree_as(monkeypatch, store, 0)
    monkeypatch.setattr(distributed, "version_of", lambda package: "0.0.1")
    with pytest.raises(UserError, match=r"version of jax(train)?: process 0 has .*, process 1 \(.*\) has 0.0.1"):
        agree_as(monkeypatch, store, 1)


def test_a_port_in_use_is_waited_for_and_named(monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} of this host cannot be used \(Address already in use\)"):
            distributed._wait_for_port(f"localhost:{port}", seconds=0)
        threading.Timer(1.0, other.close).start()
        distributed._wait_for_port(f"localhost:{port}", seconds=60)


@pytest.mark.parametrize("text", ["5", "soon", "-1"])
def test_timeouts_make_sense(monkeypatch, text):
    monkeypatch.setenv("JAXTRAIN_PEER_TIMEOUT", text)
    with pytest.raises(UserError, match=r"JAXTRAIN_PEER_TIMEOUT: .* is not a number of seconds from 6 on"):
        distributed._seconds("JAXTRAIN_PEER_TIMEOUT", 60)
