"""The rates that kernels and links reach, as shares of the data sheet: one set for the planner and for the simulator.

Each number says where it comes from. "Profile" is that of a whole step on one H200, "alone" a kernel timed by itself on
it (docs/measurements/h200.jsonl, docs/benchmarks.md); "published" are the runs of tools/benchmarks/bench_published.py,
to which a rate was fitted (`tools/benchmarks/bench_held_out.py` repeats the fit without each run in turn). The reasons
given are what would explain the figures; they were not measured.
"""

import math
from collections.abc import Mapping

GPU: Mapping[str, float] = {
    "matmul": 0.645,  # published, H100, with NEIGHBOURS; large products alone: 0.73
    "grouped": 0.50,  # jaxtrain's kernels for experts: H200's 0.61, less by about what H100's products are below H200's
    "attention": 0.42,  # heads of 128, rows of 4,096, one document, both ways: published; H200 alone: 0.45
    "mosaic": 0.54,  # jaxtrain's own attention: H200's 0.60, less as cuDNN's
    "triton": 0.30,  # jaxtrain's own attention elsewhere: no kernel of it was timed, this is a guess
    "memory": 0.72,  # elementwise: H200's 0.72
    "links": 0.80,  # published: NCCL's bus bandwidth in large collectives, within machines and across
    # Published: the share of communication that costs nothing beside computation. NCCL's kernels take processors,
    # memory bandwidth and power from the kernels that run with them, so these become slower.
    "overlap": 0.25,
}
A100: Mapping[str, float] = {"matmul": 0.77, "attention": 0.50}  # published: less short of power
H200: Mapping[str, float] = {
    "matmul": 0.77,  # profiles: 0.76 to 0.79; large products alone 0.80
    "grouped": 0.61,  # profile of Qwen3-30B
    "attention": 0.45, "mosaic": 0.60,  # alone, as the table below has them
}
TPU: Mapping[str, float] = {  # published; kernels of TPUs were never timed alone
    "matmul": 0.67,  # v6e, whose matrix units are 256 wide and whose memory is slow for its peak
    "grouped": 0.70,
    "attention": 0.40,
    "memory": 0.80,
    "links": 0.90,
    "overlap": 0.80,  # the links have engines of their own
}
V5P: Mapping[str, float] = {"matmul": 0.84}  # published: matrix units half as wide as v6e's
# Open rows of bench_published, MaxText's of 16B to 128B: matrix units half as wide as v6e's, of a peak that is a fifth.
V5E: Mapping[str, float] = {"matmul": 0.90}
# Open rows of the same, MaxText's 70B and 405B with rows of 8,192: memory twice as fast for its peak as v6e's.
TPU7X: Mapping[str, float] = {"matmul": 0.80}
CPU: Mapping[str, float] = {"matmul": 1.0, "grouped": 1.0, "attention": 1.0, "memory": 1.0, "links": 1.0,
                            "overlap": 0.0}
# How these kernels of GPUs compare with "matmul" and with "memory": profiles.
HEAD = 0.92  # products of the loss head: 0.61 of the peak where results are float32, a third of them, others 0.77
PASSES = 0.92  # passes over logits
OPTIMIZER = 1.11  # the update; alone 1.09
# Of the rate of products where other GPUs of the machine compute as well, which share its power and its cooling:
# published, 2 to 256 H200 compared with one.
NEIGHBOURS = 0.93
LAUNCH = 2.5e-6  # seconds from a kernel's end to the next one's begin, on GPUs: gaps of the profiles by their kernels

# Attention's kernels alone on one H200, of the bfloat16 peak: heads of 64 in rows of 1,024 and of 4,096 tokens, heads
# of 128 in rows of 4,096 and of 32,768. cuDNN's count the causal half, with a mask all pairs; mosaic's whole blocks,
# and seven products backward where cuDNN's have five.
SHAPES = ((64, 1024), (64, 4096), (128, 4096), (128, 32768))
ATTENTION: Mapping[tuple[str, bool], tuple[float, float, float, float]] = {  # kernel, backward
    ("cudnn", False): (0.213, 0.390, 0.399, 0.608),
    ("cudnn", True): (0.207, 0.361, 0.478, 0.532),
    ("masked", False): (0.218, 0.414, 0.443, 0.624),
    ("masked", True): (0.310, 0.440, 0.446, 0.482),
    ("mosaic", False): (0.174, 0.290, 0.467, 0.581),
    ("mosaic", True): (0.353, 0.542, 0.654, 0.676),
}
WIDEST, SHORTEST, LONGEST = 128, 256, 65536  # the table is not continued beyond


def attention(kernel: str, backward: bool, width: int, length: float) -> float:
    """Return the rate of a kernel of attention by that of heads of 128 in rows of 4,096 tokens, both ways.

    Between and beyond the measured shapes rates follow powers of width and of length. Kernels that were not timed have
    one rate for all shapes.

    Args:
        kernel: "cudnn", "masked" (cuDNN's with an array as mask), "mosaic" or "triton".
        backward: whether it is the gradient's.
        width: of a head.
        length: tokens of a row, less the share of its blocks that are skipped.
    """
    if (kernel, backward) not in ATTENTION or not width or not length:
        return 1.0
    short, narrow, wide, long = ATTENTION[kernel, backward]
    length = min(max(length, SHORTEST), LONGEST)
    by_length = math.log(narrow / short, 4) if length < 4096 else math.log(long / wide, 8)
    by_width = math.log(wide / narrow, 2)
    share = wide * (length / 4096)**by_length * (min(width, WIDEST) / 128)**by_width
    return share / reference(kernel)


def reference(kernel: str) -> float:
    """Return the share of the peak that a kernel reaches both ways, with heads of 128 in rows of 4,096 tokens."""
    forward, backward = (ATTENTION["cudnn" if kernel == "masked" else kernel, back][2] for back in (False, True))
    products = (2, 7) if kernel == "mosaic" else (2, 5)
    return sum(products) / (products[0] / forward + products[1] / backward)


def of(efficiency: Mapping[str, float], kind: str, platform: str) -> float:
    """Return a target's share for a kind of kernel: that of the more general kind where they are not told apart."""
    if kind in efficiency:
        return efficiency[kind]
    general, factor = {"head": ("matmul", HEAD), "passes": ("memory", PASSES), "optimizer": ("memory", OPTIMIZER),
                       "grouped": ("matmul", 1.0), "mosaic": ("attention", 1.0)}[kind]
    return efficiency[general] * (factor if platform in ("cuda", "rocm") else 1.0)
