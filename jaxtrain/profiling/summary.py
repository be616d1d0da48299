"""Summarise the traces of a run's profile: where the time of a step goes in each process, and the slowest kernels."""

import gzip
import re
import time
from pathlib import Path

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import LARGE, read_json, user_json
from jaxtrain.observe import events, profile_requests
from jaxtrain.plan.instructions import program
from jaxtrain.plan.targets import TARGETS, Target
from jaxtrain.profiling import trace
from jaxtrain.profiling.accounting import account
from jaxtrain.profiling.profile_tables import kernels, profiles
from jaxtrain.runs.recorded_run import RecordedRun

_FORM = {"id": str, "first": int, "steps": int, "wall_ms": float, "mesh": {str: int}, "processes": int, "platform": str,
         "device_kind": str}
_LATE = 60.0  # seconds that processes may take longer than the first to write their traces


def ask(workdir: str | Path, steps: int, processes: int, timeout: float, tick: float = 0.5) -> Path:
    """Ask the run in `workdir` for a profile, wait for it, and return its folder.

    Raises:
        UserError: no run is running there, or it does not answer.
    """
    run = RecordedRun(workdir)
    if (state := run.state()) != "running":
        raise UserError("WORKDIR", f"no run is running in {workdir}: the newest one is {state}",
                        "start it, or profile its config with jaxtrain bench --profile")
    wanted, end = profile_requests.request_profile(workdir, steps, processes), time.monotonic() + timeout
    try:
        while time.monotonic() < end:
            answered = profile_requests.pending(workdir) is None
            for path in Path(workdir).glob("profiles/*/profile.json"):
                if described(path.parent)["id"] == wanted:
                    return path.parent
            why = next((event["why"] for event in events.events(workdir) if event["kind"] == "profile_failed"
                        and event.get("request") == wanted and event.get("process") == 0), "")
            if why or answered:
                raise UserError("profile", f"the run could not write it ({why or 'its log says why'})",
                                "repair that, and ask again")
            run.look()
            if (state := run.state()) != "running":
                raise UserError("profile", f"the run in {workdir} is {state} before it was traced", "ask it earlier")
            time.sleep(tick)
    finally:
        profile_requests.withdraw(workdir, wanted)
    raise UserError("profile", f"the run in {workdir} has not answered for {timeout:g} seconds",
                    "look whether it makes steps, or give it a longer --timeout")


def described(folder: Path) -> JsonObject:
    """Return what a run wrote about a profile."""
    about = user_json(folder / "profile.json", _FORM, "WORKDIR", "take another profile")
    if about is None:
        raise UserError("WORKDIR", f"{folder} has no profile.json", "give a run's workdir or a folder in its profiles")
    return about


def summarise(folder: Path) -> str:
    """Write `summary.json` and `summary.txt` into the folder of a profile, and return the text."""
    about = described(folder)
    with gzip.open(folder / "step.hlo.txt.gz", "rt") as file:
        text = file.read(LARGE)
    code, name = program(text), re.match(r"HloModule ([\w.\-]+)", text)
    each, missing = [], []
    for process in range(about["processes"]):
        mine = folder / f"process-{process}"
        if (took := _traced(mine)) is None:
            missing.append(process)
            continue
        data = trace.newest(mine)
        found = trace.events(data, about["platform"], name[1] if name else "")
        waits = trace.waits(trace.gaps(found), trace.activities(data))
        gaps = {why: 1e-6 * waited / took["steps"] for why, waited in sorted(waits.items(), key=lambda one: -one[1])}
        profile = {"wall_ms": took["wall_ms"], "gaps_ms": gaps,
                   **account(found, code, took["steps"], about["mesh"], _target(about["device_kind"]))}
        each.append({"name": f"process {process} ({took['host']})", "profile": profile})
    if not each:
        raise UserError("profile", f"{folder} has no trace", "take another profile")
    first, last = about["first"], about["first"] + about["steps"] - 1
    lost = f"; no trace came from processes {', '.join(map(str, missing))}" if missing else ""
    shown = "\n".join([f"steps {first} to {last} on {about['device_kind']}{lost}\n", profiles(each),
                       kernels(each[0]["profile"])])
    atomic_files.write_json(folder / "summary.json", {
        **{key: about[key] for key in ("first", "steps", "device_kind", "mesh")}, "processes": each})
    atomic_files.write(folder / "summary.txt", shown)
    return shown


def _traced(folder: Path) -> JsonObject | None:
    """Return what a process wrote about its trace, once it is there; None if it does not come."""
    end = time.monotonic() + _LATE
    while not (folder / "traced.json").exists():
        if time.monotonic() > end:
            return None
        time.sleep(0.2)
    return read_json(folder / "traced.json", {"steps": int, "wall_ms": float, "host": str})


def _target(device_kind: str) -> Target | None:
    """Return the data sheet of a device; None for CPUs, which have none."""
    known = (target for target in TARGETS.values() if target.platform != "cpu")
    return next((target for target in known if re.fullmatch(target.device_kind, device_kind)), None)
