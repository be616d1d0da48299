"""Two processes of two devices are one run of four: the same numbers, the same files, the same end."""

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.builder import build
from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.config.load import load_config
from jaxtrain.distributed import exit_codes
from jaxtrain.distributed import processes as distributed
from jaxtrain.main import main
from tests.forked import forks
from tests.tiny import SLOW, devices, free_address, tiny_flags, virtual_devices

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
STEPS = 12
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=2",
        "data.global_batch_size=8", f"train.steps={STEPS}", "train.eval_every=4", "checkpoint.every=4",
        "checkpoint.keep=3", "optimizer.zero_stage=1", "resilience.check_every=0"]
STATUS = {signal.SIGTERM: exit_codes.SAVED, signal.SIGINT: exit_codes.INTERRUPTED}
MESHES = {"data": [], "product": ["--config.mesh.data=2", "--config.mesh.fsdp=2"]}
WATCHED = {"data": [], "product": ["--config.train.sample_tokens=4", "--config.observe.trackers=tensorboard",
                                   "--config.observe.histograms_every=5", "--config.observe.samples_every=6",
                                   "--config.observe.histograms=weights,gradients"]}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return tiny_flags(tmp_path_factory, TINY)


@pytest.fixture(scope="module", autouse=True)
def on_four():
    with devices(4):
        yield


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory):
    """mesh -> the workdir of a run by this one process."""
    found = {}

    def run(mesh):
        if mesh not in found:
            found[mesh] = tmp_path_factory.mktemp("alone") / mesh
            assert main([*flags, *MESHES[mesh], *WATCHED[mesh], f"--workdir={found[mesh]}"]) == 0
        return found[mesh]

    return run


def two_processes(flags, workdir, by_environment=False, seconds=0, devices=4):
    """Both of a run whose batches take so many seconds each."""
    return two_of(["-c", SLOW % seconds, *flags, f"--workdir={workdir}"], by_environment, devices)


@contextlib.contextmanager
def two_of(words, by_environment=False, devices=4, start=None):
    """Two processes of these words for Python that are to be one, started; none is left behind."""
    start = start or forks().start
    coordinator = free_address()
    started = []
    try:
        for i in range(2):
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
                           "XLA_FLAGS": virtual_devices(devices)}
            where = [f"--coordinator={coordinator}", "--num_processes=2", f"--process_id={i}"]
            if by_environment:
                where = []
                environment |= {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": "2",
                                "JAX_PROCESS_ID": str(i)}
            started.append(start([*words, *where], ROOT, environment))
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def ended(processes, seconds=400):
    """Return what each of them wrote to stderr, when all have ended."""
    return [process.communicate(timeout=seconds)[1] for process in processes]


def told(workdir):
    """Return the lines of metrics.jsonl without the times."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith(("_s", "goodput"))
             and not key.startswith("slowest")} for line in lines]


def assert_same_numbers(workdir, other):
    ours, theirs = told(workdir), told(other)
    assert len(ours) == STEPS + 3
    for our, their in zip(ours, theirs, strict=True):
        assert our.keys() == their.keys()
        # The perplexity's relative error is the loss's absolute one, which is several times its relative one.
        np.testing.assert_allclose(list(our.values()), list(their.values()), rtol=5e-6)


def final(flags, mesh, workdir, step=STEPS):
    words = [flag.removeprefix("--config.") for flag in [*flags[1:], *MESHES[mesh]]]
    run = build(load_config(flags[0].partition("=")[2], dict(word.split("=") for word in words)))
    return jax.tree.leaves(jax.device_get(CheckpointManager(workdir / "checkpoints").restore(step, run.abstract)))


@pytest.mark.parametrize("mesh", [
    pytest.param("data", marks=pytest.mark.exhaustive), pytest.param("product", marks=pytest.mark.slow)])
def test_the_numbers_of_one_process(flags, alone, tmp_path, mesh):
    with two_processes([*flags, *MESHES[mesh], *WATCHED[mesh]], tmp_path, mesh == "product", devices=2) as both:
        first, second = ended(both)
    assert [process.returncode for process in both] == [0, 0], first + second
    assert_same_numbers(tmp_path, alone(mesh))
    for written in (tmp_path / "tensorboard", alone(mesh) / "tensorboard") if mesh == "product" else ():
        events, = written.iterdir()  # of the first process
        assert all(name in events.read_bytes() for name in (b"weights/blocks", b"gradients/blocks", b"sample"))
    for ours, theirs in zip(final(flags, mesh, tmp_path), final(flags, mesh, alone(mesh)), strict=True):
        # The gradient of a key's bias is rounding noise, and Adam enlarges it: hence the absolute part.
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "run.json").read_text())["process_count"] == 2
    assert ("a sample of what the model writes now:\n" in first) == (mesh == "product")
    assert f"step {STEPS}/{STEPS}" in first and second == ""  # one of them speaks

    # What two processes saved, one process goes on from.
    shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))
    assert main([*flags, *MESHES[mesh], f"--workdir={tmp_path}"]) == 0
    assert_same_numbers(tmp_path, alone(mesh))


@pytest.mark.exhaustive
def test_all_choose_the_same_mesh(flags, tmp_path):
    few = ["--config.train.steps=1", "--config.train.eval_every=0", "--config.checkpoint.every=0"]
    with two_processes([*flags, "--config.mesh=auto", *few], tmp_path, devices=2) as both:
        first, second = ended(both, 400)
    assert [process.returncode for process in both] == [0, 0], first + second
    assert "mesh=auto: " in first and "mesh=auto" not in second


@pytest.mark.parametrize("number", [
    pytest.param(signal.SIGTERM, marks=pytest.mark.slow), pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)],
    ids=lambda number: number.name)
def test_a_signal_to_one_stops_both(flags, alone, tmp_path, number):
    """Two processes go on from what one process saved; one of them gets a signal; then one process finishes it."""
    workdir = tmp_path / "work"
    shutil.copytree(alone("product"), workdir)
    for step in (8, STEPS):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    with two_processes([*flags, *MESHES["product"]], workdir, seconds=0.5, devices=2) as both:
        end = time.monotonic() + 600
        while not 5 <= told(workdir)[-1]["step"] < STEPS and time.monotonic() < end and both[0].poll() is None:
            time.sleep(0.05)
        both[1].send_signal(number)
        outputs = ended(both)
    assert [process.returncode for process in both] == [exit_codes.SAVED, STATUS[number]], outputs
    step = CheckpointManager(workdir / "checkpoints").latest()
    assert 5 <= step < STEPS and told(workdir)[-1]["step"] == step
    assert "resumed from step 4" in outputs[0]
    assert all(f"saved at step {step}; run the same command again to resume" in output for output in outputs)
    assert not any("Traceback" in output for output in outputs)

    assert main([*flags, *MESHES["product"], f"--workdir={workdir}"]) == 0
    assert_same_numbers(workdir, alone("product"))


@pytest.mark.slow
def test_a_mistake_in_all_of_them(flags, tmp_path):
    with two_processes([*flags, "--config.mesh.tensor=3"], tmp_path, devices=2) as both:
        outputs = ended(both)
    line = "mesh: tensor=3 does not divide the 4 devices; choose sizes whose product divides 4\n"
    assert outputs == [line, line] and [process.returncode for process in both] == [2, 2]


@pytest.mark.parametrize("flags, environment, expected", [
    ((None, None, None), {}, None),
    (("127.0.0.1:1", 1, 0), {}, None),  # one process is a run on its own
    (("127.0.0.1:1", 3, 2), {}, ("127.0.0.1:1", 3, 2, None)),
    ((None, None, None), {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "127.0.0.1,b", "SLURM_STEP_NUM_TASKS": "2",
                          "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
     ("127.0.0.1:61447", 2, 1, None)),  # with all GPUs of the host, where JAX takes one
    ((None, None, None), {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "a", "SLURM_STEP_NUM_TASKS": "1"}, None),
])
def test_who_joins(monkeypatch, flags, environment, expected):
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **where: joined.append(where))
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **environment})
    distributed.initialize(*flags)
    names = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
    assert [tuple(where[name] for name in names) for where in joined] == [expected] * (expected is not None)
    assert all(where["cluster_detection_method"] == "deactivate" for where in joined)


@pytest.mark.parametrize("hosts, joins", [("10.0.0.1,10.0.0.2", True), ("local", False)])
def test_several_hosts_of_a_tpu_are_left_to_jax(monkeypatch, hosts, joins):
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **where: joined.append(where))
    slices = {"MEGASCALE_NUM_SLICES": "1"} if joins else {}
    monkeypatch.setattr(os, "environ", {"TPU_WORKER_HOSTNAMES": hosts} | slices)
    distributed.initialize()
    assert joined == []  # this is not a TPU
    tpu = jax._src.clusters.cloud_tpu_cluster
    for module in (jax._src.cloud_tpu_init, tpu):
        monkeypatch.setattr(module, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(tpu, "get_metadata", lambda _: (None, 404))
    distributed.initialize()
    assert [sorted(where) for where in joined] == [["heartbeat_timeout_seconds", "initialization_timeout"]] * joins
