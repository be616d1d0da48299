"""Any combination, same numbers: configs drawn at random, each compared with a plain model on one device in float32.

    python -m tests.composition.fuzz --cases=100 --seed=7 --devices=16

draws meshes of all six axes, rules, schedules, strategies, rematerialisation, accumulation, ZeRO stages, precisions,
offloading, frozen parameters, packing, model families, tied and untied tables, scanned and unrolled layers; training,
and of some evaluation. What `jt.build` refuses is counted apart; a refusal must be one that jaxtrain.validation
documents. A case fails where the loss, the gradient's norm or any leaf of the gradient is off, and is printed as the
config that shows it again.
"""

import argparse
import collections
import functools
import json
import os
import random
import sys
import time
from typing import Any

AXES = ("data", "fsdp", "stage", "context", "expert", "tensor")
ROWS, SEQ = 32, 32
# Relative to the largest element of a leaf; coarser dtypes are compared with float32 too.
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.06, "float16": 0.02}
# Rules of one's own. Where an axis no longer splits tokens, nothing may rest on it either: hence the preset.
OVERRIDES = [{f"mesh.overrides.{name}": axes for name, axes in table.items()} | more for table, more in (
    ({"block_seq": "context"}, {}),
    ({"vocab": "none", "act_vocab": "none"}, {}),
    ({"mlp": "none", "act_mlp": "none"}, {}),
    ({"batch": "data+fsdp"}, {"mesh.rules": "data"}),
    ({"seq": "none", "block_seq": "none"}, {"mesh.rules": "data"}),
    ({"seq": "none", "block_seq": "none", "batch": "data+context+fsdp+expert"}, {"mesh.rules": "data"}),
)]
DENSE = ("gpt2", "gpt2", "llama", "qwen2", "qwen3", "gpt2_untied", "gemma3")
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")


def draw(rng: random.Random, devices: int) -> dict[str, Any]:
    """One config, as keys like those of a command line."""
    def often(usual, *others):
        return usual if rng.random() < 0.5 else rng.choice(others)

    sizes = dict.fromkeys(AXES, 1)
    left = devices
    while left > 1:
        sizes[rng.choice(AXES)] *= 2
        left //= 2
    family = rng.choice(DENSE if rng.random() < 0.55 else EXPERTS)
    schedule = rng.choice(("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"))
    keys = {f"mesh.{axis}": size for axis, size in sizes.items()} | {
        "family": family, "packing": rng.random() < 0.8, "data.global_batch_size": ROWS, "data.seq_len": SEQ,
        "model.max_seq_len": SEQ, "model.num_layers": rng.choice((2, 3, 5)),
        "model.tied_embeddings": rng.random() < 0.5, "model.window": often(0, 7),
        "mesh.context_strategy": rng.choice(("auto", "ring", "gather", "ulysses")),
        "mesh.rules": often("fsdp_tp", "fsdp_tp", "fsdp") if sizes["tensor"] == 1 else "fsdp_tp",
        "train.remat": often("none", "full", "dots", "attention", "attention_and_dots"),
        "train.accumulation": often(1, 2, 4), "train.unroll": often(1, 0, 2), "train.loss_chunks": often(0, 2),
        "train.z_loss": often(0.0, 1e-3), "train.precision": often("float32", "float32", "bfloat16", "float16"),
        "optimizer.zero_stage": rng.choice((0, 0, 1, 2, 3)),
    }
    if sizes["stage"] > 1:
        keys |= {"pipeline.schedule": schedule, "pipeline.overlap": rng.random() < 0.3,
                 "pipeline.microbatches": often(0, 1, 2, 4),
                 "pipeline.chunks": often(0, 3) if schedule == "interleaved" else 0}
    if family in EXPERTS:
        keys |= {"model.capacity_factor": often(0.0, 0.75, 1.25)}
    if family == "deepseek_v3":
        keys |= {"model.value_head_dim": rng.choice((6, 8)), "model.dense_layers": rng.choice((0, 1))}
    if family in EXPERTS:
        layers = keys["model.num_layers"] - keys.get("model.dense_layers", family == "qwen3_moe")
        keys |= {"model.experts_every": often(1, *(every for every in (2, 3, 4) if layers % every == 0), 1)}
    if family == "gemma3":
        keys |= {"model.window": 7, "model.global_every": rng.choice((2, 3))}
    elif not family.startswith("gpt2"):
        keys |= {"model.mtp_loss_weight": often(0.0, 0.3)}
    if rng.random() < 0.25:  # a width that few axes divide together
        keys |= {"model.embed_dim": 40, "model.head_dim": 8}
    if rng.random() < 0.3:
        keys |= rng.choice(OVERRIDES[:2] if family in EXPERTS else OVERRIDES)
    keys |= {"evaluate": rng.random() < 0.3}
    keys |= {"optimizer.offload": rng.random() < 0.3}
    return keys | {"train.freeze": often([], ["embed/*"], ["blocks/layer/*attention/*", "norm/*"], ["heads"])}


def config_of(keys: dict[str, Any]):
    """The case's config; raises UserError where it is refused."""
    from tests.numerics import reference

    own = ("family", "packing", "evaluate")
    rest = {key.replace(".", "__"): value for key, value in keys.items() if key not in own}
    return reference.tiny(keys["family"], **rest)


def batch_of(packing: bool) -> dict[str, Any]:
    """A batch whose rows hold several segments, or one each."""
    import numpy as np

    from tests.numerics import reference

    batch = reference.batch(0, rows=ROWS, seq=SEQ)
    if not packing:
        batch |= {"segments": np.ones_like(batch["segments"]),
                  "positions": np.broadcast_to(np.arange(SEQ, dtype=np.int32), (ROWS, SEQ)).copy()}
    return batch


@functools.lru_cache(maxsize=32)
def _truth(model: Any, packing: bool, z_loss: float) -> tuple[Any, ...]:
    """Of the plain model: initial parameters, loss, gradient, its norm, and the new biases of routers."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxtrain.models import make_model
    from jaxtrain.train_step.state import Skeleton
    from tests.numerics import reference

    init = jax.jit(lambda key: Skeleton.of(make_model(model, rngs=nnx.Rngs(params=key))).params())
    params = jax.device_get(init.lower(jax.random.key(0)).compile({"xla_backend_optimization_level": 0})(
        jax.random.key(0)))

    def value(params):
        return reference.loss_and_excess(model, params, batch_of(packing), z_loss)

    ((loss, excess), grads) = jax.jit(jax.value_and_grad(value, has_aux=True)).lower(params).compile(
        {"xla_backend_optimization_level": 0})(params)
    bias = jnp.sign(jnp.round(excess, 6)) * -model.router_bias_rate if model.router_bias_rate else None
    return params, *jax.device_get((loss, grads, reference.norm_of(grads), bias))


def check(keys: dict[str, Any]) -> dict[str, float]:
    """Run one step of the case; raises AssertionError where a number is off, UserError where it is refused."""
    import jax
    import numpy as np

    import jaxtrain as jt
    from jaxtrain.sharding import rules as sharding
    from jaxtrain.train_step import partition
    from tests.numerics import reference

    config = config_of(keys)
    devices = int(np.prod([keys[f"mesh.{axis}"] for axis in AXES]))
    run = jt.build(config, devices=jax.devices()[:devices])
    batch, precision = batch_of(keys["packing"]), keys["train.precision"]
    params, loss, grads, norm, bias = _truth(config.model, keys["packing"], config.train.z_loss)
    grads = partition.like(grads, run.layout.axes)  # those of what is trained
    norm = norm if not keys.get("train.freeze") else reference.norm_of(grads)
    state, metrics = reference.compiled(run)(reference.start_from(run, params), run.place(batch))
    metrics = jax.device_get(metrics)

    tolerance = TOLERANCE[precision]
    c = config.optimizer
    off = {what: abs(float(metrics[key]) / float(want) - 1)
           for what, key, want in (("loss", "loss", loss), ("norm", "grad_norm", norm))}
    mu = next(s.mu for s in jax.tree.leaves(state.opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))
    clipped = (1 - c.b1) * min(1, c.clip_norm / float(metrics["grad_norm"]))
    is_none = lambda x: not isinstance(x, (jax.Array, np.ndarray)) and not isinstance(x, dict)  # noqa: E731
    got = jax.tree.map(lambda m, g: g if is_none(m) else np.asarray(m) / clipped, mu, grads, is_leaf=is_none)
    floor = 1e-3 if precision == "float32" else 3e-2
    off["gradient"], leaf = reference.worst(got, grads, floor=floor * float(norm))
    if bias is not None and precision == "float32":
        p = state.all_params
        new = [reference.router(config.model, p)["bias"],
               *(p["ahead"]["block"]["mlp"]["router"]["bias"][None] for _ in range("ahead" in p))]
        off["router bias"] = float(np.abs(np.concatenate(new) - bias).max())
    if keys.get("evaluate"):
        with sharding.use(run.mesh, run.rules):
            lowered = jax.jit(run._eval).lower(run.abstract.all_params, run.abstract_batch)
        at_rest = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), params, run.abstract.all_params)
        total, weight = lowered.compile({"xla_backend_optimization_level": 0})(at_rest, run.place(batch))
        want = jax.jit(lambda p: reference.evaluation(config.model, p, batch))(params)
        off["evaluation"] = abs(float(total) / float(weight) / float(want) - 1)
    assert int(metrics["skipped"]) == 0, "the step was skipped: something was not finite"
    for what, error in off.items():
        limit = tolerance if what == "gradient" or precision == "float32" else tolerance / 5
        assert error < limit, f"{what} is off by {error:.1e}{f', at {leaf}' if what == 'gradient' else ''}"
    return off


def main(argv: list[str] | None = None) -> int:
    """Draw and check; one line of JSON a case. -> how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("cases", 5), ("seed", 0), ("devices", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--case", help="one case to run again: the keys, as printed")
    parser.add_argument("--log", help="a file to append the lines to")
    args = parser.parse_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    import jax

    import jaxtrain as jt
    from jaxtrain.validation import explains

    rng, seen, counts = random.Random(args.seed), set(), collections.Counter()
    while counts["ok"] + counts["failed"] < (1 if args.case else args.cases):
        keys = json.loads(args.case) if args.case else draw(rng, args.devices)
        text = json.dumps(keys, sort_keys=True)
        if text in seen:
            continue
        seen.add(text)
        start, line = time.time(), {"case": keys}
        try:
            line |= {"ok": {what: float(f"{error:.1e}") for what, error in check(keys).items()}}
        except jt.UserError as refusal:
            line |= {"refused" if explains(refusal) else "failed": str(refusal)}
        except AssertionError as error:
            line |= {"failed": str(error) or "an assertion of JAX"}
        except Exception as error:
            line |= {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        counts["failed" if "failed" in line else "refused" if "refused" in line else "ok"] += 1
        line |= {"seconds": round(time.time() - start, 1)}
        if "refused" not in line:
            print(json.dumps(line), flush=True)
        if args.log:
            with open(args.log, "a") as file:
                file.write(json.dumps(line) + "\n")
        jax.clear_caches()
    print(json.dumps(dict(counts) | {"jax": jax.__version__, "devices": args.devices, "seed": args.seed}))
    return counts["failed"]


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
