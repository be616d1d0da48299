"""The data that a scaling law is fitted to: size, tokens and last loss of finished runs, from their workdirs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.builder import build
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import AXES, Config
from jaxtrain.errors import UserError, say
from jaxtrain.files.bounded_files import json_lines
from jaxtrain.plan.estimate import change
from jaxtrain.plan.scaling_laws.parametric_loss import Point
from jaxtrain.train_step.report import matmul_parameters

RESULTS = "results.jsonl"  # in the folder of a sweep, a line for each trial
_NUMBER = int | float
_TRIAL = {"workdir": str, "state": str}


def points(sources: Sequence[str | Path], metric: str = "eval_loss") -> list[Point]:
    """Return a point for each finished run of these workdirs, and of the trials of these sweeps or results.jsonl.

    Args:
        metric: the key of metrics.jsonl whose last value counts; of a trial too, whatever its sweep compares.
    """
    sizes: dict[Any, float] = {}

    def size(folder: Path) -> float:
        config = load_config(folder / "config.json")
        key = repr(config.model), repr(config.lora), repr((config.train.freeze, config.train.trainable))
        if key not in sizes:
            sizes[key] = parameters(config)
        return sizes[key]

    found: list[Point] = []
    for source in map(Path, sources):
        source = results if (results := source / RESULTS).is_file() else source
        if source.is_file():
            workdirs = _trials(source)
        elif not (source / "config.json").is_file():
            raise UserError("RUNS", f"{source} is neither a run's workdir nor a sweep's folder",
                            f"give folders with a config.json or {RESULTS}")
        else:
            workdirs = [source]
        found += filter(None, (_of_workdir(folder, metric, size) for folder in workdirs))
    return found


def parameters(config: Config) -> float:
    """Return how many parameters each token is multiplied by: 6 times as many FLOPs train on one token.

    The output head counts, tied or not, and of experts those that a token goes to; lookups, biases and norms do not.
    """
    one = change(config, {"mesh.auto": False, **dict.fromkeys((f"mesh.{axis}" for axis in AXES), 1),
                          "optimizer.zero_stage": 0, "train.remat": "none", "train.precision": "float32"})
    run = build(one, devices=1, platform="cpu")
    return matmul_parameters(run.abstract, run.layout, config.model, run.objective.frozen_axes)


def _trials(path: Path) -> list[Path]:
    """Return the workdirs of the trials that ended."""
    lines = list(json_lines(path, _TRIAL))
    if not lines:
        raise UserError("RUNS", f"{path} has no line of a trial", "give the results.jsonl of a sweep")
    ended = [line for line in lines if line["state"] == "complete"]
    if len(ended) < len(lines):
        say(f"{path}: {len(lines) - len(ended)} of {len(lines)} trials did not finish, and are skipped")
    found = []
    for line in ended:
        folder = Path(line["workdir"])
        folder = folder if folder.is_dir() else path.parent / folder.name  # the sweep may have moved
        if not (folder / "config.json").is_file():
            raise UserError("RUNS", f"the trial in {folder}, which {path} names, has no config.json",
                            "bring its folder back")
        found.append(folder)
    return found


def _of_workdir(folder: Path, metric: str, size: Any) -> Point | None:
    """Return the point of a run; None, and a message, if it did not reach its last step."""
    lines = list(json_lines(folder / "metrics.jsonl", {"step": int}))
    last = max((line["step"] for line in lines), default=0)
    if last < (steps := load_config(folder / "config.json").train.steps) or not lines:
        say(f"{folder}: it is at step {last} of {steps}, and is skipped")
        return None
    values = [line[metric] for line in lines if isinstance(line.get(metric), _NUMBER) and line["step"] == last]
    tokens = max((line["tokens"] for line in lines if isinstance(line.get("tokens"), _NUMBER)), default=0)
    if not values or not tokens:
        raise UserError("--metric", f"{folder}/metrics.jsonl has no {metric if tokens else 'tokens'} at step {last}",
                        "name a key of its last line, such as loss")
    return Point(size(folder), tokens, _loss(values[-1], folder), f"{folder}")


def _loss(value: float, folder: Path) -> float:
    if not 0 < value < float("inf"):
        raise UserError("RUNS", f"{folder} ended with a loss of {value}, which has no logarithm", "leave it out")
    return value
