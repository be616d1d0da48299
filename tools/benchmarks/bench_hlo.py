"""Compile the step with XLA for GPUs and TPUs that are not here, and report whether the result got worse.

    export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_gpu_autotune_level=0
    python tools/benchmarks/bench_hlo.py                  # all cases, against what they reached
    python tools/benchmarks/bench_hlo.py 8b_h100x8 --update
    python tools/benchmarks/bench_hlo.py --jobs=2 --minutes=30 --update
    python tools/benchmarks/bench_hlo.py --simulate --update

Each case of `docs/measurements/hlo.json` is compiled for a described target (extras `aot-cuda`, `aot-tpu`), and its
step is simulated (`jaxtrain/plan/timeline.py`). Exit status 1 if a step is more than 2 % slower than it was, or uses
2 % more memory. `--update` records what is reached now, and by which compiler; the program, reduced to what a
simulation reads, is kept in `docs/measurements/steps/`. `--simulate` compiles nothing and simulates these programs
again, and plans the cases again, as after a change of the rates; cases without a program are only planned. With
`--jobs` cases are compiled side by side, each by a process of its own, and `--minutes` begins no further ones after
this time. `--table` prints the record as docs/performance.md has it. No accelerator is needed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxtrain.builder import build
from jaxtrain.config.load import load_config
from jaxtrain.plan import recorded
from jaxtrain.plan.compiler import compile_step
from jaxtrain.plan.cost import useful_flops
from jaxtrain.plan.estimate import Estimate, estimate
from jaxtrain.plan.instructions import Program, program
from jaxtrain.plan.report.compiled_step import mfu
from jaxtrain.plan.targets import parse
from jaxtrain.plan.timeline import simulate

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "docs" / "measurements" / "hlo.json"
STEPS = ROOT / "docs" / "measurements" / "steps"
COMPILERS = {"cuda": "jax-cuda13-plugin", "tpu": "libtpu"}
WORSE = 1.02
DOCUMENTS = 4  # of a row, of which the second MFU is told
PARTS = ("matmul", "attention", "loss head", "optimizer", "elementwise")
ALONE = "JSON of "  # what a process for one case prints before it


def compilers(case: dict[str, Any]) -> str:
    """Return the packages that compile a case, with their versions; "" if one of them is not installed."""
    target, _ = parse(case["target"])
    try:
        return ", ".join(f"{name} {version(name)}" for name in ("jax", COMPILERS[target.platform]))
    except PackageNotFoundError:
        return ""


def planned(case: dict[str, Any]) -> Estimate:
    """Return the planner's estimate of a case."""
    return estimate(load_config(str(ROOT / "configs" / case["config"]), case["overrides"]), *parse(case["target"]))


def measure(name: str, case: dict[str, Any], keep: bool = False) -> dict[str, Any]:
    """Compile and simulate a case; return its figures. `keep`: record the program, too."""
    guess = planned(case)
    real = compile_step(guess.config, guess.target, guess.devices)
    made = program(real.text)
    if keep:
        recorded.write(STEPS / f"{name}.hlo.gz", recorded.reduced(made, guess.mesh))
    return figures(guess, made, real.bytes / 1e9)


def again(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Plan a case again, and simulate its recorded program, if it has one."""
    path = STEPS / f"{name}.hlo.gz"
    made = recorded.read(path) if path.exists() else None
    return figures(planned(case), made, case.get("reached", {}).get("peak_gb"))


def figures(guess: Estimate, made: Program | None, peak_gb: float | None) -> dict[str, Any]:
    """Return the figures of a case, of its plan and its compiled program; without one, of its plan alone."""
    assert guess.interval is not None, f"no run tells how far off a step on {guess.target.name} is"
    plan = {"planned_ms": 1e3 * guess.seconds, "planned_mfu": guess.mfu, "planned_gb": guess.bytes / 1e9,
            **({"peak_gb": peak_gb} if peak_gb else {}),
            "interval": [bound / guess.seconds for bound in guess.interval]}
    if made is None:
        return plan
    step = simulate(made, guess.target, guess.mesh)
    kinds, tokens = step.by_kind(), guess.config.data.global_batch_size * guess.config.data.seq_len / guess.devices
    found = {
        "step_ms": 1e3 * step.seconds, "mfu": mfu(step, guess),
        "exposed_ms": 1e3 * step.exposed, "dead_ms": 1e3 * step.dead, "tflop": step.flops / 1e12,
        **{f"{kind.replace(' ', '_')}_ms": 1e3 * kinds.get(kind, 0.0) for kind in PARTS},
        "mb_per_token_layer": step.moved / tokens / guess.config.model.num_layers / 1e6,
        **plan}
    if guess.config.model.text and any(one.instruction.own and one.instruction.attention for one in step.operations):
        run = build(guess.config, devices=guess.devices, platform=guess.target.described)
        share = useful_flops.of_row(run, DOCUMENTS) / useful_flops.of_row(run)
        shorter = simulate(made, guess.target, guess.mesh, DOCUMENTS)
        found["documents"] = {"number": DOCUMENTS, "step_ms": 1e3 * shorter.seconds, "mfu": mfu(shorter, guess),
                              "mfu_computed": share * mfu(shorter, guess)}
    return found


def complaints(now: dict[str, Any], reached: dict[str, Any]) -> list[str]:
    """Return what is worse than it was by more than two percent."""
    return [f"{key} {now[key]:.1f}, was {reached[key]:.1f}" for key in ("step_ms", "peak_gb")
            if key in reached and now.get(key, 0.0) > WORSE * reached[key]]


def apart(name: str, update: bool, deadline: float) -> dict[str, Any] | None:
    """Compile a case in a process of its own; None if the time is over, or it failed."""
    if time.monotonic() > deadline:
        return None
    command = [sys.executable, __file__, name, "--alone", *(["--update"] if update else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith(ALONE)), "")
    if not line:
        print(f"{name}: {done.stderr[-500:]}", file=sys.stderr)
        return None
    return json.loads(line.partition(": ")[2])


def row(name: str, now: dict[str, Any]) -> str:
    """Return the row of a case in the table."""
    least, most = now["interval"]
    if "step_ms" not in now:
        return f"| {name}: not simulated; planned {now['planned_ms']:.1f} ms |"
    cells = [name, f"{now['step_ms']:.1f}", f"{least * now['step_ms']:.1f} to {most * now['step_ms']:.1f}",
             f"{now['mfu']:.1%}", f"{now['planned_ms']:.1f}", f"{now['peak_gb']:.1f}",
             *(f"{now[part.replace(' ', '_') + '_ms']:.1f}" for part in (*PARTS, "exposed", "dead")),
             f"{now['mb_per_token_layer']:.2f}"]
    return f"| {' | '.join(cells)} |"


def documented(case: dict[str, Any]) -> str:
    """Return the row of a recorded case in docs/performance.md; middle, least and most are those of its interval."""
    reached = case["reached"]
    (least, most), middle = reached["interval"], reached.get("mfu", reached["planned_mfu"])
    simulated = f"{reached['step_ms']:,.0f}" if "step_ms" in reached else "not compiled"
    apart = reached.get("documents")
    within = f"{100 * middle:.1f} % ({100 * middle / most:.0f} to {100 * middle / least:.0f})"
    cells = [case["step"], simulated, f"{reached['planned_ms']:,.0f}", within if middle else "not counted",
             f"{100 * apart['mfu']:.1f} and {100 * apart['mfu_computed']:.1f} %" if apart and middle else "",
             f"{reached['peak_gb']:.1f}" if "peak_gb" in reached else f"{reached['planned_gb']:.1f} planned"]
    return f"| {' | '.join(cells)} |"


def headline(case: dict[str, Any]) -> str:
    """Return the row of a case with a goal, in per cent of MFU: reached if the whole interval is, open if a part is."""
    reached, goal = case["reached"], case["goal"]
    least, most = reached["interval"]
    middle, kind = (reached["mfu"], "simulated") if "mfu" in reached else (reached["planned_mfu"], "planned")
    low, high = 100 * middle / most, 100 * middle / least
    said = "" if not goal else "yes" if low >= goal else "no" if high < goal else "open"
    asked = f"{goal} %" if goal else ""
    return f"| {case['step']} | {asked} | {100 * middle:.1f} %, {kind} | {low:.0f} to {high:.0f} % | {said} |"


def rounded(now: dict[str, Any]) -> dict[str, Any]:
    """Return figures with four decimals."""
    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(one) for one in value]
        return rounded(value) if isinstance(value, dict) else round(value, 4) if isinstance(value, float) else value

    return {key: of(value) for key, value in now.items()}


def main() -> int:
    """Measure the cases asked for, print a table, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases; default: all")
    parser.add_argument("--update", action="store_true", help="record what is reached now")
    parser.add_argument("--simulate", action="store_true", help="simulate the recorded programs, and compile nothing")
    parser.add_argument("--jobs", type=int, default=1, help="cases that are compiled side by side; default: 1")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further case after so many")
    parser.add_argument("--table", action="store_true", help="print the record as the documentation has it")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    known, bad, missing = json.loads(CASES.read_text()), [], []
    names = flags.cases or list(known)
    if flags.table:
        print("\n".join([*(documented(known[name]) for name in names), "",
                         *(headline(known[name]) for name in names if "goal" in known[name])]))
        return 0
    if flags.alone:
        print(f"{ALONE}{names[0]}: {json.dumps(measure(names[0], known[names[0]], flags.update))}")
        return 0
    print("| case | step ms | 80 % interval | MFU | planned ms | peak GB | "
          f"{' | '.join((*PARTS, 'exposed', 'dead'))} | MB/token/layer |\n|" + "---|" * 14)
    deadline = time.monotonic() + 60 * flags.minutes
    with ThreadPoolExecutor(flags.jobs) as pool:
        found = ((again(name, known[name]) for name in names) if flags.simulate else
                 pool.map(lambda name: apart(name, flags.update, deadline), names))
        for name, now in zip(names, found, strict=True):
            if now is None:
                missing.append(name)
                continue
            bad += [f"{name}: {sentence}" for sentence in complaints(now, known[name].get("reached", {}))]
            print(row(name, now), flush=True)
            if flags.update:
                known[name]["reached"] = rounded(now)
                if not flags.simulate:
                    known[name]["compiled_by"] = compilers(known[name])
                CASES.write_text(json.dumps(known, indent=1) + "\n")
    ratios = [one["reached"]["planned_ms"] / one["reached"]["step_ms"] for one in known.values()
              if "step_ms" in one.get("reached", {})]
    print(f"\nplanned by simulated: median difference {statistics.median(abs(ratio - 1) for ratio in ratios):.1%} of "
          f"{len(ratios)} recorded cases, {min(ratios):.2f} to {max(ratios):.2f}")
    if missing:
        print(f"not compiled: {', '.join(missing)}", file=sys.stderr)
    print("\n".join(bad), file=sys.stderr)
    return bool(bad or missing) and not flags.update


if __name__ == "__main__":
    sys.exit(main())
