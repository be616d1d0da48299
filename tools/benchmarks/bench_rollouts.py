"""Measure a step on a model's own answers beside a scorer that needs time: with older answers, and without.

    python tools/benchmarks/bench_rollouts.py
    export XLA_FLAGS=--xla_force_host_platform_device_count=4
    python tools/benchmarks/bench_rollouts.py --gather --config.mesh.fsdp=4

The scorer sleeps for a multiple of the seconds that a step takes with its answers and without a scorer. Every figure is
the median over series of five steps, of which those of each staleness take turns, so that other work on the machine
slows all of them down alike. As many steps are scored at once as with a scorer behind a URL. With --gather: the answers
of a step with weights as they rest, and laid out for decoding.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import jaxtrain as jt
from jaxtrain.commands.flags import overrides_of
from jaxtrain.config.load import load_config
from jaxtrain.errors import say
from jaxtrain.tuning.pending_rewards import PendingRewards
from jaxtrain.tuning.rollouts import Rollouts
from jaxtrain.tuning.scorers import Scorers

STALENESS, SERIES = (0, 1, 2), 5
KEYS = {"model.num_layers": 4, "data.seq_len": 48, "data.global_batch_size": 64, "train.eval_every": 0,
        "rl.max_new_tokens": 32, "rl.reward": "none.py:none", "train.steps": 2**20}


class Steps:
    """One run's steps, each with its answers; the scorer sleeps for `pause` seconds."""

    def __init__(self, run, records, staleness: int = 0):
        self.run, self.state, self.step, self.pause = run, run.init(), 0, 0.0
        self.data = Rollouts(run, records, Scorers(("none",), (self.score,)), run.corpus.tokenizer)
        self.data.staleness = staleness
        self.data._pending = PendingRewards(lambda *asked: [self.score(*asked)], staleness or 1)

    def score(self, answers, records):
        time.sleep(self.pause)
        return [float(sum(map(ord, answer)) % 7) for answer in answers]

    def go_on(self) -> None:
        """Make the next step."""
        self.data.see(self.step, self.state)
        self.state, metrics = self.run.step(self.state, self.data[self.step])
        jax.block_until_ready(metrics)
        self.step += 1

    def seconds(self) -> float:
        """The time of a step in a series; before it come some, whose rewards other series have had time for."""
        for _ in range(1 + self.data.staleness):
            self.go_on()
        began = time.perf_counter()
        for _ in range(SERIES):
            self.go_on()
        return (time.perf_counter() - began) / SERIES


def in_turn(calls, repeats: int) -> list[float]:
    """The median of what each call returns, called one after the other, so many times."""
    took = [[call() for call in calls] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*took, strict=True)]


def built(records: list, overrides: dict, folder: str):
    """The run of a tiny config that answers these prompts."""
    path = Path(folder) / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (Path(folder) / "none.py").write_text("def none(answer, record):\n    return 0.0\n")
    return jt.build(load_config("configs/gpt.py:tiny", KEYS | overrides | {
        "rl.prompts": f"{path}", "rl.reward": f"{folder}/none.py:none"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gather", action="store_true")
    flags, words = parser.parse_known_args()
    records = [{"prompt": f"number {n}:"} for n in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        overrides = overrides_of(words, vars(flags))
        if flags.gather:
            runs = [Steps(built(records, overrides | {"rl.gather_weights": on}, folder), records)
                    for on in (False, True)]
            found = []

            def fields(steps):
                steps.go_on()
                return steps.data.pop_fields()

            [fields(steps) for steps in runs]  # compiles
            for _ in range(flags.repeats):
                found.append([fields(steps) for steps in runs])
            rest, laid = (statistics.median(one[n]["rollout_s"] for one in found) for n in (0, 1))
            took = statistics.median(one[1]["layout_s"] for one in found)
            say(f"answers of a step: {1000 * rest:.0f} ms with weights as they rest, {1000 * laid:.0f} ms laid out "
                f"({rest / laid:.2f} times as fast), of which {1000 * took:.0f} ms for "
                f"{found[0][1]['layout_bytes'] / 2**20:.1f} MiB on each device")
            return
        run = built(records, overrides, folder)
        every = [Steps(run, records, k) for k in STALENESS]
        in_turn([one.seconds for one in every], 1)  # compiles
        plain = in_turn([every[0].seconds], flags.repeats)[0]
        say(f"a step with its answers and without a scorer: {1000 * plain:.0f} ms")
        for share in (0.5, 1.0, 2.0):
            for one in every:
                one.pause = share * plain
            found = in_turn([one.seconds for one in every], flags.repeats)
            say(f"a scorer of {share:g} steps: " + ", ".join(
                f"staleness {k}: {1000 * took:.0f} ms ({found[0] / took:.2f} times as fast)"
                for k, took in zip(STALENESS, found, strict=True)))


if __name__ == "__main__":
    main()
