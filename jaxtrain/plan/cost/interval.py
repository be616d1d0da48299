"""The interval of a predicted step, from how far published runs were from what is predicted of them.

Its factors are percentiles 10 and 90 of the rows of tools/benchmarks/bench_published.py (docs/planner.md),
whose constants were fitted to half of them: 23 runs on GPUs, 10 on TPUs. Two of those have experts, both on TPUs.
"""

FACTORS = {"cuda": (0.94, 1.10), "tpu": (0.92, 1.21)}


def interval(platform: str, seconds: float, experts: int) -> tuple[float, float] | None:
    """Return the least and most seconds of a step that is predicted to take so many; None: no run tells.

    `experts`: of the model. What those cost on GPUs has not been compared with anybody's run.
    """
    if platform not in FACTORS or (experts and platform == "cuda"):
        return None
    least, most = FACTORS[platform]
    return seconds * least, seconds * most
