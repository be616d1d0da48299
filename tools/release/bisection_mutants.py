"""Put a change into a copy of jaxtrain, one at a time, and see that `jaxtrain bisect` names it.

    python tools/release/bisection_mutants.py                   # all of them
    python tools/release/bisection_mutants.py causal_mask       # one
    python tools/release/bisection_mutants.py --list

Each change is one replaced line, or another config, and says what has to be named: the file and the function of the
operation, the parameter, the batch, or that rounding explains all. Prints a line for each, and exits with 1 if less
than nine in ten are named.
"""

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SMALL = {"data.seq_len": 32, "data.global_batch_size": 4, "train.steps": 3, "optimizer.warmup_steps": 0,
         "train.accumulation": 2}


@dataclass(frozen=True)
class Mutant:
    """A change, and what has to be said of it."""

    told: tuple[str, ...]  # words of what is found
    file: str = ""
    old: str = ""
    new: str = ""
    keys: tuple[tuple[str, object], ...] = ()  # of the other config


LLAMA = (("model.name", "llama"),)
MUTANTS = {
    "norm_epsilon_twice": Mutant(
        told=("layer 1 of 2", "LayerNorm"),
        file="kernels/functions.py",
        old='keepdims=True) + eps), "dots")\n    return ((y - mean)',
        new='keepdims=True) + 2 * eps), "dots")\n    return ((y - mean)'),
    "norm_without_mean": Mutant(
        told=("layer 1 of 2", "LayerNorm"),
        file="kernels/functions.py",
        old="return ((y - mean) * inverse * scale + bias)",
        new="return (y * inverse * scale + bias)"),
    "norm_backward_forgets_a_term": Mutant(
        told=("LayerNorm",),
        file="kernels/functions.py",
        old="dx = inverse * (pull - pull.mean(-1, keepdims=True)",
        new="dx = inverse * (pull"),
    "attention_scale": Mutant(
        told=("layer 1 of 2", "xla_attention.py"),
        file="kernels/attention/xla_attention.py",
        old="q_BTHK * K**-0.5",
        new="q_BTHK * K**-0.51"),
    "causal_mask": Mutant(
        told=("xla_attention.py", "visible"),
        file="kernels/attention/xla_attention.py",
        old="mask = (behind >= 0)[None]",
        new="mask = (behind >= -1)[None]"),
    "documents_see_each_other": Mutant(
        told=("xla_attention.py", "visible"),
        file="kernels/attention/xla_attention.py",
        old="return mask if keys_BS is None else mask & keys_BS",
        new="return mask"),
    "residual_scaled": Mutant(
        told=("layer 1 of 2", "models/decoder.py"),
        file="models/decoder.py",
        old="return x_BTD + y_BTD, aux | routed",
        new="return x_BTD + 1.001 * y_BTD, aux | routed"),
    "gelu_exact": Mutant(
        told=("layer 1 of 2", "models/layers.py"),
        file="models/layers.py",
        old="return self.down(self.gelu(self.up(x_BTD)))",
        new="return self.down(jax.nn.gelu(self.up(x_BTD), approximate=False))"),
    "rotation_the_other_way": Mutant(
        told=("rotary.py", "layer 1 of 2"),
        file="models/attention/rotary.py",
        old="[a * cos - b * sin, b * cos + a * sin]",
        new="[a * cos + b * sin, b * cos - a * sin]",
        keys=LLAMA),
    "positions_from_one": Mutant(
        told=("rotary.py", "angles"),
        file="models/attention/rotary.py",
        old="angle = positions_BT[..., None, None].astype(jnp.float32) * ",
        new="angle = (positions_BT[..., None, None].astype(jnp.float32) * 1.5) * ",
        keys=LLAMA),
    "swiglu_gate_for_up": Mutant(
        told=("layer 1 of 2", "models/layers.py"),
        file="models/layers.py",
        old="swiglu(self.gate(x_BTD), self.up(x_BTD))",
        new="swiglu(self.up(x_BTD), self.gate(x_BTD))",
        keys=LLAMA),
    "loss_of_the_target_twice": Mutant(
        told=("cross_entropy.py", "against_tokens"),
        file="kernels/loss_head/cross_entropy.py",
        old="lse_N, correct_N = log_partition(logits_NV, hit_NV)\n        entropy_N = lse_N - correct_N",
        new="lse_N, correct_N = log_partition(logits_NV, hit_NV)\n        entropy_N = lse_N - 1.01 * correct_N"),
    "gradient_of_the_target": Mutant(
        told=("cross_entropy.py", "against_tokens"),
        file="kernels/loss_head/cross_entropy.py",
        old="jnp.where(hit_NV, weight_N[:, None], 0), lse_N",
        new="jnp.where(hit_NV, 0.99 * weight_N[:, None], 0), lse_N"),
    "micro_batches_unweighted": Mutant(
        told=("train_step/gradients.py",),
        file="train_step/gradients.py",
        old="g.astype(jnp.float32) * sums[1], grads)",
        new="g.astype(jnp.float32), grads)"),
    "clip_by_half": Mutant(
        told=("train_step/step.py", "advance"),
        file="train_step/step.py",
        old="clip_norm / norm, 1.0) if clip_norm",
        new="0.5 * clip_norm / norm, 1.0) if clip_norm"),
    "schedule_a_step_late": Mutant(
        told=("step.py", "advance"),
        file="train_step/step.py",
        old="jnp.asarray(schedule(state.step - state.skipped), jnp.float32)",
        new="jnp.asarray(schedule(state.step - state.skipped - 1), jnp.float32)"),
    "decay_of_weights": Mutant(
        told=("add_decayed_weights",),
        keys=(("optimizer.weight_decay", 0.11),)),
    "second_moment": Mutant(
        told=("tree_update_moment",),
        keys=(("optimizer.b2", 0.951),)),
    "epsilon_of_adam": Mutant(
        told=("scale_by_adam",),
        keys=(("optimizer.eps", 1e-07),)),
    "penalty_of_the_loss": Mutant(
        told=("cross_entropy.py",),
        keys=(("train.z_loss", 1e-05),)),
    "another_seed": Mutant(
        told=("begin with other values",),
        keys=(("train.seed", 1),)),
    "other_order_of_data": Mutant(
        told=("the batch of step 1",),
        keys=(("data.seed", 1),)),
    "initial_values": Mutant(
        told=("begin with other values",),
        file="models/layers.py",
        old="std: float = 0.02, value",
        new="std: float = 0.021, value"),
    "bfloat16": Mutant(
        told=("by rounding only",),
        keys=(("train.precision", "bfloat16"),)),
    "another_mesh": Mutant(
        told=("by rounding only",),
        keys=(("mesh.data", 2), ("mesh.tensor", 2))),
    "rematerialisation_and_loops": Mutant(
        told=("rounding only", "same numbers"),
        keys=(("train.remat", "full"), ("train.unroll", 2))),
}


def main() -> int:
    """Try the changes that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="changes; by default all")
    parser.add_argument("--list", action="store_true", help="print the names")
    flags = parser.parse_args()
    if flags.list:
        print("\n".join(MUTANTS))
        return 0
    names, named, sides = flags.names or [*MUTANTS], 0, {}
    for name in names:
        began = time.monotonic()
        said, right = found(MUTANTS[name], sides)
        named += right
        print(f"{name} ({time.monotonic() - began:.0f} s): {'named' if right else 'NOT NAMED'}: "
              f"{' | '.join(said.splitlines()[:3])}", flush=True)
    print(f"{named} of {len(names)} named")
    return 0 if named >= 0.9 * len(names) else 1


def found(mutant: Mutant, sides: dict) -> tuple[str, bool]:
    """Return what is said of a change, and whether that names it."""
    from jaxtrain.bisection.bisect import bisect_sides
    from jaxtrain.bisection.other_code import ElsewhereSide
    from jaxtrain.bisection.sides import Side
    from jaxtrain.config.load import load_config

    def config(keys):
        return load_config(f"{ROOT}/configs/gpt.py:tiny", {**SMALL, **keys})

    model = {key: value for key, value in mutant.keys if key == "model.name"}
    a = sides.setdefault(f"{model}", Side.of(config(model), "A", {}))
    a._state = None
    with tempfile.TemporaryDirectory(prefix="jaxtrain-bisection-mutant-") as folder:
        if mutant.file:
            shutil.copytree(ROOT / "jaxtrain", f"{folder}/jaxtrain", ignore=shutil.ignore_patterns("__pycache__"))
            file = Path(folder) / "jaxtrain" / mutant.file
            source = file.read_text()
            assert source.count(mutant.old) == 1, f"{mutant.file} does not have this once: {mutant.old}"
            file.write_text(source.replace(mutant.old, mutant.new))
            keys = "\n".join(f"    config.{key} = {value!r}" for key, value in (SMALL | model).items())
            own = Path(folder) / "config.py"
            own.write_text("import runpy\n\ndef get_config(variant=None):\n"
                           f"    config = runpy.run_path({str(ROOT / 'configs/gpt.py')!r})['get_config']('tiny')\n"
                           f"{keys}\n    return config\n")
            b = ElsewhereSide("B", a.config, source=f"{own}", code=folder)
        else:
            b = Side.of(config(dict(mutant.keys)), "B", {})
        said = f"{bisect_sides(a, b, 3, lambda text: None)}"
        if mutant.file:
            b._process.stdin.close()
            b._process.wait()
    choice = mutant.told[0] if "rounding only" in mutant.told[0] else ""
    right = any(word in said for word in mutant.told) if choice else all(word in said for word in mutant.told)
    return said, right


if __name__ == "__main__":
    from jaxtrain.proof.virtual_devices import use_virtual_devices

    use_virtual_devices(8)
    sys.exit(main())
