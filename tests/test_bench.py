"""The benchmark runs; what it measures is nobody's business here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_compare_and_losses():
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # one device, as users have
    command = [sys.executable, ROOT / "tools/bench.py", "--compare=plain", "--losses", "--shape=tiny", "--steps=2",
               "--unroll=0"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "commit" in done.stdout and "python tools/bench.py --compare=plain" in done.stdout
    times, losses = done.stdout.split("tiny, 2 steps")
    for table in (times, losses):
        rows = {line.split()[0]: line.split()[1] for line in table.splitlines() if line}
        assert float(rows["jaxtrain"]) > 0 and float(rows["plain"]) > 0
    assert "its step alone" in times


@pytest.mark.slow
def test_data():
    command = [sys.executable, ROOT / "tools/bench_data.py", "--megabytes=0.3", "--config=configs/gpt.py:tiny"]
    done = subprocess.run(command, capture_output=True, text=True,
                          timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    for words, times in (("prepare", 2), ("memory at most", 1), ("plain memmap", 2), ("full to", 3), ("waited", 1)):
        assert done.stdout.count(words) == times, words


def test_index():
    command = [sys.executable, ROOT / "tools/bench_index.py", "--documents=3000", "--per_shard=1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "3 shards" in done.stdout and "3,000 documents" in done.stdout and done.stdout.count("planned in") == 2
