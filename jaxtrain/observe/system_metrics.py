"""Use of this machine and this process: CPU, memory, disk, network, and NVIDIA GPUs where NVML is installed.

Names end with their unit; those that end with `_total` only grow. It needs no JAX, and no device waits for it.
"""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

_SPAN_S = 1.0  # over which the share of busy processors is measured at least
_lock = threading.Lock()
_busy: list[Any] = []  # when it was last measured, the processors' times then, and the share


def read(folder: str | os.PathLike[str] = "/") -> dict[str, float]:
    """Return what can be measured here, a number by name; `folder` is on the disk of which it tells.

    Reads a few files of the system, which takes about a millisecond.
    """
    found: dict[str, float] = {}
    for part in (_processors, _memory, functools.partial(_disk, folder), _network, _process, _gpus):
        with contextlib.suppress(OSError, RuntimeError, AttributeError, psutil.Error):  # not known on every system
            found.update(part())
    return found


def _processors() -> dict[str, float]:
    with _lock:  # there may be several readers
        now, times = time.monotonic(), psutil.cpu_times()
        if not _busy:
            _busy[:] = now, times, None
        elif now - _busy[0] >= _SPAN_S:
            passed = [new - old for new, old in zip(times, _busy[1], strict=True)]
            both = sum(getattr(times, name, 0) - getattr(_busy[1], name, 0) for name in ("guest", "guest_nice"))
            idle = sum(getattr(times, name, 0) - getattr(_busy[1], name, 0) for name in ("idle", "iowait"))
            whole = sum(passed) - both  # the time of guests is in that of users too
            _busy[:] = now, times, min(100.0, max(0.0, 100 * (1 - idle / whole))) if whole > 0 else _busy[2]
        share = {} if _busy[2] is None else {"host_cpu_percent": _busy[2]}
    return {**share, "host_load_1m": os.getloadavg()[0]}


def _memory() -> dict[str, float]:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {"host_memory_used_bytes": memory.total - memory.available, "host_memory_total_bytes": memory.total,
            "host_swap_used_bytes": swap.used}


def _disk(folder: str | os.PathLike[str]) -> dict[str, float]:
    space = psutil.disk_usage(os.fspath(folder))
    found: dict[str, float] = {"disk_free_bytes": space.free, "disk_total_bytes": space.total}
    if (moved := psutil.disk_io_counters()) is not None:
        found |= {"host_disk_read_bytes_total": moved.read_bytes, "host_disk_written_bytes_total": moved.write_bytes}
    return found


def _network() -> dict[str, float]:
    moved = psutil.net_io_counters()
    return {} if moved is None else {"host_network_received_bytes_total": moved.bytes_recv,
                                     "host_network_sent_bytes_total": moved.bytes_sent}


def _process() -> dict[str, float]:
    process = psutil.Process()
    with process.oneshot():
        spent = process.cpu_times()
        return {"process_cpu_seconds_total": spent.user + spent.system,
                "process_memory_bytes": process.memory_info().rss, "process_threads": process.num_threads()}


def _gpus() -> dict[str, float]:
    nvml, handles = _nvml(os.getpid())
    found: dict[str, float] = {}
    for number, handle in enumerate(handles):
        parts: dict[str, Callable[[], float]] = {
            "utilization_percent": lambda h=handle: nvml.nvmlDeviceGetUtilizationRates(h).gpu,
            "memory_used_bytes": lambda h=handle: nvml.nvmlDeviceGetMemoryInfo(h).used,
            "memory_total_bytes": lambda h=handle: nvml.nvmlDeviceGetMemoryInfo(h).total,
            "temperature_celsius": lambda h=handle: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU),
            "power_watts": lambda h=handle: nvml.nvmlDeviceGetPowerUsage(h) / 1000,
            "clock_hertz": lambda h=handle: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM) * 1e6,
            "ecc_errors_total": lambda h=handle: nvml.nvmlDeviceGetTotalEccErrors(
                h, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC)}
        for name, part in parts.items():
            with contextlib.suppress(nvml.NVMLError):  # many cards lack one or the other
                found[f"gpu{number}_{name}"] = float(part())
    return found


@functools.lru_cache(maxsize=1)
def _nvml(process: int) -> tuple[Any, list[Any]]:  # NVML does not survive a fork
    """Return NVML and the handles of all GPUs; none without the package nvidia-ml-py or a driver."""
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None, []
