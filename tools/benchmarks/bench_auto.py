"""Compare the mesh that mesh=auto takes here with every mesh that these devices allow.

    python tools/benchmarks/bench_auto.py

Every mesh is built and takes turns with the others, a few steps at a time, so that what disturbs one disturbs all. On a
CPU set XLA_FLAGS=--xla_force_host_platform_device_count=8 first.
"""

import argparse
import statistics
import sys
import time

import jax

import jaxtrain as jt
from jaxtrain.plan import search, targets
from jaxtrain.plan.estimate import change
from jaxtrain.plan.report.table import shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="configs/gpt.py:tiny")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the config")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5, help="of one turn")
    flags = parser.parse_args()
    jt.enable_compilation_cache()
    config = jt.load_config(flags.config, dict(word.split("=", 1) for word in flags.set))
    chosen = jt.build(change(config, {"mesh.auto": True})).config.mesh
    runs, failed = [], []
    for mesh in search.meshes(config, targets.here(), jax.device_count()):
        try:
            run = jt.build(change(config, mesh))
            batches = [run.batch(step) for step in range(flags.steps)]
            state, metrics = run.step(run.init(), batches[0])
            jax.block_until_ready(metrics)
        except jt.UserError as error:
            failed.append((mesh, error))
            continue
        runs.append([mesh, run, batches, state, []])
        print(shown(mesh), "compiled", file=sys.stderr, flush=True)
    for _ in range(flags.turns):
        for one in runs:
            _, run, batches, state, seconds = one
            began = time.perf_counter()
            for batch in batches:
                state, metrics = run.step(state, batch)
            jax.block_until_ready(metrics)
            seconds.append((time.perf_counter() - began) / flags.steps)
            one[3] = state
    ranked = sorted((statistics.median(one[4]), index) for index, one in enumerate(runs))
    best = ranked[0][0]
    print(f"{flags.config}, {jax.device_count()} devices, {len(runs)} meshes ran, {len(failed)} are refused")
    for seconds, index in ranked:
        mesh, run = runs[index][:2]
        mark = "  <- mesh=auto" if run.config.mesh == chosen else ""
        print(f"{1e3 * seconds:9.2f} ms  {seconds / best:5.2f}  {shown(mesh)}{mark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
