"""The capabilities of accelerators: from data sheets, overridden by measurements and by the user's files.

Rates are those of one JAX device (a TPU7x chip is two), in bytes and FLOP per second; bandwidths of links count one
direction.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError, nearest
from jaxtrain.files.bounded_files import misfit, user_json
from jaxtrain.plan.cost import rates

if TYPE_CHECKING:
    import jax

GB, GiB, T = 1e9, 2.0**30, 1e12
PCIE = {8: 25 * GB, 9: 55 * GB, 10: 55 * GB}  # by compute capability: what sixteen lanes carry in each direction


@dataclass(frozen=True)
class Link:
    """A link among the devices of one neighbourhood: all of a node, of a slice, or everything."""

    name: str
    devices: int  # number of devices that it joins
    bandwidth: float  # of one device into it
    latency: float  # seconds of one step of a collective
    dimensions: int = 1  # of a torus, all of which a collective of a whole slice uses at once
    closed: float = math.inf  # devices of the least slice whose dimensions are rings; ends of a smaller one are free


@dataclass(frozen=True)
class Target:
    """One kind of accelerator, and how many of them are connected by which links."""

    name: str
    platform: str  # "cuda", "rocm", "tpu" or "cpu", as in the compiler
    device_kind: str  # a pattern for `jax.devices()[0].device_kind`
    peak: Mapping[str, float]  # dtype -> dense FLOP/s
    memory: float  # of the device
    usable: float  # share of it that a program may fill
    bandwidth: float  # of the device's memory
    links: tuple[Link, ...]  # nearest first
    price: float  # dollars per hour for one device: a default for users to correct
    source: str  # where the figures come from
    efficiency: Mapping[str, float] = field(default_factory=lambda: rates.GPU)  # share that is reached: what -> 0..1
    chip: Mapping[str, Any] = field(default_factory=dict)  # what a GPU compiler needs besides
    # The least length of the contracted dimension at which XLA for TPUs turns a product and its sum into a ring.
    rings: float = math.inf
    host: float = 16e9  # bandwidth between device and host memory; the default is a guess, that of PCIe 4
    host_memory: float = math.inf  # the host's, for each of its devices
    launch: float = 0.0  # seconds between two kernels
    neighbours: float = 1.0  # of the rate of products, where other devices of the machine compute as well
    rates_of: str = ""  # the target whose rates these are, where none was fitted to runs on this one

    @property
    def described(self) -> str:
        """The platform with its compute capability, as `jaxtrain.builder.build` takes it: "cuda:9", "tpu"."""
        return f"{self.platform}:{self.chip['major']}" if self.chip else self.platform

    def products(self, dtype: str, rounds: bool) -> float:
        """Return the FLOP/s of products of this dtype; `rounds`: whether those of float32 may round their operands."""
        if dtype == "float32" and rounds and self.platform != "cpu":
            dtype = "tensorfloat32" if "tensorfloat32" in self.peak else "bfloat16"
        return self.peak.get(dtype, self.peak.get("float32", 1.0))

    def among(self, devices: int) -> "Target":
        """Return the target with the rates of products that it has among so many busy devices."""
        if devices == 1 or self.neighbours == 1:
            return self
        slower = {kind: self.neighbours * share for kind, share in self.efficiency.items()
                  if kind in ("matmul", "grouped")}
        return dataclasses.replace(self, efficiency={**self.efficiency, **slower}, neighbours=1.0)

    @property
    def room(self) -> float:
        """The bytes that a program may use."""
        return self.memory * self.usable

    @property
    def host_room(self) -> float:
        """The bytes of host memory per device for offloading; others need some of it, too."""
        return 0.8 * self.host_memory


_NO_RATES: Mapping[str, float] = {}


def _gpu(name: str, kind: str, bf16: float, fp8: float, memory: int, bandwidth: float, nvlink: float, node: int,
         network: float, price: float, chip: JsonObject, source: str,
         efficiency: Mapping[str, float] = _NO_RATES, fp4: float = 0, rates_of: str = "") -> Target:
    float32 = 2 * chip["cores"] * chip["fpus"] * chip["clock"] * 1e9  # without tensor cores, which would round
    peak = {"bfloat16": bf16 * T, "float16": bf16 * T, "tensorfloat32": bf16 * T / 2, "float32": float32}
    peak |= {dtype: rate * T for dtype, rate in (("float8", fp8), ("float4", fp4)) if rate}
    links = (Link("NVLink", node, nvlink * GB, 4e-6), Link("network", 1 << 30, network * GB, 15e-6))
    # JAX takes three quarters by default; jaxtrain.main asks for 0.92, since CUDA and NCCL need some.
    host = PCIE[chip["major"]] if not name.startswith("gb") else 225 * GB  # half of NVLink-C2C's 450 in each direction
    return Target(name, "cuda", kind, peak, memory, 0.92, bandwidth * GB, links, price, source,
                  {**rates.GPU, **efficiency}, chip, host=host, launch=rates.LAUNCH, neighbours=rates.NEIGHBOURS,
                  rates_of=rates_of)


def _amd(name: str, kind: str, bf16: float, fp8: float, fp4: float, float32: float, memory: float, bandwidth: float,
         links: float, price: float, source: str) -> Target:
    """Return an AMD target; `links` is one direction of the seven links to the other GPUs of a machine together.

    jaxtrain has no kernels of its own for these, so attention is XLA's, with all scores in memory.
    """
    peak = {"bfloat16": bf16 * T, "float16": bf16 * T, "float32": float32 * T, "float8": fp8 * T}
    if fp4:
        peak["float4"] = fp4 * T
    joined = Link("Infinity Fabric", 8, links * GB, 4e-6), Link("network", 1 << 30, 50 * GB, 15e-6)
    return Target(name, "rocm", kind, peak, memory * GB, 0.92, bandwidth * GB, joined, price, source, rates.GPU,
                  host=55 * GB, launch=rates.LAUNCH, neighbours=rates.NEIGHBOURS, rates_of="h100")


def _tpu(name: str, kind: str, bf16: float, fp8: float, memory: float, bandwidth: float, ici: float, ports: int,
         pod: int, closed: int, network: float, price: float, source: str,
         efficiency: Mapping[str, float] = _NO_RATES, fp4: float = 0, rates_of: str = "") -> Target:
    """Return a TPU target; `ici` is both directions of all ports together, as in the documentation.

    `closed`: the devices of the least slice that is a torus: a cube of 64 chips, or all of a pod of two dimensions.
    """
    peak = {"bfloat16": bf16 * T, "float32": bf16 * T / 6}  # in six passes
    peak |= {dtype: rate * T for dtype, rate in (("float8", fp8), ("float4", fp4)) if rate}
    # A ring over one axis of the torus uses two ports, each in both directions. The factor of `rings` was found with
    # libtpu 0.0.50.1 for v5e, v5p and v6e, rings of 8 (v6e: 4 to 16), whatever the other dimensions.
    links = (Link("ICI", pod, ici * GB / ports, 1e-6, ports // 2, closed),
             Link("network", 1 << 30, network * GB, 50e-6))
    return Target(name, "tpu", kind, peak, memory * GiB, 0.97, bandwidth * GB, links, price, source,
                  {**rates.TPU, **efficiency}, rings=2.15 * bf16 * T / links[0].bandwidth, rates_of=rates_of)


_NVIDIA = "NVIDIA data sheets (dense figures); memory, cores and clocks as XLA's target specifications have them"
_GOOGLE = "docs.cloud.google.com/tpu/docs"
_AMPERE = {"major": 8, "extension": "NONE", "cores": 108, "fpus": 64, "clock": 1.41, "l2": 41943040,
           "shared": 166912, "shared_core": 167936}
_HOPPER = {"major": 9, "extension": "ACCELERATED_FEATURES", "cores": 132, "fpus": 128, "clock": 1.98, "l2": 52428800,
           "shared": 232448, "shared_core": 233472}
_BLACKWELL = {**_HOPPER, "major": 10, "cores": 148, "clock": 1.965, "l2": 132644864}
TARGETS: dict[str, Target] = {target.name: target for target in (
    _gpu("a100", "NVIDIA A100-SXM4-80GB", 312, 0, 85100068864, 2039, 300, 8, 25, 2.0, _AMPERE, _NVIDIA,
         rates.A100),
    _gpu("h100", "NVIDIA H100 80GB HBM3", 989, 1979, 84942979072, 3352, 450, 8, 50, 3.0, _HOPPER, _NVIDIA),
    _gpu("h200", "NVIDIA H200", 989, 1979, 151397597184, 4800, 450, 8, 50, 3.5, _HOPPER, _NVIDIA,
         rates.H200),
    _gpu("b200", "NVIDIA B200", 2250, 4500, 191514411008, 7672, 900, 8, 50, 5.5, _BLACKWELL, _NVIDIA,
         fp4=9000, rates_of="h100"),
    _gpu("gb200", "NVIDIA GB200", 2500, 5000, 197897748480, 7928, 900, 72, 50, 6.5,
         {**_BLACKWELL, "cores": 152, "clock": 2.062, "l2": 135528448}, _NVIDIA, fp4=10000, rates_of="h100"),
    # Cards of 800 Gb/s for each GPU (DGX B300, GB300 NVL72). XLA's specification of B300 says 158 cores; 148 give the
    # data sheet's float32.
    _gpu("b300", "NVIDIA B300", 2250, 4500, 297021865984, 7936, 900, 8, 100, 7.0,
         {**_BLACKWELL, "l2": 135528448}, _NVIDIA, fp4=13500, rates_of="h100"),
    _gpu("gb300", "NVIDIA GB300", 2500, 5000, 297021079552, 7928, 900, 72, 100, 8.0,
         {**_BLACKWELL, "cores": 152, "clock": 2.07, "l2": 135528448}, _NVIDIA, fp4=15000, rates_of="h100"),
    _amd("mi300x", "AMD Instinct MI300X", 1307, 2615, 0, 163.4, 192, 5300, 448, 2.5,
         "AMD Instinct MI300X data sheet (dense figures)"),
    _amd("mi355x", "AMD Instinct MI355X", 2517, 5033, 10066, 157.3, 288, 8000, 538, 4.0,
         "AMD Instinct MI355X data sheet (dense figures)"),
    _tpu("v5e", "TPU v5( lite|e)", 197, 0, 16, 819, 400, 4, 256, 256, 25 / 8, 1.2, f"{_GOOGLE}/v5e", rates.V5E),
    _tpu("v5p", "TPU v5p?", 459, 0, 95, 2765, 1200, 6, 8960, 64, 50 / 8, 4.2, f"{_GOOGLE}/v5p", rates.V5P),
    _tpu("v6e", "TPU v6( lite|e)", 918, 0, 32, 1638, 800, 4, 256, 256, 100 / 8, 2.7, f"{_GOOGLE}/v6e"),
    _tpu("tpu7x", "TPU7x", 2307 / 2, 4614 / 2, 96, 7380 / 2, 600, 6, 2 * 9216, 128, 50 / 8, 6.0, f"{_GOOGLE}/tpu7x",
         rates.TPU7X),
    # Published are FP4 (12.6 PFLOP/s), memory and links; of bfloat16 and FP8 a quarter and a half of FP4 are assumed,
    # and 400 Gb/s of network, four times Ironwood's.
    _tpu("tpu8t", "TPU8t", 12600 / 4, 12600 / 2, 216e9 / GiB, 6528, 2400, 6, 9600, 64, 400 / 8, 9.0,
         "Google's announcement of TPU 8t, April 2026 (bfloat16 and FP8: assumed)", fp4=12600, rates_of="v6e"),
)}
# One virtual device on one core: roughly what a matmul in float32 and a copy in memory reached.
TARGETS["cpu"] = Target("cpu", "cpu", "cpu", {"float32": 6e10, "bfloat16": 3e10}, 4 * GiB, 0.8, 1e10,
                        (Link("memory", 1 << 30, 2e9, 1e-4),), 0.05, "a core of a usual server",
                        rates.CPU, host=5e9)
_CORES = {"v5p": 2}  # targets whose slices are named by cores: v5p-512 has 256 chips


def parse(text: str, more: str | Path | None = None) -> tuple[Target, int]:
    """Parse a target such as "h100x256", and return it with its number of devices.

    `more`: a JSON file with your own targets, or with measurements.
    """
    targets = {**TARGETS, **(read(more) if more else {})}
    found = re.fullmatch(r"([a-z][a-z0-9_]*?)(?:(x|-)(\d+))?", text.strip().lower())
    if not found or found[1] not in targets:
        raise UserError("--target", f"{text!r} is not known", nearest(found[1] if found else text, targets))
    count = int(found[3] or 1)
    if found[2] == "-":
        if count % (cores := _CORES.get(found[1], 1)):
            raise UserError("--target", f"{text!r} counts cores, {cores} a device", f"write {found[1]}-{count + 1}")
        count //= cores
    if count < 1:
        raise UserError("--target", f"{text!r} has no devices", f"write {found[1]}x8")
    return targets[found[1]], count


MEMORY_FRACTION = "0.92"  # of a GPU's memory: the planner's `usable`; JAX's own default is 0.75


def claim_memory() -> None:
    """Let JAX use as much memory as the planner assumes; call it before a backend starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    # Of the host's memory, for offloading: all of it, where XLA would stop at 64 GB.
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", f"{max(64, host_memory() >> 30)}")


def host_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def here(devices: "list[jax.Device] | None" = None, more: str | Path | None = None) -> Target:
    """Return the target of the available devices; raise a `UserError` if they are not known.

    `more`: a JSON file with their measurements (`jaxtrain calibrate`).
    """
    import jax

    measured = read(more) if more else {}

    devices = jax.devices() if devices is None else devices
    kind, platform = devices[0].device_kind, devices[0].platform
    mine = [device for device in devices if device.process_index == jax.process_index()]
    memory = host_memory() / len(mine)
    if platform == "cpu":  # virtual devices share cores and memory
        if "cpu" in measured:  # measured while all devices were busy
            return dataclasses.replace(measured["cpu"], memory=memory)
        base, share = TARGETS["cpu"], min(1.0, (os.cpu_count() or 1) / len(mine))
        return dataclasses.replace(base, memory=memory, bandwidth=base.bandwidth * share,
                                   peak={dtype: rate * share for dtype, rate in base.peak.items()})
    for target in (*measured.values(), *TARGETS.values()):
        if re.fullmatch(target.device_kind, kind):
            target = dataclasses.replace(target, host_memory=memory)
            limit = (mine[0].memory_stats() or {}).get("bytes_limit")
            return dataclasses.replace(target, memory=limit, usable=1.0) if limit else target
    raise UserError("--target", f"nothing is known of {kind!r}", "name a target, such as one in a file for --targets")


def gigabytes(size: float) -> str:
    """Format bytes as gigabytes, with enough digits for small amounts."""
    amount = size / 1e9
    return f"{amount:.1f}" if amount >= 9.95 else f"{amount:.2f}" if amount >= 0.995 else f"{amount:.2g}"


def in_gigabytes(size: float) -> str:
    """Format bytes with their unit: gigabytes, or TB, PB and EB where there are more than ten thousand."""
    for unit in ("GB", "TB", "PB", "EB"):
        if size < 1e13 or unit == "EB":
            return f"{gigabytes(size)} {unit}"
        size /= 1000
    raise AssertionError


def read(path: str | Path) -> dict[str, Target]:
    """Read targets from a JSON file: {"NAME": {"like": "h100", "price": 2.1, ...}}; its values override the base's."""
    fix = 'write {"NAME": {"like": "h100", "price": 2.1}}'
    given = user_json(path, dict, "--targets", fix)
    if given is None:
        raise UserError("--targets", f"{path} cannot be read (there is no such file)", fix)
    if misfit(given, {str: dict}):
        raise UserError("--targets", f"{path} does not hold targets by name", fix)
    return {name: _made(name, keys) for name, keys in given.items()}


def _made(name: str, keys: JsonObject) -> Target:
    like = keys.get("like", name)
    if like not in TARGETS:
        raise UserError("--targets", f"{name} is like {like!r}, which is not known", nearest(like, TARGETS))
    base, known = TARGETS[like], {f.name for f in dataclasses.fields(Target)}
    for key in keys:
        if key not in known | {"like"}:
            raise UserError("--targets", f"{name} has no {key!r}", nearest(key, known))
    changes = {key: value for key, value in keys.items() if key != "like"}
    for key, value in changes.items():
        _checked(f"{name}.{key}", value, getattr(base, key))
    if "links" in changes:
        try:
            changes["links"] = tuple(Link(**link) for link in changes["links"])
        except TypeError as error:
            raise UserError("--targets", f"{name}.links: {error}", "give name, devices, bandwidth, latency") from None
    for key in ("peak", "efficiency"):
        if key in changes:
            changes[key] = {**getattr(base, key), **changes[key]}
    if "matmul" in keys.get("efficiency", {}):  # measured with all devices at work
        changes.setdefault("neighbours", 1.0)
    return dataclasses.replace(base, name=name, **changes)


def _checked(key: str, value: object, usual: Any) -> None:
    """Raise a UserError for a value of the wrong type, or a number out of range."""
    if isinstance(usual, Mapping) and isinstance(value, dict):
        for inner, each in value.items():
            if inner in usual or key.endswith((".peak", ".efficiency")):
                _checked(f"{key}.{inner}", each, 1.0)
    elif isinstance(usual, int | float) and not isinstance(usual, bool):
        fine = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if not fine or (".efficiency." in key and value > 2):  # measured ones may exceed 1
            raise UserError("--targets", f"{key} is {value!r}", "give a number; for an efficiency, a share such as 0.7")
    elif not isinstance(value, list if isinstance(usual, tuple) else type(usual)):
        raise UserError("--targets", f"{key} is {value!r}", "write it as jaxtrain/plan/targets.py does")
