"""Sharding rules: map logical axis names to mesh axes and shardings, the only place where the two meet.

A parameter has two layouts. At rest it is sharded over everything its rules name (and, under ZeRO-3, over `data`). In
use it is gathered over the axes that shard the tokens: those devices see different tokens and need the same weights.

An axis that a surrounding `shard_map` made manual (as parallel/pipeline does) is not part of any type: there, arrays
are one device's part along it, and the specs made here leave it out.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree
from jaxtrain.errors import UserError, nearest

Names = tuple[str | None, ...]
AnyMesh = Mesh | AbstractMesh
SpecEntry = str | tuple[str, ...] | None  # of a PartitionSpec: the mesh axes that split a dimension
Axes = Any  # a pytree like the parameters', of the `Names` of each, or None for one that has none
Shardings = Any  # a pytree of the sharding of each array

# What each name means, and the config key that sets its size (for messages).
PARAMETER_NAMES = {
    "layers": "model.num_layers", "vocab": "model.vocab_size", "embed": "model.embed_dim", "mlp": "model.mlp_dim",
    "heads": "model.num_heads", "kv_heads": "model.num_kv_heads", "head_dim": "model.head_dim",
    "positions": "model.max_seq_len", "norm": "model.embed_dim",
    "every_layer": "model.num_layers",  # of a stack that all stages compute, such as a teacher's
    "experts": "model.num_experts", "expert_embed": "model.embed_dim", "expert_mlp": "model.expert_mlp_dim",
    "latent": "model.kv_rank", "rank": "model.kv_rank",  # as an output, and as an input
    "router": "model.num_experts", "router_bias": "model.num_experts",
    "every_expert": "model.num_experts",  # of a bias that is whole on the devices that share experts
    "ahead": "model.embed_dim",  # as an output that is not sharded
    "lora": "lora.rank",
}
ACTIVATION_NAMES = {
    "batch": "data.global_batch_size", "seq": "data.seq_len", "block_seq": "data.seq_len",
    "act_embed": "model.embed_dim", "act_mlp": "model.mlp_dim", "act_heads": "model.num_heads",
    "act_kv_heads": "model.num_kv_heads", "act_head_dim": "model.head_dim", "act_vocab": "model.vocab_size",
    "act_expert_mlp": "model.expert_mlp_dim",
}
CONFIG_KEYS = PARAMETER_NAMES | ACTIVATION_NAMES

# Devices that share experts are otherwise data-parallel: the batch is split over `expert` too.
_DATA: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(CONFIG_KEYS, ()), "layers": ("stage",), "experts": ("expert",),
    "batch": ("data", "fsdp", "expert"), "seq": ("context",), "block_seq": ("context",),
}
_FSDP = _DATA | dict.fromkeys(("embed", "norm"), ("fsdp", "context", "expert")) | dict.fromkeys(
    ("expert_embed", "rank"), ("fsdp", "context"))
_FSDP_TP = _FSDP | {name: ("tensor",) for name in (
    "vocab", "mlp", "heads", "kv_heads", "act_mlp", "act_heads", "act_kv_heads", "act_vocab", "expert_mlp",
    "act_expert_mlp")} | {
    # Between blocks the sequence is split over tensor, so norms and residuals are too.
    "block_seq": ("context", "tensor"),
}
PRESETS = {"data": _DATA, "fsdp": _FSDP, "fsdp_tp": _FSDP_TP}


def _meant(name: str, known: Iterable[str]) -> str:
    """Return the question whether a near name is meant; "" if none is near."""
    near = nearest(str(name), known)
    return f"{near} or " if near.startswith("did") else ""


def on_every_stage(names: Names) -> Names:
    """Return the names of a parameter for a stack that no stage has layers of."""
    return tuple("every_layer" if name == "layers" else name for name in names)


@dataclass(frozen=True)
class Rules:
    """An immutable mapping from logical names to the mesh axes that shard them."""

    table: Mapping[str, tuple[str, ...]]

    def __getitem__(self, name: str) -> tuple[str, ...]:
        if name not in self.table:
            raise UserError(f"logical axis {name!r}", "no rule sets which mesh axis splits it",
                            f"{_meant(name, self.table)}give it a rule, as in jt.rules(\"fsdp_tp\", {name}=None) or "
                            f"mesh.overrides.{name}=tensor")
        return self.table[name]

    @property
    def batch(self) -> tuple[str, ...]:
        """The mesh axes over which examples are sharded."""
        return self["batch"]

    @property
    def tokens(self) -> tuple[str, ...]:
        """The mesh axes over which tokens are sharded: examples, and the parts of a long one."""
        return self["batch"] + self["seq"]

    def spec(self, names: Names, *, gathered: bool = False) -> P:
        """Return the partition spec of an array with these logical names, or with `gathered` that of a weight in use.
        """
        axes = [self[name] if name else () for name in names]
        flat = [axis for dim in axes for axis in dim]
        if len(set(flat)) != len(flat):
            twice = next(axis for axis in flat if flat.count(axis) > 1)
            both = [name for name, dim in zip(names, axes, strict=True) if twice in dim]
            raise UserError(f"rules for {both}", f"both map onto mesh axis {twice!r} in one array {names}",
                            "map one of them elsewhere or to none")
        if gathered:
            axes = [dim if name == "experts" else tuple(axis for axis in dim if axis not in self.tokens)
                    for name, dim in zip(names, axes, strict=True)]
        return P(*map(_entry, axes))


def rules(preset: str = "fsdp_tp", **overrides: str | Sequence[str] | None) -> Rules:
    """Return a preset (`data`, `fsdp`, `fsdp_tp`) with overrides: `rules("fsdp", mlp="tensor", embed=None)`.

    New names may be added, for the axes of your own modules.
    """
    if not isinstance(preset, str) or preset not in PRESETS:
        raise UserError("mesh.rules", f"{preset!r} is not a preset", nearest(f"{preset}", PRESETS))
    return Rules({**PRESETS[preset], **{name: _axes(name, value) for name, value in overrides.items()}})


def _axes(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    from jaxtrain.sharding.mesh import AXES

    if value is None or value in ("none", ""):
        return ()
    axes = tuple(value.split("+")) if isinstance(value, str) else tuple(value) if isinstance(
        value, Sequence) else (value,)
    for axis in axes:
        if axis not in AXES:
            raise UserError(f"mesh.overrides.{name}", f"{axis!r} is not a mesh axis", nearest(f"{axis}", AXES))
    return axes


def axes_of(entry: SpecEntry) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a spec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _entry(axes: tuple[str, ...]) -> SpecEntry:
    return axes[0] if len(axes) == 1 else axes or None


def without_trivial_axes(spec: P, mesh: AnyMesh) -> P:
    """Return the same layout without axes of size 1 and manual axes, so that equal layouts have equal types."""
    seen = {axis for axis in free_axes(mesh) if mesh.shape[axis] > 1}
    return P(*(_entry(tuple(axis for axis in axes_of(entry) if axis in seen)) for entry in spec))


def free_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Return the axes that no surrounding `shard_map` has made manual."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in kinds if kind != AxisType.Manual)


def peak(x: jax.Array) -> jax.Array:
    """Return the largest magnitude in an array, on all devices; inside a pipeline on those of the stage."""
    mesh = jax.sharding.get_abstract_mesh()
    inside = set(mesh.axis_names) - {"stage", *free_axes(mesh)}  # a surrounding shard_map
    axes = tuple(axis for axis in mesh.axis_names if axis in inside and mesh.shape[axis] > 1)
    found = jnp.max(jnp.abs(x))
    # In float32, which holds every value that x has: of 16-bit ones, XLA for CPUs aborts in its AllReducePromotion.
    return jax.lax.pmax(found.astype(jnp.float32), axes).astype(x.dtype) if axes else found


def shards(entry: SpecEntry, mesh: AnyMesh) -> int:
    """Return into how many pieces one entry of a spec cuts its dimension."""
    return math.prod(mesh.shape[axis] for axis in axes_of(entry))


def check_divides(names: Names, shape: Sequence[int], spec: P, mesh: AnyMesh, what: str) -> None:
    """Refuse a dimension that its mesh axes do not divide, rather than silently replicate it."""
    if len(names) != len(shape):
        raise UserError(what, f"it has {len(shape)} dimensions and {len(names)} logical names {names}",
                        "name every dimension")
    for name, size, entry in zip(names, shape, spec, strict=True):
        if size % shards(entry, mesh):
            key = CONFIG_KEYS.get(name or "", what)
            over = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes_of(entry))
            weight = (name or "").removeprefix("act_")
            whole = (f", or leave it whole by mesh.overrides.{weight}=none and mesh.overrides.act_{weight}=none"
                     if weight in ("vocab", "kv_heads") else "")
            raise UserError(key, f"{size} does not divide over mesh axes {over} (axis {name!r} of {what})",
                            f"make it a multiple of {shards(entry, mesh)} or change the mesh{whole}")


def parameter_sharding(names: Names, shape: Sequence[int], rules: Rules, mesh: AnyMesh, what: str) -> NamedSharding:
    """Return the sharding of a parameter at rest."""
    spec = without_trivial_axes(rules.spec(names), mesh)
    check_divides(names, shape, spec, mesh, what)
    return NamedSharding(mesh, spec)


def spread(sharding: NamedSharding, shape: Sequence[int], axis: str = "data", first: int = 0) -> NamedSharding:
    """Return the sharding with `axis` added to the best dimension: ZeRO for an array that `axis` replicates.

    Dimensions before `first` are left as they are.
    """
    mesh, size = sharding.mesh, sharding.mesh.shape[axis]
    entries = [axes_of(entry) for entry in sharding.spec]
    entries += [()] * (len(shape) - len(entries))
    if size == 1 or any(axis in entry for entry in entries):
        return sharding
    fits = [d for d in range(first, len(shape)) if shape[d] % (size * shards(entries[d], mesh)) == 0]
    if not fits:
        return sharding  # a few scalars and odd vectors; report() lists them
    # Prefer a dimension that is gathered anyway, then the largest: one collective, contiguous pieces.
    best = max(fits, key=lambda d: ("fsdp" in entries[d], shape[d]))
    entries[best] = (*entries[best], axis)
    return NamedSharding(mesh, P(*map(_entry, entries)))


# ---------------------------------------------------------------------------------------------------- inside models

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


def activation_spec(*names: str | None) -> P | None:
    """Return the spec of an activation here, or None without an explicit mesh."""
    here = current()
    if here is None or not is_explicit(here[0]):
        return None
    return without_trivial_axes(here[1].spec(names), here[0])


def split_by(name: str) -> SpecEntry:
    """Return the spec entry of a dimension with this name here, or None if nothing splits it."""
    return (activation_spec(name) or (None,))[0]


def axes_over(name: str) -> tuple[str, ...]:
    """Return the mesh axes that split a dimension with this name here, manual ones included.

    For collectives inside a `manual_region`.
    """
    here = current()
    if here is None or not is_explicit(here[0]):
        return ()
    mesh, rules = here
    return tuple(axis for axis in rules[name] if mesh.shape[axis] > 1)


def gathered_spec(*names: str | None) -> P:
    """Return the spec of a weight that `gather` has brought into use here."""
    here = current()
    assert here is not None
    return without_trivial_axes(here[1].spec(names, gathered=True), here[0])


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Lay `x` out by its logical names: a reshard on an explicit mesh, a constraint on an auto one."""
    here = current()
    if here is None:
        return x
    mesh, rules = here
    spec = without_trivial_axes(rules.spec(names), mesh)
    check_divides(names, x.shape, spec, mesh, "an activation")
    return jax.reshard(x, spec) if is_explicit(mesh) else jax.lax.with_sharding_constraint(x, spec)


def enter(x: jax.Array, names: Names, shared_by: tuple[str, ...]) -> jax.Array:
    """Apply `constrain(x, *names)` to an activation shared by several matmuls, with output dimensions `shared_by`.

    Where all of those are split, each device has a part of every matmul's gradient. The type records this (`reduced`),
    and one collective then sums what each matmul would otherwise sum separately.
    """
    here = current()
    if here is None or AxisType.Auto in here[0].axis_types or AxisType.Manual in here[0].axis_types:
        return constrain(x, *names)  # among manual axes JAX 0.10 cannot differentiate such a type
    spec, splits = activation_spec(*names) or P(), {axes_of(split_by(name)) for name in shared_by}
    return jax.reshard(x, P(*spec, reduced=set(*splits)) if len(splits) == 1 else spec)


def leave_reduced(x: jax.Array) -> jax.Array:
    """Undo what `enter` records of an activation's gradient, for a product whose output dimension is not split."""
    here = current()
    if here is None or not is_explicit(here[0]) or not (spec := jax.typeof(x).sharding.spec).reduced:
        return x
    return jax.reshard(x, P(*spec.partitions))


def manual_region(f: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
    """Wrap `f` in a `shard_map` over every free axis: it runs on each device's part, with collectives by name."""
    mesh, _ = current() or (jax.sharding.get_abstract_mesh(), None)
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=set(free_axes(mesh)), check_vma=False)


def gather(weight: jax.Array, *names: str | None) -> jax.Array:
    """Bring a weight from its layout at rest to its layout in use (an all-gather, whose transpose reduces)."""
    here = current()
    if here is None or not is_explicit(here[0]):
        return weight
    return jax.reshard(weight, gathered_spec(*names))


def einsum(equation: str, x: jax.Array, weight: jax.Array, names: Names, out: Names,
           bias: jax.Array | None = None) -> jax.Array:
    """Multiply `x` by a weight with logical `names`, add `bias`, and lay the result out as `out`.

    x and the result begin with batch, sequence. Where only the batch is split this is one product of two matrices,
    [batch x sequence, ...] by [..., ...]: XLA on CPU is up to 1.2 times as fast with it as with separate dimensions,
    whose gradients need transposes.
    """
    if any(map(_splits_a_product, (*names, *out[1:]))):
        y = jnp.einsum(equation, x, gather(weight, *names), out_sharding=activation_spec(*out))
        return with_bias(y, bias)
    left, right = equation.split("->")[0].split(",")
    summed = sum(letter in right for letter in left)  # dimensions: last of x, first of the weight
    assert left[2:] == right[:summed] and equation.endswith(f"->{left[:2]}{right[summed:]}"), equation
    matrix, new = _matrix(weight, summed, names), weight.shape[summed:]

    def product(x):
        y = x.reshape(-1, len(matrix)) @ matrix
        return with_bias(y, None if bias is None else bias.reshape(-1)).reshape(-1, *new)

    return by_row(product, x)


def with_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Add a bias whose gradient is then summed in float32, whatever y is."""
    return y if bias is None else (y + bias.astype(jnp.float32)).astype(y.dtype)


def _matrix(weight: jax.Array, summed: int, names: Names) -> jax.Array:
    """Bring a weight into use as a matrix, of its first `summed` dimensions by the others.

    Where possible it becomes a matrix before it is gathered: then the gradient is summed in the shape that is split,
    by a reduce-scatter, where XLA would otherwise sum it on all devices and take a slice.
    """
    parts = slice(None, summed), slice(summed, None)
    shape = [math.prod(weight.shape[part]) for part in parts]
    here = current()
    if here is None or not is_explicit(here[0]):
        return weight.reshape(shape)
    at_rest = jax.typeof(weight).sharding.spec
    splits = [[(math.prod(weight.shape[part][:d]), entry) for d, entry in enumerate(at_rest[part]) if entry]
              for part in parts]
    if any(gathered_spec(*names)) or any(len(split) > 1 or split[0][0] > 1 for split in splits if split):
        return gather(weight, *names).reshape(shape)
    merged = jax.lax.reshape(weight, shape, out_sharding=P(*(split[0][1] if split else None for split in splits)))
    return jax.reshard(merged, P(None, None))


def _splits_a_product(name: str | None) -> bool:
    """Return whether a dimension of this name is split here over an axis that does not split the batch."""
    here = current()
    return here is not None and name is not None and any(
        axis not in here[1].batch for axis in axes_of(split_by(name)))


def by_row(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply `f` to x with batch and sequence merged, which is faster, or to x itself if the sequence is split."""
    here = current()
    if here is None or not is_explicit(here[0]):
        y = f(x.reshape(-1, *x.shape[2:]))
        return y.reshape(*x.shape[:2], *y.shape[1:])
    spec = jax.typeof(x).sharding.spec
    if any(spec[1:]) or spec.reduced:
        return f(x)
    y = f(jax.lax.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]), out_sharding=P(spec[0], *spec[2:])))
    return jax.lax.reshape(y, (*x.shape[:2], *y.shape[1:]), out_sharding=P(spec[0], *[None] * y.ndim))


def micro_batches(x: jax.Array, parts: int) -> jax.Array:
    """Reshape [B, ...] to [parts, B / parts, ...], part a being rows a, a + parts, ..., so each device splits its own.
    """
    shape = (x.shape[0] // parts, parts, *x.shape[1:])
    here = current()
    if here is None or not is_explicit(here[0]):
        return jnp.moveaxis(x.reshape(shape), 1, 0)
    batch, *rest = jax.typeof(x).sharding.spec
    return jnp.moveaxis(jax.lax.reshape(x, shape, out_sharding=P(batch, None, *rest)), 1, 0)
