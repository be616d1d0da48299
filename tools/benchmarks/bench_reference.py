"""The reference as a copy and precomputed, side by side: seconds of a step, and memory of its program.

    python tools/benchmarks/bench_reference.py --corpus=CORPUS [--config=FILE] [--loss=dpo] [--steps=30] [KEY=VALUE]

Steps of both alternate, so that both see the same machine. CORPUS holds preferences, or with `--loss=kto` answers.
"""

import argparse
import statistics
import time
from pathlib import Path

import jax

import jaxtrain as jt
from jaxtrain.extensions import of_kind
from jaxtrain.run import compiled_step
from jaxtrain.tuning.reference_sums import PrecomputedReference


def main() -> None:
    """Measure, and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--config", default=f"{Path(__file__).parents[2]}/configs/gpt.py:cpu")
    parser.add_argument("--loss", default="dpo")
    parser.add_argument("--steps", type=int, default=30)
    args, keys = parser.parse_known_args()
    packing = "answers" if args.loss == "kto" else "pairs"
    keys = dict(key.split("=", 1) for key in keys) | {
        "data.source": args.corpus, "data.packing": packing, "preference.loss": args.loss, "train.steps": args.steps}
    runs = {kind: jt.build(jt.load_config(args.config, keys | {"preference.reference": kind}))
            for kind in ("copy", "precomputed")}
    states, seconds = {kind: run.init() for kind, run in runs.items()}, {kind: [] for kind in runs}
    began = time.perf_counter()
    runs["precomputed"].see(0, states["precomputed"])
    sums = of_kind(runs["precomputed"], PrecomputedReference).sums
    print(f"computed before the first step: {len(sums.known)} rows in "
          f"{time.perf_counter() - began:.1f} s, compilation included")
    for step in range(args.steps):
        for kind, run in runs.items():
            compiled_step(run)
            began = time.perf_counter()
            states[kind], metrics = run.step(states[kind], run.batch(step))
            jax.block_until_ready(metrics)
            seconds[kind].append(time.perf_counter() - began)
    for kind, run in runs.items():
        memory = compiled_step(run).memory_analysis()
        state, beside = (size / 1e6 for size in (memory.argument_size_in_bytes, memory.temp_size_in_bytes))
        print(f"{kind}: {statistics.median(seconds[kind]):.4f} s a step; {state:.1f} MB of state and batch, "
              f"{beside:.1f} MB beside them")


if __name__ == "__main__":
    main()
