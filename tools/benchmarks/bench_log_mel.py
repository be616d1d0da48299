"""Measure log-mel frames of long audio on the host and on the device, their time and memory.

    python tools/benchmarks/bench_log_mel.py

Each way has a process of its own, since the peak of memory is that of a process. "at once" is one program for the
whole, compiled for its length.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import jax
import numpy as np

from jaxtrain.data.prepare_sequences import audio
from jaxtrain.kernels import log_mel

WAYS = {"host": audio.log_mel, "device, in pieces": log_mel.log_mel_of_file,
        "device, at once": lambda samples: np.asarray(jax.jit(log_mel.log_mel)(samples[None])[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--way", choices=WAYS, help="in this process; default: all, in others")
    flags = parser.parse_args()
    if not flags.way:
        for way in WAYS:
            subprocess.run([sys.executable, __file__, "--way", way, f"--seconds={flags.seconds}",
                            f"--turns={flags.turns}"], check=True)
        return
    frames_of = WAYS[flags.way]
    samples = np.random.default_rng(0).standard_normal(flags.seconds * audio.RATE, dtype=np.float32)
    begun = time.perf_counter()
    frames_of(samples[:40 * audio.RATE])
    first, before = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spent = []
    for _ in range(flags.turns):
        begun = time.perf_counter()
        frames_of(samples)
        spent.append(time.perf_counter() - begun)
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    took = f"{statistics.median(spent):.2f} s ({min(spent):.2f} to {max(spent):.2f})"
    print(f"{flags.way}: {took} for {flags.seconds} s; {more:.0f} MB beside the samples; "
          f"{first:.2f} s for the first 40, with compilation", flush=True)


if __name__ == "__main__":
    main()
