"""Islands as commands: one of two processes and one of a single process meet through a folder."""

import json
import os
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxtrain.builder import build
from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.config.load import load_config
from jaxtrain.diloco.outer_exchange import KEPT
from jaxtrain.distributed import exit_codes
from tests.diloco.memory_meeting import wait_until
from tests.tiny import ROOT, tiny_flags, virtual_devices
from tests.trainer.test_multiprocess import ended, two_processes

pytestmark = pytest.mark.usefixtures("cache")
STEPS = 8
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=2",
        "data.global_batch_size=8", f"train.steps={STEPS}", "checkpoint.every=4", "diloco.count=2", "diloco.every=4",
        "diloco.overlap=1"]
INT4, FACTORS = ["diloco.compression=int4"], ["diloco.compression=power_sgd", "diloco.rank=2"]


def params(flags, workdir, step=STEPS):
    words = dict(flag.removeprefix("--config.").split("=", 1) for flag in flags[1:])
    run = build(load_config(flags[0].partition("=")[2], words), devices=jax.devices()[:1])
    return jax.device_get(CheckpointManager(workdir / "checkpoints").restore(step, run.abstract)).params


@pytest.mark.exhaustive
@pytest.mark.parametrize("codec, port", [(INT4, False), (FACTORS, False), (INT4, True)],
                         ids=["int4", "power_sgd", "without their port"])
def test_an_island_of_two_processes_and_one_of_one(codec, port, tmp_path_factory, tmp_path):
    flags = [*tiny_flags(tmp_path_factory, [*TINY, *codec]), f"--config.diloco.meeting={tmp_path}/meeting"]
    if port:  # at which nobody listens
        certificates = pytest.importorskip("jaxtrain.diloco.network.certificates")
        certificates.make(tmp_path / "keys", range(2))
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        flags[-1:] = [f"--config.diloco.meeting=tcp://{address},{tmp_path}/meeting",
                      f"--config.diloco.keys={tmp_path}/keys"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": virtual_devices(1)}
    serve = subprocess.Popen([sys.executable, "-m", "jaxtrain", "diloco", "serve", f"--workdir={tmp_path}/log",
                              f"--store={tmp_path}/meeting", "--islands=2", "--store_every=0.1"], env=environment)
    one = subprocess.Popen([sys.executable, "-m", "jaxtrain.main", *flags, "--config.diloco.index=1",
                            f"--workdir={tmp_path}/one"], env=environment, text=True, stderr=subprocess.PIPE)
    try:
        with two_processes([*flags, "--config.mesh.fsdp=8"], tmp_path / "two") as both:
            said = ended([*both, one])
        assert [process.returncode for process in (*both, one)] == [0, 0, 0], "".join(said)
        assert "".join(said).count("continues at") == 2 * port, "each island says so once"
    finally:
        serve.kill()
        one.kill()
    jax.tree.map(np.testing.assert_array_equal, params(flags, tmp_path / "two"), params(flags, tmp_path / "one"))
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("island_sent_bytes", 0) for line in lines) > 0
    assert [line["island_entry"] for line in lines if "island_entry" in line] == [1, 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("codec", [INT4, FACTORS], ids=["int4", "power_sgd"])
def test_an_island_of_two_processes_that_is_stopped_while_it_sends(codec, tmp_path_factory, tmp_path):
    """With the coordinator killed before the offer; resumed, it has the bits of one that was not stopped."""
    certificates = pytest.importorskip("jaxtrain.diloco.network.certificates")
    certificates.make(tmp_path / "keys", range(1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [*tiny_flags(tmp_path_factory, [*TINY, *codec, "train.steps=24", "checkpoint.every=50", "diloco.count=1",
                                            "diloco.every=12", "diloco.overlap=10"]),
             f"--config.diloco.meeting=tcp://{address}", f"--config.diloco.keys={tmp_path}/keys"]

    def serve(log):
        return subprocess.Popen([sys.executable, "-m", "jaxtrain", "diloco", "serve", f"--workdir={tmp_path / log}",
                                 f"--address={address}", f"--keys={tmp_path}/keys", "--islands=1"],
                                env={**os.environ, "PYTHONPATH": str(ROOT)})

    def killed(coordinator):
        coordinator.kill()
        coordinator.wait()

    def steps():
        path = tmp_path / "stopped" / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def trained(workdir):
        with two_processes([*flags, "--config.mesh.fsdp=8"], tmp_path / workdir) as both:
            said = ended(both)
        assert [process.returncode for process in both] == [0, 0], "".join(said)
        return params(flags, tmp_path / workdir, 24)

    coordinator = serve("first log")
    try:
        calm = trained("calm")
        killed(coordinator)
        coordinator = serve("second log")
        with two_processes([*flags, "--config.mesh.fsdp=8"], tmp_path / "stopped", seconds=0.3) as both:
            wait_until(lambda: steps() >= 6, 300)
            killed(coordinator)
            wait_until(lambda: steps() >= 14, 300)
            both[0].send_signal(signal.SIGTERM)
            said = ended(both)
        assert [process.returncode for process in both] == [exit_codes.SAVED] * 2, "".join(said)
        assert (tmp_path / "stopped" / KEPT).exists()
        coordinator = serve("second log")
        jax.tree.map(np.testing.assert_array_equal, trained("stopped"), calm)
        assert not (tmp_path / "stopped" / KEPT).exists()
    finally:
        coordinator.kill()
