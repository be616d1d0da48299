"""The compilers' steps for accelerators are no slower and no larger than recorded (tools/benchmarks/bench_hlo.py)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.config.load import load_config
from tests.tiers import slow_if

ROOT = Path(__file__).parents[2]
CASES = json.loads((ROOT / "docs/measurements/hlo.json").read_text())
CHEAP = "124m_2_layers_h200x1"  # compiled in ten CPU-seconds


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_hlo", ROOT / "tools/benchmarks/bench_hlo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_if(name == CHEAP)) for name in CASES])
def test_no_step_is_worse_than_recorded(name, bench):
    """Each is compiled by a process of its own: what a test process tells XLA would change it."""
    compilers, recorded = bench.compilers(CASES[name]), CASES[name]["compiled_by"]
    if not compilers:
        pytest.skip("no compiler for accelerators: it comes with the extras aot-cuda and aot-tpu")
    if compilers != recorded:
        pytest.skip(f"recorded with {recorded}, and this is {compilers}")
    command = [sys.executable, "tools/benchmarks/bench_hlo.py", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_gpu_autotune_level=0",
                                            "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_two_percent_more_of_time_or_memory_are_worse(bench):
    recorded = {"step_ms": 100.0, "peak_gb": 50.0, "matmul_ms": 60.0}
    assert bench.complaints({"step_ms": 101.9, "peak_gb": 50.9, "matmul_ms": 90.0}, recorded) == []
    assert bench.complaints({"step_ms": 102.1, "peak_gb": 51.1}, recorded) == [
        "step_ms 102.1, was 100.0", "peak_gb 51.1, was 50.0"]


@pytest.mark.parametrize("name", CASES)
def test_each_step_has_a_config_and_an_mfu(name):
    case = CASES[name]
    assert load_config(ROOT / "configs" / case["config"], case["overrides"]).train.steps > 0
    assert 0 < case["reached"]["mfu"] < 1


@pytest.mark.parametrize("name", [name for name in CASES if name != CHEAP])
def test_the_docs_say_what_is_recorded(name):
    """Each case is a row of the table in docs/performance.md: its milliseconds, MFU and gigabytes."""
    reached = CASES[name]["reached"]
    row = f"| {reached['step_ms']:,.0f}, {100 * reached['mfu']:.1f} % | {reached['peak_gb']:.1f} |"
    assert [line for line in (ROOT / "docs/performance.md").read_text().splitlines() if line.endswith(row)], row
