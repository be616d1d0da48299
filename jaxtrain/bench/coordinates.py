"""The coordinate check of muP: whether the activations of a config grow with its width."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.base.annotations import JsonObject, PyTree
from jaxtrain.config.schema import AXES
from jaxtrain.errors import UserError

GROWS = 0.4  # the slope from which an activation is said to grow; without muP they are 0.5 and more
WIDTHS = ("mlp_dim", "expert_mlp_dim", "q_rank", "kv_rank")  # of the model, beside embed_dim and its heads
Sizes = dict[str, dict[str, float]]  # "size" and "change" of each activation


def wider(config: Any, width: int, grow: str = "heads") -> JsonObject:
    """Return the keys of a config of this width on one device, whose other widths are in proportion."""
    model = config.model
    keys = ("num_heads", "num_kv_heads") if grow == "heads" else [
        key for key in ("head_dim", "rope_head_dim", "value_head_dim") if getattr(model, key, 0)]
    kept = {"head_dim", "num_heads", "num_kv_heads"}.difference(keys)
    grown = {"embed_dim": width}
    for key in (*keys, *(key for key in WIDTHS if getattr(model, key, 0))):
        size = getattr(model, key) * width / model.embed_dim
        if size % 1:
            raise UserError("--widths", f"{width} makes model.{key}={getattr(model, key)} into {size:g}",
                            f"give multiples of model.embed_dim={model.embed_dim}, or a config that divides")
        grown[key] = int(size)
    one = dict.fromkeys((f"mesh.{axis}" for axis in AXES), 1)
    return {f"model.{key}": size for key, size in grown.items()} | {
        f"model.{key}": getattr(model, key) for key in kept} | one | {
            "train.remat": "none", "mesh.auto": False, "optimizer.warmup_steps": 0, "optimizer.schedule": "constant"}


def measured(config: Any, steps: int) -> dict[str, Sizes]:
    """Train some steps; return the sizes of all activations before the first step and after each ("0", "1", ...)."""
    import jax

    import jaxtrain as jt
    from jaxtrain.train_step import given_params

    run = jt.build(config, devices=jax.devices()[:1])
    state, batch = run.init(), jax.device_get(run.batch(0))
    model = run.model
    assert model is not None
    look = jax.jit(lambda params, batch: activations(model.merge(run.sharded.cast(params)), batch))
    found, first = {}, {}
    for step in range(steps + 1):
        seen = jax.device_get(look(given_params.on_one_device(state.all_params), batch))
        first = first or seen
        found[str(step)] = {name: {"size": float(abs(x).mean()), "change": float(abs(x - first[name]).mean())}
                            for name, x in seen.items()}
        state, _ = run.step(state, run.batch(step))
    return found


def activations(model: Any, batch: Any) -> dict[str, PyTree]:
    """Return the activations of a model, layer by layer: what attention and MLP add, what is between them, logits."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    segments, positions = batch["segments"], batch["positions"]
    x = model.begin(batch["tokens"], positions)
    found, layers = {"embeddings": x}, 0
    angles = model.rotary.angles(positions) if model.rotary is not None else None
    for stack in filter(None, (getattr(model, name) for name in model.STACKS)):
        graphdef, weights = nnx.split(stack.layer)
        for i in range(stack.num_layers):
            layer = nnx.merge(graphdef, jax.tree.map(lambda a, i=i: a[i], weights))
            blocks = [node for _, node in nnx.iter_graph(layer) if hasattr(node, "attention") and hasattr(node, "mlp")]
            for block in blocks:
                for part in ("attention", "mlp"):
                    _watch(getattr(block, part), lambda y, name=f"layer {layers} {part}": found.update({name: y}))
                _watch(block, lambda y, name=f"layer {layers} residual": found.update({name: y}))
                layers += 1
            x, _ = layer(x, segments, angles, *((jnp.int32(i),) if stack.numbered else ()))
    found["logits"] = model.logits(model.finish(x))
    return {name: y.astype(jnp.float32) for name, y in found.items()}


def _watch(node: Any, record: Callable[[Any], Any]) -> None:
    """Call `record` with what a module returns, each time that it is called."""
    kind = type(node)

    def call(self, *args, **keys):
        y = kind.__call__(self, *args, **keys)
        record(y[0] if isinstance(y, tuple) else y)
        return y
    node.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def slopes_of(found: dict[int, dict[str, Sizes]]) -> dict[str, dict[str, float]]:
    """Return the power of width with which each activation goes after the last step: of its size and of its change."""
    last = {width: by_step[max(by_step, key=int)] for width, by_step in found.items()}
    names = next(iter(last.values()))
    return {name: {what: _slope([(width, sizes[name][what]) for width, sizes in last.items()])
                   for what in ("size", "change")} for name in names}


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the straight line through logarithms, by least squares; 0 where something is 0."""
    if any(not y > 0 or not math.isfinite(y) for _, y in points):
        return math.inf if any(not math.isfinite(y) for _, y in points) else 0.0
    xs, ys = ([math.log(point[i]) for point in points] for i in (0, 1))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def table(found: dict[int, dict[str, Sizes]], slopes: dict[str, dict[str, float]], steps: int) -> str:
    """Return the changes at all widths, and the slopes, as text."""
    last = {width: by_step[str(steps)] for width, by_step in found.items()}
    lines = [f"change after {steps} step{'s' * (steps > 1)}, the mean of absolute values, by model.embed_dim:",
             f"{'':<20}{''.join(f'{width:>10}' for width in last)}{'slope':>8}{'slope of size':>15}"]
    for name, both in slopes.items():
        changes = "".join(f"{sizes[name]['change']:>10.3g}" for sizes in last.values())
        lines.append(f"{name:<20}{changes}{both['change']:>8.2f}{both['size']:>15.2f}"
                     + "  grows with width" * (both["change"] > GROWS))
    if not any(both["change"] > GROWS for both in slopes.values()):
        lines.append(f"no slope is above {GROWS}: one learning rate can serve these widths")
    return "\n".join(lines)


def page(found: dict[int, dict[str, Sizes]], config: str, steps: int) -> str:
    """Return the changes after each step drawn over the width, as a page."""
    from jaxtrain.plan.report.log_log import log_log, page_of

    names = next(iter(found.values()))["0"]
    charts = [log_log(name, "model.embed_dim", {
        f"after {step} step{'s' * (step > 1)}": [(width, sizes[str(step)][name]["change"])
                                                 for width, sizes in found.items()]
        for step in sorted({1, steps})}) for name in names]
    return page_of(f"Changes of activations by width: {config}", charts)
