"""The page that is served: to this machine alone, with what is new, until Ctrl-C."""

import http.client
import json
import re
import signal
import subprocess
import sys
import threading

import pytest

from jaxtrain.errors import UserError
from jaxtrain.runs.report import live_page
from jaxtrain.runs.report.report_page import ReportPage
from jaxtrain.runs.report.run_curves import charts
from tests.runs.report.recorded import recorded


@pytest.fixture
def served(tmp_path):
    workdir = recorded(tmp_path / "run")
    server = live_page.server(ReportPage([workdir]))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield workdir, server
    server.shutdown()
    thread.join()
    server.server_close()


def asked(server, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_charts_keep_their_names_as_others_come(tmp_path):
    """A page that is renewed finds the chart of each title by its name."""
    workdir = recorded(tmp_path / "run")
    page = ReportPage([workdir])
    before = {chart.title: chart.name for chart in charts(page.runs)}
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "skipped": 1}\n{"step": 32, "skipped": 2}\n')
    page.look()
    after = {chart.title: chart.name for chart in charts(page.runs)}
    assert "eval_perplexity" in before and after.items() - before.items() == {("skipped", after["skipped"])}


def test_it_renews_itself_for_this_machine_alone(served):
    workdir, server = served
    assert server.server_address[0] == "127.0.0.1"
    status, page = asked(server, "/")
    assert status == 200 and "data-live" in page and 'id="plotly"' in page
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, "loss": 1.25}) + "\n")
    status, now = asked(server, "/now", f"localhost:{server.server_address[1]}")
    assert status == 200 and 'id="plotly"' not in now and "31 of 30" in now and "31 of 30" not in page
    for host in ("evil.example", "127.0.0.1.evil.example", f"evil.example:{server.server_address[1]}", "[::1]"):
        assert asked(server, "/", host)[0] == 403, "a site whose name leads here (DNS rebinding)"
    assert asked(server, "/../config.json")[0] == 404
    with pytest.raises(UserError, match=r"^--port: .* cannot be opened"):
        live_page.server(ReportPage([workdir]), server.server_address[1])


@pytest.mark.slow
def test_ctrl_c_ends_it(tmp_path):
    words = [sys.executable, "-m", "jaxtrain", "report", str(recorded(tmp_path / "run")), "--live"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert re.match(r"http://127\.0\.0\.1:\d+/ shows the report", process.stderr.readline())
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130 and process.stderr.read() == "stopped\n"
        finally:
            process.kill()
