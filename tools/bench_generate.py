"""How fast text is generated, beside the rate at which this machine can read the weights and the cache.

    python tools/bench_generate.py --rows=1 --rows=16
    python tools/bench_generate.py --refill --config=configs/gpt.py --layers=4

A step of generation reads all weights and the cache once. The limit is that number of bytes over the bandwidth of a sum
over an array as large as the weights, measured in the same run. The path without a cache computes the whole text
again for every token; it is measured for one token at the end of the text.

With --refill: how fast four times as many prompts are continued by answers of geometric lengths (at random one token
of 32 ends one), with and without prompts that take the places of finished rows.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import jaxtrain as jt
from jaxtrain.hub.decoding import Decoding

NEW, PROMPT, REPEATS = 64, 64, 5


def seconds(call) -> float:
    """The median time of a call, after one that compiles."""
    call()
    took = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def refilled(run, state, rows: int) -> None:
    """Print tokens a second and steps of the same texts, with and without refilled rows, one after the other."""
    go_on, steps = Decoding.go_on, [0]

    def counted(self, params, held, *args):
        before = int(held["step"])
        after = go_on(self, params, held, *(args if refills else args[:-1]))  # the last: how many free rows are enough
        steps[0] += int(after["step"]) - before
        return after

    Decoding.go_on = counted
    vocab = run.config.model.vocab_size
    prompts = np.random.default_rng(0).integers(1, vocab, (4 * rows, PROMPT)).tolist()
    took, many = {True: [], False: []}, {}
    for _ in range(1 + REPEATS):  # the first compiles
        for refills in took:
            steps[0], start = 0, time.perf_counter()
            found = jt.generate(run, state, prompts, max_new_tokens=NEW, stop=list(range(0, vocab, 32)),
                                batch_size=rows)
            took[refills].append(time.perf_counter() - start)
            many[refills] = steps[0], sum(len(one.tokens) + (one.end is not None) for one in found)
    print("| rows | refilled | steps | tokens | tokens/s |\n|---|---|---|---|---|")
    for refills, seconds_ in took.items():
        (step, tokens), median = many[refills], statistics.median(seconds_[1:])
        print(f"| {rows} | {'yes' if refills else 'no'} | {step} | {tokens} | {tokens / median:,.1f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/llama3_1b.py")
    parser.add_argument("--layers", type=int, default=4, help="of the model's; the rest is left out")
    parser.add_argument("--rows", type=int, action="append", default=[])
    parser.add_argument("--refill", action="store_true", help="measure what refilled rows give instead")
    flags = parser.parse_args()
    config = jt.load_config(flags.config, {
        "model.num_layers": flags.layers, "model.max_seq_len": PROMPT + NEW, "data.seq_len": PROMPT + NEW,
        "data.global_batch_size": jax.device_count(), "mesh.fsdp": 1, "mesh.data": jax.device_count(),
        "train.precision": "float32", "train.accumulation": 1})
    run = jt.build(config)
    params = run.init().params
    state = replace(run.abstract, params=params)
    if flags.refill:
        for rows in flags.rows or [16]:
            refilled(run, state, rows)
        return 0
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    c = config.model
    per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 4
    array = jnp.ones(weights // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    bandwidth = array.nbytes / seconds(lambda: total(array).block_until_ready())
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}: {weights / 1e9:.2f} GB of float32 weights, read at "
          f"{bandwidth / 1e9:.1f} GB/s\n")
    print("| rows | tokens/s | of the limit | without a cache |\n|---|---|---|---|")
    whole = jax.jit(lambda params, tokens: run.model.merge(params)(tokens)[:, -1])
    for rows in flags.rows or [1, 16]:
        prompts = np.random.default_rng(0).integers(1, c.vocab_size, (rows, PROMPT)).tolist()

        def generated(new, prompts=prompts):
            jt.generate(run, state, prompts, max_new_tokens=new, temperature=0)

        step = (seconds(lambda: generated(NEW)) - seconds(lambda: generated(1))) / (NEW - 1)
        limit = (weights + rows * (PROMPT + NEW / 2) * per_token) / bandwidth
        tokens = jnp.ones((rows, PROMPT + NEW), jnp.int32)
        again = seconds(lambda tokens=tokens: whole(params, tokens).block_until_ready())
        print(f"| {rows} | {rows / step:,.1f} | {limit / step:.0%} | {rows / again:,.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
