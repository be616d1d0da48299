"""Requests that a training service refuses: each by a status and a sentence, and the next one is answered."""

import http.client
import json
import socket
import stat
import urllib.parse

import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.serving import http_server, wire
from jaxtrain.serving.http_server import Server
from jaxtrain.serving.keys import Keys, owner_of
from jaxtrain.serving.lora_engine import Engine
from jaxtrain.serving.service import Limits
from tests.serving import tiny_model
from tests.serving.wire_client import Client, Failed, datum
from tests.tiny import devices

KEY, OTHER = "tml-0123456789abcdefghij", "tml-another-one-9876543210"
GOOD = {"target_tokens": [1, 2], "weights": [1.0, 1.0]}
POLICY = {"target_tokens": [1, 2], "logprobs": [0.0, 0.0], "advantages": [1.0, 1.0]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory, cache):
    with devices(1):
        yield Engine.load(tiny_model.write(tmp_path_factory.mktemp("served") / "model"), batch_tokens=256)


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    with tiny_model.served(engine.folder, tmp_path_factory.mktemp("saved"), engine=engine, most_bytes=2**16,
                           limits=Limits(models=2, rank=8)) as server:
        yield server


@pytest.fixture(scope="module")
def locked(engine, tmp_path_factory):
    """A server that knows two keys."""
    with tiny_model.served(engine.folder, tmp_path_factory.mktemp("locked"), engine=engine,
                           keys=Keys([KEY, OTHER])) as server:
        yield server


@pytest.fixture(scope="module")
def model(server):
    return Client(server.url).model(tiny_model.NAME)


@pytest.mark.parametrize(("data", "loss", "numbers", "words"), [
    ([], "cross_entropy", {}, "data: there is none"),
    ([datum([5, 6], **GOOD)], "hinge", {}, "there is no loss 'hinge'"),
    ([datum([5, 6], **GOOD)], "stable_reinforce", {}, "its formula is not published"),
    ([datum([5, 6], **GOOD)], "custom", {}, "forward_backward_custom"),
    ([datum([5, 6], **POLICY)], "ppo", {"clip": 0.2}, "ppo does not read it"),
    ([datum([5, 6], **POLICY)], "ppo", {"clip_low_threshold": float("nan")}, "not a finite number"),
    ([datum([5, 6], target_tokens=[1, 2])], "cross_entropy", {}, "cross_entropy needs weights"),
    ([datum([5, 6], **GOOD)], "importance_sampling", {}, "importance_sampling needs logprobs"),
    ([datum([5, 6], **GOOD, mask=[1.0, 1.0])], "cross_entropy", {}, "does not read it"),
    ([datum([5, 6], **{**GOOD, "weights": [1.0, float("nan")]})], "cross_entropy", {}, "not finite"),
    ([datum([5, 6], **{**POLICY, "advantages": [1.0, float("inf")]})], "cispo", {}, "not finite"),
    ([datum([5, 6], **{**GOOD, "weights": [1.0]})], "cross_entropy", {}, r"its shape is \[1\]"),
    ([datum([5, 6], **{**GOOD, "target_tokens": [[1, 2], [3, 4]]})], "cross_entropy", {}, "several are not supported"),
    ([datum([5, 6], **{**GOOD, "target_tokens": [1.5, 2.0]})], "cross_entropy", {}, "give whole numbers"),
    ([datum([5, 6], **{**GOOD, "target_tokens": [1, -1]})], "cross_entropy", {}, "-1 is not a token"),
    ([datum([5, 900], **GOOD)], "cross_entropy", {}, "900 is not a token"),
    ([datum([], target_tokens=np.zeros(0, int), weights=np.zeros(0))], "cross_entropy", {}, "it has 0 tokens"),
    ([datum([1] * 300, target_tokens=[1] * 300, weights=[1.0] * 300)], "cross_entropy", {}, "give 1 to 256")])
def test_data_that_cannot_be_computed_fail_in_their_turn(model, data, loss, numbers, words):
    """The calls behind them keep their numbers, as the client expects."""
    with pytest.raises(Failed, match=words) as failed:
        model.forward_backward(data, loss, **numbers)
    assert failed.value.status == 200  # of the request; the call has failed


@pytest.mark.parametrize(("adam", "words"), [
    ({"learning_rate": "fast"}, "'fast' is out of range"), ({"beta1": 1.0}, "less than 1"),
    ({"learning_rate": float("nan")}, "nan"), ({"eps": -1}, "out of range"), ({}, "no gradient since")])
def test_a_step_that_cannot_be_made_fails(model, adam, words):
    with pytest.raises(Failed, match=words):
        model.optim_step(**adam)


@pytest.mark.parametrize(("lora", "words"), [
    ({"rank": 0}, "give 1 to 8"), ({"rank": 9}, "give 1 to 8"), ({"rank": "big"}, "not a whole number"),
    ({"seed": 2**64}, "out of range"), ({"train_mlp": False, "train_attn": False}, "neither attention nor MLP")])
def test_adapters_that_cannot_be_made_are_refused(server, lora, words):
    with pytest.raises(Failed, match=words):
        Client(server.url).model(tiny_model.NAME, **lora)


def test_another_base_or_optimizer_is_refused(server):
    client = Client(server.url)
    with pytest.raises(Failed, match="'Qwen/Qwen3-8B' is not served here; ask for 'tiny/llama'"):
        client.model("Qwen/Qwen3-8B")
    body = {"session_id": client.begin(), "model_seq_id": 9, "base_model": tiny_model.NAME,
            "optimizer_config": {"type": "dimuon", "version": 1}}
    with pytest.raises(Failed, match="no 'dimuon'"):
        client.wait(client.send("create_model", body))


def test_models_are_bounded_and_make_room_when_their_client_is_gone(engine, tmp_path, monkeypatch):
    with devices(1), tiny_model.served(engine.folder, tmp_path, engine=engine, limits=Limits(models=1)) as server:
        first, second = Client(server.url), Client(server.url)
        kept = first.model(tiny_model.NAME)
        with pytest.raises(Failed, match=r"1 are in training \(--models=1\)"):
            second.model(tiny_model.NAME)
        server.service.sessions[first.session].seen -= 1e6
        second.model(tiny_model.NAME)
        with pytest.raises(Failed, match="its session has ended") as failed:
            kept.optim_step()
        assert failed.value.status == 404
        second.send(f"sessions/{second.session}/finish", {})
        assert not server.service.models and not server.service.queue.length


@pytest.mark.parametrize(("path", "body", "status", "words"), [
    ("create_session", b"{", 400, "not a JSON object"), ("create_session", b"[1]", 400, "not a JSON object"),
    ("create_session", b"[" * 10**4, 400, "not a JSON object"), ("create_session", b"\xff\xfe", 400, "not a JSON"),
    ("optim_step", {"model_id": "no"}, 404, "there is no model 'no'"), ("optim_step", {}, 404, "there is no model"),
    ("get_info", {"model_id": ["a"]}, 404, "there is no model"), ("nothing", {}, 404, "docs/serve-training.md"),
    ("create_model", {"session_id": "x"}, 404, "there is no session 'x'"),
    ("create_model", {"session_id": {}}, 404, "there is no session"),
    ("asample", {"sampling_session_id": "x", "seq_id": 0}, 404, "there is no sampler 'x'"),
    ("retrieve_future", {"request_id": "x"}, 410, "there is no call 'x'"),
    ("retrieve_future", {"request_id": 5}, 410, "there is no call 5"),
    ("load_weights", {"path": "/etc/passwd"}, 400, "is not a saved state"),
    ("load_weights", {"path": "tinker://../weights/x", "session_id": "s"}, 400, "is not a saved state"),
    ("weights_info", {"path": "tinker://a/weights/b"}, 400, "there is no tinker://a/weights/b"),
    ("forward_backward", b"\xff" * 9, 415, "application/x-protobuf")])
def test_requests_that_make_no_sense_are_refused(server, path, body, status, words):
    with pytest.raises(Failed, match=words) as failed:
        Client(server.url).send(path, body)
    assert failed.value.status == status
    assert Client(server.url).begin()


ODD = (None, True, -1, 2**70, 1e300, "", "\0", "x" * 300, [], [[]], {}, {"a": [1]}, [None], [{"tokens": 5}])


def test_any_value_of_any_field_is_computed_or_refused(server, model, capsys):
    """Nothing is a mistake of the server's."""
    client = model.client
    sampler = client.sampler(base_model=tiny_model.NAME)
    session, path = client.session, "tinker://a/weights/b"
    bodies = {
        "create_session": {"tags": [], "user_metadata": {}}, "session_heartbeat": {"session_id": session},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 3, "model_path": path,
                                    "base_model": tiny_model.NAME},
        "create_model": {"session_id": session, "model_seq_id": 0, "base_model": "x", "lora_config": {"rank": 1},
                         "optimizer_config": {"type": "adamw"}},
        "get_info": {"model_id": model.id}, "weights_info": {"path": path}, "retrieve_future": {"request_id": "x"},
        "cancel_future": {"request_id": "x"},
        "optim_step": {"model_id": model.id, "seq_id": 1, "adam_params": {}},
        "save_weights": {"model_id": model.id, "seq_id": 1, "path": "x", "overwrite": True, "user_metadata": {}},
        "save_weights_for_sampler": {"model_id": model.id, "seq_id": 1, "path": None, "sampling_session_seq_id": 1},
        "load_weights": {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True, "model_id": "x"},
        "asample": {"sampling_session_id": sampler.id, "seq_id": 0, "num_samples": 1, "prompt_logprobs": False,
                    "prompt": {"chunks": [{"tokens": [999]}]}, "sampling_params": {"max_tokens": 1, "stop": [2]},
                    "topk_prompt_logprobs": 0, "prompt_logprobs_last_n": 1}}
    nested = [("asample", key, {"sampling_params": {key: None}}) for key in ("max_tokens", "seed", "stop", "top_k")]
    for name, key, body in [*((name, key, {}) for name, body in bodies.items() for key in body), *nested]:
        for odd in ODD:
            given = {**bodies[name], **({key: odd} if not body else {"sampling_params": {key: odd}})}
            try:
                client.send(name, given)
            except Failed as refused:
                assert refused.status in (400, 404, 410, 429), (name, key, odd, refused)
    for number, odd in enumerate(ODD):  # what the calls in the queue read
        for body in ({"adam_params": odd}, {"adam_params": {"beta1": odd}}, {"optimizer_params": odd}):
            with pytest.raises(Failed) as failed:
                client.wait(client.send("optim_step", model.next() | body))
            assert "in the server" not in failed.value.sentence, (odd, failed.value)
        for key in ("base_model", "lora_config", "optimizer_config"):
            body = bodies["create_model"] | {"model_seq_id": 100 + number, key: odd}
            with pytest.raises(Failed) as failed:
                client.wait(client.send("create_model", body))
            assert "in the server" not in failed.value.sentence, (key, odd, failed.value)
    assert "error" not in capsys.readouterr().err


def test_bytes_that_are_no_message_are_refused(server, model):
    for body in (b"\xff" * 9, wire.message_of("ForwardBackwardRequest")(model_id=model.id).SerializeToString()[:-2]):
        with pytest.raises(Failed, match=r"not a protobuf message|there is no model"):
            model.client.send("forward_backward", body, kind=wire.TYPE)
    odd = wire.message_of("ForwardBackwardRequest")(model_id=model.id, seq_id=model.next()["seq_id"], loss_fn="ppo")
    odd.data.add().model_input.add().encoded_text.tokens = b"123"
    with pytest.raises(Failed, match="3 bytes are no whole number of int32"):
        model.client.wait(model.client.send("forward_backward", odd.SerializeToString(), kind=wire.TYPE))
    odd.seq_id = model.next()["seq_id"]
    odd.data[0].model_input[0].image.SetInParent()
    with pytest.raises(Failed, match="images or sound"):
        model.client.wait(model.client.send("forward_backward", odd.SerializeToString(), kind=wire.TYPE))
    many = wire.message_of("ForwardBackwardRequest")(model_id=model.id)
    for _ in range(wire.MOST_DATA + 1):
        many.data.add()
    with pytest.raises(Failed, match="send at most 4,096 at once"):
        model.client.send("forward_backward", many.SerializeToString(), kind=wire.TYPE)
    with pytest.raises(Failed, match="seq_id 0 of"):
        model.submit([datum([5, 6], **GOOD)], number=0)


@pytest.mark.parametrize("name", ["", "../up", "a/b", "..", ".hidden", "x" * 129, "a\nb"])
def test_names_that_lead_elsewhere_are_refused(model, name):
    if name:
        with pytest.raises(Failed, match="cannot be the name of a saved state"):
            model.save(name)
    with pytest.raises(Failed, match="cannot be the name of a saved state"):
        model.save(name, "save_weights_for_sampler")


def raw(server, content, most=65536):
    """Send bytes over a connection of their own; return all that comes back."""
    with socket.create_connection(server.server_address[:2], timeout=60) as line:
        line.sendall(content)
        found = b""
        while part := line.recv(most):
            found += part
        return found


def head(*lines, path="create_session"):
    return "\r\n".join((f"POST /api/v1/{path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", "")).encode()


def test_gigabytes_are_refused_before_they_are_read(server):
    answer = raw(server, head("Content-Length: 3000000000", "X-API-Key: tml-x") + b"x" * 1000)
    assert answer.startswith(b"HTTP/1.1 413") and b"3,000,000,000 bytes" in answer
    for length in ("9" * 5000, "0" * 20 + "500000000"):
        answer = raw(server, head(f"Content-Length: {length}"))
        assert answer.startswith(b"HTTP/1.1 413")
    for line in ("Transfer-Encoding: chunked", "Content-Length: -5", "Content-Length: x", "X: y"):
        assert raw(server, head(line)).startswith(b"HTTP/1.1 411")
    assert raw(server, head("Content-Length: 2", "Content-Encoding: zstd")).startswith(b"HTTP/1.1 415")
    with pytest.raises(Failed, match="--request_mib"):
        Client(server.url).send("create_session", b"x" * 2**17)


def test_a_body_where_none_is_read_is_not_the_next_request(server):
    """Behind a proxy it could be a request in the name of another client."""
    inner = head("Content-Length: 2") + b"{}"
    answer = raw(server, b"GET /api/v1/healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                 + f"Content-Length: {len(inner)}\r\n\r\n".encode() + inner)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1 and b"has no body here" in answer


def test_a_request_that_drips_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(http_server, "IDLE_S", 0.2)
    monkeypatch.setattr(http_server, "READ_S", 0.1)
    assert raw(server, b"POST /api/v1/create_session HTTP/1.1\r\nHost: 127.0.0.1\r\n") == b""
    assert raw(server, head("Content-Length: 100") + b"{") == b""


def test_pages_of_a_browser_get_nothing_without_keys(server):
    for headers in ({"Origin": "https://example.com"}, {"Host": "example.com"}):
        with pytest.raises(Failed, match="no pages") as failed:
            Client(server.url, **headers).begin()
        assert failed.value.status == 403


def test_too_many_connections_are_told_so(server, monkeypatch):
    class Full:
        def acquire(self, blocking):
            return False

        def release(self):
            pass

    monkeypatch.setattr(server, "_free", Full())
    assert raw(server, b"").startswith(b"HTTP/1.1 503")


def test_a_key_opens_what_is_its_own(locked, capsys):
    """Sessions, models, samplers, answers and saved states; nothing of a key is told or logged."""
    for key, words in (("", "the request has no key"), ("tml-wrong", "no key in the request that this server knows")):
        with pytest.raises(Failed, match=words) as failed:
            Client(locked.url, key).begin()
        assert failed.value.status == 401 and (not key or key not in failed.value.sentence)
    with devices(1):
        mine, other = Client(locked.url, KEY), Client(locked.url, "", Authorization=f"Bearer {OTHER}")
        model, path = mine.model(tiny_model.NAME), ""
        path = model.save("mine")
        call = model.submit([datum([5, 6], **GOOD)])
    assert [one["tinker_path"] for one in mine.send("checkpoints")["checkpoints"]] == [path]
    assert other.send("checkpoints")["checkpoints"] == []
    for ask in (lambda: other.send("get_info", {"model_id": model.id}), lambda: other.wait(call),
                lambda: other.restored(path), lambda: other.send(f"sessions/{mine.session}"),
                lambda: other.send("create_model", {"session_id": mine.session}),
                lambda: other.send(f"training_runs/{model.id}"),
                lambda: other.send(f"training_runs/{model.id}/checkpoints/weights/mine", method="DELETE")):
        with pytest.raises(Failed, match="there is no"):
            ask()
    assert mine.send(f"training_runs/{model.id}")["last_checkpoint"]["tinker_path"] == path
    mine.send(f"training_runs/{urllib.parse.quote(model.id)}/checkpoints/weights/mine", method="DELETE")
    assert mine.send("checkpoints")["checkpoints"] == []
    told = capsys.readouterr()
    assert KEY not in told.out + told.err and "mine" not in told.err
    assert KEY not in json.dumps([f"{path}" for path in locked.service.folder.rglob("*")])


def test_keys_are_read_from_a_file_of_their_owner_alone(tmp_path):
    path = tmp_path / "keys"
    for content, mode, words in ((KEY, 0o644, "can be read by others"), ("", 0o600, "has none"),
                                 ("tml-short", 0o600, "can be guessed"), ("x" * 40, 0o600, "the client does not send")):
        path.write_text(content)
        path.chmod(mode)
        with pytest.raises(UserError, match=words):
            Keys.read(f"{path}")
    path.write_text(f"# of two people\n{KEY}\n\n{OTHER}\n")
    path.chmod(stat.S_IRUSR)
    keys = Keys.read(f"{path}")
    assert (keys.owner(KEY), keys.owner(OTHER), keys.owner(KEY[:-1]), keys.owner(None)) == (
        owner_of(KEY), owner_of(OTHER), None, None)
    assert KEY not in repr(vars(keys))
    with pytest.raises(UserError, match="cannot be read"):
        Keys.read(f"{tmp_path}/none")


def test_only_this_machine_is_answered_without_keys(server):
    with pytest.raises(UserError, match=r"without keys everybody who reaches 0\.0\.0\.0"):
        Server(server.service, "0.0.0.0")
    with pytest.raises(UserError, match="cannot be opened"):
        Server(server.service, port=server.server_address[1])


def test_a_connection_serves_many_requests(server):
    line = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
    for _ in range(3):
        line.request("GET", "/api/v1/healthz")
        assert json.loads(line.getresponse().read()) == {"status": "ok"}
    line.close()
