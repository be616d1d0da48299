"""Files reach another process whole, and nobody but the run's processes puts or gets any."""

import contextlib
import json
import random
import socket

import pytest

from jaxtrain.checkpoint.local import partners, pieces
from jaxtrain.checkpoint.local.partners import Partners
from jaxtrain.distributed.authentication import secret
from tests.tiny import closed_while_it_drips


@pytest.fixture
def alone(tmp_path):
    """A process that is its own partner; files that it is given go to `kept`."""
    made = Partners(lambda process, name: tmp_path / "kept" / name, lambda name: tmp_path / "kept" / name)
    yield made
    made.close()


def test_a_file_goes_there_and_back(alone, tmp_path):
    content = random.Random(0).randbytes(3 * 2**20 + 5)
    (tmp_path / "a.snapshot").write_bytes(content)
    alone.send(0, tmp_path / "a.snapshot")
    assert (tmp_path / "kept/a.snapshot").read_bytes() == content
    assert alone.fetch(0, "a.snapshot", 7, 2**20) == content[7:7 + 2**20]
    with pytest.raises(OSError):
        alone.fetch(0, "b.snapshot", 0, 1)


def strangers(alone, words):
    """Send something as a stranger does; return what comes back after the nonce."""
    with socket.create_connection(alone._addresses[0], timeout=60) as connection, contextlib.suppress(OSError):
        connection.makefile("rb").readline()
        connection.sendall(words)
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").read()
    return b""


def test_a_stranger_neither_puts_nor_gets_a_file(alone, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/a.snapshot").write_bytes(b"secret weights")
    for asked in ({"do": "keep", "by": 0, "name": "x", "size": 1}, {"code": 3}, {"code": "x" * 64}, [], None, 3, [[[]]],
                  {"do": "give", "name": "a.snapshot", "offset": 0, "size": 4}, {"do": "give", "code": None}):
        for more in ({}, {"code": "0" * 64}):
            request = asked | more if isinstance(asked, dict) else asked
            assert strangers(alone, json.dumps(request).encode() + b"\nx") == b"", request
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["a.snapshot"]
    (tmp_path / "b.snapshot").write_bytes(b"more")
    alone.send(0, tmp_path / "b.snapshot")  # it still works


def test_a_request_cannot_be_repeated(alone, tmp_path, monkeypatch):
    """A code counts for one connection, whose nonce it depends on."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/a.snapshot").write_bytes(b"secret weights")
    heard = []
    code = partners.code
    monkeypatch.setattr(partners, "code", lambda *parts: heard.append(code(*parts)) or heard[-1])
    asked = {"do": "give", "name": "a.snapshot", "offset": 0, "size": 6}
    assert alone.fetch(0, "a.snapshot", 0, 6) == b"secret"
    assert strangers(alone, json.dumps(asked | {"code": heard[0]}).encode() + b"\n") == b""


def test_many_silent_connections_hold_nobody_up(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(partners, "_MOST", 20)
    (tmp_path / "a.snapshot").write_bytes(b"content")
    with contextlib.ExitStack() as held:
        for _ in range(60):
            held.enter_context(socket.create_connection(alone._addresses[0], timeout=60))
        alone.send(0, tmp_path / "a.snapshot")
        assert len(alone._server._unknown) <= 21
    assert (tmp_path / "kept/a.snapshot").read_bytes() == b"content"


def test_a_request_of_a_byte_now_and_then_is_closed(alone, monkeypatch):
    monkeypatch.setattr(partners, "GREETING_S", 0.2)
    with socket.create_connection(alone._addresses[0]) as stranger:
        assert closed_while_it_drips(stranger)


def test_a_file_that_was_not_made_with_the_secret_is_damaged(tmp_path, monkeypatch):
    def header():
        return pieces.read_header(pieces.reader(tmp_path / "a.snapshot"))

    monkeypatch.setenv("JAXTRAIN_SECRET", "the secret of this run")
    secret.cache_clear()
    pieces.write(tmp_path / "a.snapshot", {"step": 3}, [], [])
    assert header().about == {"step": 3}
    monkeypatch.setenv("JAXTRAIN_SECRET", "the secret of another run")
    secret.cache_clear()
    with pytest.raises(pieces.Damaged, match="its header is not what was written"):
        header()
    monkeypatch.delenv("JAXTRAIN_SECRET")
    secret.cache_clear()
    with pytest.raises(pieces.Damaged):
        header()


@pytest.mark.slow
def test_two_hundred_random_requests(alone, tmp_path):
    rng = random.Random(5)
    known = [b'{"do": "keep"', b'"code": ', b'"size": 9', b"[", b"{", b"]", b"}", b"\n", b"null", b"1e999", b"-1", b'"']
    for _ in range(200):
        words = b"".join(rng.choice([*known, rng.randbytes(rng.randrange(50))]) for _ in range(rng.randrange(200)))
        assert strangers(alone, words) == b""
    assert not (tmp_path / "kept").exists()
    (tmp_path / "a.snapshot").write_bytes(b"content")
    alone.send(0, tmp_path / "a.snapshot")
