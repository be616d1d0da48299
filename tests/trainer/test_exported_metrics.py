"""A real Prometheus scrapes real runs: what it knows of them, and the alerts that fire when something is wrong."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

from jaxtrain.observe.prometheus.alert_rules import rules_file
from jaxtrain.observe.prometheus.dashboards import ALL, NODE, RUN, dashboard
from tests.tiny import free_address, tiny_flags, virtual_devices

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("cache")
FAST = 1 / 60  # what alerts wait minutes for, they wait seconds for
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=1",
        "data.global_batch_size=8", "train.steps=100000", "train.eval_every=40", "train.progress=False"]
# Batches take as long to come as a file of this process says. No file grows beyond a limit, if there is one.
PROGRAM = """
import os, resource, sys, time
from pathlib import Path
from jaxtrain.main import main
from tests.each_batch import at_each_batch

at_each_batch(lambda step, place: (time.sleep(float(Path(os.environ["DELAY"]).read_text())), place())[1])
if os.environ.get("LARGEST"):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["LARGEST"]), resource.RLIM_INFINITY))
sys.exit(main())
"""


class Prometheus:
    """A server that scrapes these ports every second."""

    def __init__(self, folder, ports):
        self.url = free_address()
        (folder / "alerts.yml").write_text(rules_file(FAST))
        (folder / "prometheus.yml").write_text(yaml.safe_dump({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": ["alerts.yml"],
            "scrape_configs": [{"job_name": "jaxtrain",
                                "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}]}))
        with open(folder / "log", "w") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address={self.url}"], stderr=log, stdout=log)

    def ask(self, query):
        """The samples that answer it: labels and value."""
        where = f"http://{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(where, timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return [(one["metric"], float(one["value"][1])) for one in found["data"]["result"]]

    def until(self, query, seconds=120):
        """Return its first answer that is not empty."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if found := self.ask(query):
                    return found
            time.sleep(0.3)
        pytest.fail(f"no answer to {query}; firing: {self.firing()}")

    def firing(self):
        return sorted({labels["alertname"] for labels, _ in self.ask('ALERTS{alertstate="firing"}')})

    def fires(self, *names):
        for name in names:
            self.until(f'ALERTS{{alertname="{name}", alertstate="firing"}}')

    def close(self):
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def prometheus(folder, ports):
    folder.mkdir()
    server = Prometheus(folder, ports)
    try:
        yield server
    finally:
        server.close()


def free_ports():
    """The first of two ports that follow each other."""
    while True:
        port = int(free_address().rpartition(":")[2])
        with contextlib.suppress(OSError), socket.socket() as other:
            other.bind(("127.0.0.1", port + 1))
            return port


def start(flags, workdir, port, number=0, processes=1, coordinator="", largest=""):
    delay = workdir.with_name(f"{workdir.name}-delay-{number}")
    if not delay.exists():
        delay.write_text("0.02")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": virtual_devices(1),
                   "DELAY": str(delay), "LARGEST": largest}
    where = [f"--coordinator={coordinator}", f"--num_processes={processes}", f"--process_id={number}"]
    command = [sys.executable, "-c", PROGRAM, *flags, f"--workdir={workdir}",
               f"--config.observe.prometheus_port={port}", *(where if processes > 1 else [])]
    with open(workdir.with_name(f"{workdir.name}-log-{number}"), "a") as log:
        return subprocess.Popen(command, env=environment, stderr=log, stdout=log), delay


def kill(*processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs apt-get install prometheus")
def test_two_processes_of_which_one_slows_down_and_stops(tmp_path, tmp_path_factory):
    flags = tiny_flags(tmp_path_factory, [*TINY, "checkpoint.every=20", "resilience.probe_every=2",
                                          "resilience.hang_factor=0"])
    port, coordinator = free_ports(), free_address()
    both = [start(flags, tmp_path / "slowing", port, number, 2, coordinator) for number in range(2)]
    (first, _), (second, delay) = both
    try:
        with prometheus(tmp_path / "server", [port, port + 1]) as server:
            server.until('count(jaxtrain_step{run="slowing"} > 100) == 2', seconds=240)
            server.until("jaxtrain_checkpoint_last_step > 0")
            server.until("jaxtrain_probe_seconds")
            server.until("jaxtrain_slowest_ratio")
            # What it is usually like: of more scrapes than are slow before the median of all tells that it is slower.
            server.until("min(count_over_time(jaxtrain_tokens_per_second[6m])) >= 30")
            assert set(server.firing()) <= {"JaxtrainStraggler"}  # where other work keeps the machine busy
            assert answered(server, RUN, "slowing") == {
                "Model FLOPs utilization", "Memory of devices"}, "a CPU has neither"
            assert {title for title in answered(server, NODE, "slowing")} <= {
                "Utilization", "Memory", "Power", "Temperature", "Clock", "Uncorrected memory errors",
                "Memory of devices"}, "there is no GPU"
            processes = server.ask("jaxtrain_start_timestamp_seconds")
            assert {labels["process"] for labels, _ in processes} == {"0", "1"}
            assert {labels["instance"] for labels, _ in processes} == {f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"}
            lines = [json.loads(line) for line in (tmp_path / "slowing/metrics.jsonl").read_text().splitlines()]
            (_, step), (_, loss) = *server.ask('jaxtrain_step{process="0"}'), *server.ask('jaxtrain_loss{process="0"}')
            losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                text = answer.read().decode()
            assert str(tmp_path.parent) not in text and "gpt.py" not in text and ".txt" not in text, "paths are secrets"
            assert loss in [losses.get(int(step) + near) for near in range(-40, 2)]

            delay.write_text("0.6")
            server.fires("JaxtrainStraggler", "JaxtrainDataWait", "JaxtrainThroughputDrop", "JaxtrainLowGoodput")
            (slowest,) = {value for _, value in server.ask('jaxtrain_slowest_process{process="0"}')}
            assert slowest == 1
            assert {labels["process"] for labels, _ in server.ask(
                'ALERTS{alertname="JaxtrainDataWait", alertstate="firing"}')} == {"1"}

            second.send_signal(signal.SIGSTOP)
            server.fires("JaxtrainProcessMissing", "JaxtrainStepStalled")
    finally:
        kill(first, second)


@pytest.mark.exhaustive  # tests/observe/prometheus has each alert and what it is about, without a run
@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs apt-get install prometheus")
def test_a_run_that_diverges_cannot_save_and_is_killed(tmp_path, tmp_path_factory):
    flags = tiny_flags(tmp_path_factory, [*TINY, "checkpoint.every=20", "optimizer.learning_rate=1e38",
                                          "optimizer.warmup_steps=0", "optimizer.schedule=constant",
                                          "resilience.max_skips=1000000"])
    port, started = free_ports(), []
    try:
        with prometheus(tmp_path / "server", [port]) as server:
            for failures in range(3):
                started.append(start(flags, tmp_path / "dying", port, largest=f"{1 << 16}")[0])
                server.until(f'jaxtrain_failures{{run="dying"}} == {failures} and jaxtrain_steps_total > 0')
                if failures < 2:
                    kill(started[-1])
            server.fires("JaxtrainRestarting", "JaxtrainLossNotFinite", "JaxtrainLossSpike", "JaxtrainCheckpointFailed",
                         "JaxtrainCheckpointOverdue")
    finally:
        kill(*started)


def answered(server, of, run):
    """The titles of panels whose queries have no answer, after all of them were asked as Grafana does."""
    silent, asked = set(), 0
    for panel in dashboard(of)["panels"]:
        for target in panel.get("targets", []):
            query = re.sub(r"\$__rate_interval", "10s", target["expr"])
            query = query.replace("$run", run).replace("$host", ".*")
            asked += 1
            if not server.ask(query):
                silent.add(panel["title"])
    assert asked > 10 and of in ALL
    return silent
