"""A job that begins on fewer nodes than it asks for, and then has all of them: the numbers of a run that always had."""

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.builder import build
from jaxtrain.commands import jobs as jobs_command
from jaxtrain.commands import launch
from jaxtrain.config.load import load_config
from jaxtrain.launch import job_record as jobs
from jaxtrain.launch.supervisor.progress_file import Steps
from jaxtrain.observe.events import events
from tests.launch.slurm import cluster as clusters
from tests.launch.waiting import until, wait_for
from tests.tiny import QUICKLY, tiny_flags

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache"), pytest.mark.skipif(
    bool(clusters.missing()), reason="apt-get install --no-install-recommends slurm-wlm munge")]
STEPS = 8
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_every=0",
        "data.global_batch_size=24", "train.eval_batches=1", f"train.steps={STEPS}",
        "train.log_every=1", "checkpoint.every=1000"]
# A run that waits before its fourth step, if it has one process, until it is told to stop.
HELD = """
import os, sys, threading
from jaxtrain.main import main
from jaxtrain.trainer.shutdown import Interrupt
from tests.each_batch import at_each_batch

def received(self, number, frame, before=Interrupt._received):
    told.set()
    before(self, number, frame)

def held(step, place):
    if step == 3 and os.environ["JAX_NUM_PROCESSES"] == "1":
        told.wait()
    return place()

told, Interrupt._received = threading.Event(), received
at_each_batch(held)
sys.exit(main())
"""
ELASTIC = ["--config.resilience.elastic=true", "--config.mesh.data=-1"]


def losses(workdir: Path) -> list[float]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line.get("loss") is not None]


def test_one_node_of_two_and_all_of_them_after_a_requeue(begun, cluster, tmp_path, tmp_path_factory):
    flags = tiny_flags(tmp_path_factory, TINY, lines=2000)
    (tmp_path / "train.py").write_text(HELD)
    quick = f'[env]\nXLA_FLAGS = "{QUICKLY}"\nJAXTRAIN_CACHE = "{os.environ["JAXTRAIN_CACHE"]}"\n'
    (tmp_path / "job.toml").write_text((cluster.folder / "job.toml").read_text() + quick)
    workdir, steps = tmp_path / "run", Steps(tmp_path / "run" / "metrics.jsonl")
    other = begun("--nodes=3", "--cpus_per_process=2", workdir=tmp_path / "other")
    assert launch.main(["--on=slurm", f"--workdir={workdir}", f"--job={tmp_path}/job.toml", "--nodes=2",
                        "--min_nodes=1", "--cpus_per_process=2", "--", sys.executable, f"{tmp_path}/train.py", *flags,
                        *ELASTIC, f"--workdir={workdir}"]) == 0

    def begun_with(processes: int, beyond: int) -> bool:
        steps.look()
        run = workdir / "run.json"
        return steps.newest > beyond and json.loads(run.read_text())["process_count"] == processes

    def told() -> str:
        return jobs.newest(workdir).output.read_text()

    wait_for(lambda: begun_with(1, 1), told)
    (other / "end").write_text("0")
    until(other, lambda status: status.state == "done")
    assert jobs_command.main(["requeue", f"{workdir}"]) == 0
    wait_for(lambda: begun_with(2, steps.newest), told)
    assert until(workdir, lambda status: status.state not in ("running", "waiting")).state == "done", told()
    (event,) = (event for event in events(workdir) if event["kind"] == "elastic")
    assert (event["processes"], event["mesh"], event["accumulation"]) == (1, "data=1", 2)
    keys = dict(flag.removeprefix("--config.").split("=", 1) for flag in flags[1:])
    calm = build(load_config(flags[0].removeprefix("--config="), keys), devices=jax.devices()[:1])
    state, theirs = calm.init(), []
    for step in range(STEPS):
        state, metrics = calm.step(state, calm.batch(step))
        theirs.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses(workdir), theirs, rtol=1e-6)
