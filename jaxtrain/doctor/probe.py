"""Probe the devices in a process of its own: list them, multiply matrices on each, and sum over all of them.

Numbers are small integers, so that correct results are exact in every precision.
"""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxtrain.base.annotations import JsonObject, PyTree
from jaxtrain.doctor.child import Budget, say

ROWS = 8  # rows of a product that are computed again on the host
REPEATS = 5


def main() -> None:
    """Print the devices, then the measurements, as far as it gets."""
    try:
        import jax

        say(jax=jax.__version__)
        with contextlib.suppress(Exception):  # private API, and only a hint
            from jax._src import cloud_tpu_init, hardware_utils

            say(tpu_chips=hardware_utils.num_available_tpu_chips_and_device_id()[0],
                libtpu=bool(cloud_tpu_init.get_tpu_library_path()))
        with contextlib.suppress(Exception):
            from jaxtrain.compile_cache import cache_dir

            say(cache=str(getattr(jax.config, "jax_compilation_cache_dir", None) or cache_dir()))
        found = jax.local_devices()
        say(devices=[{"name": str(device), "kind": device.device_kind, "platform": device.platform,
                      "memory": _memory(device)} for device in found])
        with contextlib.suppress(Exception):  # what is slow is no reason to stop
            from jaxtrain.kernels import slow_paths

            capability = getattr(found[0], "compute_capability", "")
            say(slow=slow_paths.usual(found[0].platform + f":{capability}" * bool(capability)))
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}"[:2000])
        raise
    for kind in ("bfloat16", "float32"):
        say(**{kind: _products(found, kind)})
    if len(found) > 1:
        say(all_reduce=_all_reduce(found))
    say(done=True)


def _products(devices: list, kind: str) -> JsonObject:
    """Return, for each device, its rate in FLOP/s, and whether the result was correct."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    width = 512 if devices[0].platform == "cpu" else 8192
    random = np.random.default_rng(0)
    left, right = (random.integers(-3, 4, (width, width), np.int8) for _ in range(2))
    expected = left[:ROWS].astype(np.float64) @ right.astype(np.float64)

    @jax.jit
    def product(left, right):
        return jnp.matmul(left.astype(kind), right.astype(kind), preferred_element_type=jnp.float32)

    def compiled(device):
        return product.lower(*(jax.ShapeDtypeStruct((width, width), jnp.int8, sharding=_alone(device)),) * 2).compile()

    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(compiled, devices))
    found, budget = {}, Budget(20)
    for device, program in zip(devices, programs, strict=True):
        if not budget.left():
            break
        given = [jax.device_put(matrix, _alone(device)) for matrix in (left, right)]
        result = np.asarray(program(*given)[:ROWS])
        rate = 2 * width**3 / _seconds(program, given)
        found[str(device)] = {"rate": rate, "right": bool((result == expected).all())}
    return found


def _all_reduce(devices: list) -> JsonObject:
    """Return the all-reduce rate in bytes per second of each device's link, and the devices with a wrong sum."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    many, count = len(devices), 2**20 if devices[0].platform == "cpu" else 2**25
    mesh = jax.sharding.Mesh(np.array(devices), ("all",))
    apart, everywhere = (jax.sharding.NamedSharding(mesh, spec) for spec in (jax.P("all"), jax.P()))

    def part():
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (many, count), axis) for axis in (0, 1))
        return ((rows + 1) * (columns % 7)).astype(jnp.float32)

    parts = jax.jit(part, out_shardings=apart)()
    total = jax.jit(lambda parts: parts.sum(0), out_shardings=everywhere).lower(parts).compile()
    expected = (many * (many + 1) // 2) * (np.arange(count) % 7).astype(np.float32)
    wrong = [str(shard.device) for shard in total(parts).addressable_shards
             if not np.array_equal(np.asarray(shard.data), expected)]
    moved = 2 * (many - 1) / many * expected.nbytes  # sent by each device in a ring
    return {"rate": moved / _seconds(total, [parts]), "wrong": wrong}


def _seconds(program: Callable[..., PyTree], given: list) -> float:
    """Return the seconds of the fastest call, after one to warm up."""
    import jax

    jax.block_until_ready(program(*given))
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(*given))
        best = min(best, time.perf_counter() - start)
    return best


def _alone(device: Any) -> Any:
    import jax

    return jax.sharding.SingleDeviceSharding(device)


def _memory(device: Any) -> int | None:
    with contextlib.suppress(Exception):  # not every platform reports it
        return (device.memory_stats() or {}).get("bytes_limit")
    return None


if __name__ == "__main__":
    main()
