"""Jobs in Slurm: submitted with sbatch, seen with squeue and sacct, held and released with scontrol."""

import math
import re
import shutil
import subprocess
import time
from collections.abc import Sequence

from jaxtrain.errors import UserError
from jaxtrain.launch.job_engines import refuse_running
from jaxtrain.launch.job_record import IN_WORDS, Job, Status, quoted
from jaxtrain.launch.slurm_script import enroot, ranged, script

SCRIPT = "job.sh"
PREEMPTED = "PREEMPTED"  # by a cluster that cancels what it preempts; otherwise the job waits again
_FORGOTTEN = "Invalid job id"
_STATES = {"PENDING": "waiting", "CONFIGURING": "waiting", "REQUEUED": "waiting", "REQUEUE_HOLD": "paused",
           "RUNNING": "running", "COMPLETING": "running", "SIGNALING": "running", "RESIZING": "running",
           "STAGE_OUT": "running", "SUSPENDED": "paused", "STOPPED": "paused", "COMPLETED": "done",
           "CANCELLED": "cancelled", "FAILED": "failed", "TIMEOUT": "failed", "NODE_FAIL": "failed",
           "OUT_OF_MEMORY": "failed", "BOOT_FAIL": "failed", "DEADLINE": "failed", "LAUNCH_FAILED": "failed",
           "RECONFIG_FAIL": "failed", PREEMPTED: "failed", "REVOKED": "cancelled", "SPECIAL_EXIT": "paused",
           "RESV_DEL_HOLD": "paused", "POWER_UP_NODE": "waiting", "REQUEUE_FED": "waiting", "EXPEDITING": "waiting"}
_REASONS = {  # of waiting, in words for those who do not run the cluster
    "Priority": "jobs of a higher priority wait too, and come first",
    "Resources": "it is the next one, and waits until enough nodes are free",
    "Dependency": "it waits for another job to end",
    "BeginTime": "it was stopped and put back; Slurm starts such jobs after a pause, of two minutes by default",
    "JobHeldUser": "it is paused: jaxtrain jobs resume WORKDIR", "JobHeldAdmin": "an administrator has held it",
    "ReqNodeNotAvail": "nodes that it asks for are down, drained or reserved",
    "PartitionNodeLimit": "it asks for more nodes than its partition gives to a job",
    "PartitionTimeLimit": "its time limit is longer than its partition allows",
    "PartitionConfig": "it asks for more nodes, or for more of each, than its partition has",
    "PartitionDown": "its partition takes no jobs now", "PartitionInactive": "its partition starts no jobs now",
    "InvalidAccount": "its account does not exist", "InvalidQOS": "its QoS does not exist or is not allowed",
    "Licenses": "it waits for a licence", "Reservation": "its reservation has not begun",
    "job requeued in held state": "it is paused: jaxtrain jobs resume WORKDIR",
    "launch failed requeued held": "a node could not start it; to try again: jaxtrain jobs resume WORKDIR"}
_PARTS = (  # of limits: who has them, by the first letters, and what they limit
    ("Grp(?!.*Run).*Minutes|GrpWall", "its {} has used up all the time that it was given"),
    ("Grp", "running jobs of its {} use up what these may have together"),
    ("Min", "it asks for less than its {} demands"),
    ("PerJob", "it asks for more than its {} gives to one job"),
    ("PerAccount", "running jobs of its account use up what one account may have"),
    ("PerUser|MaxJobs", "running jobs of the same user use up what one may have"),
    ("", "it is beyond a limit of its {}"))


class SlurmEngine:
    """Slurm, by its own commands."""

    name = "slurm"

    def check(self, job: Job) -> None:
        """Refuse a job that it cannot run."""
        if not job.spec.preemptible:
            raise UserError("preemptible", "in Slurm partitions and QoS say who may be stopped",
                            "leave it out, and set queue or priority")
        if wrong := next((v for v, where in job.spec.secrets.items() if not where.startswith("file:")), None):
            raise UserError(f"secrets.{wrong}", "Slurm keeps no secrets", "give file:PATH, which all nodes can read")
        if wrong := next((letter for letter in "\\\n" if letter in f"{job.workdir}"), None):
            raise UserError("--workdir", f"Slurm writes no output into a folder with {wrong!r} in its name",
                            "give another")
        if wrong := next((one for one in job.spec.extra if re.search(r"^:$|hetjob|het-group|\*\d", one)), None):
            raise UserError("extra", f"{wrong!r} asks for machines of several kinds, on which a mesh would be uneven",
                            "ask for one kind")
        own = [f"{job.workdir}", job.directory] if job.spec.image else []
        if wrong := next((path for path in own if re.search("[:,]", path)), None):
            raise UserError("image", f"a container cannot mount {wrong!r}, which has a colon or a comma",
                            "use another folder")
        for path, what in job.spec.mounts.items():
            if not what.startswith("/") or re.search("[:,]" if enroot(job.spec) else ":", what + path):
                raise UserError(f"mounts.{path}", f"{what!r} is not a folder that nodes have", "give /PATH")

    def render(self, job: Job) -> dict[str, str]:
        """Return the files of a job."""
        return {SCRIPT: script(job)}

    def rehearse(self, job: Job) -> str:
        """Return when and where a job would start, as Slurm says, which may refuse it; "": there is no Slurm here."""
        if shutil.which("sbatch") is None:
            return ""
        try:
            return _sentence(_done("sbatch", "--test-only", given=script(job)).stderr)
        except UserError as error:
            if re.search("contact|connect|configuration source|no answer", error.reason, re.I):
                return f"not shown to Slurm: {error.reason}"
            raise

    def submit(self, job: Job) -> str:
        """Submit a job, whose files are there, and return its number."""
        held = ["--hold"] if job.pause_file.exists() else []
        return _run("sbatch", "--parsable", *held, f"{job.folder / SCRIPT}").partition(";")[0].strip()

    def find(self, job: Job) -> str:
        """Return the number of a job that was not recorded; "": it has none."""
        lines = _run("squeue", "--me", "--noheader", "--states=all", "--format=%i|%o").splitlines()
        return next((line.partition("|")[0] for line in lines
                     if line.partition("|")[2].strip() == f"{job.folder / SCRIPT}"), "")

    def status(self, job: Job) -> Status:
        """Return what became of a job."""
        found = ""
        try:
            found = _run("squeue", "--noheader", "--states=all", f"--jobs={job.id}", "--format=%T|%r|%N")
        except UserError as error:
            if _FORGOTTEN not in error.reason:  # Slurm does not answer, which says nothing about the job
                raise
        if not found.strip():
            return self._past(job)
        state, reason, nodes = found.strip().splitlines()[0].split("|")
        known = _STATES.get(state, "unknown")
        if state == "COMPLETING" and reason.startswith("job requeued"):  # the script ends, the run has
            known = "waiting"
        if known == "waiting" and "held" in reason.lower():
            known = "paused"
        if known == "cancelled" or reason == "None":  # Slurm still says why a cancelled one waited
            reason = state if known == "failed" else ""
        return Status(_unless_cancelled(known, job), reason, nodes)

    def _past(self, job: Job) -> Status:
        """Return what the accounting, or the log of ended jobs, knows of a job that squeue has forgotten."""
        for words in (("sacct",), ("sacct", "--completion")):
            found = _run(*words, "--noheader", "--parsable2", f"--jobs={job.id}", "--format=JobID,State", missing="")
            states = [line.split("|")[1].split()[0] for line in found.splitlines() if line.split("|")[0] == job.id]
            if states:
                known = _STATES.get(states[-1], "unknown")
                return Status(_unless_cancelled(known, job), "" if known in ("done", "cancelled") else states[-1])
        return Status("unknown", "Slurm does not know it any more")

    def why(self, job: Job) -> str:
        """Return why a job does not run, in a sentence."""
        status = self.status(job)
        if status.state not in ("waiting", "paused"):
            return status.sentence()
        if not status.detail:
            return "it is waiting, and Slurm does not say yet for what" if status.state == "waiting" else "it is paused"
        known = _REASONS.get(status.detail.partition(",")[0]) or _limit(status.detail) or "Slurm says only this"
        return f"{known} ({status.detail})" + (self._ahead(job) if status.detail == "Priority" else "")

    def _ahead(self, job: Job) -> str:
        """Return which jobs come before one that waits."""
        queue = [f"--partition={job.spec.queue}"] if job.spec.queue else []
        lines = _run("squeue", "--noheader", "--states=PENDING", "--sort=-p,i", *queue, "--format=%i %a %q",
                     missing="").splitlines()
        numbers = [line.split()[0] for line in lines]
        before = lines[:numbers.index(job.id)] if job.id in numbers else []  # by now it may have begun
        named = ", ".join("{} (account and QoS: {})".format(*line.split(" ", 1)) for line in before[:3])
        return f"; {len(before)} before it: {named}" if before else ""

    def node_hours(self, job: Job) -> float | None:
        """Return for how many hours a job has held how many nodes, in all its starts; None: nobody counts here."""
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(job.submitted - 60))  # numbers are used again
        found = _run("sacct", "--allocations", "--duplicates", "--noheader", "--noconvert", "--parsable2",
                     f"--jobs={job.id}", f"--starttime={since}", "--format=ElapsedRaw,NNodes", missing="").split()
        return sum(math.prod(map(int, line.split("|"))) for line in found) / 3600 if found else None

    def pause(self, job: Job) -> None:
        """Have a job save, stop and hold."""
        self._refuse(job, "done", "failed", "cancelled")
        job.pause_file.write_text("pause")
        if self.status(job).state == "running":
            _run("scancel", "--signal=TERM", job.id)
        else:
            _run("scontrol", "hold", job.id)

    def resume(self, job: Job, nodes: int | None) -> str:
        """Let a paused job go on, under the same number."""
        self._refuse(job, "done", "failed", "cancelled")
        if not job.pause_file.exists() and self.status(job).state == "running":
            refuse_running(job, "running", nodes)
        if nodes is not None:
            self._resize(job, nodes)
        _run("scontrol", "release", job.id)
        job.pause_file.unlink(missing_ok=True)
        return job.id

    def _refuse(self, job: Job, *states: str) -> None:
        """Refuse a job in one of these states."""
        if (state := self.status(job).state) in states:
            raise UserError("WORKDIR", f"its job {IN_WORDS[state]}",
                            "to resume from its last checkpoint, launch another job with this workdir")

    def _resize(self, job: Job, nodes: int) -> None:
        """Ask for another number of nodes; where Slurm refuses it, for as many as before."""
        def ask(count: int) -> list[str]:
            tasks = count * job.spec.processes
            return ["scontrol", "update", f"JobId={job.id}", f"NumNodes={count}-{count}",
                    f"NumTasks={count if ranged(job.spec) else tasks}",
                    f"NumCPUs={tasks * max(1, job.spec.cpus_per_process)}"]

        before = _run("squeue", "--noheader", f"--jobs={job.id}", "--format=%D").strip()
        try:
            _run(*ask(nodes))
        except UserError:
            if before.isdecimal():  # it has taken some of these already
                _run(*ask(int(before)), missing="")
            raise

    def cancel(self, job: Job, now: bool) -> None:
        """End a job: once it has saved, or at once."""
        if not now and self.status(job).state == "running":
            job.pause_file.write_text("cancel")
            _run("scancel", "--signal=TERM", job.id)
        else:
            _run("scancel", job.id)

    def requeue(self, job: Job) -> None:
        """Have a job save, stop and start again."""
        if (state := self.status(job).state) != "running":
            raise UserError("WORKDIR", f"its job {IN_WORDS[state]}",
                            "resume it" if state == "paused" else "see jaxtrain jobs show")
        job.pause_file.unlink(missing_ok=True)
        _run("scancel", "--signal=TERM", job.id)


def _limit(reason: str) -> str:
    """Return in words which limit of an account or a QoS a job waits for; "": it waits for none."""
    if not (found := re.match("Assoc|QOS|Max", reason)):
        return ""
    who = "QoS" if found[0] == "QOS" else "account"
    return next(words for pattern, words in _PARTS if re.search(pattern, reason)).format(who)


def _unless_cancelled(state: str, job: Job) -> str:
    """Return the state, of a job that has saved and ended since it was cancelled too."""
    cancelled = state == "done" and job.pause_file.exists() and job.pause_file.read_text() == "cancel"
    return "cancelled" if cancelled else state


def _run(*words: str, missing: str | None = None) -> str:
    """Return what a command of Slurm prints; `missing`: what to return where it fails."""
    done = _done(*words, may_fail=missing is not None)
    return missing if done.returncode and missing is not None else done.stdout


def _done(*words: str, given: str = "", may_fail: bool = False) -> subprocess.CompletedProcess:
    """Run a command of Slurm that reads a text."""
    if shutil.which(words[0]) is None:
        raise UserError("--on", f"there is no {words[0]} here", "run this on a login node of the cluster")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, input=given)
    except subprocess.TimeoutExpired:
        raise UserError(words[0], "it gave no answer within 60 s",
                        "see whether slurmctld works: scontrol ping") from None
    if done.returncode and not may_fail:
        raise UserError(words[0], _sentence(done.stderr), f"the whole command was: {quoted(words)}")
    return done


def _sentence(said: str) -> str:
    lines: Sequence[str] = [line.split("error: ")[-1] for line in said.splitlines() if line.strip()]
    return "; ".join(lines) or "it failed without a word"
