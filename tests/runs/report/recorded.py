"""Folders of runs as these leave them, made in a moment."""

import json
import math
from pathlib import Path

from jaxtrain.config.load import make_config

BEGAN = 1_700_000_000.0


def recorded(workdir: Path, steps: int = 30, overrides: dict | None = None, events: tuple = (), shift: float = 0.0,
             starts: int = 1, bad: tuple[int, ...] = ()) -> Path:
    """A run of so many steps, evaluated every tenth, with a loss that is not finite at the bad ones."""
    workdir.mkdir(parents=True)
    config = make_config({}, {"train.steps": steps, **(overrides or {})}).to_dict()
    (workdir / "config.json").write_text(json.dumps(config))
    (workdir / "run.json").write_text(json.dumps({"mesh": {"data": 2, "tensor": 4},
                                                  "device_kind": "NVIDIA H100 80GB HBM3",
                                                  "proof": {"layouts": 20, "date": "2026-11-30T15:00:00+00:00"}}))
    with (workdir / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = 2 + 3 / step**0.5 + 0.1 * math.sin(step) + shift
            line = {"step": step, "loss": None if step in bad else loss, "grad_norm": 1 / step, "learning_rate": 1e-3,
                    "tokens": 64 * step, "step_time_s": None if step == 1 else 36.0, "data_wait_s": 0.001,
                    "tokens_per_s": None if step == 1 else 900.0 + step, "mfu": 0.4, "memory_peak_bytes": 2**34,
                    "goodput": 0.9}
            file.write(json.dumps(line) + "\n")
            if step % 10 == 0:
                file.write(json.dumps({"step": step, "eval_loss": loss, "eval_perplexity": math.exp(loss)}) + "\n")
    (workdir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (workdir / "ledger").mkdir()
    for number in range(starts):
        each = steps // starts
        seconds = {"init": 10.0, "compile": 20.0, "step": 60.0, "checkpoint": 5.0}
        (workdir / "ledger" / f"{number + 1:04}.json").write_text(json.dumps(
            {"began": BEGAN + 200 * number, "seconds": seconds, "resumed": each * number,
             "ended": "finished" if number == starts - 1 else "", "reached": [each * (number + 1) + 2, 60.0],
             "last_step": steps}))
    return workdir
