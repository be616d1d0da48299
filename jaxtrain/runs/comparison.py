"""Tell all that is known of a run, and in what runs differ."""

import contextlib
import dataclasses
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

_RECORDED = ("mesh", "device_kind", "process_count", "packages", "python", "platform", "data_manifests")  # by run.json


def described(workdir: str) -> JsonObject:
    """Return what is known of a run, as scripts read it."""
    with at_hand(workdir) as here:
        run, brief = _read(workdir, here)
        good = [step for step in run.checkpoints if verify.good(run.workdir / "checkpoints", step)]
        account = run.account
        return {**dataclasses.asdict(brief), "workdir": workdir, "state": run.state(), **numbers(run),
                "starts": len(account.incarnations) if account else 0, "failures": account.failures if account else 0,
                "seconds_left": account.left if account else None, "tags": [*tags.of(here.folder)],
                "checkpoints": [{"step": step, "verified": step in good} for step in run.checkpoints],
                **{key: run.run.get(key) for key in _RECORDED}, "events": [*run.events[-5:]]}


def compared(workdirs: Sequence[str]) -> list[JsonObject]:
    """Return the figures of each run, and the keys in which their configs differ, as scripts read them."""
    with contextlib.ExitStack() as opened:
        runs = [_read(workdir, opened.enter_context(at_hand(workdir)))[0] for workdir in workdirs]
        configs = [_flat(run.config) for run in runs]
        keys = [key for key in dict.fromkeys(key for config in configs for key in config)
                if len({json.dumps(config.get(key, ...), default=str) for config in configs}) > 1]
        return [{"workdir": workdir, "state": run.state(), "step": run.step, "last_step": run.last_step,
                 **numbers(run), "commit": run.run.get("git_commit"),
                 "config": {key: config[key] for key in keys if key in config}}
                for workdir, run, config in zip(workdirs, runs, configs, strict=True)]


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


def numbers(run: RecordedRun) -> JsonObject:
    """Return losses, tokens, throughput, goodput and cost of a run; None: not known."""
    account, rate = run.account, hourly(run)
    unit = _unit(run)
    counted = run.steps[unit]
    return {
        **_losses("loss", run.steps), **_losses("eval_loss", run.evaluations),
        unit: int(counted[-1]) if len(counted) and np.isfinite(counted[-1]) else None,
        f"{unit}_per_s": _median(run.steps[f"{unit}_per_s"]), "mfu": _median(run.steps["mfu"]),
        "goodput": account.goodput if account else None, "seconds": account.lived if account else None,
        "dollars": rate * account.lived / 3600 if account and rate else None, "dollars_per_hour": rate or None}


def _unit(run: RecordedRun) -> str:
    return next((unit for unit in ("tokens", "examples") if f"{unit}_per_s" in run.steps), "tokens")


def _median(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def _losses(key: str, lines: Any) -> JsonObject:
    """Return the last value of a key and its lowest one, with their steps."""
    values, steps = lines[key], lines["step"]
    if not len(values) or np.isnan(values).all():
        return {}
    last, best = np.flatnonzero(~np.isnan(values))[-1], int(np.nanargmin(values))
    return {f"last_{key}": float(values[last]), f"last_{key}_step": int(steps[last]),
            f"best_{key}": float(values[best]), f"best_{key}_step": int(steps[best])}


def _figures(run: RecordedRun) -> dict[str, str]:
    """Return these numbers as words; "": not known."""
    found, unit = numbers(run), _unit(run)

    def words(key: str, text: str) -> str:
        return "" if found[key] is None else text.format(found[key])

    return {
        **{f"{which} {key}": f"{found[f'{which}_{key}']:.4f} at step {found[f'{which}_{key}_step']}"
           for key in ("loss", "eval_loss") for which in ("last", "best") if f"{which}_{key}" in found},
        unit: words(unit, "{:,}"), f"{unit}/s": words(f"{unit}_per_s", "{:,.0f} (median)"),
        "mfu": words("mfu", "{:.1%} (median)"), "goodput": words("goodput", "{:.1%}"),
        "time": duration(found["seconds"]) if found["seconds"] is not None else "",
        "cost": f"${found['dollars']:,.2f} at ${found['dollars_per_hour']:,.2f} an hour" if found["dollars"] else ""}


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
