"""The update of one layer at a time: of optimizer state that rests in the hosts' memory (`optimizer.offload`) and is
moved to the devices piece by piece each step, or of moments that pass through float32 as whole arrays.

A piece is the state of one layer, or of one parameter outside the layers. Layers go through a loop, because a compiler
that is free to reorder the transfers would fetch all of them at once.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import optax

from jaxtrain.base.annotations import PyTree
from jaxtrain.config import part_tables
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.run import Extension, Parts
from jaxtrain.run.validation import Refusal
from jaxtrain.sharding.axis_rules import Axes
from jaxtrain.sharding.host_memory import HOST, fetched
from jaxtrain.train_step import optimizers
from jaxtrain.train_step.hooks import MakeUpdate, Update
from jaxtrain.train_step.state import Layout


@dataclass(frozen=True)
class UpdateByLayer(Extension):
    """The config's optimizer, made for each layer by itself."""

    parts: Parts

    refusals = (
        Refusal("optimizer.offload", "an offloaded optimizer and a pipeline",
                lambda a: a.config.optimizer.offload and a.mesh.shape["stage"] > 1,
                lambda a: f"layers are fetched one by one, and mesh.stage={a.mesh.shape['stage']} has some on every "
                          "stage",
                lambda a: "use mesh.fsdp in place of mesh.stage",
                {"mesh.stage": 2, "optimizer.offload": True}, {"optimizer.offload": False}),
    )

    @classmethod
    def layout_options(cls, config: Config, *, own_optimizer: bool, pipeline: bool) -> Mapping[str, bool]:
        """Return whether the state lies in the hosts' memory, and whether it is laid out to be updated by layers."""
        c = config.optimizer
        if own_optimizer and c.offload:
            raise UserError("optimizer.offload", "only the optimizers that a config names can be updated layer by "
                            "layer", "set it to false, or leave out optimizer=")
        whole = c.moment_dtype == "int8" or (c.moment_dtype == "bfloat16" and getattr(  # of blocks, or of matrices
            part_tables.OPTIMIZERS.load(c.name), "whole_matrices", False))
        return {"offload": c.offload, "layerwise": whole and not (own_optimizer or pipeline)}

    @classmethod
    def of(cls, parts: Parts) -> "UpdateByLayer | None":
        """Return it if the layout is by layers."""
        return cls(parts) if parts.layout.layerwise else None

    def update(self, make: MakeUpdate) -> Update:
        """Return the update that holds one layer's state on the devices at a time."""
        return by_pieces(self.parts.layout, self.parts.updates, self._optimizer, make)

    def _optimizer(self, axes: Axes, updates: PyTree) -> optax.GradientTransformation:
        c = self.parts.config
        assert self.parts.schedule, "an optimizer of one's own cannot be updated by layers"
        made = optimizers.make_optimizer(c.optimizer, self.parts.schedule, axes, c.model.growth,
                                         c.plug_ins.get(c.optimizer.name))
        return optimizers.with_update_rules(made, updates, c.model.experts.bias_rate)


def by_pieces(layout: Layout, updates: PyTree, optimizer: Callable[[Axes, PyTree], optax.GradientTransformation],
              updating: MakeUpdate) -> Update:
    """Return an update of all parameters that holds one piece of the state on the devices at a time.

    Args:
        updates: the name of each parameter's own update rule, or "".
        optimizer: makes the optimizer for parameters with given logical names and update rules. It must not combine
            different parameters.
        updating: makes the update of a part, from its optimizer and the shardings of its parameters and their state.
    """
    where, homes = (_flat(tree) for tree in (layout.state.params, layout.state.opt_state))
    names = dict(zip(where, jax.tree.structure(layout.state.params).flatten_up_to(layout.axes), strict=True))
    rules = dict(zip(where, jax.tree.leaves(updates), strict=True))
    stacks = defaultdict(list)  # stacks of layers, of which a model may have several
    for path in where:
        if (names[path] or ("",))[0] == "layers":
            stacks[path.partition("]")[0]].append(path)
    stacked = {path for paths in stacks.values() for path in paths}

    def owner(key):
        """Return the parameter of a part of the state; the end of a path may be that of another one."""
        return max((path for path in where if key.endswith(path)), key=len, default="")

    def update(params, opt_state, grads, factors, taken):
        flat, state, slopes, factors = _flat(params), _flat(opt_state), _flat(grads), _flat(factors)
        after = dict(state)

        def piece(paths, params, state, slopes):
            """Return new parameters and state of these paths."""
            part = optimizer(*(_nested({path: of[path] for path in paths}) for of in (names, rules)))
            own = _nested({path: params[path] for path in paths})
            keys, treedef = _keys(jax.eval_shape(part.init, own))  # named as in the whole tree
            here = treedef.unflatten([fetched(state[key]) for key in keys])
            places = (_nested({path: where[path] for path in paths}), treedef.unflatten([homes[key] for key in keys]))
            slope, factor = (_nested({path: of[path] for path in paths}) for of in (slopes, factors))
            new, here = updating(part, places)(own, here, slope, factor, taken)
            back = [jax.device_put(x, jax.memory.Space.Host) if homes[key].memory_kind == HOST else x
                    for key, x in zip(keys, jax.tree.leaves(here), strict=True)]
            return _flat(new), dict(zip(keys, back, strict=True))

        for path in [path for path in where if path not in stacked]:
            new, back = piece([path], flat, state, slopes)
            flat |= new
            after |= back
        # Those of no parameter, such as the number of updates: each piece makes the same of them.
        shared = [key for key in state if not owner(key) and not key.endswith(".first_layer")]
        for paths in stacks.values():
            theirs = [key for key in state if owner(key) in paths]

            def one(i, carry, paths=paths):
                *carry, _ = carry
                mine = [{key: jax.lax.dynamic_slice_in_dim(x, i, 1) for key, x in tree.items()}
                        for tree in (*carry, {path: slopes[path] for path in paths})]
                at = {key: i for key in state if key.endswith(".first_layer")}  # RoundedState: which layer it is
                new, back = piece(paths, mine[0], state | mine[1] | at, mine[2])
                stacks = ({key: jax.lax.dynamic_update_slice_in_dim(x, layer[key], i, 0) for key, x in tree.items()}
                          for tree, layer in zip(carry, (new, back), strict=True))
                return *stacks, {key: back[key] for key in shared}

            new, back, advanced = jax.lax.fori_loop(0, flat[paths[0]].shape[0], one, (
                {path: flat[path] for path in paths}, {key: state[key] for key in theirs},
                {key: state[key] for key in shared}))
            flat |= new
            after |= back | advanced
        return (jax.tree.unflatten(jax.tree.structure(params), flat.values()),
                jax.tree.unflatten(jax.tree.structure(opt_state), after.values()))

    return update


def _flat(tree: PyTree) -> dict[str, PyTree]:
    return dict(zip(_keys(tree)[0], jax.tree.leaves(tree), strict=True))


def _keys(tree: PyTree) -> tuple[list[str], jax.tree_util.PyTreeDef]:
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path) for path, _ in flat], treedef


def _nested(leaves: dict[str, PyTree]) -> PyTree:
    """Build nested dicts from leaves by path, such as ['blocks']['norm']."""
    tree: dict = {}
    for path, leaf in leaves.items():
        *parents, last = path[2:-2].split("']['")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree
