"""The mesh, the rules and the platform that code is traced for: what `use` sets and layers ask for."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxtrain.sharding.axis_rules import AnyMesh, Rules

_ACTIVE: ContextVar[Rules | None] = ContextVar("rules", default=None)
_PLATFORM: ContextVar[str] = ContextVar("platform", default="")


@contextlib.contextmanager
def use(mesh: AnyMesh, rules: Rules, platform: str = "") -> Iterator[None]:
    """A context in which models are traced for `mesh` under `rules`; outside of it they run eagerly.

    Args:
        platform: the kind of device that an abstract mesh represents, if not the one here; "cuda:9" is a GPU of
            compute capability 9.
    """
    token = _ACTIVE.set(rules)
    kind = _PLATFORM.set(platform_of(mesh, platform))
    try:
        # set_mesh is for concrete meshes; tracing with an abstract one needs no devices.
        with jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh):
            yield
    finally:
        _ACTIVE.reset(token)
        _PLATFORM.reset(kind)


def platform_of(mesh: AnyMesh, platform: str = "") -> str:
    """Return the kind of a mesh's devices, or the given one if it is abstract."""
    return mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else platform


def platform() -> str:
    """Return the kind of device that the code being traced is for, such as "cpu"."""
    return _PLATFORM.get().partition(":")[0] or jax.default_backend()


def compute_capability() -> float:
    """Return the compute capability of the GPU that the code being traced is for; 0.0 if it is unknown or no GPU."""
    kind, _, capability = _PLATFORM.get().partition(":")
    if capability or (kind or jax.default_backend()) != "gpu":
        return float(capability or 0)
    return float(getattr(jax.local_devices()[0], "compute_capability", 0.0))


def current() -> tuple[AbstractMesh, Rules] | None:
    """Return the mesh and rules that the code being traced is for, or None when a model is called eagerly."""
    rules, mesh = _ACTIVE.get(), jax.sharding.get_abstract_mesh()
    return None if rules is None or mesh.empty else (mesh, rules)


def is_explicit(mesh: AnyMesh) -> bool:
    """Return whether shardings are part of types on this mesh."""
    return AxisType.Auto not in mesh.axis_types
