"""The rates that the devices of this machine reach, and the keys of a planner's target that follow from them."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import JsonObject
from jaxtrain.kernels import attention
from jaxtrain.plan import targets
from jaxtrain.plan.trace import kernels

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


def planned(sizes: JsonObject, dtype: str, devices: int) -> list[Row]:
    """Return what is to be measured, the most important first: time may run out."""
    def matmuls(what: str, dtype: str) -> list[Row]:
        return [Row(what, dtype, shape, 6.0 * np.prod(shape, dtype=float)) for shape in sizes[what]]

    other = "float32" if dtype == "bfloat16" else "bfloat16"
    rows = matmuls("llm", dtype)
    for B, T, H, G, K in sizes["attention"]:
        shapes: list[tuple[int, ...]] = [(B, T, H, K), (B, T, G, K), (B, T, G, K)]
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


def calibrated(target: targets.Target, dtype: str, rows: list[Row]) -> JsonObject:
    """The target's keys that were measured."""
    done: dict[str, list[Row]] = {}
    for row in rows:
        if row.seconds:
            done.setdefault(f"{row.what} {row.dtype}" if row.what in ("llm", "square") else row.what, []).append(row)

    def median(name: str) -> float:
        return statistics.median(row.rate for row in done[name])

    has_sheet, efficiency = target.platform != "cpu", {}
    keys: dict[str, Any] = {"like": target.name, "source": f"jaxtrain calibrate on {jax.devices()[0].device_kind}"}
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


def sizes_for(target: targets.Target, quick: bool) -> dict[str, Any]:
    """Return the sizes of what is measured on a kind of device; with `quick` small ones, as for CPUs."""
    if quick:
        return QUICK
    return FULL if target.platform == "cuda" else {**FULL, "attention": SCORES}


def measured(rows: Sequence[Row], devices: Sequence[Any], target: targets.Target, seconds: float,
             quick: bool = False) -> Iterator[tuple[Row, str]]:
    """Measure rows on devices, and yield each with the error, if any; after so many seconds no further one begins."""
    begin, mesh = time.monotonic(), jax.sharding.Mesh(np.array(devices), ("all",))
    wanted, repeats = (0.02, 3) if quick else (0.2, 5)
    for row in rows:
        if time.monotonic() - begin > seconds and row is not rows[0]:
            yield row, ""
            continue
        try:
            row.seconds = measure(row, mesh, guess(row, target), wanted, repeats)
        except jax.errors.JaxRuntimeError as error:  # such as too little memory
            yield row, str(error).partition(chr(10))[0]
        else:
            yield row, ""
