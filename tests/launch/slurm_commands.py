"""Commands that stand in for Slurm's: short scripts, found before others."""

import os
import shlex
from pathlib import Path

import pytest


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Write a script for each command, and have it found first."""
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\ncd {shlex.quote(f'{folder}')}\n{text}\n")
        (folder / name).chmod(0o755)
    if not os.environ["PATH"].startswith(f"{folder}:"):
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
