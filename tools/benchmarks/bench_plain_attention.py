"""Compare plain attention in blocks of queries with all scores at once, forward and backward, by CPU time.

    JAX_PLATFORMS=cpu python tools/benchmarks/bench_plain_attention.py --rounds=21

Rows of four documents in float32. Both ways alternate in one process; of each pair of rounds the ratio is taken, and of
these the median, so that other work on the machine counts little.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.kernels.attention import query_blocks, xla_attention

# Rows, tokens, heads, heads of keys and values, width, window.
SHAPES = [(32, 64, 4, 4, 32, 0), (16, 128, 4, 4, 32, 0), (8, 256, 4, 4, 32, 0), (4, 512, 4, 4, 64, 0),
          (2, 1024, 4, 4, 64, 0), (1, 2048, 8, 2, 64, 0), (1, 4096, 2, 2, 64, 0), (4, 1024, 4, 4, 64, 128),
          (1, 4096, 2, 2, 64, 512)]
WAYS = {"whole": xla_attention.attention, "blocks": query_blocks.attention}


def compiled(attention, arrays, window):
    """Return the program, the seconds of CPU that compiling took, and its MiB of temporaries."""
    def loss(q, k, v, documents):
        return jnp.sin(attention(q, k, v, documents, window, 0.0, None, None)).sum()

    began = time.process_time()
    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile()
    took = time.process_time() - began
    jax.block_until_ready(program(*arrays))
    return program, took, program.memory_analysis().temp_size_in_bytes / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    flags = parser.parse_args()
    print(f"JAX {jax.__version__}: whole, then in blocks\n| rows x tokens | heads x width | window | blocks | ms "
          "| ratio | compiling, s | MiB |\n|---|---|---|---|---|---|---|---|")
    for B, T, H, G, K, window in SHAPES:
        rng = np.random.default_rng(0)
        arrays = [*(jnp.asarray(rng.normal(size=(B, T, heads, K)), jnp.float32) for heads in (H, G, G)),
                  jnp.asarray(np.sort(rng.integers(0, 4, (B, T)), axis=1))]
        made = {way: compiled(attention, arrays, window) for way, attention in WAYS.items()}
        times = {way: [] for way in WAYS}
        repeats = max(1, 1024 // T)
        for turn in range(flags.rounds):
            for way in list(WAYS)[::1 if turn % 2 else -1]:
                began = time.process_time()
                for _ in range(repeats):
                    jax.block_until_ready(made[way][0](*arrays))
                times[way].append((time.process_time() - began) / repeats * 1e3)
        ratio = np.median(np.divide(times["blocks"], times["whole"]))
        cells = [" to ".join(f"{values[way]:.{digits}f}" for way in WAYS) for values, digits in (
            ({way: np.median(times[way]) for way in WAYS}, 1), ({way: made[way][1] for way in WAYS}, 1),
            ({way: made[way][2] for way in WAYS}, 0))]
        print(f"| {B} x {T:,} | {H}{f' ({G})' * (G != H)} x {K} | {window or '–'} "
              f"| {len(query_blocks.ends(T, window))} | {cells[0]} | {ratio:.2f} | {cells[1]} | {cells[2]} |",
              flush=True)


if __name__ == "__main__":
    main()
