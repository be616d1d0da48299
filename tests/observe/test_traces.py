"""Spans of a run's phases: what is sent, to a receiver that speaks OTLP, and what happens when there is none."""

import http.server
import json
import logging
import threading
import time

import pytest

from jaxtrain.errors import UserError
from jaxtrain.observe import traces
from jaxtrain.observe.traces import Traces, opened

sdk = pytest.importorskip("opentelemetry.sdk.trace.export")
collector = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")


class Collected:
    def __init__(self):
        self.spans = []

    def export(self, spans):
        self.spans += spans
        return sdk.SpanExportResult.SUCCESS

    def shutdown(self):
        pass


def a_run(workdir, kind="otlp", exporter=None, step=7, ended=None):
    """One start: it restores, trains, saves, rolls back and trains again, and ends."""
    class RolledBack(Exception):
        pass

    with opened(kind, workdir, lambda: step, time.time() - 5, True, exporter) as spans, \
            spans.run((KeyboardInterrupt,), model="gpt2", data="s3://user:secret@host/x"):
        with spans.span("restore"):
            pass
        with pytest.raises(RolledBack), spans.training():
            with spans.span("checkpoint"):
                pass
            raise RolledBack("of secret")
        with spans.training(), spans.span("eval"):
            pass
        if ended:
            raise ended


def test_phases_are_spans_of_one_run(tmp_path):
    collected = Collected()
    a_run(tmp_path, exporter=collected)
    *phases, root = collected.spans
    assert [span.name for span in phases] == ["restore", "start", "save", "train", "rollback", "evaluate", "train"]
    assert root.name == "run" and root.parent is None
    assert dict(root.attributes) == {"model": "gpt2", "data": "s3://***@host/x", "step": 7, "ended": "finished"}
    by_name = {span.name: span for span in reversed(phases)}
    assert by_name["start"].start_time == root.start_time and 5e9 <= by_name["start"].end_time - root.start_time < 60e9
    assert dict(by_name["train"].attributes) == {"ended_by": "RolledBack", "step": 7}
    assert by_name["rollback"].start_time >= by_name["train"].end_time
    assert {span.parent.span_id for span in phases} == {root.context.span_id}
    assert "secret" not in "".join(span.to_json() for span in collected.spans)


@pytest.mark.parametrize(("error", "ended"), [(KeyboardInterrupt(), "stopped"), (ValueError("secret"), "failed")])
def test_starts_share_a_trace_and_say_how_they_ended(tmp_path, error, ended):
    first, second = Collected(), Collected()
    a_run(tmp_path, exporter=first)
    with pytest.raises(type(error)):
        a_run(tmp_path, exporter=second, ended=error)
    ids = {span.context.trace_id for span in first.spans + second.spans}
    assert len(ids) == 1 and f"{ids.pop():032x}" == (tmp_path / "trace_id").read_text().strip()
    assert len({span.context.span_id for span in first.spans + second.spans}) == 16
    assert second.spans[-1].attributes["ended"] == ended
    assert second.spans[-1].attributes["ended_by"] == type(error).__name__
    (tmp_path / "trace_id").write_text("damaged")
    a_run(tmp_path, exporter=(third := Collected()))
    assert {span.context.trace_id for span in third.spans}.isdisjoint({span.context.trace_id for span in first.spans})


def test_lines_of_a_file(tmp_path):
    a_run(tmp_path, "file")
    a_run(tmp_path, "file")
    lines = [json.loads(line) for line in (tmp_path / "traces.jsonl").open()]
    assert [line["name"] for line in lines].count("run") == 2
    assert len({line["context"]["trace_id"] for line in lines}) == 1


def test_a_file_that_cannot_be_written_costs_a_warning(tmp_path, capsys):
    (tmp_path / "traces.jsonl").mkdir()
    a_run(tmp_path, "file")
    assert capsys.readouterr().err == "warning: observe.traces: spans are lost (IsADirectoryError); the run continues\n"


def test_without_the_key_nothing_is_traced(tmp_path):
    a_run(tmp_path, "")
    with opened("otlp", tmp_path, lambda: 0, 0.0, False) as spans, spans.span("compile"):
        assert isinstance(spans, Traces)  # another process than the first one
    assert not list(tmp_path.iterdir())


@pytest.fixture
def receiver():
    """A server that speaks OTLP on loopback, and the list of what it received."""
    came = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            message = collector.ExportTraceServiceRequest()
            body = self.rfile.read(int(self.headers["Content-Length"]))
            message.ParseFromString(body)
            came.append((self.path, self.headers, message))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", came
    server.shutdown()
    server.server_close()


def test_spans_reach_a_receiver_by_otlp(tmp_path, receiver, monkeypatch):
    address, came = receiver
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=token")
    a_run(tmp_path)
    (path, headers, message), = came
    assert path == "/v1/traces" and headers["authorization"] == "token"
    resource, = message.resource_spans
    about = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert about["service.name"] == "jaxtrain"
    assert set(about) <= {"service.name", "service.instance.id", "telemetry.sdk.language", "telemetry.sdk.name",
                          "telemetry.sdk.version"}
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    names = ["restore", "start", "save", "train", "rollback", "evaluate", "train", "run"]
    assert [span.name for span in spans] == names
    assert not any(span.events for span in spans)  # no tracebacks
    assert {span.trace_id.hex() for span in spans} == {(tmp_path / "trace_id").read_text().strip()}
    assert b"secret" not in message.SerializeToString()


def test_a_dead_endpoint_costs_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.01")
    a_run(tmp_path)
    warning = "warning: observe.traces: spans are lost (the endpoint did not take them)"
    assert capsys.readouterr().err.count(warning) == 1
    assert any(isinstance(each, logging.NullHandler) for each in logging.getLogger("opentelemetry").handlers)


def test_an_endpoint_that_does_not_answer_keeps_nobody_waiting(tmp_path, monkeypatch):
    answers = threading.Event()

    class Silent(Collected):
        def export(self, spans):
            answers.wait()
            return super().export(spans)

    monkeypatch.setattr(traces, "_LAST_S", 0.01)
    a_run(tmp_path, exporter=(silent := Silent()))
    assert not silent.spans and any(thread.name == "traces" for thread in threading.enumerate())
    answers.set()


def test_settings_that_are_wrong_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "-5")
    said = r"observe\.traces: OpenTelemetry refuses its settings \(ValueError\); look at"
    with pytest.raises(UserError, match=said), opened("otlp", tmp_path, lambda: 0, 0.0, True):
        pass
