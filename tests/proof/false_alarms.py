"""No false alarm: configs drawn at random, each proven on layouts drawn at random.

    python -m tests.proof.false_alarms --proofs=20 --meshes=10

draws families, optimizers, frozen parameters, adapters, averages, noise and z-loss, and proves each config on so many
layouts. Prints a line of JSON for each, and exits with 1 if one is refuted.
"""

import argparse
import json
import random
import sys
import time
from typing import Any

from jaxtrain.proof.virtual_devices import use_virtual_devices

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gemma3", "olmo2", "gpt2_untied", "mixtral", "qwen3_moe", "deepseek_v3",
            "gpt_oss", "alternating", "bamba", "qwen3_5")


def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A family, and keys of a config."""
    family = rng.choice(FAMILIES)
    keys: dict[str, Any] = {"optimizer.name": rng.choice(("adamw", "adamw", "muon", "adafactor")),
                            "train.z_loss": rng.choice((0.0, 1e-3)), "train.ema_decay": rng.choice((0.0, 0.75)),
                            "model.num_layers": {"deepseek_v3": 3, "gpt_oss": 3, "alternating": 7}.get(family, 2)}
    if family in ("mixtral", "qwen3_moe") and rng.random() < 0.5:
        keys["model.capacity_factor"] = 1.25
    if family in ("gpt2", "llama", "qwen3") and rng.random() < 0.4:
        keys |= {"optimizer.name": "adamw", "lora.rank": 2, "lora.dropout": rng.choice((0.0, 0.3))}
    elif rng.random() < 0.3:
        keys["train.freeze"] = rng.choice((["embed/*"], ["blocks/layer/*attention/*", "norm/*"]))
    if family == "gpt2" and rng.random() < 0.3:
        keys["train.neftune_noise_alpha"] = 5.0
    if keys["optimizer.name"] == "adamw" and rng.random() < 0.3:
        keys["optimizer.moment_dtype"] = rng.choice(("bfloat16", "int8"))
    return family, keys


def check(family: str, keys: dict[str, Any], meshes: int, seed: int) -> dict[str, Any]:
    """Return what the proof of a config says."""
    import jaxtrain as jt
    from tests.numerics import reference

    began = time.monotonic()
    config = reference.tiny(family, **{key.replace(".", "__"): value for key, value in keys.items()},
                            data__seq_len=32, model__max_seq_len=32)
    proof = jt.prove(config, meshes=meshes, steps=2, seed=seed)
    return {"family": family, "keys": keys, "layouts": len(proof.comparisons), "worst": round(proof.worst, 3),
            "where": max(proof.comparisons, key=lambda one: one.worst).where, "float64": proof.certificate["float64"],
            "seconds": round(time.monotonic() - began), "finding": f"{proof.finding or ''}"}


def main(argv: list[str] | None = None) -> int:
    """Prove the configs, and return how many were refuted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("proofs", 20), ("meshes", 10), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args(argv)
    use_virtual_devices(8)
    import jax

    refuted = 0
    for seed in range(flags.seed, flags.seed + flags.proofs):
        found = check(*draw(random.Random(f"proof {seed}")), flags.meshes, seed)
        refuted += bool(found["finding"])
        print(json.dumps(found), flush=True)
        jax.clear_caches()
    return refuted


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
