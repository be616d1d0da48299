"""The exporter's port and file: what they answer, and that nothing they cannot do ends a run."""

import contextlib
import os
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from jaxtrain.observe import profile_requests
from jaxtrain.observe.events import events, listeners
from jaxtrain.observe.prometheus import exporter
from tests.observe.prometheus.exposition import made, values
from tests.tiny import closed_while_it_drips, free_address


def get(address, path="/metrics"):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def waited_for(what, seconds=30):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def open_port(workdir):
    return waited_for(lambda: [event for event in events(workdir) if event["kind"] == "prometheus"])


@contextlib.contextmanager
def exported(workdir, address="", textfile=""):
    workdir.mkdir(exist_ok=True)
    metrics, *_ = made(workdir)
    host, _, port = address.rpartition(":")
    with exporter.exporting(metrics, workdir, host=host, port=int(port or 0), textfile=textfile):
        yield metrics


def test_the_port_answers_and_is_closed_at_the_end(tmp_path):
    address = free_address()
    with exported(tmp_path / "run", address) as metrics:
        open_port(tmp_path / "run")
        text, kind = get(address)
        assert kind.startswith("text/plain; version=0.0.4") and values(text)["jaxtrain_devices"] == 4
        assert values(text)['jaxtrain_events_total,kind="prometheus"'] == 1, "it hears events"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(address, "/")
        metrics.text = lambda: 1 / 0
        with pytest.raises(urllib.error.HTTPError, match="500"):
            get(address)
    with pytest.raises(OSError):
        get(address)
    assert listeners == []


def test_a_program_of_this_machine_asks_for_a_profile_and_a_page_does_not(tmp_path):
    def post(path, **headers):
        asked = urllib.request.Request(f"http://{address}{path}", b"", headers, method="POST")
        try:
            with urllib.request.urlopen(asked, timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    address, workdir = free_address(), tmp_path / "run"
    with exported(workdir, address):
        open_port(workdir)
        assert (post("/metrics"), post("/profile?steps=x"), post("/profile?steps=9999")) == (404, 409, 409)
        assert post("/profile?steps=3", Origin="http://evil.example") == 403
        assert profile_requests.pending(workdir) is None
        assert post("/profile?steps=3") == 202 and profile_requests.pending(workdir)["steps"] == 3
        assert post("/profile") == 409, "one is under way"


def test_it_is_bound_to_what_is_said(tmp_path):
    address = free_address()
    with exported(tmp_path / "run", address):
        open_port(tmp_path / "run")
        port = int(address.rpartition(":")[2])
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=5):
            pass  # another address of this machine


def test_a_port_in_use_costs_no_run_and_is_taken_when_it_is_free(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exporter, "AGAIN_S", 0.05)
    address = free_address()
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        other.listen()
        with exported(tmp_path / "run", address):
            waited_for(lambda: events(tmp_path / "run"))
            time.sleep(0.2)
            other.close()
            open_port(tmp_path / "run")
            assert "jaxtrain_devices" in get(address)[0]
    assert [event["kind"] for event in events(tmp_path / "run")] == ["prometheus_failed", "prometheus"]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (f"observe.prometheus_port: nothing can be exported at http://{address}/metrics (Address already "
                       "in use); the run continues, and this is tried again every 0 s")
    assert said[1] == f"metrics are exported at http://{address}/metrics"


def test_an_address_of_another_machine_is_told_by_the_key_of_the_host(tmp_path, capsys):
    with exported(tmp_path / "run", "192.0.2.1:9400"):
        waited_for(lambda: events(tmp_path / "run"))
    assert capsys.readouterr().err.startswith("observe.prometheus_host: nothing can be exported at http://192.0.2.1:")


@pytest.mark.parametrize("address", ["127.0.0.1:65536", f"{'x' * 70}.example:9400"])
def test_an_address_that_cannot_be_costs_no_run(tmp_path, address):
    """A port behind the last one, as many processes of a host may get, and a name that is none."""
    with exported(tmp_path / "run", address):
        failed, = waited_for(lambda: events(tmp_path / "run"))
    assert failed["kind"] == "prometheus_failed" and failed["reason"]


def test_silent_and_slow_clients_keep_nobody_out_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(exporter, "REQUEST_S", 0.3)
    monkeypatch.setattr(exporter._Handler, "timeout", 0.3)
    monkeypatch.setattr(exporter, "WHOLE_S", 0.5)
    address = free_address()
    with exported(tmp_path / "run", address), contextlib.ExitStack() as held:
        open_port(tmp_path / "run")
        before = threading.active_count()  # other tests may have left some
        where = "127.0.0.1", int(address.rpartition(":")[2])
        for _ in range(3 * exporter.MOST):
            held.enter_context(socket.create_connection(where))
        # Two for each that is let in, and some that are just ending; of all there would be twice as many as this.
        assert threading.active_count() < before + 3 * exporter.MOST
        waited_for(lambda: answered(address))
        assert closed_while_it_drips(socket.create_connection(where))


def answered(address):
    with contextlib.suppress(OSError):
        return get(address)


def test_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(exporter, "FILE_S", 0.02)
    (tmp_path / "text").mkdir()
    path = tmp_path / "text" / "jaxtrain-a_run-0.prom"
    with exported(tmp_path / "a run", textfile=tmp_path / "text") as metrics:
        for loss in (1.25, 2.25):
            metrics.write({"step": 1, "loss": loss})
            waited_for(lambda want=f" {loss}\n": path.exists() and want in path.read_text())
        assert values(path.read_text(), "a run")["jaxtrain_loss"] == 2.25
        first = path.stat().st_ino
        waited_for(lambda: path.stat().st_ino != first)  # another file takes its place: no reader sees half of one
        assert {name.rpartition(".")[2] for name in os.listdir(tmp_path / "text")} <= {"prom", "tmp"}
    assert os.listdir(tmp_path / "text") == [], "a run that ends leaves no old numbers"


def test_a_folder_that_is_missing_costs_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exporter, "FILE_S", 0.02)
    with exported(tmp_path / "run", textfile=tmp_path / "text"):
        waited_for(lambda: events(tmp_path / "run"))
        (tmp_path / "text").mkdir()
        waited_for((tmp_path / "text" / "jaxtrain-run-0.prom").exists)
    assert [event["kind"] for event in events(tmp_path / "run")] == ["prometheus_failed"]
    assert "the run continues" in capsys.readouterr().err
