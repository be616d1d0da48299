"""Describe a job from a config or a command, check it, and submit it to an engine."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.launch import job_record as jobs
from jaxtrain.launch.job_engines import engine_of
from jaxtrain.launch.job_spec import JobSpec
from jaxtrain.redaction import redacted


def describe(on: str, workdir: Path, config: str | None, loaded: Config | None, overrides: list[str], own: list[str],
             spec: JobSpec) -> jobs.Job:
    """Return the job that words describe, whose config was loaded; its folder does not exist yet."""
    about: dict[str, Any] = {}
    if bool(config) == bool(own):
        raise UserError("command line", "a job runs a config or a command, one of the two",
                        "write jaxtrain launch CONFIG ..., or -- and a command at the end")
    if loaded:
        from jaxtrain.launch import mesh_check  # imports JAX, for which --help does not wait

        if spec.min_nodes % spec.nodes and not loaded.resilience.elastic:
            raise UserError("min_nodes", "the config does not allow fewer nodes",
                            "set resilience.elastic=true, or leave it out")
        if counts := mesh_check.check_mesh(loaded, spec):
            about["node_counts"] = counts
        if loaded.observe.prometheus_host != "127.0.0.1":
            about["metrics_port"] = loaded.observe.prometheus_port
        about["config_hash"] = atomic_files.digest(loaded.to_dict())
        python = "python" if spec.setup or spec.image else sys.executable  # setup may activate an environment
        module = ["jaxtrain.main"] if on != "local" else [
            "jaxtrain", "supervise", f"--processes={spec.processes}", f"--max_restarts={spec.retries}", "--"]
        command = [python, "-m", *module, f"--config={config}", *overrides, f"--workdir={workdir.absolute()}"]
    elif overrides:
        raise UserError(overrides[0], "a command has no config", "write it behind --")
    else:
        command = own
    if wrong := next((word for word in command if redacted(word) != word), None):
        raise UserError(wrong, "it has a password, which would be in files of the job", "put it into the config "
                        "file, or name a file with it under secrets")
    commit, _ = jobs.provenance(Path.cwd())
    folder = workdir.absolute() / "jobs" / "0"
    name = spec.name or name_of(workdir.absolute().name)
    return jobs.Job(folder, on, name, command, str(Path.cwd()), spec, about | commit)


def submit(job: jobs.Job) -> jobs.Job:
    """Write the files of a job, submit it, and return it as it was recorded."""
    engine = engine_of(job.engine)
    if getattr(engine, "by_hand", ""):
        engine.submit(job)  # refuses it
    _refuse_second(job)
    job = replace(job, folder=jobs.new_folder(job.workdir))
    try:
        _, patch = jobs.provenance(Path(job.directory))
        if patch:
            atomic_files.write(job.folder / "checkout.patch", patch)
        for name, content in engine.render(job).items():
            atomic_files.write(job.folder / name, content)
        jobs.record(job)  # without a name: see recovered()
        job = replace(job, id=engine.submit(job))
    except BaseException:
        shutil.rmtree(job.folder, ignore_errors=True)
        raise
    jobs.record(job)
    return job


def recovered(workdir: Path) -> jobs.Job | None:
    """Return a job that the engine has although its submission was cut off, as by a kill; it is recorded now."""
    for job in jobs.cut_off(workdir):
        if name := engine_of(job.engine).find(job):
            jobs.record(job := replace(job, id=name))
            return job
    return None


def _refuse_second(job: jobs.Job) -> None:
    """Refuse a second job in a workdir whose first one may still write there."""
    recovered(job.workdir)
    try:
        before = jobs.newest(job.workdir)
    except UserError:
        return
    state = engine_of(before.engine).status(before).state
    if state in ("waiting", "running", "paused") and (state, before.engine) != ("paused", "local"):
        number = before.id.partition(":")[0]
        raise UserError("--workdir", f"{job.workdir} has a job that is {state} ({number} on {before.engine})",
                        f"see it: jaxtrain jobs show {job.workdir}")


def name_of(text: str) -> str:
    """Return the name of a job in the letters that all engines take."""
    kept = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in text.lower())
    return kept.strip("-")[:52].strip("-") or "jaxtrain"
