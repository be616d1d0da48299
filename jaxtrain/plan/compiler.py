"""Compile a step for devices that are not available: memory and collectives according to the real compiler.

TPUs: libtpu compiles for any topology on a CPU (extra `aot-tpu`), and raises if memory does not
suffice. GPUs: the CUDA plugin does, given a description of the chip (extra `aot-cuda`); it never raises for memory.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxtrain.builder import build
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError, install_extra
from jaxtrain.plan import hlo
from jaxtrain.plan.targets import Target
from jaxtrain.run import Run, abstract_model
from jaxtrain.sharding.mesh import AXES, make_mesh
from jaxtrain.train_step import compiler_options
from jaxtrain.train_step.report import in_hosts, total

if TYPE_CHECKING:
    from jax.experimental import topologies

# The compiler's description of a chip, in the text form of XLA's GpuTargetConfigProto.
_GPU = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: {fpus}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared} shared_memory_per_core: {shared_core}
  core_count: {cores} l2_cache_size: {l2} clock_rate_ghz: {clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {bandwidth} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} feature_extension: {extension} }}
  device_vendor: "NVIDIA Corporation" name: "{name}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.28.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True)
class Compiled:
    """The compiler's figures for a step on one device."""

    bytes: int  # peak memory
    allocated: int  # allocated memory: more on TPUs, since not all of it is reused
    talked: Counter  # (kind, axes) -> bytes of results
    seconds: float  # compile time
    text: str  # the optimised program
    options: compiler_options.Options  # what the compiler was told beside XLA_FLAGS


def compile_step(config: Config, target: Target, devices: int) -> Compiled:
    """Lower and compile the step for `devices` devices of the target; a missing compiler is a `UserError`."""
    mesh_devices = devices_of(target, devices)
    began = time.perf_counter()
    mesh = make_mesh(*(getattr(config.mesh, axis) for axis in AXES), devices=mesh_devices)
    assert isinstance(mesh, jax.sharding.Mesh)
    # Described GPUs have no host memory: shardings on them would lose the memory kind of arrays.
    run = build(config, mesh=mesh.abstract_mesh, platform=target.described)
    try:
        with capability(target.described):
            lowered = run.lower(mesh)
        compiled = compiler_options.compiled(lowered, run.sharded.compiler_options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in f"{error}":
            raise
        raise UserError("--verify", f"the compiler reports that it does not fit ({f'{error}'.splitlines()[0][:200]})",
                        "use the next layout") from None
    text = compiled.as_text()
    assert text is not None, "the compiler returns no text"
    talked: Counter = Counter()
    sizes = dict(run.mesh.shape)
    for found in hlo.collectives(text):
        axes = tuple(axis for axis, size in sizes.items() if size > 1 and found.joins(axis, sizes))
        talked[found.kind, axes] += found.bytes
    peak, allocated = memory_of(compiled, run)
    return Compiled(peak, allocated, talked, time.perf_counter() - began, text, run.sharded.compiler_options)


def compile_answering(config: Config, target: Target, devices: int) -> dict[str, int]:
    """Compile the programs that answer prompts; return the peak memory of one device in each phase."""
    from jaxtrain.plan.answering import beside, phases  # only runs that answer need what answers

    mesh = make_mesh(*(getattr(config.mesh, axis) for axis in AXES), devices=devices_of(target, devices))
    assert isinstance(mesh, jax.sharding.Mesh)
    run = build(config, mesh=mesh.abstract_mesh, platform=target.described)
    state, found = total(run.abstract) - (in_hosts(run.abstract) if target.platform != "cpu" else 0), {}
    state += sum(total(abstract_model(other)) for other in beside(config, target, devices).values())
    with capability(target.described):
        for phase in phases(run, mesh):
            lowered = phase.traced.lower(lowering_platforms=(target.platform,))
            memory = compiler_options.compiled(lowered, {}).memory_analysis()
            assert memory is not None, "the compiler reports no memory"
            found[phase.name] = state + total(phase.copy) + total(phase.apart) - total(phase.weights) + (
                memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
                - memory.alias_size_in_bytes if target.platform == "cpu" else memory.peak_memory_in_bytes)
    return found


@contextlib.contextmanager
def capability(described: str) -> Iterator[None]:
    """Let the described GPU answer what JAX asks the local one before it traces cuDNN's attention."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    has, before = described.partition(":")[2], cudnn.check_compute_capability
    if has:
        cudnn.check_compute_capability = lambda capability: float(has) >= float(capability)
    try:
        yield
    finally:
        cudnn.check_compute_capability = before


def memory_of(compiled: jax.stages.Compiled, run: Run) -> tuple[int, int]:
    """Return the peak and the allocated bytes of device memory for a compiled step of this run."""
    memory = compiled.memory_analysis()
    assert memory is not None, "the compiler reports no memory"
    allocated = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    # XLA for CPU reports no peak, and its device memory is the host's. The others include host memory in their peak.
    hosts, kind = in_hosts(run.abstract), run.sharded.settings.platform or jax.default_backend()
    if kind != "cpu" and memory.host_temp_size_in_bytes and not hosts:  # the peak is then that of both together
        return allocated, allocated
    return (allocated + hosts if kind == "cpu" else memory.peak_memory_in_bytes - hosts), allocated


def devices_of(target: Target, count: int) -> list[jax.Device]:
    """Return described devices of a target; if their compiler is not installed, raise a `UserError`."""
    from jax.experimental import topologies

    if target.platform == "cpu":
        if count > jax.device_count():
            raise UserError("--verify", f"there are {jax.device_count()} CPU devices, but {count} are needed",
                            f"set XLA_FLAGS=--xla_force_host_platform_device_count={count}")
        return jax.devices()[:count]
    if target.platform == "rocm":
        raise UserError("--verify", f"no compiler for {target.name} works without the GPU", "leave --verify out")
    try:
        if target.platform == "tpu":
            # Do not search for a machine with TPUs, nor for another process that uses them.
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
            os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
            found = _slice(target, count)
        else:
            node = target.links[0].devices
            described = _GPU.format(**target.chip, bandwidth=int(target.bandwidth), memory=int(target.memory),
                                    name=target.device_kind)
            found = topologies.get_topology_desc(
                platform="cuda", topology_name=target.name, target_config=described,
                topology=f"1x{max(1, count // node)}x{min(count, node)}")
    except (RuntimeError, ValueError, KeyError) as error:
        if target.platform == "tpu" and "INVALID_ARGUMENT" in str(error):  # the compiler is there, and knows no such
            there = " or ".join(map(str, _powers_around(target, count)))
            raise UserError("--verify", f"{target.name} has no slice of {count} devices",
                            f"plan for {there or 'a power of two'}") from None
        extra = "aot-tpu" if target.platform == "tpu" else "aot-cuda"
        raise UserError("--verify", f"the compiler for {target.name} is missing ({f'{error}'.splitlines()[0][:100]})",
                        f"{install_extra(extra)} with Python 3.12 or later, and set JAX_PLATFORMS=cpu") from None
    devices = list(np.ravel(found.devices))
    if len(devices) != count:
        raise UserError("--verify", f"{target.name} has no slice of {count} devices; the nearest has {len(devices)}",
                        f"plan for {len(devices)}")
    return devices


def _slice(target: Target, count: int) -> "topologies.TopologyDescription":
    """Return the compiler's description of a slice of TPUs with so many devices."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=f"{target.name}:{_torus(target, count)}")


def _powers_around(target: Target, count: int) -> list[int]:
    """Return the powers of two next to a number of devices of which there are slices."""
    found, least = [], _CORES.get(target.name, 1)
    for size in (1 << count.bit_length() - 1, 1 << count.bit_length()):
        with contextlib.suppress(RuntimeError, ValueError):
            found += [size] if size >= least and _slice(target, size) else []
    return found


_CORES = {"tpu7x": 2}  # of a chip, each of which is a device; of others a chip is one


def _torus(target: Target, count: int) -> str:
    """Return the most even sides of the slice of chips that has so many devices."""
    dimensions = 2 if target.name in ("v5e", "v6e") else 3
    sides, rest = [], max(1, count // _CORES.get(target.name, 1))
    for left in range(dimensions, 0, -1):
        root = round(rest ** (1 / left))
        side = max((d for d in range(1, rest + 1) if rest % d == 0 and d <= max(1, root)), default=1)
        sides.append(rest if left == 1 else side)
        rest //= side
    assert rest == 1
    return "x".join(map(str, sorted(sides)))
