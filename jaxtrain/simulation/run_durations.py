"""The durations of the parts of a run: assumed, or measured in the ledger and the events of a real one."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import json_lines, user_json
from jaxtrain.observe.events import events
from jaxtrain.observe.goodput import Incarnation, incarnations

_EVERY = {"checkpoint": {"every": int}}


@dataclass(frozen=True)
class Durations:
    """Seconds that the parts of a run take; "launch" to "compile" come at each start, one after the other."""

    step: float = 10.0  # with all machines; with fewer, the same batch takes proportionally longer
    data_wait: float = 0.0  # of each step
    first_wait: float = 0.0  # besides, before the first step of a start: for its batch, and for other processes
    opening: float = 0.0  # before that, opening what the loop writes, which is booked as held up by saves
    launch: float = 20.0  # from the decision to start to the first line of training: imports
    init: float = 20.0
    restore: float = 15.0
    compile: float = 10.0
    save_blocked: float = 1.0  # a save holds up the loop
    save_written: float = 60.0  # and is on disk so much later
    save_drag: float = 0.0  # so much longer the steps beside it take, all together
    snapshot_blocked: float = 0.2  # a snapshot in memory holds up the loop
    snapshot_stored: float = 5.0  # and is with the peer so much later
    mirrored: float = 600.0  # a checkpoint that is on disk is in the mirror so much later
    finish: float = 0.0  # after the last step: until its checkpoint is read back
    others_end: float = 1.0  # those that live end so much after they notice a failure
    silence: float = 60.0  # a lost machine is noticed by its peers (JAXTRAIN_PEER_TIMEOUT)
    join: float = 300.0  # processes wait for a missing one at their start (JAXTRAIN_JOIN_TIMEOUT)
    swap: float = 60.0  # a spare machine takes the place of a lost one
    repair: float = 7200.0  # mean until a lost machine is back, or another one is found
    maintenance: float = 600.0  # the run stays down after it was told to stop
    fix: float = 3600.0  # a fault in code or data takes a person so long
    person: float = 1800.0  # until somebody starts a run again whose supervisor gave up
    ledger: float = 5.0  # between two writes of the ledger

    @property
    def start(self) -> float:
        """Seconds from the decision to start to the first step."""
        return self.launch + self.init + self.restore + self.compile


def measured(workdir: str | Path, flag: str = "--measured") -> Durations:
    """Return the durations of a real run under the supervisor: means of what its ledger and events say.

    Args:
        flag: what errors name.

    Raises:
        UserError: it has trained too little to tell.
    """
    starts, told = incarnations(workdir), events(workdir)
    trained = [one for one in starts if one.resumed is not None and one.reached[0] > one.resumed]
    if not trained:
        raise UserError(flag, f"{workdir} has no start in its ledger that completed a step",
                        "give the workdir of a run that has trained")
    steps = sum(one.reached[0] - (one.resumed or 0) for one in trained)
    every, begun = _every(workdir, flag), [one for one in starts if one.resumed is not None]
    under_way = [one for one in trained if one.ended != "finished"]
    opening, blocked = _line([_saves(one, every) for one in under_way],
                             [one.seconds["checkpoint"] for one in under_way])
    written = _mean(_numbers((event for event in told if event["kind"] == "checkpoint"), "written_s"))
    found = {"step": sum(one.reached[1] for one in trained) / steps,
             **_waits(trained, steps, workdir),
             "restore": _mean(one.seconds["restore"] for one in begun if one.resumed),
             "init": _mean(one.seconds["init"] for one in begun),
             "compile": _mean(one.seconds["compile"] for one in trained),
             "opening": opening, "save_blocked": blocked,
             "save_written": written, "snapshot_stored": written,  # whose end no event tells of
             "snapshot_blocked": 0.0,  # the ledger has it in the steps
             **_of_restarts(told, starts)}
    if trained[-1].ended == "finished":
        found["finish"] = max(0.0, trained[-1].seconds["checkpoint"] - (opening or 0.0) - (blocked or 0.0) * _saves(
            trained[-1], every))
    return dataclasses.replace(Durations(), **{name: value for name, value in found.items() if value is not None})


def _every(workdir: str | Path, flag: str) -> int:
    """Return how many steps a run makes between two checkpoints."""
    config = user_json(Path(workdir) / "config.json", _EVERY, flag, "give the workdir of a run")
    if config is None:
        raise UserError(flag, f"{workdir} has no config.json", "give the workdir of a run that has trained")
    return config["checkpoint"]["every"]


def each_measured(workdir: str | Path, flag: str = "--replay") -> list[Durations]:
    """Return the durations of each attempt of a real run: its own, and means of parts that it did not complete."""
    mean, starts, every = measured(workdir, flag), incarnations(workdir), _every(workdir, flag)
    attempts = [event["time"] for event in events(workdir) if event["kind"] == "attempt"]
    found = []
    for time, after in itertools.zip_longest(attempts, attempts[1:], fillvalue=math.inf):
        own = next((one for one in starts if time < one.began < after), None)
        found.append(_own(mean, own, time, every) if own else mean)
    return found


def _own(mean: Durations, one: Incarnation, attempt: float, every: int) -> Durations:
    """Return the durations of one start, where it completed the parts."""
    steps, seconds = one.reached[0] - (one.resumed or 0), one.seconds
    changes = {"launch": one.began - attempt}
    if one.resumed is not None:
        changes |= {"init": seconds["init"], "restore": seconds["restore"]}
    if seconds["data_wait"]:
        changes["compile"] = seconds["compile"]
        if one.ended != "finished":
            changes["opening"] = max(0.0, seconds["checkpoint"] - mean.save_blocked * _saves(one, every))
    if steps:
        changes |= {"step": one.reached[1] / steps,
                    "first_wait": max(0.0, seconds["data_wait"] - mean.data_wait * steps)}
    return dataclasses.replace(mean, **changes)


def _waits(trained: Sequence[Incarnation], steps: int, workdir: str | Path) -> dict[str, float | None]:
    """Return how long a step waits for its batch, as metrics.jsonl has it, and a start before its first step."""
    firsts = {(one.resumed or 0) + 1 for one in trained}
    lines = json_lines(Path(workdir) / "metrics.jsonl", {"step": int, "data_wait_s": int | float})
    each = _mean(line["data_wait_s"] for line in lines if line["step"] not in firsts) or 0.0
    whole = sum(one.seconds["data_wait"] for one in trained)
    return {"data_wait": min(each, whole / steps), "first_wait": max(0.0, whole - each * steps) / len(trained)}


def _of_restarts(told: Sequence[JsonObject], starts: Sequence[Incarnation]) -> dict[str, float | None]:
    """Return what the supervisor's events say: how long a launch takes, and the end of those that live."""
    attempts = [event["time"] for event in told if event["kind"] == "attempt"]
    launches = [one.began - max(begun) for one in starts if (begun := [time for time in attempts if time < one.began])]
    ended, noticed = 0.0, []
    for event in told:
        if event["kind"] == "restart":
            ended = event["time"]
        elif event["kind"] == "recovered":
            noticed.append(ended - (event["time"] - event["seconds"]))
    return {"launch": _mean(launches), "others_end": _mean(noticed)}


def _line(counts: Sequence[int], seconds: Sequence[float]) -> tuple[float | None, float | None]:
    """Return what each start took, and each save, where both are booked together: the line of least squares."""
    if len(set(counts)) < 2:
        return None, math.fsum(seconds) / sum(counts) if sum(counts) else None
    each, first = np.polyfit(counts, seconds, 1)
    if first < 0 or each < 0:
        return 0.0, math.fsum(seconds) / sum(counts)
    return float(first), float(each)


def _saves(one: Incarnation, every: int) -> int:
    return one.reached[0] // every - (one.resumed or 0) // every if every else 0


def _numbers(found: Iterable[JsonObject], name: str) -> list[float]:
    return [event[name] for event in found if isinstance(event.get(name), int | float)]


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None
