"""Jobs on a real Ray of two nodes on this machine."""

import json
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxtrain.commands import jobs as jobs_command
from jaxtrain.commands import launch as launch_command
from jaxtrain.distributed import exit_codes
from jaxtrain.errors import UserError
from jaxtrain.launch import job_record as jobs
from jaxtrain.launch import ray_driver, ray_engine
from jaxtrain.launch import submission as launch
from jaxtrain.launch.job_spec import JobSpec
from jaxtrain.launch.ray_engine import RayEngine
from jaxtrain.launch.restarts import restart_history
from tests.launch.ray import raylets
from tests.launch.waiting import all_began, event, until
from tests.tiny import tiny_flags, virtual_devices

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "launch" / "program.py"


def job_of(tmp_path, **keys):
    return jobs.Job(tmp_path / "jobs" / "1", "ray", "name", ["true"], f"{tmp_path}", JobSpec(**keys))


# ---------------------------------------------------------------------------------------------------- without a cluster
@pytest.mark.parametrize("keys", [{"image": "x"}, {"time": "1:00:00"}, {"queue": "x"}, {"min_nodes": 1},
                                  {"extra": ("x",)}, {"secrets": {"X": "secret:a/b"}}])
def test_what_ray_does_not_read_is_refused(tmp_path, keys):
    with pytest.raises(UserError, match=r"--on=ray does not read it|Ray keeps no secrets"):
        RayEngine().check(job_of(tmp_path, **keys))


def test_every_key_is_read_by_ray_or_refused_with_an_alternative():
    read = {"name", "nodes", "processes_per_node", "accelerators_per_node", "accelerator", "cpus_per_process",
            "memory_gb", "grace_s", "retries", "setup", "env", "secrets"}
    assert set(JobSpec.__dataclass_fields__) == read | ray_engine._INSTEAD.keys()


def test_a_node_is_a_bundle(tmp_path):
    files = RayEngine().render(job_of(tmp_path, nodes=2, accelerators_per_node=8, accelerator="H100", memory_gb=2,
                                      cpus_per_process=4))
    assert '"CPU": 32.0' in files["plan.json"] and '"GPU": 8.0' in files["plan.json"]
    assert '"accelerator_type:H100": 0.001' in files["plan.json"] and '"memory": 2000000000.0' in files["plan.json"]
    assert files["job.sh"].endswith("exec true\n")


@pytest.mark.parametrize("statuses, expected", [
    ([0, 0], 0), ([75, 75], 75), ([75, 76], 76), ([76, 1, 76], 1), ([1, 2], 2), ([137, 76], 137), ([0, 75], 75),
    ([77, ray_driver._LOST], 77), ([76, ray_driver._LOST], ray_driver._LOST)])
def test_what_the_statuses_of_all_mean(statuses, expected):
    assert ray_driver.of_all(list(enumerate(statuses)))[1] == expected


class Actors:
    """Processes whose statuses `poll` tells one after the other; None: it runs. A signal ends it with 128 more."""

    def __init__(self, *told):
        self.told, self.signals, self.poll, self.send = list(told), [], SimpleNamespace(remote=self.next), (
            SimpleNamespace(remote=self.signalled))

    def next(self):
        return 128 + self.signals[-1] if self.signals else self.told.pop(0) if self.told else None

    def signalled(self, number):
        self.signals.append(number)


def driver_of(tmp_path, **plan) -> ray_driver.Driver:
    errors = SimpleNamespace(ActorUnavailableError=KeyError, RayActorError=KeyError, GetTimeoutError=KeyError)
    ray = SimpleNamespace(exceptions=errors, get=lambda answer, timeout: answer)
    return ray_driver.Driver(tmp_path, ray, {"retries": 3, "counted": True, "grace_s": 0} | plan)


@pytest.mark.parametrize("first, second, expected", [
    ([1], [None, 75], (0, 1)), ([None, 76], [2], (1, 2)), ([None, 75], [-11], (1, 139)), ([76], [None, 134], (0, 76)),
    ([76], [], (0, 76)),  # the other one hangs, and is killed
    ([75], [None, 1], (1, 1))])
def test_the_first_failure_of_several_processes_counts(tmp_path, monkeypatch, first, second, expected):
    monkeypatch.setattr(ray_driver, "_POLL_S", 0)
    driver = driver_of(tmp_path, grace_s=60 if second else 0)
    assert driver.watch({"0 a": Actors(*first), "1 b": Actors(*second)}) == expected[1]
    assert driver.process == expected[0]


@pytest.mark.parametrize("counted, statuses, starts, end", [
    (True, [76] * 30 + [0], 31, 0),  # it counts its own steps
    (False, [76] * 30, 11, 77), (False, [1] * 30, 4, 1), (True, [76, 1, 75, 1, 1, 1], 6, 1), (True, [2], 1, 2)])
def test_how_often_a_job_starts_again(tmp_path, monkeypatch, capsys, counted, statuses, starts, end):
    driver, left = driver_of(tmp_path, counted=counted), list(statuses)
    monkeypatch.setattr(driver, "attempt", lambda: left.pop(0))
    assert driver.run() == end and len(statuses) - len(left) == starts
    assert restart_history.of(replace(job_of(tmp_path), folder=tmp_path)).count == starts - 1


def test_a_cluster_that_does_not_answer(tmp_path):
    pytest.importorskip("ray", reason="ray comes with the extra .[ray]")
    status = RayEngine().status(replace(job_of(tmp_path), id="x:http://127.0.0.1:9"))
    assert status.state == "unknown" and "no Ray answers at http://127.0.0.1:9" in status.detail


# ------------------------------------------------------------------------------------------------------- with a cluster
@pytest.fixture(scope="module")
def cluster():
    if raylets.missing():
        pytest.skip("pip install 'ray[default]', whose Jobs API this needs")
    with tempfile.TemporaryDirectory(prefix="ray") as short, pytest.MonkeyPatch.context() as patch:  # for sockets
        variables = {"PYTHONPATH": f"{ROOT}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": virtual_devices(1)}
        with raylets.Raylets(Path(short), **variables) as found:
            patch.setenv("RAY_ADDRESS", found.dashboard)
            patch.setenv("RAY_AUTH_MODE", "disabled")
            yield found


@pytest.fixture
def begun(cluster, tmp_path):
    """Submit the program; what it leaves running is ended."""
    cluster.fill()
    made = []

    def begin(*flags: str, wait: bool = True) -> Path:
        workdir = tmp_path / "work"
        assert launch_command.main(["--on=ray", f"--workdir={workdir}", *flags, "--", sys.executable,
                            f"{PROGRAM}", f"{workdir}"]) == 0
        made.append(workdir)
        if wait:
            all_began(workdir)
        return workdir

    yield begin
    for workdir in made:
        job = jobs.newest(workdir)
        if RayEngine().status(job).state in ("running", "waiting"):
            RayEngine().cancel(job, now=True)
            until(workdir, lambda status: status.state not in ("running", "waiting"))


def number_of(began: Path) -> int:
    """Return the number of the process that wrote a file."""
    return int(began.read_text().split()[2])


def told(what: str, workdir: Path, *flags: str) -> None:
    assert jobs_command.main([what, f"{workdir}", *flags]) == 0


@pytest.mark.exhaustive
def test_a_run_has_the_losses_of_one_here(cluster, tmp_path, tmp_path_factory, monkeypatch):
    """Bit by bit: two nodes with a device each, and one process with two."""
    flags = tiny_flags(tmp_path_factory, [
        "model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.steps=3",
        "data.global_batch_size=4", "train.eval_every=0", "mesh.data=2", "checkpoint.every=3", "train.log_every=1"])
    losses = []
    monkeypatch.setenv("XLA_FLAGS", virtual_devices(2))
    for on, nodes in (("ray", 2), ("local", 1)):
        workdir = tmp_path / on
        assert launch_command.main([flags[0].partition("=")[2], *flags[1:], f"--on={on}", f"--nodes={nodes}",
                            f"--workdir={workdir}"]) == 0
        status = until(workdir, lambda status: status.state not in ("waiting", "running"))
        assert status.state == "done", (workdir / "jobs" / "1" / "output.log").read_text()
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if line.get("loss") is not None])
    assert losses[0] == losses[1] and len(losses[0]) == 3


@pytest.mark.slow
def test_a_run_pauses_and_goes_on_with_other_nodes(begun, capsys):
    workdir = begun("--nodes=2")
    assert (workdir / "began-0-0").read_text().startswith("2 ")
    jobs.record(replace(job := jobs.newest(workdir), id=""))  # its submission was cut off
    assert launch.recovered(workdir).id == job.id
    assert jobs_command.main(["resume", f"{workdir}"]) == 2
    told("requeue", workdir)
    all_began(workdir, 1)
    assert len(list(workdir.glob("saved-0-*"))) == 2 and not jobs.newest(workdir).pause_file.exists()
    told("pause", workdir)
    until(workdir, lambda status: status.state == "paused")
    assert len(list(workdir.glob("saved-1-*"))) == 2
    told("resume", workdir, "--nodes=1")
    event(workdir / "began-2-0")
    assert (workdir / "began-2-0").read_text().startswith("1 ")
    (workdir / "end").write_text("0")
    until(workdir, lambda status: status.state == "done")
    told("logs", workdir)
    assert "attempt 2" in capsys.readouterr().out
    told("list", workdir.parent)
    assert "work     ray" in capsys.readouterr().out


@pytest.mark.slow
def test_a_lost_node_starts_all_again_when_there_are_enough(begun, cluster, capsys):
    workdir = begun("--nodes=2", "--grace_s=5", "--retries=1")
    first = [number_of(workdir / f"began-0-{rank}") for rank in (0, 1)]
    cluster.kill("second")
    status = until(workdir, lambda status: status.state == "waiting")
    assert "2 machines with 1 CPU are needed, and the cluster has 1" in status.detail
    assert not any(Path(f"/proc/{number}").exists() for number in first)
    cluster.add("third")
    event(workdir / "began-1-1")

    worker = Path(f"/proc/{number_of(workdir / 'began-1-1')}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(worker), signal.SIGKILL)
    all_began(workdir, 2)  # the first crash: a lost machine is none
    told("logs", workdir)
    assert "was lost with its machine" in (said := capsys.readouterr().out) and "was lost with its worker" in said
    told("cancel", workdir)
    until(workdir, lambda status: status.state == "cancelled")
    assert len(list(workdir.glob("saved-2-*"))) == 2


@pytest.mark.slow
def test_a_crash_starts_again_as_often_as_it_may(begun):
    workdir = begun("--nodes=2", "--retries=1", wait=False)
    (workdir / "end").write_text("1")
    assert until(workdir, lambda status: status.state == "failed").detail == exit_codes.words(1)
    assert sorted(path.name for path in workdir.glob("began-*-0")) == ["began-0-0", "began-1-0"]


@pytest.mark.slow
def test_a_job_ends_while_it_waits_and_at_once_and_after_a_mistake(begun, tmp_path, capsys):
    workdir = begun("--nodes=3", wait=False)
    assert "3 machines" in until(workdir, lambda status: "needed" in status.detail).detail
    told("why", workdir)
    assert "it is waiting: 3 machines with 1 CPU are needed" in capsys.readouterr().out
    told("cancel", workdir)
    until(workdir, lambda status: status.state == "cancelled")
    begun()
    told("cancel", workdir, "--now")
    until(workdir, lambda status: status.state == "cancelled")
    assert launch_command.main(["--on=ray", f"--workdir={workdir}", "--", sys.executable, f"{ROOT}/none.py"]) == 0
    assert until(workdir, lambda status: status.state == "failed").detail == exit_codes.words(2)
    assert os.environ["RAY_ADDRESS"] in jobs.newest(workdir).id
