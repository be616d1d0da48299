"""The memory of this process's devices, as their allocator counts it; CPUs count none."""

import jax

FIGURES = {"memory_bytes": "bytes_in_use", "memory_peak_bytes": "peak_bytes_in_use",
           "memory_limit_bytes": "bytes_limit"}


def device_memory() -> dict[str, int]:
    """Return what is in use now, the most since the process began, and the limit, each of the device with the most.

    A figure that devices do not report is left out.
    """
    try:
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
    except (RuntimeError, NotImplementedError):
        return {}
    found = {name: max((each.get(key, 0) for each in stats), default=0) for name, key in FIGURES.items()}
    return {name: most for name, most in found.items() if most}
