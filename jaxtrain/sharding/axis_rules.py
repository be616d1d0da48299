"""Sharding rules: the mesh axes of each logical axis name, and the shardings of parameters that follow.

A parameter has two layouts. At rest it is sharded over everything its rules name (and, under ZeRO-3, over `data`). In
use it is gathered over the axes that shard the tokens: those devices see different tokens and need the same weights.

An axis that a surrounding `shard_map` made manual (as parallel/pipeline does) is not part of any type: there, arrays
are one device's part along it, and the specs made here leave it out.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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
    "state_groups": "model.state_groups",  # of heads that share B and C of a state space model; few, so whole
}


ACTIVATION_NAMES = {
    "batch": "data.global_batch_size", "seq": "data.seq_len", "block_seq": "data.seq_len",
    "act_embed": "model.embed_dim", "act_mlp": "model.mlp_dim", "act_heads": "model.num_heads",
    "act_kv_heads": "model.num_kv_heads", "act_head_dim": "model.head_dim", "act_vocab": "model.vocab_size",
    "act_expert_mlp": "model.expert_mlp_dim", "act_state_groups": "model.state_groups",
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
    spec = at_rest(names, shape, rules, mesh)
    check_divides(names, shape, spec, mesh, what)
    return NamedSharding(mesh, spec)


def at_rest(names: Names, shape: Sequence[int], rules: Rules, mesh: AnyMesh) -> P:
    """Return the spec of a parameter at rest.

    What is gathered to bring the matrices of experts into use splits them by expert where their number divides: then
    the parts that devices hold lie one after the other, and are not transposed behind the gather.
    """
    spec = without_trivial_axes(rules.spec(names), mesh)
    if "experts" not in names:
        return spec
    entries = [axes_of(entry) for entry in spec]
    experts, whole = names.index("experts"), [axes_of(entry) for entry in rules.spec(names, gathered=True)]
    moved = [axis for d, entry in enumerate(entries) for axis in entry if d != experts and axis not in whole[d]]
    by_expert = [*entries[experts], *moved]
    if not moved or len(names) != len(shape) or shape[experts] % math.prod(mesh.shape[axis] for axis in by_expert):
        return spec
    return P(*(_entry(tuple(by_expert) if d == experts else tuple(axis for axis in entry if axis not in moved))
               for d, entry in enumerate(entries)))


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
