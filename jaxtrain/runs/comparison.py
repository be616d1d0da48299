"""Tell all that is known of a run, and in what runs differ."""

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.checkpoint import verify
from jaxtrain.errors import UserError
from jaxtrain.observe.goodput import duration
from jaxtrain.pages.plain_text import age, in_bytes
from jaxtrain.runs import tags
from jaxtrain.runs.recorded_run import RecordedRun
from jaxtrain.runs.run_index import AtHand, Summary, at_hand, hourly, summary


def facts(workdir: str) -> dict[str, str]:
    """Return what is known of a run, by name."""
    with at_hand(workdir) as here:
        return _facts(*_read(workdir, here), here)


def _facts(run: RecordedRun, brief: Summary, here: AtHand) -> dict[str, str]:
    mesh = " ".join(f"{axis}={size}" for axis, size in run.run.get("mesh", {}).items() if size > 1)
    good = [step for step in run.checkpoints if verify.good(run.workdir / "checkpoints", step)]
    said = {
        "state": run.state(), "step": f"{run.step} of {run.last_step}", **_figures(run),
        "starts": f"{len(run.account.incarnations)}, of which {run.account.failures} failed" if run.account else "",
        "to go": duration(run.account.left) if run.account and run.account.left and run.state() != "finished" else "",
        "last sign": f"{age(time.time() - brief.time)} ago" if brief.time else "",
        "tags": ", ".join(tags.of(here.folder)),
        "checkpoints": ", ".join(f"{step}{'' if step in good else ' (not verified)'}" for step in run.checkpoints),
        "size": f"{in_bytes(here.size)}, of which checkpoints {in_bytes(here.of_checkpoints)}",
        "config hash": brief.config_hash, "commit": brief.commit,
        "data": ", ".join(filter(None, (run.run.get("data_manifests") or {}).values())),
        "device": f"{run.run.get('device_kind', '')} ({mesh or 'one device'})" if run.run else "",
        "packages": " ".join(f"{name}={version}" for name, version in (run.run.get("packages") or {}).items()),
        "python": run.run.get("python", ""), "platform": run.run.get("platform", ""),
        **{f"event {number}": _event(event) for number, event in enumerate(reversed(run.events[-5:]), 1)}}
    return {name: value for name, value in said.items() if value}


def table(workdirs: Sequence[str]) -> list[list[str]]:
    """Return rows of cells: figures of the runs, then the keys of their configs that differ, a column for each run."""
    with contextlib.ExitStack() as opened:
        return _table(workdirs, [_read(workdir, opened.enter_context(at_hand(workdir)))[0] for workdir in workdirs])


def _table(workdirs: Sequence[str], runs: Sequence[RecordedRun]) -> list[list[str]]:
    figures = [{"state": run.state(), "step": f"{run.step} of {run.last_step}", **_figures(run),
                "commit": run.run.get("git_commit") or ""} for run in runs]
    names = list(dict.fromkeys(name for one in figures for name in one))
    rows = [[name, *(one.get(name, "") for one in figures)] for name in names]
    configs = [_flat(run.config) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    different = [[key, *values] for key in keys if len(set(values := [
        json.dumps(config[key]) if key in config else "" for config in configs])) > 1]
    head = ["", *(f"{workdir}" for workdir in workdirs)]
    return [head, *(row for row in rows if any(row[1:])), *(different or [["the configs are the same",
                                                                         *[""] * len(runs)]])]


def _read(workdir: str, here: AtHand) -> tuple[RecordedRun, Summary]:
    """Return a run and its summary, which checked what is read of it."""
    brief = summary(here.folder)
    if brief.problem:
        raise UserError("WORKDIR", f"{workdir}: {brief.problem}", "give the workdir of a run")
    return RecordedRun(here.folder), brief


def _figures(run: RecordedRun) -> dict[str, str]:
    """Return losses, tokens, throughput, goodput and cost, each as words; "": not known."""
    account, rate = run.account, hourly(run)
    mfu = run.steps["mfu"][~np.isnan(run.steps["mfu"])]
    unit = next((unit for unit in ("tokens", "examples") if f"{unit}_per_s" in run.steps), "tokens")
    counted, speed = run.steps[unit], run.steps[f"{unit}_per_s"]
    speed = speed[~np.isnan(speed)]
    return {
        **_losses("loss", run.steps), **_losses("eval_loss", run.evaluations),
        unit: f"{int(counted[-1]):,}" if len(counted) and np.isfinite(counted[-1]) else "",
        f"{unit}/s": f"{np.median(speed):,.0f} (median)" if len(speed) else "",
        "mfu": f"{np.median(mfu):.1%} (median)" if len(mfu) else "",
        "goodput": f"{account.goodput:.1%}" if account else "",
        "time": duration(account.lived) if account else "",
        "cost": f"${rate * account.lived / 3600:,.2f} at ${rate:,.2f} an hour" if account and rate else ""}


def _losses(key: str, lines: Any) -> dict[str, str]:
    """Return the last value of a key and its lowest one, with their steps."""
    values, steps = lines[key], lines["step"]
    if not len(values) or np.isnan(values).all():
        return {}
    last, best = np.flatnonzero(~np.isnan(values))[-1], int(np.nanargmin(values))
    return {f"last {key}": f"{values[last]:.4f} at step {steps[last]:.0f}",
            f"best {key}": f"{values[best]:.4f} at step {steps[best]:.0f}"}


def _event(event: JsonObject) -> str:
    then = event.get("time")
    at = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(then)) if isinstance(then, int | float) and abs(
        then) < 1e11 else ""
    about = {key: value for key, value in event.items() if key not in ("time", "kind", "process", "host")}
    return f"{at}{event['kind']}{f' {json.dumps(about)[:200]}' if about else ''}"


def _flat(tree: JsonObject, above: str = "") -> JsonObject:
    """Return the values of nested objects by their dotted keys."""
    found = {}
    for key, value in tree.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, dict) and value else {f"{above}{key}": value}
    return found
