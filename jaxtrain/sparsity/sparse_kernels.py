"""The choice of kernels that become 2:4 sparse (optimizers/structured_sparsity.py), by the paths of linear layers."""

from fnmatch import fnmatchcase
from typing import Any

from flax import nnx

from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError, nearest
from jaxtrain.models.experts.moe import MATRICES, MoE
from jaxtrain.models.layers import Linear
from jaxtrain.sharding import rules as sharding
from jaxtrain.train_step.optimizers.structured_sparsity import GROUP, Sparsity
from jaxtrain.train_step.state import Layout, Skeleton


def sparsity_of(config: Config, model: Skeleton, params: Any, layout: Layout) -> Sparsity | None:
    """Return what becomes sparse of a model's trained parameters, which may be abstract; None: nothing does."""
    c = config.sparsity
    if not c.targets:
        return None
    known = _kernels(model)
    inputs: dict[str, Any] = {}
    for pattern in c.targets:
        chosen = [path for path in known if fnmatchcase(path, pattern)]
        if not chosen:
            raise UserError("sparsity.targets", f"no linear layer's path matches {pattern!r}", nearest(pattern, known))
        for path in chosen:
            *parents, last = known[path][0].split("/")
            node, leaf, where = inputs, params, layout.state.params
            for key in parents:
                node = node.setdefault(key, {})
                leaf, where = leaf.get(key, {}), where.get(key, {})
            if last not in leaf:
                raise UserError("sparsity.targets", f"{path} is not trained", "leave it out")
            node[last] = known[path][1]
            _check(path, leaf[last].shape, known[path][1], where[last])
    return Sparsity(inputs, c.start, c.every, c.stop or c.start, c.decay)


def _kernels(model: Skeleton) -> dict[str, tuple[str, int]]:
    """Return by path of each linear layer, or matrix of experts, its parameter's path and the dimension of inputs."""
    found = {}
    for names, node in nnx.iter_graph(model.merge(model.params())):
        path = "/".join(map(str, names))
        if isinstance(node, Linear):
            given, weight, _ = node.equation.replace("->", ",").split(",")
            stacked = len(node.kernel.get_value().shape) - len(weight)
            found[path] = f"{path}/kernel", stacked + sum(letter in given for letter in weight) - 1
        elif isinstance(node, MoE):
            found |= {f"{path}/{name}": (f"{path}/{name}", len(getattr(node, name).get_value().shape) - 2)
                      for name in MATRICES}
    return dict(sorted(found.items()))


def _check(path: str, shape: tuple[int, ...], dimension: int, where: Any) -> None:
    """Refuse a kernel whose neighbouring inputs are not together on one device."""
    spec = (*where.spec, *(None,) * (len(shape) - len(where.spec)))
    pieces = sharding.shards(spec[dimension], where.mesh)
    if shape[dimension] // pieces % GROUP:
        over = f", split over {'+'.join(sharding.axes_of(spec[dimension]))}," if pieces > 1 else ""
        raise UserError("sparsity.targets", f"the {shape[dimension]} inputs of {path}{over} are not groups of {GROUP} "
                        f"on {'each device' if pieces > 1 else 'a device'}", "leave it out, or change its size or the "
                        "mesh")
