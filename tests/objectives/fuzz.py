"""Any objective of tuning, any combination, same numbers: drawn at random, compared with formulas on one device.

    python -m tests.objectives.fuzz --cases=100 --seed=7 --devices=8

draws what tests/composition/fuzz.py draws (meshes, schedules, precisions, rematerialization, accumulation, adapters,
frozen parameters, model families), and beside it a loss of preferences or of rewards with its settings, or a family
that is not a decoder of text. Policy and reference differ. A case fails where the loss, the gradient's norm, any leaf
of the gradient of what is trained or, in float32, a metric is off, or where a frozen leaf has changed after twenty
steps.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import random
import sys
import time
from typing import Any

from tests.composition.fuzz import ROWS, SEQ, TOLERANCE, config_of, draw

PREFERENCES = ("dpo", "robust", "ipo", "hinge", "simpo", "orpo", "reward", "kto")
OTHERS = ("clips", "whisper", "siglip", "clip", "vision_language", "picture_flow")  # and events
STEPS = 20  # after which frozen leaves have the same bits
UNFIT = ("train.z_loss", "data.cross_document_attention", "model.mtp_loss_weight", "optimizer.name",
         "optimizer.moment_dtype", "optimizer.offload", "train.attention")


def draw_case(rng: random.Random, devices: int) -> dict[str, Any]:
    """One config, as keys like those of a command line."""
    keys = {key: value for key, value in draw(rng, devices).items() if key not in UNFIT}
    own = random.Random(f"{sorted(keys.items())}")  # its own numbers: the other cases stay as drawn
    if own.random() < 0.25:
        return other_case(keys, own)
    keys |= {"packing": True, "evaluate": False, "value_and_grad": False, "empty": ""}
    if keys["train.precision"] == "fp8":  # whose own rounding hides a wrong loss
        keys["train.precision"] = "bfloat16"
    if not keys.get("train.freeze") and rng.random() < 0.5:
        keys |= {"lora.rank": rng.choice((1, 3)), "lora.alpha": 4.0, "lora.quantize": rng.choice(("", "int8", "nf4")),
                 "lora.dora": rng.random() < 0.3}
    if rng.random() < 0.5:
        loss = rng.choice(PREFERENCES)
        keys |= {"preference.loss": loss, "data.packing": "answers" if loss == "kto" else "pairs"}
        if loss == "reward":
            return keys | {"preference.margin": rng.choice((0.0, 0.3)), "preference.center": rng.choice((0.0, 0.1))}
        if loss in ("dpo", "robust", "ipo", "hinge", "kto"):
            keys["preference.reference"] = rng.choice(("copy", "precomputed"))
        smooth = {"preference.label_smoothing": 0.2} if loss in ("dpo", "robust", "simpo") else {}
        return keys | smooth | {"preference.beta": rng.choice((0.1, 0.5))}
    critic = {"reinforce.baseline": "value", "reinforce.value_loss": rng.choice((0.1, 1.0)),
              "reinforce.value_clip": rng.choice((0.0, 0.2))} if rng.random() < 0.5 else {}
    return keys | critic | {"reinforce.prompts": "prompts.jsonl", "reinforce.reward": "reward.py:reward",
                   "reinforce.max_new_tokens": 5, "reinforce.loss": rng.choice(("dapo", "grpo", "dr_grpo")),
                   "reinforce.ratio": rng.choice(("token", "sequence")), "reinforce.kl": rng.choice((0.0, 0.1))}


def other_case(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The case for a family that is not a decoder of text: the mesh, the steps and the number of layers stay."""
    family = rng.choice(("events", "events", *OTHERS))
    kept = ("mesh.", "pipeline.", "train.", "optimizer.", "model.num_layers")
    if family == "events":
        kept += ("model.tied_embeddings", "data.global", "data.seq_len", "model.max_seq_len", "model.window")
    keys = {key: value for key, value in keys.items() if key.startswith(kept) and key not in (
        "train.freeze", "train.ema_decay")}
    if keys["train.precision"] == "fp8":
        keys["train.precision"] = "bfloat16"
    if family != "events":
        whole = [] if family == "vision_language" else ["mesh.stage"]
        whole += ["mesh.context"] * (family in ("clips", "whisper"))  # axes that they are refused with
        whole += ["train.accumulation"] * (family in ("siglip", "clip"))  # with which fewer pairs are compared
        keys = {key: value for key, value in keys.items() if whole[:1] != ["mesh.stage"] or key[:9] != "pipeline."}
        # A class token's norm over random parameters rounds too much in float32 for the tolerance: not clip's.
        published = family == "siglip" and rng.random() < 0.5
        return keys | dict.fromkeys(whole, 1) | {"family": family + " published" * published,
                                                 "data.global_batch_size": 16}
    return keys | {"family": "events", "model.time_loss": rng.choice((0.0, 0.3)),
                   "model.num_kv_heads": rng.choice((4, 8)), "model.predict": rng.choice(("item", "shop"))}


def plain_of(family: str) -> tuple[Any, Any, Any]:
    """Return the functions that make a config of keys, make a batch, and compute the loss, of a family in OTHERS."""
    from tests.objectives import plain_clips, plain_events, plain_transcription, plain_vision

    if family == "events":
        return plain_events.config, functools.partial(plain_events.batch, rows=ROWS, seq=SEQ), plain_events.loss
    if family == "clips":
        return plain_clips.config, plain_clips.batch, lambda *args: plain_clips.metrics(*args)[0]
    if family == "whisper":
        return plain_transcription.config, plain_transcription.batch, plain_transcription.loss
    return (functools.partial(plain_vision.config, family), functools.partial(plain_vision.batch, family, rows=16),
            plain_vision.loss)


def check_other(keys: dict[str, Any]) -> dict[str, float]:
    """Compare one case of a family that is not a decoder of text; raises as `check` does."""
    import jax
    import numpy as np

    from jaxtrain import builder
    from jaxtrain.train_step import partition
    from tests.numerics import reference

    config_of, batch_of, loss_of = plain_of(keys["family"])
    config = config_of(**{key.replace(".", "__"): value for key, value in keys.items() if key != "family"})
    devices = int(np.prod([value for key, value in keys.items() if key.startswith("mesh.") and type(value) is int]))
    run = builder.build(config, devices=jax.devices()[:devices])
    rng, batch = np.random.default_rng(0), batch_of()
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(np.float32), run.abstract.all_params)
    truth = jax.jit(jax.value_and_grad(lambda params: loss_of(config.model, params, batch)))
    loss, want = jax.device_get(truth.lower(params).compile({"xla_backend_optimization_level": 0})(params))
    want = partition.like(want, run.abstract.params)
    value, got = jax.device_get(run.value_and_grad(reference.start_from(run, params), batch))
    norm, precision = float(reference.norm_of(want)), keys["train.precision"]
    off = {"value": abs(float(value) / float(loss) - 1)}
    off["gradient"], leaf = reference.worst(got, want, (1e-3 if precision == "float32" else 3e-2) * norm)
    for what, error in off.items():
        assert error < 2 * TOLERANCE[precision], f"{what} is off by {error:.1e}, at {leaf}"
    return off


@functools.lru_cache(maxsize=16)
def _begun(model: Any, lora: Any, targets: tuple[str, ...], scalar_head: str) -> Any:
    """All parameters of the model at step 0, with adapters and a value head that are not zero."""
    import jax
    from flax import nnx

    from jaxtrain.models import make_model
    from jaxtrain.train_step.state import Skeleton
    from tests.numerics.plain_lora import at_random

    init = jax.jit(lambda key: Skeleton.of(make_model(
        model, None, lora, scalar_head=scalar_head, rngs=nnx.Rngs(params=key))).params())
    quick = {"xla_backend_optimization_level": 0}
    return at_random(jax.device_get(init.lower(jax.random.key(0)).compile(quick)(jax.random.key(0))))


def _state_of(run: Any, params: Any, step: Any) -> Any:
    """Return the state around parameters, in float16 with a loss scale at which gradients do not overflow."""
    import jax

    from tests.numerics import reference

    state, tries = reference.start_from(run, params), 15 if run.precision == "float16" else 0
    for _ in range(tries):  # each that overflows halves the scale, and changes nothing else
        state, metrics = step(state)
        if not int(metrics["skipped"]):
            break
    if not tries:
        return state
    scale, state = jax.device_get(state.loss_scale), reference.start_from(run, params)
    return dataclasses.replace(state, loss_scale=jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), scale, state.loss_scale))


def check(keys: dict[str, Any]) -> dict[str, float]:
    """Compare one case; raises AssertionError where a number is off, UserError where it is refused."""
    if keys["family"].split()[0] in ("events", *OTHERS):
        return check_other(keys)
    import jax
    import numpy as np

    from jaxtrain import builder
    from jaxtrain.models.lora import scale
    from jaxtrain.train_step import partition
    from tests.numerics import reference
    from tests.numerics.plain_lora import merged
    from tests.objectives import plain_kto, plain_policy_gradient, plain_preference
    from tests.objectives.tuned import precomputed

    config = config_of(keys)
    devices = int(np.prod([value for key, value in keys.items() if key.startswith("mesh.") and type(value) is int]))
    run = builder.build(config, devices=jax.devices()[:devices])
    plain, settings = (plain_preference, config.preference) if config.preference.loss else (
        plain_policy_gradient, config.reinforce)
    by, loss_of = 1.1, plain.loss
    if config.preference.loss == "kto":  # of which a policy has to be less certain to be far from the reference
        plain, by, loss_of = plain_kto, 0.8, functools.partial(plain_kto.loss, parts=config.train.accumulation)
    batch = plain.batch(rows=ROWS, seq=SEQ, **({"values": True} if config.reinforce.value_head else {}))
    begun = _begun(config.model, config.lora, tuple(config.lora.targets), config.scalar_head)
    trained = partition.like(begun, run.layout.axes)
    policy, rest = jax.tree.map(lambda a: a * np.float32(by), trained), partition.without(begun, trained)
    beside = {"reference": partition.like(trained, run.objective.trained)} if run.objective.frozen_axes else {}

    def whole(some):
        both = partition.merge(some, rest)
        return merged(both, scale(config.lora)) if config.lora.rank else both

    truth = jax.jit(jax.value_and_grad(
        lambda policy: loss_of(settings, config.model, whole(policy), whole(trained), batch), has_aux=True))
    (loss, told), want = jax.device_get(truth.lower(policy).compile({"xla_backend_optimization_level": 0})(policy))
    norm = float(reference.norm_of(want))
    if run.objective.precomputed:
        batch = precomputed(run, begun, batch)
    step, placed = reference.compiled(run), run.place(batch)
    state = _state_of(run, partition.merge(policy, rest) | beside, lambda state: step(state, placed))
    before = jax.device_get(state.frozen)
    value, got = jax.device_get(run.value_and_grad(state, batch))
    state, metrics = step(state, placed)
    for _ in range(STEPS - 1):
        state, _ = step(state, placed)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(state.frozen))), "a frozen leaf has changed"

    precision = keys["train.precision"]
    # Terms of both signs cancel in gradients of policies, on one device too, so that rounding weighs more.
    by_cancelling = 2 if precision == "float32" or config.reinforce.prompts else 1
    floor, tolerance = (1e-3 if precision == "float32" else 3e-2) * norm, TOLERANCE[precision]
    size = max(abs(float(loss)), 0.1)  # policy gradients may add up to nothing
    off = {"loss": abs(float(metrics["loss"]) - float(loss)) / size, "value": abs(float(value) - float(loss)) / size,
           "norm": abs(float(metrics["grad_norm"]) / norm - 1)}
    got = jax.tree_util.tree_map_with_path(  # that of a router's bias is its experts' excess of load
        lambda path, g, w: w if "['router']['bias']" in jax.tree_util.keystr(path) else g, got, want)
    off["gradient"], leaf = reference.worst(got, want, floor)
    if precision == "float32":  # elsewhere rounding counts too much in a difference of sums
        off |= {f"metric {name}": abs(float(metrics[name]) - float(value)) / max(abs(float(value)), 1)
                for name, value in told.items() if name in metrics}
    assert int(metrics["skipped"]) == 0, "the step was skipped: something was not finite"
    for what, error in off.items():
        assert error < tolerance * by_cancelling, f"{what} is off by {error:.1e}, at {leaf}"
    return off


def main(argv: list[str] | None = None) -> int:
    """Draw and check; one line of JSON a case. -> how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("cases", 5), ("seed", 0), ("devices", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--case", help="one case to run again: the keys, as printed")
    args = parser.parse_args(argv)
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={args.devices}"}
    import jax

    import jaxtrain as jt
    from jaxtrain.validation import explains

    rng, counts = random.Random(args.seed), collections.Counter()
    while counts["ok"] + counts["failed"] < (1 if args.case else args.cases):
        keys = json.loads(args.case) if args.case else draw_case(rng, args.devices)
        start, line = time.time(), {"case": keys}
        try:
            line |= {"ok": {what: float(f"{error:.1e}") for what, error in check(keys).items()}}
        except jt.UserError as refusal:
            line |= {"refused" if explains(refusal) else "failed": str(refusal)}
        except Exception as error:
            line |= {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        counts["failed" if "failed" in line else "refused" if "refused" in line else "ok"] += 1
        if "refused" not in line:
            print(json.dumps(line | {"seconds": round(time.time() - start, 1)}), flush=True)
        jax.clear_caches()
    print(json.dumps(dict(counts) | {"jax": jax.__version__, "devices": args.devices, "seed": args.seed}))
    return counts["failed"]


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
