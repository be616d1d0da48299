"""Run a sweep: submit its trials as jobs, compare them, stop them, and take all of it up again after a kill.

The sweeper knows nothing that is not in the sweep's folder. Its trials are jobs that go on without it.
"""

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from jaxtrain.distributed import child_processes
from jaxtrain.errors import UserError, say
from jaxtrain.launch import job_record as jobs
from jaxtrain.launch import submission
from jaxtrain.launch.job_engines import engine_of
from jaxtrain.launch.local_job import ENDED
from jaxtrain.launch.slurm_engine import PREEMPTED
from jaxtrain.launch.sweep import device_slots, halving, optuna_points, sweep_budget
from jaxtrain.launch.sweep.metric_curve import MetricCurve
from jaxtrain.launch.sweep.search_space import Point
from jaxtrain.launch.sweep.sweep_file import CONFIG, OWN, Sweep, shown
from jaxtrain.launch.sweep.trials import Trial, points_of, read, workdir_of, write_results

_POLL_S = {"local": 0.5}
_POLL_OTHERS_S = 10.0
_SHOWN = 10  # points of a dry run
_FORGOTTEN_S = 600.0  # how long an engine may not know a job, until it counts as lost
_ENDS = {"done": "complete", "failed": "failed", "cancelled": "stopped"}


class Sweeper:
    """The trials of a sweep, and what becomes of them."""

    def __init__(self, sweep: Sweep, root: Path, on: str, began: float):
        self.sweep, self.root, self.on, self.began = sweep, root, on, began
        self.trials = read(sweep, root)
        self._gpus = child_processes.gpus(os.environ) if on == "local" else []
        self._own = sweep.points()
        self._submitted = False
        self._told: set[str] = set()  # what is said once
        self._reports: dict[tuple[int, int], float] = {}
        self._stopped: set[Path] = set()  # jobs that were told so
        self._forgotten: dict[int, float] = {}  # since when the engine does not know the job of a trial

    def check(self) -> None:
        """Refuse a sweep that the engine, the devices or Optuna cannot run."""
        if self.on == "local":
            device_slots.check(self._gpus, self.sweep.parallel, self.sweep.job.accelerators_per_node)
        optuna_points.check(self.sweep)
        with tempfile.TemporaryDirectory() as folder:  # in place of the sweep's, which is not written yet
            config = Path(folder, CONFIG)
            config.write_text(json.dumps(self.sweep.values))
            trial = self._trial(0, self.sweep.example())
            engine_of(self.on).check(self._described(trial, config))

    def warn(self) -> None:
        """Say so where there are too few trials for one of them to pass all rungs."""
        trial = self._trial(0, self.sweep.example())
        if "first" in self.sweep.stop and self.sweep.trials:
            rungs, factor = self._rungs(trial), self.sweep.stop.get("factor", 3)
            if factor ** len(rungs) > self.sweep.trials:
                say(f"none of {self.sweep.trials} trials will continue beyond step {rungs[-1]} of {trial.length}: one "
                    f"of {factor} passes each of the {len(rungs)} rungs, so that takes {factor ** len(rungs)} trials")

    def first_points(self) -> list[Point]:
        """Return the points that are tried first, some of those that do not depend on results."""
        if self.sweep.method in OWN:
            return self._own[:_SHOWN]
        drawn = optuna_points.draw(self.sweep, points_of(self.trials, self.sweep.runs), 0)
        return [drawn[0]] if drawn else []

    # -------------------------------------------------------------------------------------------------- the whole sweep
    def run(self) -> None:
        """Go on until no trial runs and none is to begin."""
        write_results(self.root, self.trials)
        while True:
            for trial in self.running():
                self._look(trial)
            self._begin()
            if not self.running():
                return
            time.sleep(_POLL_S.get(self.on, _POLL_OTHERS_S))

    def running(self) -> list[Trial]:
        """Return the trials that have not ended."""
        return [trial for trial in self.trials if not trial.ended]

    def _begin(self) -> None:
        """Submit what was not submitted, and begin new trials, as many as may run."""
        for trial in self.running():
            if self._job(trial) is None and not self._recovered(trial):
                self._submit(trial)
        while len(self.running()) < self.sweep.parallel:
            if why := sweep_budget.spent(self.sweep, self.trials, self.began):
                self._once(f"the budget is spent, and no trial begins any more: {why}")
                return
            trial = self._resumed() or self._new()
            if trial is None:
                return
            if trial.ended:
                trial.record()
                write_results(self.root, self.trials)
            else:
                self._submit(trial)

    # ----------------------------------------------------------------------------------------------------- which trials
    def _new(self) -> Trial | None:
        """Return the next trial; None: all points were tried, or the next one waits for those that run."""
        number, runs = len(self.trials), self.sweep.runs
        if number == self.sweep.trials > 0:
            self._once(f"all {number} trials of the budget have begun")
            return None
        keys, sampler = (self.trials[number - number % runs].keys, {}) if number % runs else (
            self._draw(number // runs) or (None, {}))
        if keys is None:
            return None
        trial = self._trial(number, keys)
        trial.sampler = sampler
        if refused := self.sweep.refused(keys):
            trial.ended = trial.result(self.sweep, "failed")
            say(f"trial {number} ({shown(keys)}) is refused: {refused}")
        self.trials.append(trial)
        return trial

    def _trial(self, number: int, keys: Point) -> Trial:
        """Return a trial of which nothing is known yet."""
        seed = self.sweep.seeds[number % self.sweep.runs] if self.sweep.seeds else None
        try:
            length = self.sweep.config_of(keys, seed).train.steps
        except UserError:
            length = 0
        return Trial(self.root, number, keys, seed, length,
                     MetricCurve(workdir_of(self.root, number), self.sweep.metric))

    def _draw(self, number: int) -> tuple[Point, dict] | None:
        if self.sweep.method in OWN:
            return (self._own[number], {}) if number < len(self._own) else None
        tried = points_of(self.trials, self.sweep.runs)
        if not self.sweep.stop:  # each point follows from the same others, whichever ends first
            known = number - max(1, -(-self.sweep.parallel // self.sweep.runs))
            if any(point.number <= known and not point.state for point in tried):
                return None
            tried = [point if point.number <= known else replace(point, state="", value=None) for point in tried]
        return optuna_points.draw(self.sweep, tried, number)

    def _resumed(self) -> Trial | None:
        """Return a trial that was stopped at a rung and may go on now."""
        if "first" not in self.sweep.stop:
            return None
        chosen = self._promotable()
        if chosen is None or not self.trials[chosen[0]].ended:
            return None
        trial = self.trials[chosen[0]]
        trial.passed, trial.ended, trial.job = chosen[1] + 1, None, int(jobs.newest(trial.workdir).folder.name) + 1
        say(f"trial {trial.number} continues: it is among the best at step {self._rungs(trial)[chosen[1]]} now")
        return trial

    # ------------------------------------------------------------------------------------------------- what they became
    def _look(self, trial: Trial) -> None:
        """End a trial whose job has ended, and stop one that is not among the best."""
        job = self._job(trial)
        if job is None:
            return
        status = self._status(trial, job)
        trial.curve.look()
        if status in _ENDS:
            trial.ended = trial.result(self.sweep, _ENDS[status])
            trial.record()
            write_results(self.root, self.trials)
            say(f"trial {trial.number} {trial.state}: {self.sweep.metric} {trial.ended['value']} after "
                f"{trial.ended['steps']} steps ({shown(trial.keys)})")
        elif status == "running" and self.sweep.stop and self._is_to_stop(trial, job):
            say(f"trial {trial.number}: stopped at step {trial.curve.steps}; it saves first")
            self._stopped.add(job.folder)
            try:
                engine_of(job.engine).cancel(job, now=False)
            except UserError as error:  # it has ended meanwhile
                say(error)

    def _status(self, trial: Trial, job: jobs.Job) -> str:
        """Return the state of a trial's job; submits it again where it was stopped by what is not its own fault."""
        try:
            status = engine_of(job.engine).status(job)
        except UserError as error:
            self._once(f"{error}")
            return "unknown"
        state = status.state
        if state == "unknown":
            since = self._forgotten.setdefault(trial.number, time.monotonic())
            gone = time.monotonic() - since > _FORGOTTEN_S
            return "unknown" if not gone else "done" if self._finished(trial) else "failed"
        self._forgotten.pop(trial.number, None)
        here, number = job.engine == "local", int(job.folder.name)
        killed = here and state == "failed" and not (job.folder / ENDED).exists() and number <= job.spec.retries
        preempted = state == "failed" and status.detail == PREEMPTED
        if killed or preempted or (here and state == "paused" and not job.pause_file.exists()):
            trial.job = number + 1
            trial.record()
            return "waiting"
        return state

    def _finished(self, trial: Trial) -> bool:
        trial.curve.look()
        return trial.curve.steps >= trial.length

    def _is_to_stop(self, trial: Trial, job: jobs.Job) -> bool:
        """Return whether to stop a trial that runs. A sweeper that was killed may have decided so and told nobody."""
        if job.folder in self._stopped:
            return False
        return job.pause_file.read_text() == "cancel" if job.pause_file.exists() else self._stops(trial)

    def _stops(self, trial: Trial) -> bool:
        """Return whether a trial that runs is to stop now."""
        if "first" not in self.sweep.stop:
            tried = points_of(self.trials, 1)
            before = dict(trial.sampler)
            stops = optuna_points.stopped(self.sweep, tried, tried[trial.number])
            if trial.sampler != before:
                trial.record()
            return stops
        rungs = self._rungs(trial)
        while trial.passed < len(rungs) and trial.curve.reached(rungs[trial.passed]):
            chosen = self._promotable()
            if chosen is None or self.trials[chosen[0]].ended or self._stopping(self.trials[chosen[0]]):
                return True  # its place goes to that one, or to a new trial
            other = self.trials[chosen[0]]  # it runs: going on costs no place
            other.passed = chosen[1] + 1
            other.record()
        return False

    def _rungs(self, trial: Trial) -> list[int]:
        return halving.rungs(self.sweep.stop["first"], self.sweep.stop.get("factor", 3), trial.length)

    def _promotable(self) -> tuple[int, int] | None:
        """Return the trial that a free place goes to, and the rung at which it stands."""
        reports: list[dict[int, float]] = []
        for trial in self.trials:
            for rung, step in enumerate(self._rungs(trial)):
                if (value := self._report(trial, step)) is not None:
                    reports += [{} for _ in range(rung + 1 - len(reports))]
                    reports[rung][trial.number] = value
        passed = {trial.number: len(reports) if trial.state in ("failed", "complete") else trial.passed
                  for trial in self.trials}
        return halving.promotable(reports, passed, self.sweep.stop.get("factor", 3))

    def _report(self, trial: Trial, step: int) -> float | None:
        """Return what a trial has at a rung, lower being better; None: it did not come so far."""
        if (trial.number, step) not in self._reports:
            value = trial.curve.at(step) if trial.curve.reached(step) else None
            if value is None:
                return None
            self._reports[trial.number, step] = value * self.sweep.sign if value == value else float("inf")
        return self._reports[trial.number, step]

    def _stopping(self, trial: Trial) -> bool:
        job = self._job(trial)
        return bool(job and job.pause_file.exists())

    # ------------------------------------------------------------------------------------------------------------- jobs
    def _job(self, trial: Trial) -> jobs.Job | None:
        """Return the job of a trial; None: it is to be submitted."""
        try:
            job = jobs.newest(trial.workdir)
        except UserError:
            return None
        return job if int(job.folder.name) >= trial.job else None

    def _recovered(self, trial: Trial) -> bool:
        """Return whether a sweeper that was killed has submitted a trial; if the engine does not answer, it may have.
        """
        try:
            return submission.recovered(trial.workdir) is not None
        except UserError as error:
            self._once(f"{error}")
            return True

    def _submit(self, trial: Trial) -> None:
        seed = "" if trial.seed is None else f", seed {trial.seed}"
        self._once(f"trial {trial.number}, job {trial.job}: {shown(trial.keys)}{seed}")
        trial.devices = ""
        if self._gpus:
            taken = [other.devices for other in self.running() if other is not trial]
            trial.devices = device_slots.assigned(self._gpus, taken, self.sweep.job.accelerators_per_node)
        trial.record()
        try:
            submission.submit(self._described(trial, self.root / CONFIG))
            self._submitted = True
        except UserError as error:
            if not self._submitted:
                raise
            self._once(f"trial {trial.number} cannot be submitted now, and will be tried again: {error}")

    def _described(self, trial: Trial, config: Path) -> jobs.Job:
        """Return the job of a trial."""
        words = [f"--config.{key}={value}" for key, value in self.sweep.overrides(trial.keys, trial.seed).items()]
        spec = self.sweep.job
        spec = replace(spec, name=submission.name_of(f"{spec.name or self.root.name}"[:30] + f"-{trial.number:04}"))
        if trial.devices:
            spec = replace(spec, env={**spec.env, device_slots.VARIABLE: trial.devices})
        return submission.describe(self.on, trial.workdir, f"{config}", self.sweep.config_of(trial.keys, trial.seed),
                                   words, [], spec)

    def _once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            say(text)
