"""The real services, all in one run that is killed and resumed: each has every step once, and no password.

MLflow is a server with a SQLite database on the loopback interface; Weights & Biases is offline, where nothing may
reach for the network; trackio keeps its own database.
"""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time

import pytest

from jaxtrain.errors import UserError
from jaxtrain.observe import events, trackers
from tests.tiny import QUICKLY, ROOT, tiny_flags

NAMES = ("tensorboard", "wandb", "mlflow", "trackio")
STEPS, SAVED, KILLED = 9, 3, 8
SECRET = "planted-password"
# A run that dies at a step, once the trackers have what came before; and in which no host but this one may be called.
RUN = """
import json, os, signal, socket, sys, time
from pathlib import Path
import jaxtrain as jt
from jaxtrain.config.load import load_config
from jaxtrain.observe.trackers.tracking import _Follower

def only_here(self, address, connect=socket.socket.connect):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        Path(sys.argv[1], "called").open("a").write(f"{address}\\n")
        raise OSError("no network")
    return connect(self, address)
socket.socket.connect = only_here

class Own(jt.Tracker):
    def log(self, lines):
        with open(Path(sys.argv[1], "own.jsonl"), "a") as file:
            file.writelines(json.dumps(dict(line)) + "\\n" for line in lines)

class Killer(jt.Observer):
    def on_batch(self, step, batch):
        if step == int(sys.argv[2]):
            while not all(self.has(name) for name in (*config.observe.trackers, "Own")):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    def has(self, name):
        place = Path(sys.argv[1], "trackers", f"{name}.json")
        return place.exists() and json.loads(place.read_text())["sent"][0] >= step_wanted

step_wanted = int(sys.argv[2]) - 2
config = load_config(sys.argv[3], json.loads(sys.argv[4]))
try:
    jt.train(config, sys.argv[1], observers=[Killer(), Own()])
except jt.UserError as error:
    sys.exit(str(error))
"""


def run(forked, workdir, kill_at, flags, environment, code=RUN):
    keys = dict(flag.removeprefix("--config.").split("=", 1) for flag in flags[1:])
    ended = forked(["-c", code, str(workdir), str(kill_at), flags[0].removeprefix("--config="), json.dumps(keys)],
                   ROOT, {**os.environ, **environment}, timeout=900)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An MLflow server; the test that shuts it down is the last one."""
    pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = open(folder / "log", "w")  # noqa: SIM115
    started = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
         "--backend-store-uri", f"sqlite:///{folder}/ml.db", "--artifacts-destination", f"{folder}/artifacts"],
        stdout=log, stderr=log, start_new_session=True,
        env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})
    while True:
        assert started.poll() is None, (folder / "log").read_text()
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.1)
    started.url, started.folder = f"http://127.0.0.1:{port}", folder
    yield started
    stop(started)
    log.close()


def stop(server):
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def flags_of(tmp_path_factory, names, *more):
    return tiny_flags(tmp_path_factory, [
        "model.num_layers=1", "model.embed_dim=32", "data.seq_len=32", "data.global_batch_size=8",
        f"train.steps={STEPS}", "train.eval_every=3", "train.eval_batches=1", "train.progress=false",
        f"checkpoint.every={SAVED}",
        f"observe.trackers={','.join(names)}", *more])


@pytest.fixture(scope="module")
def world(server, forked, tmp_path_factory):
    """A run that was killed and resumed: its workdir, what its trackers are told of, and what they printed."""
    for name in ("wandb", "trackio", "tensorboardX"):
        pytest.importorskip(name)
    root = tmp_path_factory.mktemp("root")
    workdir = root / "tracked"
    environment = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": server.url.replace("//", f"//me:{SECRET}-1@"),
                   "TRACKIO_DIR": str(root / "trackio"), "XLA_FLAGS": QUICKLY,
                   "WANDB_API_KEY": f"{SECRET}-2".ljust(40, "0"), "MY_TOKEN": f"{SECRET}-3"}
    flags = flags_of(tmp_path_factory, NAMES, "observe.histograms_every=2", "observe.histograms=weights,gradients",
                     "observe.samples_every=4", "train.sample_tokens=8", f"observe.name=https://me:{SECRET}-4@host/it")
    code, said = run(forked, workdir, KILLED, flags, environment)
    assert code == -signal.SIGKILL, said
    code, more = run(forked, workdir, STEPS + 1, flags, environment)
    assert code == 0, more
    return workdir, root / "trackio", server, said + more


def truth(workdir):
    """The loss at each step, and that of evaluations, of a run that was not killed: resuming is exact to the bit."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return ([(line["step"], line["loss"]) for line in lines if "loss" in line],
            [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line])


@pytest.mark.slow
def test_it_was_killed_behind_what_the_trackers_had(world):
    """Steps were sent that came again; otherwise what follows tests nothing."""
    taken_back = (world[0] / "metrics.rolled_back.jsonl").read_text().splitlines()
    assert json.loads(taken_back[-1])["step"] > SAVED and [step for step, _ in truth(world[0])[0]] == list(
        range(1, STEPS + 1))


@pytest.mark.slow
def test_tensorboard(world):
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    points, extras = [], set()
    for path in sorted((world[0] / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # length (8), its CRC (4), event, its CRC (4)
            size = int.from_bytes(data[:8], "little")
            event, data = Event.FromString(data[12:12 + size]), data[16 + size:]
            if event.session_log.status == SessionLog.START:  # as readers do: these steps come again
                points = [one for one in points if one[1] < event.step]
            points += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            extras |= {value.tag.split("/")[0] for value in event.summary.value}
    for tag, expected in zip(("loss", "eval_loss"), truth(world[0]), strict=True):
        assert [(step, pytest.approx(value)) for name, step, value in points if name == tag] == expected
    assert extras >= {"weights", "gradients", "sample", "checkpoint", "config", "run", "evaluations", "system"}


@pytest.mark.slow
def test_wandb(world):
    from jaxtrain.observe.trackers import wandb_offline

    workdir = world[0]
    id = json.loads((workdir / "run.json").read_text())["run"]
    rows = list(wandb_offline.rows(workdir, id))
    for key, expected in zip(("loss", "eval_loss"), truth(workdir), strict=True):
        assert [(int(row["step"]), float(row[key])) for row in rows if key in row] == expected
    assert [int(row["_step"]) for row in rows] == sorted({int(row["_step"]) for row in rows})
    assert len(list((workdir / "wandb").glob("offline-run-*"))) == 2
    kept = {key.split("/")[0] for row in rows for key in row}
    for path in (workdir / "wandb").glob("offline-run-*/*.wandb"):  # what came after the last row is in the summary
        kept |= {(item.key or item.nested_key[0]).split("/")[0] for record in wandb_offline.records(path)
                 if record.HasField("summary") for item in record.summary.update}
    assert kept >= {"weights", "gradients", "sample", "system"}
    assert not (workdir / "called").exists()  # no host but this one


@pytest.mark.slow
def test_mlflow(world):
    from mlflow import MlflowClient

    workdir, _, server, _ = world
    client = MlflowClient(server.url)
    found = client.search_runs([client.get_experiment_by_name("jaxtrain").experiment_id])
    assert len(found) == 1 and found[0].info.status == "FINISHED"
    id, data = found[0].info.run_id, found[0].data
    for key, expected in zip(("loss", "eval_loss"), truth(workdir), strict=True):
        assert [(one.step, one.value) for one in client.get_metric_history(id, key)] == expected
    assert data.params["train.steps"] == f"{STEPS}" and data.tags["run.git_commit"]
    assert data.tags["checkpoint"] == (workdir / "checkpoints" / f"{STEPS}").as_uri()
    assert {one.path for one in client.list_artifacts(id)} >= {"checkpoints", "sample", "weights", "gradients",
                                                               "evaluations"}


@pytest.mark.slow
def test_trackio(world):
    workdir, folder, *_ = world
    with sqlite3.connect(next(folder.glob("jaxtrain*.db"))) as database:
        rows = [(step, json.loads(metrics)) for step, metrics in database.execute(
            "SELECT step, metrics FROM metrics ORDER BY id")]
        names = {name for name, in database.execute("SELECT run_name FROM metrics")}
    assert len(names) == 1
    for key, expected in zip(("loss", "eval_loss"), truth(workdir), strict=True):
        assert [(step, metrics[key]) for step, metrics in rows if key in metrics] == expected


@pytest.mark.slow
def test_a_tracker_of_ones_own(world):
    lines = [json.loads(line) for line in (world[0] / "own.jsonl").read_text().splitlines()]
    for key, expected in zip(("loss", "eval_loss"), truth(world[0]), strict=True):
        assert [(line["step"], line[key]) for line in lines if key in line] == expected


@pytest.mark.slow
def test_nothing_secret_leaves(world):
    workdir, own, server, said = world
    assert SECRET not in said
    found = [path for folder in (workdir, own, server.folder) for path in folder.rglob("*")
             if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert found == []


@pytest.mark.slow
def test_a_server_that_goes_away(world, forked, tmp_path, tmp_path_factory):
    """The run finishes with one warning, and goes on without it."""
    server = world[2]
    flags = flags_of(tmp_path_factory, ["mlflow"])
    environment = {"MLFLOW_TRACKING_URI": server.url, "XLA_FLAGS": QUICKLY, "GONE": f"{server.pid}"}
    script = RUN.replace("os.kill(os.getpid(), signal.SIGKILL)",
                         "os.killpg(int(os.environ['GONE']), signal.SIGKILL)")
    code, said = run(forked, tmp_path, 5, flags, environment, script)
    server.wait()
    assert code == 0, said
    assert [step for step, _ in truth(tmp_path)[0]] == list(range(1, STEPS + 1))
    kinds = [event["kind"] for event in events.events(tmp_path)]
    assert (kinds.count("tracker_down"), kinds.count("tracker_behind")) == (1, 1), said
    assert "mlflow has the metrics of this run only up to step " in said


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_one_sentence(monkeypatch, name):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf"^observe.trackers: .* is not installed; .*\.\[{name}\]"):
        trackers.check([name])
