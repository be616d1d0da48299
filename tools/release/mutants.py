"""Put known bugs into a copy of the repository, one at a time, and see that the tests notice each.

    python tools/release/mutants.py                    # the quick tier: what README's command runs
    python tools/release/mutants.py --tier=all         # bugs that the quick tier misses go through the longer tiers too
    python tools/release/mutants.py causal_mask_shifted weight_decay_on_norms

Each bug is one replaced line. The tests that are likely to notice it run first, so that the others need not. Prints a
line for each bug and exits with 1 if fewer than `--least` are caught (by default 18 of them, and all with --tier=all).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIERS = {"quick": ("not slow and not exhaustive",), "all": ("not slow and not exhaustive", "slow", "exhaustive")}
EQUAL, STEP = "tests/numerics/test_equality.py", "tests/numerics/test_step.py"
ATTENTION = "tests/kernels/attention/test_xla_attention.py"


@dataclass(frozen=True)
class Mutant:
    """A bug: the text that it replaces in a file, and the tests that are likely to notice."""

    file: str
    old: str
    new: str
    likely: tuple[str, ...]


MUTANTS = {
    "causal_mask_shifted": Mutant(
        "kernels/attention/xla_attention.py", "mask = (behind >= 0)[None]", "mask = (behind >= -1)[None]",
        (ATTENTION, EQUAL)),
    "documents_see_each_other": Mutant(
        "kernels/attention/xla_attention.py", "return mask if keys_BS is None else mask & keys_BS", "return mask",
        (ATTENTION, EQUAL)),
    "window_of_a_block_too_short": Mutant(
        "kernels/attention/query_blocks.py", "max(0, start + 1 - window)", "max(0, start + 2 - window)", (ATTENTION,)),
    "rotary_turned_backwards": Mutant(
        "models/attention/rotary.py", "[a * cos - b * sin, b * cos + a * sin]",
        "[a * cos + b * sin, b * cos - a * sin]",
        ("tests/models/attention/test_rotary.py", EQUAL)),
    "loss_not_summed_over_vocabulary_shards": Mutant(
        "kernels/loss_head/cross_entropy.py", "jnp.exp(own_N - top_N))), over_vocab(correct_N)",
        "jnp.exp(own_N - top_N))), correct_N", ("tests/kernels", EQUAL)),
    "z_loss_without_gradient": Mutant(
        "kernels/loss_head/cross_entropy.py", "pull_N = weight_N * (1 + 2 * z_loss * lse_N)", "pull_N = weight_N",
        ("tests/kernels",)),
    "weight_decay_on_norms": Mutant(
        "train_step/optimizers/optimizer_parts.py", "map_names(is_matrix, self.axes))",
        "map_names(lambda names: True, self.axes))", ("tests/train_step/test_optimizers.py",)),
    "accumulation_unweighted": Mutant(
        "train_step/gradients.py", "g.astype(precisions.wide(g)) * sums[1], grads)",
        "g.astype(precisions.wide(g)), grads)",
        (STEP, EQUAL)),
    "anomaly_applied": Mutant(
        "train_step/step.py", "return jax.lax.cond(taken, apply, lambda: (params, opt_state))", "return apply()",
        (STEP, "tests/extensions/test_anomaly_history.py", "tests/trainer/test_rollback.py")),
    "clipping_left_out": Mutant(
        "train_step/step.py", "clip_norm / norm, 1.0)", "1.0, 1.0)", (STEP, EQUAL)),
    "warm_up_one_step_late": Mutant(
        "train_step/optimizers/__init__.py", "peak / c.warmup_steps, peak, max(1, c.warmup_steps - 1))",
        "0.0, peak, c.warmup_steps)", ("tests/train_step/test_optimizers.py",)),
    "router_weights_not_normalised": Mutant(
        "models/experts/router.py", "weights_BTK /= weights_BTK.sum(-1, keepdims=True) + c.sum_eps", "pass",
        ("tests/numerics/test_experts.py",)),
    "ring_attention_sees_the_future": Mutant(
        "parallel/ring.py",
        "lax.cond(source < lax.axis_index(AXIS), lambda: work(every, early), lambda: work(late, every))",
        "lax.cond(source > lax.axis_index(AXIS), lambda: work(every, early), lambda: work(late, every))",
        ("tests/parallel/test_context.py",)),
    "pipeline_loses_a_gradient": Mutant(
        "parallel/pipeline/stage.py", "return add(grads, pull(dx)[0])", "return grads",
        ("tests/parallel/pipeline/test_pipeline.py",)),
    "epochs_in_one_order": Mutant(
        "data/loading/shuffle.py", "(seed + epoch) % 2**32", "seed % 2**32",
        ("tests/data/loading/test_shuffle.py", "tests/data/loading/test_loader.py")),
    "foreign_targets_learnt": Mutant(
        "data/packing/packed_rows.py", "weights[row_S[begun_S], within_S[begun_S] - 1] = 0", "pass",
        ("tests/data/packing/test_packed_rows.py",)),
    "checkpoint_byte_flipped": Mutant(
        "checkpoint/verify.py", "if hashes and hash_file(folder / name)[1] != sha256:", "if False:",
        ("tests/checkpoint/test_damage.py", "tests/checkpoint")),
    "resume_off_by_one": Mutant(
        "trainer/loop.py", "drawn(run, data, start, begun.last)", "drawn(run, data, start + 1, begun.last)",
        ("tests/trainer/test_order.py", "tests/trainer/test_resume.py")),
    "metrics_not_flushed_before_a_save": Mutant(
        "trainer/loop.py", "writer.flush()", "pass", ("tests/trainer/test_order.py",)),
    "rollback_forgets_the_batches": Mutant(
        "data/loading/skipped_batches.py", "tuple(sorted({*self.batches, *more}))", "tuple(sorted({*more}))",
        ("tests/data/loading/test_skipped_batches.py", "tests/trainer/test_rollback.py")),
    "router_bias_the_wrong_way": Mutant(
        "train_step/optimizers/__init__.py", "0.0, -rate * jnp.sign(excess))", "0.0, rate * jnp.sign(excess))",
        ("tests/models/experts/test_moe.py",)),
}


def caught_by(mutant: Mutant, tier: str) -> str:
    """Return what noticed the bug, with the seconds that took; nothing if no test did."""
    with tempfile.TemporaryDirectory(prefix="jaxtrain-mutant-") as folder:
        copy = Path(folder) / "jaxtrain"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info"))
        file = copy / "jaxtrain" / mutant.file
        source = file.read_text()
        assert source.count(mutant.old) == 1, f"{mutant.file} does not have this once: {mutant.old}"
        file.write_text(source.replace(mutant.old, mutant.new))
        began = time.monotonic()
        for marker in TIERS[tier]:
            for tests in (mutant.likely, ("tests",)):
                command = [sys.executable, "-m", "pytest", "-x", "-n", "2", "-p", "no:cacheprovider", "-m", marker,
                           "--durations=0", "--durations-min=1e9", *tests]
                done = subprocess.run(command, cwd=copy, capture_output=True, text=True,
                                      env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"})
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                # 5: the tier has no such tests. Anything else is not an answer: pytest was ended, or could not start.
                assert failed or done.returncode in (0, 5), f"pytest: {done.returncode}, {done.stderr[-2000:]}"
                if failed:
                    where = failed[0].split(" - ")[0].partition(" ")[2]
                    return f"{where} ({time.monotonic() - began:.0f} s)"
    return ""


def main() -> int:
    """Try the bugs that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *MUTANTS], metavar="NAME", help="bugs; by default all")
    parser.add_argument("--tier", choices=TIERS, default="quick")
    parser.add_argument("--least", type=int, help="exit with 1 if fewer are caught")
    flags = parser.parse_args()
    names = flags.names or list(MUTANTS)
    least = flags.least if flags.least is not None else len(names) if flags.tier == "all" else round(0.9 * len(names))
    caught = 0
    for name in names:
        found = caught_by(MUTANTS[name], flags.tier)
        caught += bool(found)
        print(f"{name:<40}{found or 'NOT CAUGHT'}", flush=True)
    print(f"{caught} of {len(names)} caught")
    return 0 if caught >= least else 1


if __name__ == "__main__":
    sys.exit(main())
