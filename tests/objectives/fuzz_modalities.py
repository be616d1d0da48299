"""Families that are not decoders of text, with all that they support: drawn, and compared with their plain formulas.

tests/objectives/fuzz.py runs them. Most cases compile one step, and few shapes are drawn of each family, so that most
share a formula that is compiled already.
"""

import dataclasses
import functools
import random
from typing import Any

from tests.composition.fuzz import AXES, OVERRIDES, TOLERANCE, from_moments

ROWS, STEPS = 16, 20  # after so many steps frozen leaves have the same bits
RATE = 1e-3  # decay is a tenth of what a step changes
SHAPES: dict[str, list[dict[str, Any]]] = {
    "events": [dict(num_layers=2), dict(num_layers=1, predict="shop", tied_embeddings=False, time_loss=0.0, window=5),
               dict(num_layers=3, num_kv_heads=8, tied_embeddings=False, window=5)],
    "clips": [dict(num_layers=2), dict(num_layers=1, num_kv_heads=8)],
    "whisper": [dict(num_layers=2, encoder_layers=2), dict(num_layers=1, encoder_layers=3, mask_padding=False),
                dict(num_layers=1, audio_chunk=2, audio_chunks_back=1, ctc_weight=0.0)],
    # Of published models; a class token's norm over random parameters rounds too much in float32 for clip's.
    "siglip": [dict(num_layers=2), dict(num_layers=1, image_layers=1, pooling="mean"), dict(
        num_layers=1, image_size=9, pooling="probe", projections="text", joint_dim=40, image_norm_eps=1e-3)],
    "clip": [dict(num_layers=2), dict(num_layers=1, image_layers=1, pooling="attention")],
    "vision_language": [dict(num_layers=2), dict(num_layers=3, image_layers=1, num_kv_heads=4, tied_embeddings=True)],
    "image_flow": [dict(num_layers=2), dict(num_layers=1)],
}
FAMILIES, CHEAP = tuple(SHAPES), ("events", "clips", "image_flow")  # of one stack, drawn twice as often
BOTH_WAYS = ("clips", "whisper", "siglip", "image_flow")  # families whose encoders are what a kernel computes
WITHOUT_VOCAB = ("clips", "image_flow")
FROZEN = {"events": ["embed/*"], "clips": ["project/*"], "whisper": ["encoder_blocks/*", "first/*", "second/*"],
          "siglip": ["image/*"], "clip": ["text/*"], "vision_language": ["image/*"], "image_flow": ["labels"]}
LOSSY = ({"method": "int8", "block": 64}, {"method": "int4"}, {"method": "top_k", "ratio": 0.25},
         {"method": "random_k", "ratio": 0.25}, {"method": "power_sgd", "rank": 2})


def draw(rng: random.Random, devices: int) -> dict[str, Any]:
    """One config, as keys like those of a command line."""
    def often(usual, *others):
        return usual if rng.random() < 0.5 else rng.choice(others)

    family = rng.choice(FAMILIES + CHEAP)
    sizes, left = dict.fromkeys(AXES, 1), devices
    while left > 1:
        sizes[rng.choice(AXES)] *= 2
        left //= 2
    shape, shards = rng.choice(SHAPES[family]), sizes["data"] * sizes["fsdp"] * sizes["expert"]
    keys = {"family": family, "batch": rng.randrange(2)} | {f"mesh.{axis}": size for axis, size in sizes.items()}
    keys |= {f"model.{key}": value for key, value in shape.items()} | {
        "mesh.rules": often("fsdp_tp", "fsdp_tp", "fsdp") if sizes["tensor"] == 1 else "fsdp_tp",
        "mesh.context_strategy": rng.choice(("auto", "ring", "gather", "ulysses")),
        "train.accumulation": often(1, *(n for n in (1, 2, 4) if ROWS % (n * shards) == 0)),
        "train.unroll": rng.choice((1, 1, 1, 0, 2)),
        "train.precision": often("float32", "float32", "bfloat16", "float16"),
        "train.remat": often("none", *remats(keys, shape)), "train.ema_decay": rng.choice((0.0, 0.0, 0.0, 0.75)),
        "optimizer.zero_stage": often(0, 1, 2, 3), "optimizer.offload": sizes["stage"] == 1 and rng.random() < 0.2,
        "optimizer.name": rng.choice(("adamw",) * 20 + ("muon", "adafactor", "lion", "sgd"))}
    if family not in ("clips", "whisper") and keys["batch"]:
        keys |= {"data.seq_len": 32, "model.max_seq_len": 32}
    if sizes["stage"] > 1:
        keys |= {"pipeline.schedule": rng.choice(("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")),
                 "pipeline.overlap": rng.random() < 0.3, "pipeline.microbatches": often(0, 1, 2, 4)}
    if rng.random() < 0.3:
        keys |= rng.choice([rules for rules in OVERRIDES if family not in WITHOUT_VOCAB
                            or "mesh.overrides.vocab" not in rules])
    if rng.random() < 0.3:
        keys |= {"train.freeze": rng.choice((FROZEN[family], ["heads"], ["*norm*"], ["mlp", "*bias"]))}
    elif rng.random() < 0.15:
        keys |= {"train.trainable": rng.choice((FROZEN[family], ["*norm*"], ["*mlp/*"]))}
    axes = [axis for axis in ("data", "fsdp") if sizes[axis] > 1 and (axis == "data" or keys["mesh.rules"] == "data")]
    if family not in ("siglip", "clip") and sizes["stage"] == 1 and axes and rng.random() < 0.6:
        keys |= compression(rng) | {"compression.axis": axes[-1], "optimizer.zero_stage": 0}
    kernel = family in BOTH_WAYS and keys["train.precision"] != "float16" and rng.random() < 0.1
    if kernel and (sizes["context"] == 1 or family != "whisper" or keys["mesh.context_strategy"] == "ulysses"):
        keys["train.attention"] = "splash"  # interpreted
    return keys


def remats(keys: dict[str, Any], shape: dict[str, Any]) -> list[str]:
    """Policies by name, and by layer where all stacks have several layers and none is cut into stages."""
    several = keys["mesh.stage"] == 1 and shape["num_layers"] > 1 and shape.get("image_layers", 2) > 1
    by_layer = ["full:1,attention_and_dots", "attention:1,none", "dots:1,heads@host"]
    return ["full", "dots", "attention", "attention_and_dots", "heads@host", "attention+mlp", *by_layer * several]


def compression(rng: random.Random) -> dict[str, Any]:
    """A way to sum gradients over an axis; what messages lose is to be in the senders' memory."""
    lossy = rng.random() < 0.6
    method = rng.choice(LOSSY) if lossy else {"method": "exact"}
    # AdamW's moments show what was sent, and fewer bits would hide what was lost.
    shown = {"optimizer.name": "adamw", "train.precision": "float32"} if lossy else {}
    return {f"compression.{key}": value for key, value in method.items()} | shown


def plain_of(family: str) -> tuple[Any, Any, Any]:
    """Return the functions that make a config of keys and a batch of a seed, and the formula of the loss."""
    from tests.objectives import plain_clips, plain_events, plain_transcription, plain_vision

    if family == "events":
        return plain_events.config, lambda seed: plain_events.batch(seed, seq=16 + 16 * seed), plain_events.loss
    if found := {"clips": plain_clips, "whisper": plain_transcription}.get(family):
        return found.config, found.batch, found.loss
    return (functools.partial(plain_vision.config, family), lambda seed: plain_vision.batch(
        family, rows=ROWS, length=16 + 16 * seed, seed=seed), plain_vision.loss)


def config_of(keys: dict[str, Any]) -> Any:
    """The case's config; raises UserError where it is refused."""
    rest = {key.replace(".", "__"): value for key, value in keys.items() if key not in ("family", "batch")}
    return plain_of(keys["family"])[0](**rest, data__global_batch_size=ROWS, optimizer__clip_norm=0.7,
                                     optimizer__learning_rate=RATE, optimizer__warmup_steps=0,
                                     optimizer__weight_decay=0.5)


@functools.lru_cache(maxsize=64)
def truth(model: Any, seed: int, parts: int) -> tuple[Any, Any, Any]:
    """Parameters of which none is as at first, the loss by the formula, and its gradient."""
    import jax
    import numpy as np
    from flax import nnx

    from jaxtrain.config.sections.tuning_keys import LoraConfig
    from jaxtrain.models.make_model import make_model
    from jaxtrain.train_step.state import Skeleton

    shapes = jax.eval_shape(lambda key: Skeleton.of(make_model(
        model, None, LoraConfig(), rngs=nnx.Rngs(params=key))).params(), jax.random.key(0))
    rng, (_, batch_of, loss_of) = np.random.default_rng(0), plain_of(model.name)
    batch = batch_of(seed)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (rng.normal(0, 0.15, leaf.shape) + (path[-1].key == "scale")).astype(np.float32), shapes)

    def mean(params):  # pairs are compared with those of their own part of the batch
        if parts == 1:
            return loss_of(model, params, batch)
        of_parts = [{name: x[part::parts] for name, x in batch.items()} for part in range(parts)]
        return sum(loss_of(model, params, part) * part["weights"].sum() for part in of_parts) / batch["weights"].sum()

    formula = jax.jit(jax.value_and_grad(mean))
    return params, *jax.device_get(formula.lower(params).compile({"xla_backend_optimization_level": 0})(params))


def check(keys: dict[str, Any]) -> dict[str, float]:
    """Compare one case; raises AssertionError where a number is off, UserError where it is refused."""
    import jax
    import numpy as np

    from jaxtrain import builder
    from jaxtrain.train_step import partition
    from tests.numerics import reference

    config = config_of(keys)
    devices = int(np.prod([keys[f"mesh.{axis}"] for axis in AXES]))
    run = builder.build(config, devices=jax.devices()[:devices])
    contrastive = keys["family"] in ("siglip", "clip")
    params, loss, want = truth(config.model, keys["batch"], config.train.accumulation if contrastive else 1)
    want, batch = partition.like(want, run.abstract.params), plain_of(keys["family"])[1](keys["batch"])
    step, placed, c = reference.compiled(run), run.sharded.place(batch), config.optimizer
    state = state_of(run, params, lambda state: step(state, placed))
    by_call = None if c.name == "adamw" else jax.device_get(run.value_and_grad(state, batch))
    before = jax.device_get(state.frozen)
    state, metrics = step(state, placed)
    after, metrics = jax.device_get((state, metrics))

    norm = float(metrics["grad_norm"])
    got = from_moments(after, want, c, norm) if by_call is None else by_call[1]
    size = reference.norm_of(want)
    if lost := after.extras.get("compression"):
        lossy = config.compression.method != "exact"  # then the norm is that of what was sent
        size = reference.norm_of(got) if lossy else size
        got = jax.tree.map(lambda g, kept: g + kept["error"].sum(0) if "error" in kept else g, got, lost)
    precision = keys["train.precision"]
    off = {"loss": abs(float(metrics["loss"]) / float(loss) - 1), "norm": abs(norm / float(size) - 1)}
    floor = (1e-3 if precision == "float32" else 3e-2) * float(reference.norm_of(want))
    off["gradient"], leaf = reference.worst(got, want, floor)
    if by_call is not None:
        off["value"] = abs(float(by_call[0]) / float(loss) - 1)
    if c.name == "adamw":
        error, leaf = decay_error(c, partition.like(params, after.params), after)
        assert error < 0.01, f"decay is off by {error:.1e} at {leaf}"
    if c.name != "adamw":
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params)), "a parameter is lost"
    if config.train.ema_decay:
        average = jax.tree.map(lambda a, p: 0.75 * a + 0.25 * p, partition.like(params, want), after.params)
        off["average"], _ = reference.worst(after.extras["ema"], average, floor=1e-3)
    for _ in range(STEPS - 1 if config.train.freeze or config.train.trainable else 0):
        state, _ = step(state, placed)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(state.frozen))), "a frozen leaf has changed"
    assert int(metrics["skipped"]) == 0, "the step was skipped: something was not finite"
    for what, error in off.items():
        limit = 2 * TOLERANCE[precision] / (1 if what == "gradient" or precision == "float32" else 5)
        assert error < limit, f"{what} is off by {error:.1e}{f', at {leaf}' if what == 'gradient' else ''}"
    return off


def decay_error(c: Any, before: Any, after: Any) -> tuple[float, str]:
    """Return how far what AdamW's first step took off the parameters is from the formula's, and of which the most."""
    import jax
    import numpy as np

    from tests.numerics import reference

    first, none = reference.moments(after), jax.tree.map(np.zeros_like, before)
    grads = jax.tree.map(lambda m: m / (1 - c.b1), first)
    both = [reference.adamw(dataclasses.replace(c, weight_decay=decay), before, grads, none, none, RATE, 0)[0]
            for decay in (0, c.weight_decay)]
    floor = RATE * c.weight_decay * 0.1  # above what float32 rounds of a norm's scale, 1e-7
    return reference.worst(*(jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), both[0], moved)
                             for moved in (after.params, both[1])), floor)


def state_of(run: Any, params: Any, step: Any) -> Any:
    """Return the state around parameters, in float16 with a loss scale at which gradients do not overflow."""
    import jax

    from tests.numerics import reference

    state, tries = reference.start_from(run, params), 15 if run.sharded.settings.precision == "float16" else 0
    for _ in range(tries):  # each that overflows halves the scale, and changes nothing else
        state, metrics = step(state)
        if not int(metrics["skipped"]):
            break
    if not tries:
        return state
    scale, state = jax.device_get(state.loss_scale), reference.start_from(run, params)
    return dataclasses.replace(state, loss_scale=jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), scale, state.loss_scale))
