"""Train a small model in several precisions from several seeds, and compare the losses.

    python tools/benchmarks/bench_precisions.py --steps=300 --seeds=3 bfloat16 mxfp8 nvfp4

Every precision begins with the same parameters and sees the same batches for a seed. Prints a Markdown table: the
evaluation loss of each seed, the mean, and whether each loss lies within the interval of the first precision's seeds.
"""

import argparse
import statistics
import sys

import jax

import jaxtrain as jt


def losses(precision: str, steps: int, seeds: int, config: str, overrides: dict[str, object]) -> list[float]:
    """Return the evaluation loss after training from each seed; the step is compiled once."""
    found, first = [], None
    for seed in range(seeds):
        keys = {"train.steps": steps, "train.precision": precision, "train.seed": seed, "data.seed": seed,
                "mesh.data": 1, **overrides}
        run = jt.build(jt.load_config(config, keys), devices=jax.devices()[:1])
        first = first or run
        state = run.init()
        for n in range(steps):
            state, _ = first.step(state, run.batch(n))
        found.append(first.evaluate(state, 32)["eval_loss"])
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("precisions", nargs="+", help='values of train.precision; "nvfp4:1" leaves out one layer at '
                        "the end")
    parser.add_argument("--config", default="configs/gpt.py:tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    flags = parser.parse_args()
    seeds, first = range(flags.seeds), None
    print(f"| precision | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | within |")
    print("|" + "---|" * (3 + len(seeds)))
    for text in flags.precisions:
        kind, _, wide = text.partition(":")
        found = losses(kind, flags.steps, flags.seeds, flags.config,
                       {"train.layers_at_end_in_bf16": int(wide)} if wide else {})
        first = first or found
        within = sum(min(first) <= loss <= max(first) for loss in found)
        print(f"| {text} | {' | '.join(f'{loss:.4f}' for loss in found)} | {statistics.mean(found):.4f} | "
              f"{within} of {len(found)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
