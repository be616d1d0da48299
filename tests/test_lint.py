"""ruff and the type checker have nothing to say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUFF, PYREFLY = ["ruff", "check"], ["pyrefly", "check", "--python-interpreter-path", sys.executable]


@pytest.mark.parametrize("command", [RUFF, pytest.param(PYREFLY, marks=pytest.mark.slow)], ids=["ruff", "pyrefly"])
def test_clean(command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
