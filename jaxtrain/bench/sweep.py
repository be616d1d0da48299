"""Every combination of some keys' values, one process each, ranked: one that runs out of memory costs only itself."""

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxtrain.bench import records, tables
from jaxtrain.errors import UserError, say


def combinations(words: Iterable[str]) -> Iterator[dict[str, str]]:
    """["train.remat=none,full", "train.unroll=1,0"] -> four dicts, the last key changing first."""
    keys: dict[str, list[str]] = {}
    for word in words:
        key, equals, values = word.partition("=")
        if not equals or not values or "." not in key:
            raise UserError("--sweep", f"{word!r} gives no values", "write train.remat=none,full")
        keys[key] = values.split(",")
    for values in itertools.product(*keys.values()):
        yield dict(zip(keys, values, strict=True))


def sweep(argv: list[str], words: list[str], json_file: str | None, seconds: float) -> list[records.Record]:
    """Measure every combination by a process with the flags `argv`; returns their records, fastest first.

    `seconds`: after which one is ended.
    """
    found = []
    every = list(combinations(words))
    for number, keys in enumerate(every, 1):
        name = " ".join(f"{key}={value}" for key, value in keys.items())
        record = measured([*argv, *(f"--config.{key}={value}" for key, value in keys.items())], seconds)
        record["name"] = name
        if json_file:
            records.append(json_file, record)
        say(f"{number} of {len(every)}: {name}: {tables.outcome(record)}")
        found.append(record)
    return sorted(found, key=lambda record: -record.get("tokens_per_s", 0.0))


def measured(argv: list[str], seconds: float, environment: dict[str, str] | None = None) -> records.Record:
    """The record of `python -m jaxtrain.bench` with these flags, in a process of its own; what fails says why."""
    with tempfile.TemporaryDirectory(prefix="jaxtrain-sweep-") as folder:
        file = Path(folder) / "measured.jsonl"
        command = [sys.executable, "-m", "jaxtrain.bench", *argv, f"--json={file}"]
        process = subprocess.Popen(command, env={**os.environ, **(environment or {})}, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True)
        try:
            _, errors = process.communicate(timeout=seconds)
            why = last_line(errors) or f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            why = f"took longer than {seconds:g} s"
        if file.exists() and (lines := records.read(file)):
            return lines[-1]
        return {**records.about(records.command_line("-m jaxtrain.bench", argv)), "what": "run", "failed": why,
                "rows": 0, "seq_len": 0, "accumulation": 1}


def last_line(text: str) -> str:
    """What a program said last."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:300]


def ranked(found: list[records.Record]) -> str:
    """The sweep as a table, fastest first."""
    return tables.table("run", found)
