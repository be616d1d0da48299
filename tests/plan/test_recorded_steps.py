"""The compilers' steps for accelerators are no slower and no larger than recorded (tools/benchmarks/bench_hlo.py)."""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxtrain.config.load import load_config
from jaxtrain.config.schema import AXES
from jaxtrain.plan import instructions, recorded
from jaxtrain.plan.cost.interval import FACTORS
from jaxtrain.plan.targets import TARGETS, parse
from jaxtrain.plan.timeline import simulate
from jaxtrain.sharding.mesh import axis_sizes
from tests.plan.test_instructions import OWN
from tests.plan.test_timeline import BESIDE, EXCHANGE, STEP
from tests.tiers import slow_if

ROOT = Path(__file__).parents[2]
CASES = json.loads((ROOT / "docs/measurements/hlo.json").read_text())
STEPS = ROOT / "docs/measurements/steps"
SIMULATED = [name for name in CASES if (STEPS / f"{name}.hlo.gz").exists()]
CHEAP = "124m_2_layers_h200x1"  # compiled in ten CPU-seconds


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_hlo", ROOT / "tools/benchmarks/bench_hlo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_if(name == CHEAP)) for name in SIMULATED])
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


def test_a_goal_is_reached_where_the_whole_interval_is(bench):
    case = {"step": "8B", "goal": 50, "reached": {"interval": [0.8, 1.25], "planned_mfu": 0.7}}
    assert bench.headline(case) == "| 8B | 50 % | 70.0 %, planned | 56 to 88 % | yes |"
    case["reached"]["mfu"] = 0.5
    assert bench.headline(case) == "| 8B | 50 % | 50.0 %, simulated | 40 to 62 % | open |"
    case["reached"]["mfu"] = 0.39
    assert bench.headline(case).endswith("| 31 to 49 % | no |")


def test_two_percent_more_of_time_or_memory_are_worse(bench):
    recorded = {"step_ms": 100.0, "peak_gb": 50.0, "matmul_ms": 60.0}
    assert bench.complaints({"step_ms": 101.9, "peak_gb": 50.9, "matmul_ms": 90.0}, recorded) == []
    assert bench.complaints({"step_ms": 102.1, "peak_gb": 51.1}, recorded) == [
        "step_ms 102.1, was 100.0", "peak_gb 51.1, was 50.0"]


@pytest.mark.parametrize("name", CASES)
def test_each_step_has_a_config_an_mfu_and_an_interval(name):
    case = CASES[name]
    reached, config = case["reached"], load_config(ROOT / "configs" / case["config"], case["overrides"])
    assert 0 <= reached.get("mfu", reached["planned_mfu"]) < 1
    group = "experts" if config.model.experts.num else parse(case["target"])[0].platform
    assert reached["interval"] == pytest.approx(list(FACTORS[group]), abs=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_the_docs_say_what_is_recorded(name, bench):
    """Each case is a row of the table in docs/performance.md, and one of that of goals if it has one."""
    page = (ROOT / "docs/performance.md").read_text().splitlines()
    assert bench.documented(CASES[name]) in page
    assert "goal" not in CASES[name] or bench.headline(CASES[name]) in page


def test_planner_and_simulator_agree():
    """Within ten percent in the median over all recorded cases, and each within half of the other."""
    ratios = {name: CASES[name]["reached"]["planned_ms"] / CASES[name]["reached"]["step_ms"] for name in SIMULATED}
    assert len(ratios) >= 20
    assert statistics.median(abs(ratio - 1) for ratio in ratios.values()) <= 0.10
    assert all(0.5 < ratio < 2 for ratio in ratios.values()), ratios


def test_planned_memory_is_what_the_compiler_takes():
    """Within five percent in the median over all recorded cases, and each within a third."""
    ratios = {name: case["reached"]["planned_gb"] / case["reached"]["peak_gb"] for name, case in CASES.items()
              if "peak_gb" in case["reached"]}
    assert statistics.median(abs(ratio - 1) for ratio in ratios.values()) <= 0.05
    assert all(2 / 3 < ratio < 4 / 3 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("name", [
    name if (STEPS / f"{name}.hlo.gz").stat().st_size < 4500 else pytest.param(name, marks=pytest.mark.slow)
    for name in SIMULATED])
def test_the_record_is_what_today_s_rates_make_of_its_program(name):
    case = CASES[name]
    target, devices = parse(case["target"])
    config = load_config(ROOT / "configs" / case["config"], case["overrides"])
    mesh = dict(zip(AXES, axis_sizes(tuple(getattr(config.mesh, axis) for axis in AXES), devices), strict=True))
    program, reached = recorded.read(STEPS / f"{name}.hlo.gz"), case["reached"]
    step = simulate(program, target, mesh)
    assert 1e3 * step.seconds == pytest.approx(reached["step_ms"], abs=1e-3)
    assert 1e3 * step.exposed == pytest.approx(reached["exposed_ms"], abs=1e-3)
    if documents := reached.get("documents"):
        shorter = simulate(program, target, mesh, documents["number"])
        assert 1e3 * shorter.seconds == pytest.approx(documents["step_ms"], abs=1e-3)
        assert documents["mfu_computed"] < documents["mfu"] and shorter.seconds < step.seconds


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="other kernels of attention are planned")
@pytest.mark.parametrize("name", [name if name == CHEAP else pytest.param(name, marks=pytest.mark.exhaustive)
                                  for name in CASES])
def test_the_record_is_what_is_planned_today(name, bench):
    assert bench.planned(CASES[name]).seconds * 1e3 == pytest.approx(CASES[name]["reached"]["planned_ms"], rel=0.01)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "measured" in case])
def test_measured_steps_lie_within_both_predictions(name):
    lines = map(json.loads, (ROOT / "docs/measurements/h200.jsonl").read_text().splitlines())
    took = next(line["step_ms"]["median"] for line in lines
                if line["name"] == CASES[name]["measured"] and line.get("profile"))
    least, most = CASES[name]["reached"]["interval"]
    for predicted in ("planned_ms", "step_ms"):
        assert least * CASES[name]["reached"][predicted] <= took <= most * CASES[name]["reached"][predicted]
        assert took == pytest.approx(CASES[name]["reached"][predicted], rel=0.05)


@pytest.mark.parametrize(("text", "mesh"), [(STEP.replace("BESIDE", BESIDE), {"data": 1, "fsdp": 8}),
                                            (STEP.replace("BESIDE", ""), {"data": 1, "fsdp": 8}),
                                            (EXCHANGE, {"data": 1, "fsdp": 8}), (OWN, {"data": 1})])
def test_a_reduced_program_takes_the_time_of_the_whole_one(text, mesh, tmp_path):
    whole = instructions.program(text)
    recorded.write(tmp_path / "step.hlo.gz", recorded.reduced(whole, mesh))
    reduced = recorded.read(tmp_path / "step.hlo.gz")
    for target in ("h100", "v5p"):
        one, other = (simulate(program, TARGETS[target], mesh) for program in (whole, reduced))
        assert one.by_kind() == other.by_kind() and one.seconds == other.seconds > 0
        assert (one.dead, one.moved, one.flops, one.exposed) == (other.dead, other.moved, other.flops, other.exposed)


def test_cases_are_compiled_side_by_side_until_the_time_is_over(bench, monkeypatch, capsys):
    begun = []
    monkeypatch.setattr(bench, "apart", lambda name, update, deadline: begun.append((name, deadline)))
    monkeypatch.setattr(sys, "argv", ["bench_hlo.py", "--jobs=2", "--minutes=0", CHEAP, "1b_h200x1"])
    assert bench.main() == 1
    assert {name for name, _ in begun} == {CHEAP, "1b_h200x1"}
    assert f"not compiled: {CHEAP}, 1b_h200x1" in capsys.readouterr().err
    monkeypatch.undo()
    assert bench.apart(CHEAP, False, 0.0) is None, "the time is over"
