"""Measure what keys of a config cost a step: CPU time with and without them, in turns, on the same batches.

    python tools/benchmarks/bench_keys.py --config=configs/gpt.py optimizer.qk_clip=100

Two steps are compiled in one process and take turns of a few steps each, beginning with either. Prints the medians
of CPU seconds a step (all threads of the process) and the median of the turns' ratios with its quartiles. Other
work on the machine lengthens both alike.
"""

import argparse
import os
import statistics
import time

import jax

import jaxtrain as jt
from jaxtrain.run import Run, compiled_step


class Arm:
    """A run whose steps are timed."""

    def __init__(self, run: Run, batches: int):
        self.run, self.step, self.state = run, compiled_step(run), run.init()
        self.batches = [run.sharded.place(run.batch(n)) for n in range(batches)]

    def turn(self) -> float:
        """Take a step on each batch; return the CPU seconds of one."""
        began = time.process_time()
        for batch in self.batches:
            self.state, metrics = self.step(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        return (time.process_time() - began) / len(self.batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="+", metavar="KEY=VALUE", help="what the second run has besides")
    parser.add_argument("--config", default="configs/gpt.py")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of both")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    flags = parser.parse_args()
    both, more = (dict(word.split("=", 1) for word in words) for words in (flags.set, flags.keys))
    arms = [Arm(jt.build(jt.load_config(flags.config, keys)), flags.steps) for keys in (both, both | more)]
    for arm in arms:
        arm.turn()
    taken = [[arm.turn() for arm in arms[::1 if turn % 2 else -1]][::1 if turn % 2 else -1]
             for turn in range(flags.turns)]
    low, middle, high = statistics.quantiles([other / one for one, other in taken], n=4)
    one, other = (1e3 * statistics.median(times) for times in zip(*taken, strict=True))
    print(f"{' '.join(flags.keys)}: {other:.1f} ms of CPU time a step, {one:.1f} without; ratio {middle:.3f} "
          f"({low:.3f} to {high:.3f}) of {flags.turns} turns of {flags.steps} steps, load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
