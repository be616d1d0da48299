"""Checks that sharding rules, mesh and model agree, made before tracing; errors name the config key."""

import math

import jax

from jaxtrain.config.remat_policies import PRESETS, STATES, policies
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError, nearest
from jaxtrain.sharding import axis_rules
from jaxtrain.sharding.axis_rules import AnyMesh, Axes, Rules


def activations_divide(config: Config, rules: Rules, mesh: AnyMesh) -> None:
    """Check that activation sizes are divisible by the mesh axes that shard them."""
    c = config.model
    sizes = {"seq": config.data.seq_len, "block_seq": config.data.seq_len, "act_embed": c.embed_dim,
             "act_mlp": c.mlp_dim, "act_heads": c.num_heads, "act_kv_heads": c.num_kv_heads,
             "act_expert_mlp": c.experts.mlp_dim,
             "act_head_dim": c.head_dim, "act_vocab": c.vocabulary}
    for name, length in sizes.items():
        spec = axis_rules.without_trivial_axes(rules.spec((name,)), mesh)
        axis_rules.check_divides((name,), (length,), spec, mesh, "an activation")
    context = axis_rules.shards(rules["seq"], mesh)
    for key, length, what, looks_back in c.other_rows(config.data.seq_len):
        cut = 2 * context if looks_back and context > 1 else context
        parts = math.lcm(axis_rules.shards(rules["block_seq"], mesh), cut)
        if length % parts:
            raise UserError(key, f"the {length} {what} in {parts} parts: that does not divide over mesh axes context "
                            "and tensor", f"make their number a multiple of {parts}, or change the mesh")


def agree(config: Config, rules: Rules) -> None:
    """Check that a matmul's weight and result are split alike, and that nothing is split that no model supports."""
    def split(name):
        return [axis for axis in rules[name] if axis not in rules.tokens]
    for name, axes in rules.table.items():
        if "stage" in axes and name != "layers":
            raise UserError(f"mesh.overrides.{name}", "nothing but layers is split over stages", "use another axis")
        if name.startswith("act_") and (twice := [axis for axis in axes if axis in rules.tokens]):
            raise UserError(f"mesh.overrides.{name}", f"{twice[0]} splits tokens already", "use tensor or none")
    if config.model.experts.num and not set(rules["experts"]) <= set(rules.batch):
        raise UserError("mesh.overrides.batch", f"it leaves out {'+'.join(rules['experts'])}, and devices that hold "
                        "different experts need examples of their own", "add it, or set mesh.overrides.experts=none")
    for weight in ("vocab", "mlp", "heads", "kv_heads", "expert_mlp", "state_groups"):
        if split(weight) != split(f"act_{weight}"):
            raise UserError(f"mesh.overrides.{weight}", f"it maps onto {'+'.join(split(weight)) or 'none'} and "
                            f"act_{weight} onto {'+'.join(split(f'act_{weight}')) or 'none'}",
                            "map both in the same way")
    for name, axis in (("seq", "context"), ("layers", "stage"), ("experts", "expert")):
        if rules[name] not in ((), (axis,)):
            raise UserError(f"mesh.overrides.{name}", f"it cannot be split over {'+'.join(rules[name])}",
                            f"use none or {axis}")
    for name in ("act_embed", "act_head_dim", "every_layer"):
        if rules[name]:
            raise UserError(f"mesh.overrides.{name}", f"no model splits it over {'+'.join(rules[name])}", "use none")
    for name in ("embed", "norm", "head_dim", "positions", "expert_embed", "rank", "latent", "router",
                 "router_bias", "ahead", "lora"):
        if split(name):
            raise UserError(f"mesh.overrides.{name}", f"no model splits it over {'+'.join(split(name))}, which splits "
                            "no tokens", "use none or an axis of the batch or the sequence")


def are_used(config: Config, axes: Axes) -> None:
    """Check that the model has every dimension that an overridden rule or a policy of rematerialization names."""
    used = set(axis_rules.ACTIVATION_NAMES)
    for names in jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple)):
        used.update(names)
    kept = {name for policy, _ in policies(config.train.remat, config.model.stacked_layers)
            for name in (*policy.names, *policy.hosted)}
    states = {STATES} if config.model.state_flops else set()
    if unknown := sorted(kept - used - states - {"attention", "dots"}):
        raise UserError("train.remat", f"unknown policy {unknown[0]!r}; it is neither a preset nor an axis of model "
                        f"{config.model.name!r}",
                        nearest(unknown[0], used.difference(axis_rules.ACTIVATION_NAMES).union(PRESETS, states)))
    for name in config.mesh.overrides:
        if name not in used:
            raise UserError(f"mesh.overrides.{name}", f"model {config.model.name!r} has no such axis",
                            "remove the rule")
