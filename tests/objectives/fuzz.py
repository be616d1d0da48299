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
import functools
import json
import os
import random
import sys
import time
from typing import Any

from tests.composition.fuzz import ROWS, SEQ, TOLERANCE, config_of, draw
from tests.objectives import fuzz_modalities
from tests.tiny import virtual_devices

PREFERENCES = ("dpo", "robust", "ipo", "hinge", "simpo", "orpo", "reward", "kto", "apo_zero", "apo_down")
UNFIT = ("train.z_loss", "data.cross_document_attention", "model.mtp_loss_weight", "optimizer.name",
         "optimizer.moment_dtype", "optimizer.offload", "train.attention", "lora.dropout", "train.neftune_noise_alpha")


def draw_case(rng: random.Random, devices: int) -> dict[str, Any]:
    """One config, as keys like those of a command line."""
    keys = {key: value for key, value in draw(rng, devices).items() if key not in UNFIT}
    own = random.Random(f"{sorted(keys.items())}")  # its own numbers: the other cases stay as drawn
    if own.random() < 0.25:
        return fuzz_modalities.draw(own, devices)
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
        if loss in PREFERENCES[:4] + PREFERENCES[-2:] and own.random() < 0.3:
            keys["preference.rpo_alpha"] = 0.5
        if loss in (*PREFERENCES[:4], *PREFERENCES[-3:]):
            keys["preference.reference"] = rng.choice(("copy", "precomputed"))
        smooth = {"preference.label_smoothing": 0.2} if loss in ("dpo", "robust", "simpo") else {}
        return keys | smooth | {"preference.beta": rng.choice((0.1, 0.5))}
    critic = {"rl.baseline": "value", "rl.value_loss": rng.choice((0.1, 1.0)),
              "rl.value_clip": rng.choice((0.0, 0.2))} if rng.random() < 0.5 else {}
    critic |= {"rl.temperature": own.choice((0.6, 1.5))} if own.random() < 0.3 else {}
    return keys | critic | {"rl.prompts": "prompts.jsonl", "rl.reward": "reward.py:reward",
                   "rl.max_new_tokens": 5, "rl.loss": rng.choice(("dapo", "grpo", "dr_grpo")),
                   "rl.ratio": rng.choice(("token", "sequence")), "rl.kl": rng.choice((0.0, 0.1))}


@functools.lru_cache(maxsize=16)
def _begun(model: Any, lora: Any, targets: tuple[str, ...], scalar_head: str) -> Any:
    """All parameters of the model at step 0, with adapters and a value head that are not zero."""
    import jax
    from flax import nnx

    from jaxtrain.models.make_model import make_model
    from jaxtrain.train_step.state import Skeleton
    from tests.numerics.plain_lora import at_random

    init = jax.jit(lambda key: Skeleton.of(make_model(
        model, None, lora, scalar_head=scalar_head, rngs=nnx.Rngs(params=key))).params())
    quick = {"xla_backend_optimization_level": 0}
    return at_random(jax.device_get(init.lower(jax.random.key(0)).compile(quick)(jax.random.key(0))))


def check(keys: dict[str, Any]) -> dict[str, float]:
    """Compare one case; raises AssertionError where a number is off, UserError where it is refused."""
    if keys["family"] in fuzz_modalities.FAMILIES:
        return fuzz_modalities.check(keys)
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
        plain_policy_gradient, config.rl)
    by, loss_of = 1.1, plain.loss
    if config.preference.loss == "kto":  # of which a policy has to be less certain to be far from the reference
        plain, by, loss_of = plain_kto, 0.8, functools.partial(plain_kto.loss, parts=config.train.accumulation)
    batch = plain.batch(rows=ROWS, seq=SEQ, **({"values": True} if config.rl.value_head else {}))
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
    step, placed = reference.compiled(run), run.sharded.place(batch)
    state = fuzz_modalities.state_of(run, partition.merge(policy, rest) | beside, lambda state: step(state, placed))
    before = jax.device_get(state.frozen)
    value, got = jax.device_get(run.value_and_grad(state, batch))
    state, metrics = step(state, placed)
    for _ in range(fuzz_modalities.STEPS - 1):
        state, _ = step(state, placed)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(state.frozen))), "a frozen leaf has changed"

    precision = keys["train.precision"]
    # Terms of both signs cancel in gradients of policies, on one device too, so that rounding weighs more.
    by_cancelling = 2 if precision == "float32" or config.rl.prompts else 1
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
    parser.add_argument("--only", choices=["modalities"], help="families that are not decoders of text, and no others")
    parser.add_argument("--case", action="append", help="a case to run again: the keys, as printed")
    args = parser.parse_args(argv)
    flags = f"--xla_force_host_platform_device_count={args.devices}"
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": virtual_devices(args.devices) if args.only else flags}
    import jax

    import jaxtrain as jt
    from jaxtrain.run.validation import explains

    rng, counts = random.Random(args.seed), collections.Counter()
    own, draw_one = [json.loads(text) for text in args.case or []], fuzz_modalities.draw if args.only else draw_case
    while counts["ok"] + counts["failed"] + (counts["refused"] if own else 0) < (len(own) or args.cases):
        keys = own[counts.total()] if own else draw_one(rng, args.devices)
        start, line = time.process_time(), {"case": keys}
        try:
            line |= {"ok": {what: float(f"{error:.1e}") for what, error in check(keys).items()}}
        except jt.UserError as refusal:
            line |= {"refused" if explains(refusal) else "failed": str(refusal)}
        except Exception as error:
            line |= {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        counts["failed" if "failed" in line else "refused" if "refused" in line else "ok"] += 1
        if own or "refused" not in line:
            print(json.dumps(line | {"cpu_seconds": round(time.process_time() - start, 1)}), flush=True)
        if counts.total() % 8 == 0:
            jax.clear_caches()
    print(json.dumps(dict(counts) | {"jax": jax.__version__, "devices": args.devices, "seed": args.seed}))
    return counts["failed"]


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
