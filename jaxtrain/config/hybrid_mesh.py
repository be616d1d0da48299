"""The mesh that `mesh=hsdp` means: fully sharded data parallelism within a node, data parallelism across nodes."""

import contextlib
import math
from dataclasses import replace

from jaxtrain.config.schema import AXES, Config
from jaxtrain.errors import UserError


def with_hybrid_mesh(config: Config, devices: int, node: int) -> Config:
    """Return the config with the sizes that `mesh=hsdp` means for this many devices, `node` of them in a node each.

    Weights are gathered within a node. Over nodes go the gradients, once a step, and what the optimizer makes of them:
    its state is spread over all devices (`optimizer.zero_stage=2`).
    """
    if not config.mesh.hsdp:
        return config
    node = min(node, devices)
    others = math.prod(getattr(config.mesh, axis) for axis in AXES[2:])
    if devices % node or node % others:
        raise UserError("mesh.hsdp", f"{devices} devices are not whole nodes of {node}" if devices % node else
                        f"the other mesh axes need {others} devices, which does not divide the {node} of a node",
                        "set mesh.data and mesh.fsdp instead")
    sizes = replace(config.mesh, hsdp=False, data=devices // node, fsdp=node // others)
    config = replace(config, mesh=sizes)
    if sizes.data == 1 or config.compression.method not in ("", "exact"):  # others send gradients that are whole
        return config
    config = replace(config, optimizer=replace(config.optimizer, zero_stage=max(2, config.optimizer.zero_stage)))
    if sizes.stage > 1 or config.compression.method or config.model.compares_rows:
        return config
    with contextlib.suppress(UserError):  # of objectives that compare examples of the whole batch, as that model does
        return replace(config, compression=replace(config.compression, method="exact"))
    return config
