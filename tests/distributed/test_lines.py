"""Messages between two ends of a connection: made up, changed, repeated or endless ones are refused."""

import json
import socket

import pytest

from jaxtrain.distributed.authentication import Forged
from jaxtrain.distributed.lines import GREETING, LONGEST, Line


@pytest.fixture
def pair(monkeypatch):
    """A function that returns both ends after their greetings."""
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *_: None)  # a pair has no TCP_NODELAY
    open_ends = []

    def make(key=b"k" * 32, other=b"k" * 32):
        one, two = socket.socketpair()
        open_ends.extend((one, two))
        for end in (one, two):
            end.settimeout(30)
        server, client = Line(one, key, accepts=True), Line(two, other, accepts=False)
        client.greet({"process": 1})
        assert server.receive()
        assert server.accept() == {"process": 1}
        return server, client

    yield make
    for end in open_ends:
        end.close()


def test_messages_come_in_both_directions(pair):
    server, client = pair()
    for n in range(3):
        client.send({"n": n})
        server.send({"n": -n})
    while len(server.messages) < 3:
        server.receive()
    while len(client.messages) < 3:
        client.receive()
    assert server.messages == [{"n": n} for n in range(3)] and client.messages == [{"n": -n} for n in range(3)]


def test_another_key_is_not_welcome(pair):
    with pytest.raises(Forged, match="a greeting does not come"):
        pair(other=b"x" * 32)


@pytest.mark.parametrize("change", [
    lambda line: line.replace(b"1", b"2"), lambda line: line + line, lambda line: line[65:], lambda line: b"x" + line,
    lambda line: b"[]\n", lambda line: b"\xff\n", lambda line: b"[" * 5000 + b"\n", lambda line: b"x" * LONGEST + line])
def test_a_changed_line_is_refused(pair, change, monkeypatch):
    server, client = pair()
    sent = []
    real, client.connection = client.connection, type("Tap", (), {"sendall": lambda self, data: sent.append(data)})()
    client.send({"n": 1})
    real.settimeout(30)
    with pytest.raises(Forged):
        data = memoryview(change(sent[0]))
        while not len(server.messages) > 1:
            if data:
                data = data[real.send(data[:1 << 16]):]
            server.receive()


@pytest.mark.parametrize("words", [
    b"[]\n", b"null\n", b"3\n", b"{}\n", b'{"nonce": 3, "code": 3}\n', b'{"nonce": null, "code": "x\\u00e4"}\n',
    b"[" * 4000 + b"\n", b'{"code": ' + b"[" * 2000 + b"]" * 2000 + b"}\n", b"x" * (GREETING + 1), b"GET / HTTP/1.1\n"])
def test_a_greeting_of_a_stranger_is_refused(monkeypatch, words):
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *_: None)
    one, two = socket.socketpair()
    with one, two:
        line = Line(one, b"k" * 32, accepts=True)
        assert json.loads(two.recv(1000))["nonce"]
        two.sendall(words)
        with pytest.raises(Forged):
            line.receive()
            line.accept()
