"""Put known bugs into a copy of jaxtrain, one at a time, and see that `jaxtrain prove` finds each.

    python tools/release/proof_mutants.py                   # all of them
    python tools/release/proof_mutants.py ring_attention_sees_the_future --show

Each bug is one replaced line that leaves the numbers of one device as they are and changes those of a mesh. Prints a
line for each, and exits with 1 if one is not found. tests/proof/own_module.py has the bugs of modules that their users
shard by hand.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = ("--config.model.name=qwen3_moe", "--config.model.num_experts=8", "--config.model.experts_per_token=2",
           "--config.model.expert_mlp_dim=32", "--config.model.num_kv_heads=4", "--config.model.head_dim=16",
           "--config.model.balance_loss=0.02")


@dataclass(frozen=True)
class Mutant:
    """A bug: the text that it replaces in a file, and what to prove."""

    file: str
    old: str
    new: str
    flags: tuple[str, ...] = field(default=())  # beside configs/gpt.py:tiny


MUTANTS = {
    "embedding_gradient_not_summed_over_rows": Mutant(
        "parallel/vocab.py", "return lax.psum(d, others) if others else d", "return d"),
    "embedding_rows_of_other_shards_not_summed": Mutant(
        "parallel/vocab.py", "lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True) if scatter_sequence",
        "lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * (x.shape[1] // lax.axis_size(axes)), x.shape[1] // "
        "lax.axis_size(axes), 1) if scatter_sequence"),
    "loss_not_summed_over_vocabulary_shards": Mutant(
        "kernels/loss_head/cross_entropy.py", "jnp.exp(own_N - top_N))), over_vocab(correct_N)",
        "jnp.exp(own_N - top_N))), correct_N"),
    "loss_of_own_rows_only": Mutant(
        "kernels/loss_head/cross_entropy.py", "sums_2 = lax.psum(sums_2, batch_axes)",
        "sums_2 = lax.psum(sums_2, batch_axes[:1])"),
    "head_gradient_not_summed_over_rows": Mutant(
        "kernels/loss_head/cross_entropy.py", "dhead_DV = lax.psum(dhead_DV, others)", "pass"),
    "head_input_gradient_of_own_vocabulary": Mutant(
        "kernels/loss_head/cross_entropy.py", "dx_ND = over_vocab(jnp.dot(", "dx_ND = (jnp.dot("),
    "accumulation_unweighted": Mutant(
        "train_step/gradients.py", "g.astype(precisions.wide(g)) * sums[1], grads)",
        "g.astype(precisions.wide(g)), grads)"),
    "ring_attention_sees_the_future": Mutant(
        "parallel/ring.py",
        "lax.cond(source < lax.axis_index(AXIS), lambda: work(every, early), lambda: work(late, every))",
        "lax.cond(source > lax.axis_index(AXIS), lambda: work(every, early), lambda: work(late, every))"),
    "late_chunk_of_a_context_shard_misplaced": Mutant(
        "parallel/cut_rows.py", "(2 * n - 1 - device) * len(chunk) + chunk])",
        "(2 * n - 1 - device - (n > 1)) * len(chunk) + chunk])"),
    "gathered_key_gradient_averaged": Mutant(
        "parallel/context.py", "[lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True) for x in dkv]",
        "[lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True) / n for x in dkv]"),
    "pipeline_loses_a_gradient": Mutant(
        "parallel/pipeline/stage.py", "return add(grads, pull(dx)[0])", "return grads"),
    "pipeline_loses_the_head_of_a_micro_batch": Mutant(
        "parallel/pipeline/stage.py", "return (loss, further), add(grads, d_outer), dy",
        "return (loss, further), add(grads, jax.tree.map(lambda g: jnp.where(row[Column.B_MB] > 0, g, 0), d_outer)), "
        "dy"),
    "expert_outputs_averaged": Mutant(
        "parallel/experts.py", 'return lax.psum_scatter(y_ND, axis, tiled=True) if way == "gather" else y_ND',
        'return lax.psum_scatter(y_ND, axis, tiled=True) / n if way == "gather" else y_ND', EXPERTS),
    "first_expert_of_each_device_dropped": Mutant(
        "parallel/experts.py", "experts_NK = jnp.where((experts_NK >= 0) & (experts_NK < held), experts_NK, held)",
        "experts_NK = jnp.where((experts_NK > 0) & (experts_NK < held), experts_NK, held)", EXPERTS),
    "expert_parts_not_summed_over_tensor": Mutant(
        "models/experts/moe.py", "y_BTD = lax.psum_scatter(y_BTD, split, scatter_dimension=1, tiled=True)",
        "y_BTD = lax.dynamic_slice_in_dim(y_BTD, lax.axis_index(split) * (y_BTD.shape[1] // lax.axis_size(split)), "
        "y_BTD.shape[1] // lax.axis_size(split), 1)", EXPERTS),
    "norm_counted_once_per_tensor_shard": Mutant(
        "train_step/step.py", "norm = global_norm([g for g, own in zip(leaves, own_rule, strict=True) if not own])",
        "norm = global_norm([g for g, own in zip(leaves, own_rule, strict=True) if not own]) * "
        'layout.mesh.shape["tensor"] ** 0.5'),
    "clipped_by_the_norm_of_a_shard": Mutant(
        "train_step/step.py", "factor = jnp.where(norm > clip_norm, clip_norm / norm, 1.0) if clip_norm else 1.0",
        'local = norm / layout.mesh.shape["fsdp"] ** 0.5\n'
        "        factor = jnp.where(local > clip_norm, clip_norm / local, 1.0) if clip_norm else 1.0"),
    "update_summed_over_zero_shards": Mutant(
        "train_step/step.py", "return optax.apply_updates(params, updates), new_state",
        'return optax.apply_updates(params, jax.tree.map(lambda u: u * layout.mesh.shape["data"], updates)), '
        "new_state"),
    "averaged_weights_decay_by_devices": Mutant(
        "extensions/ema.py", "share = jnp.where(taken, 1 - decay, 0)",
        'share = jnp.where(taken, 1 - decay ** (jax.sharding.get_abstract_mesh().shape["data"]), 0)',
        ("--config.train.ema_decay=0.75",)),
    "pipeline_gradient_not_scattered_to_rows": Mutant(
        "parallel/pipeline/pipeline.py", "grad = _sum(grad, self.sum)", "pass"),
    "exact_gradients_summed_unweighted": Mutant(
        "parallel/compression/compressed_gradients.py",
        "share = sums[1][0] / jnp.maximum(whole[1], 1e-8)", "share = 1 / lax.axis_size(self.axis)",
        ("--config.compression.method=exact",)),
}


def found_by(mutant: Mutant, show: bool) -> str:
    """Return what the proof says of the bug; nothing if it finds none."""
    with tempfile.TemporaryDirectory(prefix="jaxtrain-proof-mutant-") as folder:
        copy = Path(folder) / "jaxtrain"
        shutil.copytree(ROOT / "jaxtrain", copy / "jaxtrain", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "configs", copy / "configs", ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / "jaxtrain" / mutant.file
        source = file.read_text()
        assert source.count(mutant.old) == 1, f"{mutant.file} does not have this once: {mutant.old}"
        file.write_text(source.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "jaxtrain", "prove", "configs/gpt.py:tiny", *mutant.flags]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=1800,
                              env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"})
        if show:
            print(done.stdout, done.stderr, sep="\n")
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, f"prove: {done.stderr[-2000:]}"
        return "".join(line for line in done.stdout.splitlines() if line.startswith("WRONG"))


def main() -> int:
    """Try the bugs that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *MUTANTS], metavar="NAME", help="bugs; by default all")
    parser.add_argument("--show", action="store_true", help="print all that the proofs print")
    flags = parser.parse_args()
    names, found = flags.names or list(MUTANTS), 0
    for name in names:
        began = time.monotonic()
        said = found_by(MUTANTS[name], flags.show)
        found += bool(said)
        print(f"{name} ({time.monotonic() - began:.0f} s): {said or 'NOT FOUND'}", flush=True)
    print(f"{found} of {len(names)} found")
    return 0 if found == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
