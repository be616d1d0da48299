"""Check whether activations grow with width: the coordinate check of muP.

    jaxtrain coordinates --config=FILE --widths=64,128,256,512
    jaxtrain coordinates --config=FILE --config.model.mup_base.embed_dim=64 --config.model.mup_base.num_heads=4

Trains the config for some steps at several widths, on one device and at a constant learning rate, and prints how large
the activations of each layer are (the mean of their absolute values, on one batch) and how much they have changed
since the start. A size that grows as width to the power of s has the slope s. For one learning rate to suit all
widths, no slope of a change may be far above 0.

Exit status 0; 1: something grows with width; 2: a user error, reported in one line.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonObject, PyTree
from jaxtrain.config.schema import AXES
from jaxtrain.errors import UserError
from jaxtrain.flags import add_config, command, need_config, overrides_of, parser_of

GROWS = 0.4  # the slope from which an activation is said to grow; without muP they are 0.5 and more
WIDTHS = ("mlp_dim", "expert_mlp_dim", "q_rank", "kv_rank")  # of the model, beside embed_dim and its heads
Sizes = dict[str, dict[str, float]]  # "size" and "change" of each activation


@command()
def main(argv: list[str] | None) -> None:
    """Measure, print the table, and exit with status 1 if something grows."""
    flags, words = parser().parse_known_args(argv)
    overrides = overrides_of(words, vars(flags))
    need_config(flags)
    if flags.steps < 1:
        raise UserError("--steps", f"{flags.steps} is too few", "give 1 or more")
    try:
        widths = sorted({int(word) for word in flags.widths.split(",")})
    except ValueError:
        raise UserError("--widths", f"{flags.widths!r} are not widths", "write 64,128,256") from None
    if len(widths) < 2 or widths[0] < 1:
        raise UserError("--widths", f"{flags.widths!r} are not two widths or more", "write 64,128,256")
    for name in ("json", "output"):
        if (path := getattr(flags, name)) and not Path(path).absolute().parent.is_dir():
            raise UserError(f"--{name}", f"there is no folder {Path(path).parent}", "make it first")
    from jaxtrain.config.load import load_config  # imports JAX, for which --help does not wait

    load_config(flags.config, overrides)  # reports mistakes in it
    configs = [load_config(flags.config, overrides | wider(load_config(flags.config, overrides), width, flags.grow))
               for width in widths]
    found = {width: measured(config, flags.steps) for width, config in zip(widths, configs, strict=True)}
    slopes = slopes_of(found)
    growing = [name for name, both in slopes.items() if both["change"] > GROWS]
    if flags.json:
        record = {"config": flags.config, "steps": flags.steps, "mup_base": configs[0].model.mup_base, "sizes": found,
                  "slopes": slopes, "growing": growing}
        Path(flags.json).write_text(json.dumps(record, indent=1) + "\n")
    if flags.output:
        Path(flags.output).write_text(page(found, flags.config, flags.steps))
    print(table(found, slopes, flags.steps))
    if growing:
        raise SystemExit(1)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("coordinates", __doc__)
    add_config(made)
    made.add_argument("--widths", default="64,128,256,512",
                      help="values of model.embed_dim; other widths grow in proportion")
    made.add_argument("--steps", type=int, default=4, help="number of training steps; default: 4")
    made.add_argument("--grow", choices=("heads", "head_dim"), default="heads",
                      help="whether wider models have more attention heads or wider ones; default: heads")
    made.add_argument("--json", metavar="FILE", help="also write all numbers to this file")
    made.add_argument("--output", metavar="FILE", help="also write a page with charts")
    return made


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
    found["logits"] = jnp.einsum("btd,dv->btv", model.finish(x), model.head(), preferred_element_type=jnp.float32)
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


if __name__ == "__main__":
    sys.exit(main())
