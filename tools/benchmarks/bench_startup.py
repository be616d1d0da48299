"""Measure how long jaxtrain takes to start, beside a plain script of the same model (bench/reference/plain_jax.py).

    python tools/benchmarks/bench_startup.py --first_step     from the start of the process to the end of the first step
    python tools/benchmarks/bench_startup.py --import_time    CPU seconds

What a step takes, `python -m jaxtrain.bench` measures.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxtrain.bench import records, tables  # noqa: E402

SHAPE = (4, 128, 4, 256, 8)  # of configs/gpt.py: layers, width, heads, context, sequences


def first_step(which: str, cache: str) -> float:
    """Seconds from the start of a process to the end of its first step."""
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
           "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as workdir, contextlib.ExitStack() as stack:
        start = time.perf_counter()
        if which == "plain":
            command = [sys.executable, ROOT / "jaxtrain/bench/reference/plain_jax.py", *map(str, SHAPE)]
            process = stack.enter_context(subprocess.Popen(command, env=env, stdout=subprocess.PIPE))
            line = process.stdout.readline()  # the loss
        else:
            command = [sys.executable, "-m", "jaxtrain.main", f"--config={ROOT}/configs/gpt.py", f"--workdir={workdir}"]
            process = stack.enter_context(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL))
            metrics, line = Path(workdir, "metrics.jsonl"), b""
            while process.poll() is None and not line:
                time.sleep(0.005)
                line = metrics.read_bytes() if metrics.exists() else b""
        seconds = time.perf_counter() - start
        process.kill()
        process.wait()
    if not line:
        raise SystemExit(f"{command} ended without a step")
    return seconds


def print_first_step(times: int = 5) -> None:
    names = ("jaxtrain", "plain")
    first_step("jaxtrain", tempfile.mkdtemp())  # tokenises the text, if this machine has not yet
    print(f"\nfirst step of configs/gpt.py, seconds from the start of the process, median of {times}")
    for kind in ("cold", "warm"):
        with contextlib.ExitStack() as stack:
            def fresh(stack=stack):
                return stack.enter_context(tempfile.TemporaryDirectory())

            kept = {name: fresh() for name in names}
            if kind == "warm":
                for name in names:
                    first_step(name, kept[name])
            seconds = {name: [] for name in names}
            for _ in range(times):
                for name in names:
                    seconds[name].append(first_step(name, kept[name] if kind == "warm" else fresh()))
        ours, theirs = (statistics.median(seconds[name]) for name in names)
        paired = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
        print(f"{kind} compilation cache: jaxtrain {ours:.2f}  plain {theirs:.2f}  ratio of medians "
              f"{ours / theirs:.2f}, of pairs {paired:.2f}; all "
              f"{[[round(s, 2) for s in seconds[name]] for name in names]}", flush=True)


def print_import_time(times: int = 5) -> None:
    run = ("import gc; gc.disable(); import jaxtrain.main, jaxtrain.compile_cache, jaxtrain.distributed.processes, "
           "jaxtrain.trainer.loop, ml_collections")
    codes = {
        "python alone": "", "import jax": "import jax", "import jaxtrain": "import jaxtrain",
        "all that a run imports before its first step": run}
    print(f"\nCPU seconds, median of {times}")
    for name, code in codes.items():
        seconds = []
        for _ in range(times + 1):  # the first one may have to write bytecode
            env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPATH": str(ROOT)}
            process = subprocess.Popen([sys.executable, "-c", code], env=env)
            _, status, used = os.wait4(process.pid, 0)
            if status:
                raise SystemExit(f"{code} failed")
            seconds.append(used.ru_utime + used.ru_stime)
        print(f"{name:46}{statistics.median(seconds[1:]):6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first_step", action="store_true")
    parser.add_argument("--import_time", action="store_true")
    asked = parser.parse_args()
    command = records.command_line("tools/benchmarks/bench_startup.py", sys.argv[1:])
    print(tables.sources([records.about(command)]), end="")
    if asked.first_step:
        print_first_step()
    if asked.import_time:
        print_import_time()
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
