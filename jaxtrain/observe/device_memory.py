"""The most memory that a device of this process has held."""

import jax


def peak_bytes() -> int | None:
    """Return the bytes that the fullest device of this process held at most; None: devices do not tell, as on CPU."""
    try:
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
    except (RuntimeError, NotImplementedError):
        return None
    return max((one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one), default=None)
