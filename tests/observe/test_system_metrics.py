"""The metrics of a machine: names with units, counters that never shrink, and GPUs through a stand-in for NVML."""

import re
import subprocess
import sys
import types

import pytest

from jaxtrain.observe import system_metrics

UNITS = ("_bytes", "_percent", "_celsius", "_watts", "_hertz", "_seconds", "_threads", "_load_1m", "_errors")


class NVMLError(Exception):
    pass


def nvml(gpus: int) -> types.ModuleType:
    fake = types.ModuleType("pynvml")
    fake.NVMLError = NVMLError
    fake.NVML_TEMPERATURE_GPU, fake.NVML_CLOCK_SM = 0, 1
    fake.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, fake.NVML_AGGREGATE_ECC = 1, 1
    fake.nvmlInit = lambda: None
    fake.nvmlDeviceGetCount = lambda: gpus
    fake.nvmlDeviceGetHandleByIndex = lambda n: n
    fake.nvmlDeviceGetUtilizationRates = lambda n: types.SimpleNamespace(gpu=10 + n)
    fake.nvmlDeviceGetMemoryInfo = lambda n: types.SimpleNamespace(used=2**30 * (n + 1), total=2**34)
    fake.nvmlDeviceGetTemperature = lambda n, kind: 50 + n
    fake.nvmlDeviceGetPowerUsage = lambda n: 300_500  # milliwatts
    fake.nvmlDeviceGetClockInfo = lambda n, kind: 1980  # MHz

    def no_ecc(*_):
        raise NVMLError("Not Supported")
    fake.nvmlDeviceGetTotalEccErrors = no_ecc
    return fake


@pytest.fixture(autouse=True)
def fresh():
    system_metrics._nvml.cache_clear()
    yield
    system_metrics._nvml.cache_clear()


def test_names_have_units_and_totals_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(system_metrics, "_SPAN_S", 0.0)
    first = system_metrics.read(tmp_path)
    sum(n * n for n in range(200_000))
    second = system_metrics.read(tmp_path)
    assert second.keys() >= {"host_cpu_percent", "host_memory_used_bytes", "host_memory_total_bytes", "disk_free_bytes",
                             "process_memory_bytes", "process_cpu_seconds_total", "host_network_sent_bytes_total"}
    for name, value in second.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name) and name.removesuffix("_total").endswith(UNITS), name
        assert value >= (first[name] if name.endswith("_total") else 0), name
    assert 0 <= second["host_cpu_percent"] <= 100
    assert 0 < second["process_memory_bytes"] < second["host_memory_total_bytes"]


def test_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(2))
    found = {name: value for name, value in system_metrics.read().items() if name.startswith("gpu")}
    assert found == {f"gpu{n}_{name}": value for n in range(2) for name, value in {
        "utilization_percent": 10 + n, "memory_used_bytes": 2**30 * (n + 1), "memory_total_bytes": 2**34,
        "temperature_celsius": 50 + n, "power_watts": 300.5, "clock_hertz": 1.98e9}.items()}  # and no ECC


def test_without_a_driver(monkeypatch):
    fake = nvml(1)

    def no_driver():
        raise NVMLError("Driver Not Loaded")
    fake.nvmlInit = no_driver
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert not [name for name in system_metrics.read() if name.startswith("gpu")]


def test_it_needs_no_jax():
    code = "import sys; from jaxtrain.observe import system_metrics; system_metrics.read(); print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
