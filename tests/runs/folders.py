"""Folders of runs as training leaves them, made without training."""

import hashlib
import json
import time

from jaxtrain.checkpoint import verify

RUN = {"run": "ab12", "adopted": [], "config_hash": "0" * 16, "git_commit": "1" * 40, "packages": {"jax": "1"},
       "python": "3.11.7", "platform": "Linux", "mesh": {"data": 2}, "device_kind": "NVIDIA H100 80GB HBM3",
       "process_count": 1, "data_manifests": {"": "d" * 64}, "own_parts": {}}


def make(workdir, steps=4, ended="finished", checkpoints=(), config=None, run=None, began=None, loss=None):
    """The folder of a run of 4 steps, of which so many are done, with these good checkpoints."""
    workdir.mkdir(parents=True)
    sections = {"train": {"steps": 4, "seed": 0}, "checkpoint": {"keep_every": 0, "best": ""}, **(config or {})}
    (workdir / "config.json").write_text(json.dumps(sections))
    (workdir / "run.json").write_text(json.dumps(RUN | (run or {})))
    if steps:
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(
            {"step": step, "loss": loss or 5.0 - step, "tokens": 10 * step, "tokens_per_s": 100.0, "step_time_s": 1.0,
             "data_wait_s": 0.001}) + "\n" for step in range(1, steps + 1)) + '{"step": 4, "eval_loss": 1.5}\n')
    (workdir / "ledger").mkdir()
    began = time.time() - 3600 if began is None else began
    (workdir / "ledger" / "0001.json").write_text(json.dumps(
        {"began": began, "seconds": {"step": 1800.0, "init": 200.0}, "ended": ended, "resumed": 0,
         "reached": [steps, 1800.0], "last_step": 4}))
    for step in checkpoints:
        checkpoint(workdir, step)
    return workdir


def checkpoint(workdir, step, name=""):
    """A folder of a checkpoint; one whose name is its step is good."""
    folder = workdir / "checkpoints" / (name or f"{step}")
    (folder / "state").mkdir(parents=True)
    content = f"{step}".encode() * 5000
    (folder / "state" / "data").write_bytes(content)
    if not name:
        verify.write_mark(workdir / "checkpoints", step, {
            "files": {"state/data": [len(content), hashlib.sha256(content).hexdigest()]},
            "meta": {"step": step, "time": time.time(), "loss": 1.25, "config": {"train": {"steps": 4}},
                     "config_hash": "0" * 16, "git_commit": "1" * 40, "mesh": {"data": 2}}})
    return folder
