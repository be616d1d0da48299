"""Virtual CPU devices: what they need has to be set before JAX starts."""

import os
import sys
from importlib import metadata

# What takes longest is making machine code, which without optimization takes a third as long. What XLA makes of a
# program, its collectives and its buffers, is the same.
# In one piece it takes a tenth less again.
# JAX 0.10 has an older way to make the code of fused operations too, which takes half the time again. With it, XLA's
# scheduler for concurrency gave a step on eight devices wrong numbers now and then, and none without that scheduler.
OLDER_WAY = metadata.version("jaxlib").startswith("0.10.")
QUICKLY = ("--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
           + OLDER_WAY * (" --xla_cpu_use_fusion_emitters=false"
                          " --xla_cpu_enable_concurrency_optimized_scheduler=false"))


def virtual_devices(number: int) -> str:
    """Return XLA_FLAGS for so many virtual devices, for which programs are compiled quickly."""
    return f"{QUICKLY} --xla_force_host_platform_device_count={number}"


def use_virtual_devices(number: int) -> None:
    """Have this process compute on so many virtual CPU devices, unless JAX has started in it already."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # of shardings that cost time, which is none of ours here
    if "jax" in sys.modules:
        import jax

        try:
            jax.config.update("jax_num_cpu_devices", number)
        except RuntimeError:  # it has its devices
            return
        jax.config.update("jax_platforms", "cpu")
        os.environ["XLA_FLAGS"] = f"{flags} {QUICKLY}".strip()
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"{flags} {virtual_devices(number)}".strip()
