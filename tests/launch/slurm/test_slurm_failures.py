"""Real runs in a real Slurm of which one process of two fails."""

import json
import signal

import pytest

from jaxtrain.commands import jobs as jobs_command
from jaxtrain.commands import launch
from jaxtrain.launch import job_record as jobs
from tests.launch.slurm import cluster as clusters
from tests.launch.waiting import until
from tests.tiny import tiny_flags, virtual_devices

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(
    bool(clusters.missing()), reason="apt-get install --no-install-recommends slurm-wlm munge")]
# What a process of a run does once there are metrics, as the file `fail` in the workdir says, which it removes.
FAILING = """
import os, sys, threading, time
from pathlib import Path

def fail(workdir):
    while not (workdir / "metrics.jsonl").exists() or not (workdir / "metrics.jsonl").read_text():
        time.sleep(0.05)
    status = int((workdir / "fail").read_text())
    (workdir / "fail").unlink()
    os.kill(os.getpid(), -status) if status < 0 else os._exit(status)

if os.environ.get("SLURM_PROCID") == "1" and "--workdir=" in sys.orig_argv[-1]:
    workdir = Path(sys.orig_argv[-1].partition("=")[2])
    if (workdir / "fail").exists():
        threading.Thread(target=fail, args=(workdir,), daemon=True).start()
"""


@pytest.mark.parametrize("status, state, starts", [(1, "failed", 1), (2, "failed", 1), (-signal.SIGKILL, "done", 2)])
def test_a_process_of_a_real_run_fails(cluster, tmp_path, tmp_path_factory, capsys, status, state, starts):
    """Its peer notices, and ends with 75 or 76 of itself."""
    flags = tiny_flags(tmp_path_factory, [
        "model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.steps=400",
        "data.global_batch_size=4", "train.eval_every=0", "mesh.data=2", "checkpoint.every=5", "train.log_every=1"])
    (workdir := tmp_path / "work").mkdir()
    (workdir / "fail").write_text(f"{int(status)}")
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    job = (cluster.folder / "job.toml").read_text().replace("PYTHONPATH=", f"PYTHONPATH={tmp_path}:")
    (tmp_path / "job.toml").write_text(job + f'[env]\nXLA_FLAGS = "{virtual_devices(1)}"\n')
    assert launch.main([flags[0].partition("=")[2], *flags[1:], "--on=slurm", f"--workdir={workdir}", "--nodes=2",
                        f"--job={tmp_path}/job.toml", f"--retries={int(status < 0)}"]) == 0
    ended = until(workdir, lambda status: status.state not in ("waiting", "running"))
    assert ended.state == state, jobs.newest(workdir).output.read_text()
    assert json.loads((workdir / "jobs" / "1" / "starts.json").read_text())["starts"] == starts
    assert jobs_command.main(["show", f"{workdir}"]) == 0
    assert ("restarts   1; the last one because process 1 was killed by SIGKILL" in capsys.readouterr().out) == (
        starts == 2)
