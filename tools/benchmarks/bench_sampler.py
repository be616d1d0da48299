"""Measure rollouts of unequal lengths: this checkout's sampler beside another one's, in turn.

    git worktree add --detach ../before COMMIT
    python tools/benchmarks/bench_sampler.py --against=../before
    python tools/benchmarks/bench_sampler.py --against=../before --config=configs/gpt.py:124m --layers=4

Answers to groups of equal prompts, as reinforcement learning asks for: with random weights and a share of the tokens
that ends an answer, lengths are geometric, with a mean of a quarter of the limit. Each contender is a process of its
own, which answers once to compile and then waits for its turns; printed are medians of seconds, of the CPU's time, and
of the ratios of each turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]


def worker(flags) -> None:
    """Answer whenever a line comes, and print what it took."""
    import jax
    import numpy as np

    import jaxtrain as jt

    config = jt.load_config(flags.config, {
        "model.num_layers": flags.layers, "model.max_seq_len": flags.prompt + flags.limit, "mesh.fsdp": 1,
        "data.seq_len": flags.prompt + flags.limit, "data.global_batch_size": jax.device_count(),
        "mesh.data": jax.device_count(), "train.precision": flags.precision, "train.accumulation": 1})
    run = jt.build(config)
    state, vocab = replace(run.abstract, params=run.init().params), config.model.vocab_size
    rng = np.random.default_rng(0)
    prompts = [prompt for prompt in rng.integers(1, vocab, (flags.answers // flags.group, flags.prompt)).tolist()
               for _ in range(flags.group)]
    stop = list(range(0, vocab, max(1, flags.limit // 4)))
    for line in sys.stdin:
        began, worked = time.perf_counter(), time.process_time()
        found = jt.generate(run, state, prompts, max_new_tokens=flags.limit, stop=stop, seed=int(line), logprobs=True,
                            batch_size=flags.rows or len(prompts))
        print(json.dumps({
            "s": time.perf_counter() - began, "cpu": time.process_time() - worked,
            "tokens": sum(len(one.tokens) + (one.end is not None) for one in found),
            "longest": max(len(one.tokens) for one in found), "digest": hash(tuple(one.tokens for one in found))}),
            flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="", help="another checkout of this repository")
    parser.add_argument("--config", default="configs/gpt.py")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rows", type=int, default=0, help="answers generated at once; 0: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        worker(flags)
        return
    names = {"before": Path(flags.against).resolve(), "now": HERE} if flags.against else {"now": HERE}
    workers = {name: subprocess.Popen(
        [sys.executable, f"{Path(__file__).resolve()}", *sys.argv[1:], "--worker"], stdin=subprocess.PIPE, text=True,
        stdout=subprocess.PIPE, cwd=folder, env=os.environ | {"PYTHONPATH": f"{folder}", "PYTHONHASHSEED": "0"})
        for name, folder in names.items()}

    def answer(name: str, seed: int) -> dict:
        workers[name].stdin.write(f"{seed}\n")
        workers[name].stdin.flush()
        return json.loads(workers[name].stdout.readline())

    for seed in range(flags.repeats):  # compiles: shapes depend on the lengths
        for name in names:
            answer(name, seed)
    rounds = [{name: answer(name, seed) for name in names} for seed in range(flags.repeats)]
    print(f"{flags.config}, {flags.layers} layers, {flags.precision}: {flags.answers} answers in groups of "
          f"{flags.group}, prompts of {flags.prompt} tokens, at most {flags.limit} new ones\n\n"
          "| | tokens | longest | s | CPU s | tokens/s |\n|---|---|---|---|---|---|")
    for name in names:
        each = [one[name] for one in rounds]
        took, worked = (statistics.median(one[key] for one in each) for key in ("s", "cpu"))
        tokens, longest = (statistics.median(one[key] for one in each) for key in ("tokens", "longest"))
        speed = statistics.median(one["tokens"] / one["s"] for one in each)
        print(f"| {name} | {tokens} | {longest} | {took:.2f} | {worked:.2f} | {speed:,.0f} |")
    if flags.against:
        for key in ("s", "cpu"):
            ratios = [one["before"][key] / one["now"][key] for one in rounds]
            print(f"ratio of {key}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print("same tokens:", all(one["before"]["digest"] == one["now"]["digest"] for one in rounds))
    for process in workers.values():
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
