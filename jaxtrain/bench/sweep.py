"""Measure every combination of some keys' values, each in its own process, so that a failure costs only itself."""

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from jaxtrain.bench import records, tables
from jaxtrain.config.family import config_classes
from jaxtrain.config.sections import plug_in_sections
from jaxtrain.errors import UserError, nearest, say
from jaxtrain.redaction import redacted


def combinations(words: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield combinations: ["train.remat=none,full", "train.unroll=1,0"] -> four dicts, the last key changing first."""
    keys: dict[str, list[str]] = {}
    for word in words:
        key, equals, values = word.partition("=")
        if not equals or not values or "." not in key:
            raise UserError("--sweep", f"{word!r} gives no values", "write train.remat=none,full")
        _known(key)
        keys[key] = list(dict.fromkeys([*keys.get(key, ()), *values.split(",")]))
    for values in itertools.product(*keys.values()):
        yield dict(zip(keys, values, strict=True))


def _known(key: str) -> None:
    """Raise a UserError for a key that no config has, before anything is measured."""
    section, _, name = key.partition(".")
    sections = plug_in_sections.sections()
    if section not in sections:
        raise UserError("--sweep", f"there is no section {section!r}", nearest(section, sections))
    known = set(get_type_hints(sections[section]))
    if section == "model":  # in any model family
        known = {field.name for cls in config_classes().values() for field in fields(cls)}
    if name.partition(".")[0] not in known:
        raise UserError("--sweep", f"there is no key {key!r}", nearest(name, known))


def sweep(argv: list[str], words: list[str], json_file: str | None, seconds: float) -> list[records.Record]:
    """Measure every combination in a process with the flags `argv`; return their records, fastest first.

    `seconds`: the time limit of each process.
    """
    found = []
    every = list(combinations(words))
    for number, keys in enumerate(every, 1):
        name = " ".join(f"{key}={value}" for key, value in keys.items())
        try:
            record = measured([*argv, *(f"--config.{key}={value}" for key, value in keys.items())], seconds)
        except KeyboardInterrupt:
            say(f"stopped after {len(found)} of {len(every)}")
            break
        if json_file:
            records.append(json_file, record)
        say(f"{number} of {len(every)}: {name}: {tables.outcome(record)}")
        found.append({**record, "name": name})
    return sorted(found, key=lambda record: -record.get("tokens_per_s", 0.0))


def measured(argv: list[str], seconds: float, environment: dict[str, str] | None = None,
             about: records.Record | None = None) -> records.Record:
    """Return the record of `python -m jaxtrain.bench` with these flags, run in its own process; a failed one says why.

    `about`: facts about this machine for the record of a failure. This process itself uses no device.
    """
    with tempfile.TemporaryDirectory(prefix="jaxtrain-sweep-") as folder:
        file, errors = Path(folder) / "measured.jsonl", Path(folder) / "errors.txt"
        command = [sys.executable, "-m", "jaxtrain.bench", *argv, f"--json={file}"]
        with open(errors, "w") as log:  # a pipe would stay open as long as any process that this one started
            process = subprocess.Popen(command, env={**os.environ, **(environment or {})}, stdout=subprocess.DEVNULL,
                                       stderr=log)
        try:
            status = process.wait(seconds)
            why = records.reason(errors.read_text(errors="replace")) or f"ended with status {status}"
        except subprocess.TimeoutExpired:
            why = f"took longer than {seconds:g} s"
        finally:
            process.kill()
            process.wait()
        if file.exists() and (lines := records.read(file)):
            return lines[-1]
        if "Traceback" in (told := errors.read_text(errors="replace")):  # not a user error: show where
            print(told[-3000:], file=sys.stderr, flush=True)
        command = records.command_line("-m jaxtrain.bench", argv)
        compared = any(word.startswith("--compare") for word in argv)
        here = about or records.about_elsewhere(command)
        return {**here, "command": command, "what": "compare" if compared else "run", "failed": why,
                "name": " ".join(word.partition("config.")[2] for word in redacted(argv)
                                 if word.startswith("--config."))}


def ranked(found: list[records.Record]) -> str:
    """Return the sweep as a table, fastest first."""
    return tables.table("run", found)
