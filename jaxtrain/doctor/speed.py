"""Check whether devices compute correctly and equally fast, alone and together."""

import statistics

from jaxtrain.doctor.child import Measured, Outcome
from jaxtrain.doctor.finding import Finding, fail, note, ok, warn

SLOW = 0.5  # of the median of all devices


def speed(outcome: Outcome) -> list[Finding]:
    """Return findings about the measurements of the probe."""
    if not outcome.measured.get("devices"):
        return []  # `devices` reports why
    found = []
    for kind in ("bfloat16", "float32"):
        if measured := outcome.measured.get(kind):
            found += products(kind, measured, len(outcome.measured["devices"]))
    if "all_reduce" in outcome.measured:
        found += all_reduce(outcome.measured["all_reduce"], len(outcome.measured["devices"]))
    if not outcome.measured.get("done"):
        words = outcome.stderr.strip().splitlines()[-1:] or [""]
        doing = next((f"multiplying in {kind}" for kind in ("bfloat16", "float32") if kind not in outcome.measured),
                     "adding up over all devices")
        if "RESOURCE_EXHAUSTED" in outcome.stderr:
            fix = "free memory of the devices: other processes use it (nvidia-smi)"
        elif doing.startswith("adding"):
            fix = "run this with NCCL_DEBUG=INFO; nvidia-smi topo -m shows how the GPUs are connected"
        else:
            fix = "see dmesg for Xid, then nvidia-smi -q, or take another host"
        found.append(fail("speed", f"JAX {outcome.end or 'stopped'} while {doing} ({words[0][:200]})", fix))
    return found


def slow_kernels(outcome: Outcome) -> list[Finding]:
    """Return what usual models compute slowly on these devices for want of a kernel."""
    return [note("kernels", sentence, "nothing is broken: the start of a run says whether it computes this")
            for sentence in outcome.measured.get("slow", [])]


def products(kind: str, measured: Measured, devices: int) -> list[Finding]:
    """Check the matrix products of each device."""
    found = []
    if wrong := [name for name, one in measured.items() if not one["right"]]:
        found.append(fail("matmul", f"{kind} is wrong on {', '.join(wrong)}",
                          "do not train on it: exclude it by CUDA_VISIBLE_DEVICES, and have it inspected"))
    rates = {name: one["rate"] for name, one in measured.items()}
    middle = statistics.median(rates.values())
    if slow := [f"{name} ({_rate(rate)})" for name, rate in rates.items() if rate < SLOW * middle]:
        found.append(warn("matmul", f"{kind} is slow on {', '.join(slow)}; the median is {_rate(middle)}",
                          "nvidia-smi -q -d PERFORMANCE,TEMPERATURE shows throttling; else another process may use it"))
    if not wrong:
        some = "" if len(rates) == devices else f" ({len(rates)} of {devices} measured, the time was up)"
        found.append(ok("matmul", f"{kind} is right, {_rate(middle)} a device{some}"))
    return found


def all_reduce(measured: Measured, devices: int) -> list[Finding]:
    """Check the all-reduce over all devices of this process."""
    if measured["wrong"]:
        return [fail("all-reduce", f"the sum over {devices} devices is wrong on {', '.join(measured['wrong'])}",
                     "do not train on these; if NCCL_P2P_DISABLE=1 helps, the links or the IOMMU are at fault")]
    return [ok("all-reduce", f"over {devices} devices is right, {measured['rate'] / 1e9:.3g} GB/s a device")]


def _rate(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
