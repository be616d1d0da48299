"""Compile the step with XLA for GPUs and TPUs that are not here, and report whether the result got worse.

    export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_gpu_autotune_level=0
    python tools/benchmarks/bench_hlo.py                  # all cases, against what they reached
    python tools/benchmarks/bench_hlo.py 8b_h100x8 --update

Each case of `docs/measurements/hlo.json` is compiled for a described target (extras `aot-cuda`, `aot-tpu`), and its
step is simulated by rooflines (`jaxtrain/plan/timeline.py`). Exit status 1 if a step is more than 2 % slower than it
was, or uses 2 % more memory. `--update` records what is reached now, and by which compiler. No accelerator is needed.
"""

import argparse
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxtrain.config.load import load_config
from jaxtrain.plan.compiler import compile_step
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.instructions import program
from jaxtrain.plan.report.compiled_step import mfu
from jaxtrain.plan.targets import parse
from jaxtrain.plan.timeline import simulate

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "docs" / "measurements" / "hlo.json"
COMPILERS = {"cuda": "jax-cuda13-plugin", "tpu": "libtpu"}
WORSE = 1.02


def compilers(case: dict[str, Any]) -> str:
    """Return the packages that compile a case, with their versions; "" if one of them is not installed."""
    target, _ = parse(case["target"])
    try:
        return ", ".join(f"{name} {version(name)}" for name in ("jax", COMPILERS[target.platform]))
    except PackageNotFoundError:
        return ""


def measure(case: dict[str, Any]) -> dict[str, float]:
    """Compile and simulate a case; return its figures."""
    config = load_config(str(ROOT / "configs" / case["config"]), case["overrides"])
    target, devices = parse(case["target"])
    guess, real = estimate(config, target, devices), compile_step(config, target, devices)
    step = simulate(program(real.text), target, guess.mesh)
    kinds = step.by_kind()
    tokens = config.data.global_batch_size * config.data.seq_len / devices
    return {
        "step_ms": 1e3 * step.seconds, "mfu": mfu(step, guess), "peak_gb": real.bytes / 1e9,
        "exposed_ms": 1e3 * step.exposed, "dead_ms": 1e3 * step.dead, "tflop": step.flops / 1e12,
        **{f"{kind.replace(' ', '_')}_ms": 1e3 * kinds.get(kind, 0.0) for kind in ("matmul", "attention", "loss head",
                                                                                "optimizer", "elementwise")},
        "mb_per_token_layer": step.moved / tokens / config.model.num_layers / 1e6,
        "planned_ms": 1e3 * guess.seconds, "planned_gb": guess.bytes / 1e9}


def complaints(now: dict[str, float], reached: dict[str, float]) -> list[str]:
    """Return what is worse than it was by more than two percent."""
    return [f"{key} {now[key]:.1f}, was {reached[key]:.1f}" for key in ("step_ms", "peak_gb")
            if reached and now[key] > WORSE * reached[key]]


def main() -> int:
    """Measure the cases asked for, print a table, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases; default: all")
    parser.add_argument("--update", action="store_true", help="record what is reached now")
    flags = parser.parse_args()
    known, bad = json.loads(CASES.read_text()), []
    parts = ("matmul", "attention", "loss_head", "optimizer", "elementwise", "exposed", "dead")
    print(f"| case | step ms | MFU | peak GB | {' | '.join(parts)} | MB/token/layer |\n|" + "---|" * 12)
    for name in flags.cases or known:
        now = measure(known[name])
        bad += [f"{name}: {sentence}" for sentence in complaints(now, known[name].get("reached", {}))]
        cells = [name, f"{now['step_ms']:.1f}", f"{now['mfu']:.1%}", f"{now['peak_gb']:.1f}",
                 *(f"{now[f'{part}_ms']:.1f}" for part in parts), f"{now['mb_per_token_layer']:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        if flags.update:
            known[name]["reached"] = {key: round(value, 4) for key, value in now.items()}
            known[name]["compiled_by"] = compilers(known[name])
            CASES.write_text(json.dumps(known, indent=1) + "\n")
    print("\n".join(bad), file=sys.stderr)
    return bool(bad) and not flags.update


if __name__ == "__main__":
    sys.exit(main())
