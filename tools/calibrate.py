"""Measure what the devices of this machine reach, for the planner: writes what `--targets` of jaxtrain.plan takes.

    python tools/calibrate.py --targets=FILE [--quick] [--seconds=150]
    python -m jaxtrain.plan --config=configs/llama3_8b.py --target=h100x8 --targets=FILE

All devices work at the same time, as in training, where they share power and memory. Every measurement is one compiled
loop, long enough that starting it does not count; of several runs the median is taken. What is measured: linear layers
forward and backward in bfloat16 and float32 (as jaxtrain computes it: "highest"), attention forward and backward, an
elementwise operation for the memory's bandwidth, and all-reduce and all-gather over all devices of this machine.

The target keeps its data sheet's peak in its first dtype, its bandwidth of memory and its links to other machines;
the efficiencies are what was reached of them. Where a figure has no efficiency of its own (float32, the nearest link),
it is written such that the planner's product of the two is what was measured. A CPU has no data sheet: there the best
of what was seen is the peak. Not measured: links to other machines and to the hosts, and how much talk hides behind
computation. The efficiency of attention counts only where attention is a kernel: elsewhere it is matmuls to the
planner. All measurements, one a line, are written beside FILE, with the ending .rows.jsonl.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxtrain.errors import UserError, say  # noqa: E402
from jaxtrain.flags import Parser, command  # noqa: E402
from jaxtrain.kernels import attention  # noqa: E402
from jaxtrain.plan import targets  # noqa: E402
from jaxtrain.plan.trace import kernels  # noqa: E402

# Linear layers: rows, width of what goes in, width of what comes out.
LLM = ((8192, 4096, 14336), (8192, 14336, 4096), (8192, 4096, 4096), (8192, 4096, 6144), (8192, 8192, 28672),
       (8192, 8192, 3584), (4096, 4096, 32768))
SQUARE = ((2048,) * 3, (4096,) * 3, (8192,) * 3)
ATTENTION = ((4, 4096, 32, 8, 128), (2, 8192, 32, 8, 128))  # rows, tokens, heads, key heads, width of a head
SCORES = ((1, 2048, 32, 8, 128),)  # where there is no kernel, and all scores are in memory
MEMORY = (1 << 28, 1 << 30)  # bytes
LINKS = tuple(1 << power for power in (12, 16, 20, 23, 26, 28))  # bytes of a result
QUICK = {"llm": ((256, 128, 512), (256, 512, 128)), "square": ((256,) * 3,), "attention": ((1, 128, 4, 2, 64),),
         "memory": (1 << 25,), "links": (1 << 12, 1 << 18, 1 << 22)}
FULL = {"llm": LLM, "square": SQUARE, "attention": ATTENTION, "memory": MEMORY, "links": LINKS}
KINDS = ("all-reduce", "all-gather")


@dataclass
class Row:
    """One thing to measure, and what came out."""

    what: str  # "llm", "square", "attention", "memory", or a collective
    dtype: str
    shape: tuple[int, ...]
    work: float  # of one device and one turn of the loop: FLOP, bytes read and written, or bytes on links
    steps: float = 0  # of a collective, one after the other
    seconds: float = 0.0  # of one turn

    @property
    def rate(self) -> float:
        """FLOP or bytes a second of one device."""
        return self.work / self.seconds

    def __str__(self) -> str:
        unit, scale = ("TFLOP/s", 1e12) if self.what in ("llm", "square", "attention") else ("GB/s", 1e9)
        measured = f"{1e3 * self.seconds:12.4f} ms{self.rate / scale:12.3f} {unit}" if self.seconds else ""
        return f"{self.what:<12}{self.dtype:<10}{' x '.join(map(str, self.shape)):<26}{measured}"


def planned(sizes: dict[str, Any], dtype: str, devices: int) -> list[Row]:
    """Return what is to be measured, the most important first: time may run out."""
    def matmuls(what: str, dtype: str) -> list[Row]:
        return [Row(what, dtype, shape, 6.0 * np.prod(shape, dtype=float)) for shape in sizes[what]]

    other = "float32" if dtype == "bfloat16" else "bfloat16"
    rows = matmuls("llm", dtype)
    for B, T, H, G, K in sizes["attention"]:
        shapes = [(B, T, H, K), (B, T, G, K), (B, T, G, K)]
        work = kernels.flops(kernels.FORWARD, shapes) + kernels.flops(kernels.BACKWARD, shapes)
        rows.append(Row("attention", dtype, (B, T, H, G, K), work))
    rows += [Row("memory", "float32", (size,), 2.0 * size) for size in sizes["memory"]]
    if devices > 1:  # bytes and steps as jaxtrain/plan/cost/links.py counts them
        for kind in KINDS:
            ways = 2 if kind == "all-reduce" else 1
            steps = min(ways * (devices - 1), 4 * math.log2(devices) + 2)
            rows += [Row(kind, "float32", (size,), ways * size * (devices - 1) / devices, steps)
                     for size in sizes["links"]]
    return rows + matmuls("llm", other) + matmuls("square", dtype) + matmuls("square", other)


# ------------------------------------------------------------------------------------- one turn of the loop on a device
def linear(x, w, *_):
    """A linear layer forward, and both of its matmuls backward."""
    y = x @ w
    dx = y @ w.T
    return again(x, dx), w, dx, x.T @ y


def attend(q, k, v, *_):
    """Attention forward and backward, by the kernel that training takes."""
    out, back = jax.vjp(attention.attend, q, k, v)
    dq, dk, dv = back(out)
    return again(q, dq), k, v, dq, dk, dv


def again(x, dx):
    """The same except for one row, so that each turn has to wait for the last and no number grows or vanishes.

    All results of a turn are carried besides: what is carried has to be computed.
    """
    return x.at[:1].add(1e-6 * dx[:1])


def copy(x):
    """Read all and write all."""
    return (x * 0.999 + 1e-3,)


def all_reduce(x):
    """The mean, so that numbers stay as they are."""
    return (jax.lax.psum(x, "all") / jax.lax.axis_size("all"),)


def all_gather(x):
    """Only a part of the result goes on, which the compiler must not know."""
    return (jax.lax.optimization_barrier(jax.lax.all_gather(x, "all", tiled=True))[:x.shape[0]],)


def arguments(row: Row, devices: int) -> tuple[Callable, list[tuple[int, ...]]]:
    """The turn, and the shapes of what it carries on each device."""
    if row.what in ("llm", "square"):
        M, K, N = row.shape
        return linear, [(M, K), (K, N), (M, K), (K, N)]
    if row.what == "attention":
        B, T, H, G, K = row.shape
        return attend, [(B, T, H, K), (B, T, G, K), (B, T, G, K)] * 2
    if row.what == "memory":
        return copy, [(row.shape[0] // 4,)]
    of_one = row.shape[0] // 4 // (devices if row.what == "all-gather" else 1)
    return {"all-reduce": all_reduce, "all-gather": all_gather}[row.what], [(of_one,)]


def measure(row: Row, mesh: Mesh, expected: float, wanted: float, repeats: int) -> float:
    """Seconds of one turn. `expected`: the same, about; `wanted`: seconds that one loop should take."""
    turn, shapes = arguments(row, mesh.size)
    turns = int(np.clip(wanted / expected, 4, 2000))

    def made(key):
        keys = jax.random.split(jax.random.fold_in(key, jax.lax.axis_index("all")), len(shapes))
        return tuple(jax.random.normal(k, s, row.dtype) for k, s in zip(keys, shapes, strict=True))

    def loop(*carried):
        # A number of turns that the compiler knows: the host need not look at each.
        return jax.lax.fori_loop(0, turns, lambda _, carry: turn(*carry), carried)

    split = P("all")
    start = jax.jit(jax.shard_map(made, mesh=mesh, in_specs=P(), out_specs=split, check_vma=False))
    run = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    given = start(jax.device_put(jax.random.key(0), NamedSharding(mesh, P())))
    with jax.default_matmul_precision("highest" if row.dtype == "float32" else "default"):
        jax.block_until_ready(run(*given))  # compiles, and warms up
        taken = []
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(run(*given))
            taken.append(time.perf_counter() - begin)
            if sum(taken) > 10 * repeats * wanted:
                break  # much slower than expected
    return statistics.median(taken) / turns


def guess(row: Row, target: targets.Target) -> float:
    """About how long a turn takes."""
    if row.what in ("llm", "square", "attention"):
        return row.work / (0.5 * target.peak[row.dtype])
    if row.what == "memory":
        return row.work / target.bandwidth
    return row.work / target.links[0].bandwidth + row.steps * max(target.links[0].latency, 1e-5)


# ------------------------------------------------------------------------------------------------- what is written down
def fitted(rows: list[Row]) -> tuple[float, float]:
    """(bytes a second, seconds of a step) by least squares of relative errors, so that small sizes count as well."""
    A = np.array([(row.work, row.steps) for row in rows]) / np.array([[row.seconds] for row in rows])
    (inverse, latency), *_ = np.linalg.lstsq(A, np.ones(len(rows)), rcond=None)
    if latency < 0 or inverse <= 0:  # noise: take what the largest say of bandwidth, and the smallest of latency
        inverse = min(row.seconds / row.work for row in rows)
        latency = min(row.seconds / row.steps for row in rows)
    return float(1 / inverse), float(latency)


def calibrated(target: targets.Target, dtype: str, rows: list[Row]) -> dict[str, Any]:
    """The target's keys that were measured."""
    done: dict[str, list[Row]] = {}
    for row in rows:
        if row.seconds:
            done.setdefault(f"{row.what} {row.dtype}" if row.what in ("llm", "square") else row.what, []).append(row)

    def median(name: str) -> float:
        return statistics.median(row.rate for row in done[name])

    has_sheet, efficiency = target.platform != "cpu", {}
    keys: dict[str, Any] = {"like": target.name, "source": f"tools/calibrate.py on {jax.devices()[0].device_kind}"}
    peak = target.peak[dtype] if has_sheet else max(row.rate for row in rows if row.seconds and row.dtype == dtype
                                                    and row.what in ("llm", "square", "attention"))
    efficiency["matmul"] = median(f"llm {dtype}") / peak
    keys["peak"] = {dtype: peak}
    for other in {"float32", "bfloat16"} - {dtype}:
        if f"llm {other}" in done:
            keys["peak"][other] = median(f"llm {other}") / efficiency["matmul"]
    if "attention" in done:
        efficiency["attention"] = median("attention") / peak
    if "memory" in done:
        keys["bandwidth"] = target.bandwidth if has_sheet else median("memory")
        efficiency["memory"] = median("memory") / keys["bandwidth"]
    talk = [row for kind in KINDS for row in done.get(kind, [])]
    if len(talk) > 1:
        bandwidth, latency = fitted(talk)
        # The efficiency of links is also of those to other machines, which were not measured: it stays.
        near = replace(target.links[0], bandwidth=bandwidth / target.efficiency["links"], latency=latency)
        keys["links"] = [asdict(link) for link in (near, *target.links[1:])]
    return {**keys, "efficiency": efficiency}


@command()
def main(argv: list[str] | None) -> None:
    """Exit status 0; 2: the user's mistake, in one line."""
    flags = parser().parse_args(argv)
    begin, devices = time.monotonic(), jax.local_devices()
    target, sizes = targets.here(devices), QUICK if flags.quick else FULL
    if target.platform != "cuda" and not flags.quick:
        sizes = {**sizes, "attention": SCORES}
    dtype = "float32" if target.platform == "cpu" else "bfloat16"
    rows = planned(sizes, dtype, len(devices))
    if flags.dry_run:
        print(f"{len(devices)} x {target.name}, for at most about {flags.seconds:g} s:", *rows, sep="\n")
        return
    if not flags.targets or not Path(flags.targets).parent.is_dir() or Path(flags.targets).is_dir():
        raise UserError("--targets", f"{flags.targets} cannot be written", "name a file in a directory there is")
    mesh, skipped = Mesh(np.array(devices), ("all",)), 0
    wanted, repeats = (0.02, 3) if flags.quick else (0.2, 5)
    for row in rows:
        if time.monotonic() - begin > flags.seconds and row is not rows[0]:
            skipped += 1
            continue
        try:
            row.seconds = measure(row, mesh, guess(row, target), wanted, repeats)
        except jax.errors.JaxRuntimeError as error:  # such as too little memory
            say(f"{row} left out: {str(error).partition(chr(10))[0]}")
        else:
            print(row, flush=True)
    if skipped:
        say(f"{skipped} measurements were left out after {flags.seconds:g} s; --seconds allows more")
    if len(devices) == 1:
        say("one device has no links to measure: those of the data sheet stay")
    if not any(row.seconds for row in rows if row.what == "llm" and row.dtype == dtype):
        raise UserError("--targets", "no matmul could be measured", "see the errors above")
    keys = calibrated(target, dtype, rows)
    Path(flags.targets).write_text(json.dumps({target.name: keys}, indent=2) + "\n")
    lines = [json.dumps({**asdict(row), "rate": row.rate}) for row in rows if row.seconds]
    Path(flags.targets).with_suffix(".rows.jsonl").write_text("\n".join(lines) + "\n")
    print(json.dumps(keys["efficiency"]))
    print(f"written to {flags.targets}: python -m jaxtrain.plan --targets={flags.targets} "
          f"--target={target.name}x{len(devices)} --config=...")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = Parser(__doc__, prog="python tools/calibrate.py")
    made.add_argument("--targets", metavar="FILE", help="to write")
    made.add_argument("--quick", action="store_true", help="small shapes, for CPU: a few seconds")
    made.add_argument("--dry-run", action="store_true", help="print what would be measured")
    made.add_argument("--seconds", type=float, default=150, help="after which nothing more is measured")
    return made


if __name__ == "__main__":
    sys.exit(main())
