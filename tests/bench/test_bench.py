"""The benchmarks of tools/benchmarks run; what they measure is not checked here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "tools" / "benchmarks"


@pytest.mark.exhaustive
def test_startup():
    done = subprocess.run([sys.executable, BENCHMARKS / "bench_startup.py", "--import_time"], capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "python tools/benchmarks/bench_startup.py --import_time" in done.stdout and "import jaxtrain " in done.stdout


@pytest.mark.exhaustive
def test_data():
    command = [sys.executable, BENCHMARKS / "bench_data.py", "--megabytes=0.3", "--config=configs/gpt.py:tiny"]
    done = subprocess.run(command, capture_output=True, text=True,
                          timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    for words, times in (("prepare", 2), ("memory at most", 1), ("plain memmap", 2), ("full to", 3), ("waited", 1)):
        assert done.stdout.count(words) == times, words


@pytest.mark.slow
def test_index():
    command = [sys.executable, BENCHMARKS / "bench_index.py", "--documents=3000", "--per_shard=1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "3 shards" in done.stdout and "3,000 documents" in done.stdout and done.stdout.count("planned in") == 3
    assert done.stdout.count("documents traced through") == 6
