"""The interval of a predicted step, from how far runs that were timed were from what is predicted of them.

Its factors come from the held-out errors of those runs: each is predicted with rates that were fitted to all others
(`tools/benchmarks/bench_held_out.py`, docs/planner.md). 27 runs on GPUs, 8 on TPUs, and 4 of models with experts, two
of them on GPUs. An interval from so few is wide; that of GPUs holds for cards that were among the runs, and is borrowed
for others.
"""

FACTORS = {"cuda": (0.89, 1.11), "tpu": (0.82, 1.16), "experts": (0.59, 1.68)}


def interval(platform: str, seconds: float, experts: int) -> tuple[float, float] | None:
    """Return the least and most seconds of a step that is predicted to take so many; None: no run tells.

    `experts`: of the model.
    """
    if platform not in FACTORS:
        return None
    least, most = FACTORS["experts" if experts else platform]
    return seconds * least, seconds * most
