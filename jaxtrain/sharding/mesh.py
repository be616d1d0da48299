"""The device mesh: six named axes, ordered so that the axis with the most communication has the fastest links."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxtrain.base.arguments import kind
from jaxtrain.errors import UserError

# Slowest links first: create_device_mesh keeps neighbours on the last axes, and whole slices apart on the first.
AXES = ("data", "fsdp", "stage", "context", "expert", "tensor")


def make_mesh(
    data: int = 1, fsdp: int = 1, stage: int = 1, context: int = 1, expert: int = 1, tensor: int = 1,
    *, devices: Sequence[jax.Device] | int | None = None,
) -> Mesh | AbstractMesh:
    """Return a mesh of all six axes, in explicit sharding mode.

    One size may be -1: whatever the devices leave. `devices` defaults to all of them, or to the first ones if the sizes
    need fewer; an integer instead gives an abstract mesh of that many devices, for lowering without them.
    """
    sizes = (data, fsdp, stage, context, expert, tensor)
    if isinstance(devices, int) and devices < 1:
        raise UserError("devices", f"{devices} is not a valid number of devices", "give 1 or more")
    if devices is not None and not isinstance(devices, int) and (
            isinstance(devices, str) or not hasattr(devices, "__len__") or not len(devices)):
        what = "an empty list" if hasattr(devices, "__len__") and not len(devices) else kind(devices)
        raise UserError("devices", f"it is {what}, not devices", "give some of jax.devices(), or a number")
    available = devices if isinstance(devices, int) else len(devices if devices is not None else jax.devices())
    sizes = axis_sizes(sizes, available, exact=devices is not None)
    types = (AxisType.Explicit,) * len(AXES)
    if isinstance(devices, int):
        return AbstractMesh(sizes, AXES, axis_types=types)
    used = list(devices if devices is not None else jax.devices())[: math.prod(sizes)]
    return Mesh(_ordered(sizes, used), AXES, axis_types=types)


def training_devices(sampling: int) -> list[jax.Device]:
    """Return all devices but the last ones, of which so many sample for a run (`rl.sampler_devices`)."""
    devices = jax.devices()
    if sampling >= len(devices):
        raise UserError("rl.sampler_devices", f"of {len(devices)} devices, {sampling} leave none that trains",
                        f"give at most {len(devices) - 1}" if devices[1:] else "leave it out")
    return devices[:len(devices) - sampling]


def check_mesh(mesh: object, required: bool = False) -> None:
    """Refuse what is not a mesh of all six axes; None is one to be made, unless one is required."""
    lacking = [axis for axis in AXES if axis not in getattr(mesh, "axis_names", ())]
    if (required or mesh is not None) and lacking:
        raise UserError("mesh", f"{mesh} lacks the axes {', '.join(lacking)}", "make it by jt.make_mesh(...)")


def axis_sizes(sizes: Sequence[int], available: int, exact: bool = True) -> tuple[int, ...]:
    """Return the sizes with the one -1 filled in, checked against the number of devices."""
    for axis, size in zip(AXES, sizes, strict=True):
        if not isinstance(size, int | np.integer) or (size < 1 and size != -1):
            raise UserError(f"mesh.{axis}", f"{size!r} is not a valid axis size", "give a positive number or -1")
    product = math.prod(size for size in sizes if size != -1)
    asked = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True) if size not in (1, -1))
    rest = [f"mesh.{axis}" for axis, size in zip(AXES, sizes, strict=True) if size == -1]
    if len(rest) > 1:
        raise UserError("mesh", f"{' and '.join(rest)} are -1, and only one axis can be",
                        f"give the others a size, such as {rest[0]}=1")
    if -1 in sizes:
        if available % product:
            raise UserError("mesh", f"{asked} does not divide the {available} devices",
                            f"choose sizes whose product divides {available}")
        return tuple(available // product if size == -1 else size for size in sizes)
    if product > available or (exact and product != available):
        raise UserError("mesh", f"{asked or 'every axis 1'} needs {product} devices and there are {available}",
                        "set one axis to -1, or make the product of the axes equal the device count")
    return tuple(sizes)


def with_auto_axes(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Return the same mesh for code that leaves shardings to the compiler."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def _ordered(sizes: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    from jax.experimental import mesh_utils

    slices, by_process = slices_of(devices)
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    between = split_over_slices(sizes, slices)
    within = tuple(size // outer for size, outer in zip(sizes, between, strict=True))
    return mesh_utils.create_hybrid_device_mesh(
        within, between, devices, process_is_granule=by_process, allow_split_physical_axes=True)


def slices_of(devices: Sequence[jax.Device]) -> tuple[int, bool]:
    """Return how many slices, or hosts of GPUs, have fast links inside and slow ones between; and if these are hosts.
    """
    slices, hosts = ({getattr(device, name, 0) for device in devices} for name in ("slice_index", "process_index"))
    if len(slices) > 1 or devices[0].platform != "gpu":
        return len(slices), False
    return len(hosts), True  # NVLink inside a host, the network between


def split_over_slices(sizes: Sequence[int], slices: int) -> tuple[int, ...]:
    """Return how much of each axis crosses the slow network between slices (or hosts), slow axes first."""
    between = []
    for size in sizes:
        between.append(math.gcd(size, slices))
        slices //= between[-1]
    if slices > 1:
        raise UserError("mesh", f"its axes cannot be laid over the slices: a factor of {slices} remains",
                        "make the product of data, fsdp and stage a multiple of the number of slices")
    return tuple(between)
