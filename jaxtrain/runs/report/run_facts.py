"""The text and tables of a report: each function returns facts, a table's head and rows, or texts."""

import json
import math
from collections.abc import Sequence
from statistics import median

import numpy as np

from jaxtrain.config import data_stages, load
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import json_lines
from jaxtrain.observe.goodput import CATEGORIES, duration, settled
from jaxtrain.plan.cost import spending
from jaxtrain.redaction import redacted
from jaxtrain.runs.recorded_run import RecordedRun
from jaxtrain.runs.report import sampled_conversations, seed_statistics
from jaxtrain.runs.report.goodput_figure import clock, said
from jaxtrain.runs.report.run_curves import Chart, RunCurves

Table = tuple[list[str], list[list[str]]]
_MOST_ROWS, _MOST_SAMPLES, _ALTERNATIVE_ROWS = 500, 8, 8
_DEVICES = 2**24  # more than there are


def summary(one: RunCurves) -> dict[str, str]:
    """Return the figures by which a run is known at first sight."""
    run = one.run
    facts = {"state": run.state(), "step": f"{run.step:,} of {number(run.last_step)}"}
    facts |= {key: number(run.steps.last[key]) for key in ("tokens", "examples", "loss") if key in run.steps.last}
    if (found := seed_statistics.best(one)) and found[0] != "loss":
        facts[f"best {found[0]}"] = f"{found[1]:.4f} at step {found[2]:,}"
    for title, key, form in (("tokens/s", "tokens_per_s", "{:,.0f}"),
                             ("examples/s", "examples_per_s", "{:,.0f}"),
                             ("step time", "step_time_s", "{:.4g} s"), ("MFU", "mfu", "{:.1%}")):
        if len(values := finite(run.steps[key])):
            facts[f"{title}, median"] = form.format(median(values.tolist()))
    if run.account:
        facts |= {"goodput": f"{run.account.goodput:.1%}", "ETTR": f"{run.account.ettr:.1%}",
                  "time": duration(run.account.life), "starts": f"{len(run.account.incarnations)}, "
                  f"{run.account.failures} failed"}
        if (left := run.account.left) and run.state() == "running":
            facts["time left, about"] = duration(left)
    if sizes := _mesh(run):
        shape = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        facts["devices"] = f"{math.prod(sizes.values())} {run.run.get('device_kind', '')}" + f" ({shape})" * bool(shape)
    if isinstance(proof := run.run.get("proof"), dict):
        date = f"{proof.get('date', '')}"[:10]
        facts["proof"] = f"{proof.get('layouts')} layouts as one device ({date})"
    return facts


def cost(run: RecordedRun) -> str:
    """Return what a run has cost; "" where no price of its devices is known."""
    devices = math.prod(_mesh(run).values())
    return spending.of_run(run.account, f"{run.run.get('device_kind', '')}", devices) if run.account else ""


def _mesh(run: RecordedRun) -> dict[str, int]:
    mesh = run.run.get("mesh")
    return {axis: size for axis, size in mesh.items()
            if isinstance(size, int) and 0 < size < _DEVICES} if isinstance(mesh, dict) else {}


def compared(runs: Sequence[RunCurves]) -> Table:
    """Return the runs, those with the lowest evaluation loss first, and after them those without evaluations.

    A training loss is never ranked among evaluation losses.
    """
    facts = {one: summary(one) for one in runs}
    metrics = [key for key in ("eval_loss", "loss") if any(seed_statistics.best(one, key) for one in runs)]

    def ranked(one: RunCurves) -> list[float]:
        return [best[1] if (best := seed_statistics.best(one, key)) else math.inf for key in metrics]

    shown = ("state", "step", "tokens", "examples", "tokens/s, median", "examples/s, median",
             "step time, median", "MFU, median", "goodput", "time", "starts")
    keys = [key for key in shown if any(key in fact for fact in facts.values())]
    head = ["", "run", *(title for key in metrics for title in (f"best {key}", "at step", f"newest {key}")), *keys]
    return head, [[f"{place}", one.name, *(cell for key in metrics for cell in _best_and_newest(one, key)),
                   *(facts[one].get(key, "") for key in keys)] for place, one in enumerate(sorted(runs, key=ranked), 1)]


def _best_and_newest(one: RunCurves, key: str) -> tuple[str, str, str]:
    """Return the best value of a metric, its step and the newest value, as text; empty for a run without it."""
    if (curve := one.curve(key)) is None:
        return "", "", ""
    best = seed_statistics.best(one, key)
    newest = number(float(curve.values[-1]))
    return (f"{best[1]:.4f}", f"{best[2]:,}", newest) if best else ("", "", newest)


def over_seeds(groups: Sequence[seed_statistics.Group]) -> Table:
    """Return the statistics of runs that differ in seeds alone; no rows, if there are none."""
    rows = []
    for group in groups:
        key = seed_statistics.metric(group.runs)
        at, newest = seed_statistics.together(group.runs) or (0, [])
        best = [found[1] if (found := seed_statistics.best(one, key)) else None for one in group.runs]
        for what, values in ((f"{key} at step {at:,}", newest), (f"best {key}", best)):
            if found := seed_statistics.statistics(values):
                n, mean, deviation, margin = found
                rows.append([", ".join(one.name for one in group.runs), what, f"{n}", f"{mean:.4f}", f"{deviation:.4f}",
                             f"{mean - margin:.4f} to {mean + margin:.4f}"])
    return ["runs", "value", "number of runs", "mean", "standard deviation", "95 % interval of the mean"], rows


def config_differences(runs: Sequence[RunCurves]) -> Table:
    """Return the keys in which runs differ; of one run, those in which it differs from the defaults."""
    if len(runs) > 1:
        found = seed_statistics.differences(runs)
        return ["key", *(one.name for one in runs)], [[key, *map(value_text, values)] for key, values in found.items()]
    config = runs[0].run.config
    try:
        defaults = load.make_config({"model": {"name": config.get("model", {}).get("name", "gpt2")}}).to_dict()
    except UserError:  # of another version
        defaults = {}
    known = seed_statistics.flat(defaults)
    rows = [[key, value_text(value), value_text(known.get(key))]
            for key, value in seed_statistics.flat(config).items() if value != known.get(key)]
    return ["key", "value", "default"], rows


def changes(run: RecordedRun) -> Table:
    """Return what changed in a run on purpose, as run.json has it."""
    entries = [entry for kind in ("config_changes", "data_changes") if isinstance(found := run.run.get(kind), list)
               for entry in found if isinstance(entry, dict)]
    return ["key", "from", "to", "at step"], [
        [f"{entry.get('key', '')}", value_text(entry.get("before")), value_text(entry.get("after")),
         value_text(entry.get("step"))] for entry in entries]


def mixture(run: RecordedRun) -> Table:
    """Return the sources of a run's data: their shares in each stage, and about how many tokens it has read of each."""
    try:
        config = load.make_config({"data": run.config.get("data", {})}).data
        sources, stages = data_stages.sources(config), data_stages.stages(config)
    except UserError:  # of another version
        return [], []
    ends = [stage.start for stage in stages[1:]] + [max(run.last_step, run.step)]
    rows = []
    for source in sources:
        read, shares = 0.0, []
        for stage, end in zip(stages, ends, strict=True):
            share = stage.weights[source.name] / sum(stage.weights.values())
            shares.append(f"{share:.1%}" + f" from step {stage.start:,}" * (len(stages) > 1))
            read += share * max(0, min(run.step, end) - stage.start) * stage.seq_len * stage.batch
        rows.append([source.name or "all", source.source, ", ".join(shares), f"{read:,.0f}"])
    return ["source", "text", "share of the samples", "tokens so far, about"], rows


def starts(run: RecordedRun) -> Table:
    """Return the starts of a run and how each spent its time."""
    found = run.account.incarnations if run.account else ()
    shown = [category for category in CATEGORIES if any(one.seconds[category] for one in found)
             or category == "lost_work"]
    rows = [[f"{place}", clock(one.began), one.ended or "killed, or still running",
             "" if one.resumed is None else f"{one.resumed:,}", f"{one.reached[0]:,}", duration(sum(seconds.values())),
             *(f"{seconds[key]:,.1f}" for key in shown)]
            for place, (one, seconds) in enumerate(zip(found, settled(found), strict=True), 1)]
    head = ["", "began (UTC)", "ended", "from step", "to step", "time", *(f"{key}, s" for key in shown)]
    return head, rows[-_MOST_ROWS:]


def happened(runs: Sequence[RunCurves]) -> Table:
    """Return the events of runs, the newest first."""
    found = [(event, one.name) for one in runs for event in one.run.events]
    found.sort(key=lambda pair: pair[0]["time"] if isinstance(pair[0].get("time"), int | float) else 0, reverse=True)
    named = ["run"] if len(runs) > 1 else []
    return ["time (UTC)", *named, "kind", "details", "process"], [
        [clock(event.get("time")), *([name] if named else []), event["kind"], said(event),
         f"{event.get('process', '')}"]
        for event, name in found[:_MOST_ROWS]]


def saves(run: RecordedRun) -> Table:
    """Return the checkpoints that a run has, with what its events say of each."""
    told = {event["step"]: event for event in run.events
            if event["kind"] == "checkpoint" and isinstance(event.get("step"), int)}
    head, keys = ["blocked training, s", "written in, s", "verified in, s"], ("blocked_s", "written_s", "verified_s")
    return ["step", "saved (UTC)", *head], [[f"{step:,}", clock(told.get(step, {}).get("time")),
                                             *(number(told[step].get(key)) if step in told else "" for key in keys)]
                                            for step in run.checkpoints]


def samples(run: RecordedRun) -> list[tuple[str, str]]:
    """Return the newest texts that the model of a run wrote: what each is, and the text."""
    found = [(f"at step {event.get('step')}", f"{event.get('text', '')}")
             for event in run.events if event["kind"] == "sample"][-_MOST_SAMPLES:]
    rounds = sampled_conversations.files(run.workdir)
    for line in [*json_lines(rounds[-1])][:_MOST_SAMPLES] if rounds else []:
        reward = f", reward {number(line['reward'])}" if isinstance(line.get("reward"), int | float) else ""
        prompt = line.get("prompt")
        asked = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        found.append((f"step {rounds[-1].stem}{reward}", f"{asked}\n→ {line.get('text', '')}"))
    return [(what, sampled_conversations.cleaned(text)) for what, text in found]


def key_numbers(chart: Chart, runs: Sequence[RunCurves]) -> Table:
    """Return a chart in numbers: of each curve the first, the last, the least and the greatest, and some between."""
    rows, steps = [], []
    curves = [(one, curve) for one in runs for key in chart.keys if (curve := one.curve(key))]
    ends = [curve.axes["step"][-1] for _, curve in curves]
    if ends:
        steps = sorted({int(step) for step in np.linspace(1, max(ends), _ALTERNATIVE_ROWS)})
    for one, curve in curves:
        values, at = curve.values, curve.axes["step"]
        places = np.minimum(np.searchsorted(at, steps), len(at) - 1)
        there = finite(values)
        ends = [there.min(), there.max()] if len(there) else [None, None]
        rows.append([f"{one.name} {curve.key}" if len(runs) > 1 else curve.key, *map(number, ends),
                     f"{len(values) - len(there):,}",
                     *(number(values[place]) if step <= at[-1] else ""
                       for step, place in zip(steps, places, strict=True))])
    return ["curve", "minimum", "maximum", "not finite", *(f"step {step:,}" for step in steps)], rows


def finite(values: np.ndarray) -> np.ndarray:
    """Return those of some values that are finite."""
    return values[np.isfinite(values)]


def number(value: object) -> str:
    """Return a number as text."""
    if isinstance(value, float | np.floating):
        return f"{value:.5g}" if math.isfinite(value) else "not finite"
    return "not finite" if value is None else f"{value:,}" if isinstance(value, int) else f"{value}"


def value_text(value: object) -> str:
    """Return a value of a config as text."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(redacted(value), ensure_ascii=False)
