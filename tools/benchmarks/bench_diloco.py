"""Loss against bytes: islands that talk seldom beside synchronous training on the same tokens.

    python tools/benchmarks/bench_diloco.py
    python tools/benchmarks/bench_diloco.py --only synchronous diloco "streaming, int4" --seeds 0 1
    python tools/benchmarks/bench_diloco.py --tune --rate=0.048 --only synchronous
    python tools/benchmarks/bench_diloco.py --only "synchronous, one slow" "diloco, one slow" "asynchronous, one slow"
    python tools/benchmarks/bench_diloco.py --tune --only --also "rate=0.004" "momentum=0.8" "every=10"

Flags such as --config.model.embed_dim=32 change the config of all runs.

Eight islands are simulated one after the other in this process: exchanges are those of real islands (jaxtrain/diloco),
the meeting is in memory, and nothing waits. So losses and bytes are real, and times are not measured: with stragglers,
a clock of steps says when each island would arrive (one of the eight takes three times as long for a step). The losses
after a fourth, a half and three fourths of the steps have the steps of time and the MB until then beside them.

Of gossip no island has the parameters of another one: the loss is that of their mean, and the islands' own stand beside
it.

All islands begin with the first steps of the synchronous run, whose bytes do not count. Learning rates fall to zero
along a cosine. Their peaks are the best of those tried with --tune, of synchronous training (--rate), and of islands
(--inner; docs/diloco.md). "Alone" is one island that exchanges nothing: how much there is to gain.

Bytes are those that an island sends and receives, headers included. Synchronous training is charged with a ring
all-reduce of float32 gradients in every step: 2 x (N - 1) / N x 4 bytes a parameter sent, and as many received.
"""

import argparse
import dataclasses
import heapq
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import jaxtrain as jt
from jaxtrain.commands.flags import overrides_of
from jaxtrain.config.load import load_config
from jaxtrain.diloco.outer_exchange import Exchange
from jaxtrain.run import shapes_of
from jaxtrain.train_step.hooks import extras_of
from tests.diloco.memory_meeting import MemoryMeeting

ISLANDS, EVERY, SLOW = 8, 50, 3
EVALUATED = 4096  # rows; as many behind them are for tuning
STREAMING = dict(fragments=2, overlap=5)
MODES = {  # what differs from DiLoCo with --outer: diloco.* keys, whether one island is slow, the inner rate
    "synchronous": None,
    "synchronous, one slow": dict(synchronous=True, slow=True),
    "alone": dict(alone=True),
    "local SGD": dict(learning_rate=1.0, momentum=0.0),
    "diloco": {},
    "diloco, one slow": dict(slow=True),
    "diloco, bfloat16": dict(compression="bfloat16"),
    "diloco, int4": dict(compression="int4"),
    "diloco, top_k": dict(compression="top_k"),
    "diloco, two fragments": dict(fragments=2),
    "streaming": STREAMING,
    "streaming, int4": STREAMING | dict(compression="int4"),
    "streaming, int4, not blended": STREAMING | dict(compression="int4", blend=0.0),
    "gossip": dict(mode="gossip", learning_rate=0.7),
    "gossip, momentum 0.5": dict(mode="gossip", learning_rate=0.7, momentum=0.5),
    "gossip, averaging": dict(mode="gossip", learning_rate=1.0, momentum=0.0),
    "asynchronous": dict(mode="async", learning_rate=0.7),
    "asynchronous, one slow": dict(mode="async", learning_rate=0.7, slow=True),
    "asynchronous, one slow, ages alike": dict(mode="async", learning_rate=0.7, slow=True, age_decay=0.0),
}
PUBLISHED = {  # what the papers say of it, for models and runs of another size
    "diloco": "as good, 500 times less communication (2311.08105)",
    "streaming, int4": "similar quality, bandwidth less by two orders of magnitude (2501.18512)",
    "gossip": "up to 4 % faster than DiLoCo (2506.10911)",
}


def config_of(args, rows, keys, rate):
    """The config of a run of a small model on the source code of Python's library."""
    return load_config(str(Path(__file__).resolve().parents[2] / "configs" / "gpt.py:tiny"), {
        "model.embed_dim": "16", "model.num_layers": "1", "model.num_heads": "1",
        "optimizer.learning_rate": str(rate), "optimizer.warmup_steps": str(args.steps // 20),
        "optimizer.final_fraction": "0.0", "train.steps": str(args.steps), "train.eval_every": "0",
        "train.seed": str(args.seed), "data.seed": str(args.seed), "data.global_batch_size": str(rows),
        **args.overrides, **{key if "." in key else f"islands.{key}": str(value) for key, value in keys.items()}})


class Training:
    """A run whose steps are made many at a time."""

    def __init__(self, args, rows, keys, rate):
        self.run = jt.build(config_of(args, rows, keys, rate), devices=jax.devices()[:1])
        self.evaluated = range(EVALUATED // rows * args.tune, EVALUATED // rows * (1 + args.tune))
        self.evaluation = self.run.sharded.compiled_evaluation(shapes_of(self.run).abstract())
        step, self.whole = self.run.sharded.make(), self.run.sharded.place(self.run.batch(0))

        def chunk(state, batches, many):
            def one(i, state):
                return step(state, jax.tree.map(lambda x: x[i], batches))[0]
            return jax.lax.fori_loop(0, many, one, state)

        self._chunk = jax.jit(chunk, donate_argnums=0)

    def train(self, state, batches, first, many):
        """The state after so many steps from this one on."""
        rows = [batches[first + n] for n in range(many)]
        stacked = {key: np.stack([row[key] for row in rows] + [rows[0][key]] * (EVERY - many)) for key in rows[0]}
        with self.run.sharded.context():
            return self._chunk(state, jax.tree.map(jnp.asarray, stacked), many)

    def loss(self, state):
        """The evaluation's loss, of the same rows for all sizes of a batch."""
        total = weight = 0.0
        for n in self.evaluated:
            nats, tokens, *_ = jax.device_get(
                self.evaluation(state.all_params, self.run.batch(n, self.run.eval_batches)))
            total, weight = total + nats, weight + tokens
        return float(total / weight)


def synchronous(args):
    """Return loss and bytes of an island; and the state after the first steps, with which the islands begin."""
    made = Training(args, ISLANDS * args.rows, {}, args.rate)
    state = trained(made, made.run.init(), 0, args.warm)
    begin = jax.tree.map(np.array, jax.device_get(state))  # copies, since steps donate the state
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    each, curve = 2 * 2 * (ISLANDS - 1) / ISLANDS * 4 * size, []
    for first in range(args.warm, args.steps, EVERY):
        state = trained(made, state, first, first + EVERY)
        done = first + EVERY - args.warm
        if quarter(done // EVERY, (args.steps - args.warm) // EVERY):
            curve.append((done, done * each, made.loss(state)))
    steps = args.steps - args.warm
    return {"loss": made.loss(state), "bytes": steps * each, "time": steps, "parameters": size, "curve": curve}, begin


def quarter(done, many):
    """-> whether a fourth, a half or three fourths of so many have just been done."""
    return done in (many // 4, many // 2, many * 3 // 4)


def trained(made, state, first, end):
    """Return the state after the steps from one to another of a run."""
    for step in range(first, end, EVERY):
        state = made.train(state, made.run.batch_source, step, EVERY)
    return state


def alone(args, keys, begin):
    """Return what is measured of an island that exchanges nothing: what the others' tokens are worth."""
    keys = {key: value for key, value in keys.items() if key != "alone"}
    made = Training(args, args.rows, keys, keys.pop("rate", args.inner))
    batches = jt_part(made.run.config.data, made.run.corpus, 0)
    state = made.run.sharded.adopt(jax.tree.map(np.array, begin))
    for first in range(args.warm, args.steps, EVERY):
        state = made.train(state, batches, first, EVERY)
    return {"loss": made.loss(state), "bytes": 0.0, "time": args.steps - args.warm}


class Simulated:
    """A simulation of some islands around one meeting."""

    def __init__(self, args, keys, begin):
        keys = dict(keys)
        self.slow, self.args = keys.pop("slow", False), args
        rate = keys.pop("rate", args.inner)
        self.made = Training(args, args.rows,
                             dict(count=ISLANDS, every=EVERY, learning_rate=args.outer) | keys, rate)
        section = self.made.run.config.diloco
        self.section, self.meeting = section, MemoryMeeting(ISLANDS, section.mode, section.max_age)
        self.exchanges = [Exchange(dataclasses.replace(section, index=i), self.made.run.abstract,
                                   self.made.run.layout.axes, self.meeting) for i in range(ISLANDS)]
        extras = {name: make(begin.params) for name, make in extras_of(self.made.run.extensions).items()}
        state = dataclasses.replace(begin, extras=extras)
        self.states = [self.made.run.sharded.adopt(jax.tree.map(np.array, state)) for _ in range(ISLANDS)]
        data = self.made.run.config.data
        self.batches = [jt_part(data, self.made.run.corpus, i) for i in range(ISLANDS)]
        self.done, self.bytes, self.curve = [args.warm] * ISLANDS, 0.0, []

    def steps(self, i, many):
        """Inner steps of an island."""
        self.states[i] = self.made.train(self.states[i], self.batches[i], self.done[i], many)
        self.done[i] += many

    def exchange(self, do, islands):
        """One half of an exchange, of some islands."""
        for i in islands:
            self.states[i] = do(self.exchanges[i], self.done[i], self.states[i])
            fields = self.exchanges[i].pop_fields()
            self.bytes += sum(fields.get(f"island_{way}_bytes", 0) for way in ("sent", "received")) / ISLANDS

    def together(self):
        """All islands at one speed, for as many steps as asked for; then every fragment once more."""
        everyone, overlap, interval = range(ISLANDS), self.section.overlap, self.section.interval
        steps, pace = self.args.steps - self.args.warm, SLOW if self.slow else 1
        for number in range(steps // interval):
            if overlap and number:
                for i in everyone:
                    self.steps(i, overlap)
                self.exchange(Exchange.finish, everyone)
            for i in everyone:
                self.steps(i, interval - (overlap if number else 0))
            last = (number + 1) * interval == steps
            for _ in range(self.section.fragments if last else 1):
                self.exchange(Exchange.offer, everyone)
                if last or not overlap:
                    self.exchange(Exchange.finish, everyone)
            if quarter(number + 1, steps // interval):
                self.curve.append(((number + 1) * interval * pace, self.bytes, self.made.loss(self.states[0])))
        return steps * pace

    def apart(self):
        """Each island as it comes, until all together have made as many steps as asked for."""
        pace = [SLOW if self.slow and i == ISLANDS - 1 else 1 for i in range(ISLANDS)]
        coming = [(EVERY * pace[i] + i / 100, i) for i in range(ISLANDS)]
        at, left = 0.0, (self.args.steps - self.args.warm) // EVERY * ISLANDS
        for number in range(left):
            at, i = heapq.heappop(coming)
            self.steps(i, EVERY)
            self.exchange(Exchange.offer, [i])
            self.exchange(Exchange.finish, [i])
            heapq.heappush(coming, (at + EVERY * pace[i], i))
            if quarter(number + 1, left):
                self.curve.append((at, self.bytes, self.made.loss(self.states[i])))
        self.last = i
        return at

    def result(self):
        """Train, and return loss and bytes."""
        self.last = 0
        at = self.together() if self.section.mode != "async" else self.apart()
        found = {"loss": self.made.loss(self.states[self.last]), "bytes": self.bytes, "time": at, "curve": self.curve}
        if self.section.mode != "gossip":
            return found
        mean = jax.tree.map(lambda *own: sum(own) / ISLANDS, *(state.params for state in self.states))
        return found | {"loss": self.made.loss(dataclasses.replace(self.states[0], params=mean)),
                        "own": [self.made.loss(state) for state in self.states]}


def jt_part(data, corpus, index):
    """An island's batches; an island that is fast goes on behind what the schedule has."""
    from jaxtrain.data.loading.island_part import island_batches

    return island_batches(data, corpus, index, ISLANDS)


def main():
    """Parse the flags, and print a line for each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6000, help="of synchronous training, a multiple of 50")
    parser.add_argument("--warm", type=int, default=1600,
                        help="the first of them, synchronous in every mode; a multiple of 50, too")
    parser.add_argument("--rows", type=int, default=8, help="of an island's batch")
    parser.add_argument("--rate", type=float, default=0.024, help="the learning rate of synchronous training")
    parser.add_argument("--inner", type=float, default=0.008, help="that of an island's steps")
    parser.add_argument("--outer", type=float, default=1.0,
                        help="the outer learning rate, of the modes that name none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of first parameters and of the data's order")
    parser.add_argument("--tune", action="store_true", help="evaluate on other held-out rows, by which to choose rates")
    parser.add_argument("--only", nargs="*", choices=MODES, default=list(MODES),
                        help="these modes, or none of them")
    parser.add_argument("--also", nargs="+", default=[], metavar="'KEY=VALUE ...'",
                        help="modes of diloco.* keys; rate is that of an island's steps, and names with a dot, as "
                             "optimizer.b2, are keys of its config")
    args, words = parser.parse_known_args()
    args.overrides = overrides_of(words, vars(args))
    modes = {name: MODES[name] for name in args.only}
    modes |= {keys: dict(key.split("=", 1) for key in keys.split()) for keys in args.also}
    rows = {name: [] for name in modes}
    for seed in args.seeds:
        args.seed = seed
        whole, begin = synchronous(args)
        for name, keys in modes.items():
            began = time.time()
            found = whole if keys is None else measured(args, keys, begin, whole)
            rows[name].append(found | {"more": found["loss"] / whole["loss"] - 1,
                                       "fewer": whole["bytes"] / (found["bytes"] or np.inf)})
            print(json.dumps({"mode": name, "seed": seed, **rows[name][-1], "seconds": time.time() - began}),
                  file=sys.stderr, flush=True)
    print("| mode | loss | against synchronous | MB an island sends and receives | times fewer | steps of time "
          "| loss at 1/4, 1/2, 3/4 (time, MB) | published |")
    print("|---|---|---|---|---|---|---|---|")
    for name, found in rows.items():
        print(line(name, found))


def measured(args, keys, begin, whole):
    """Return what is measured of a mode, given what was measured of synchronous training."""
    if keys.get("synchronous"):  # all wait for the slow one in every step
        return whole | {"time": SLOW * whole["time"], "curve": [(SLOW * at, *rest) for at, *rest in whole["curve"]]}
    return alone(args, keys, begin) if keys.get("alone") else Simulated(args, keys, begin).result()


def line(name, found):
    """Return the table's line of a mode; of several seeds, means and the range of how much more the loss is."""
    def mean(key):
        return sum(one[key] for one in found) / len(found)

    more, own = [one["more"] for one in found], [loss for one in found for loss in one.get("own", ())]
    between = f" ({min(more):+.2%} to {max(more):+.2%})" if len(found) > 1 and any(more) else ""
    fewer = f"{mean('fewer'):.0f}" if mean("bytes") else ""
    curve = ", ".join(f"{np.mean([loss for *_, loss in points]):.4f} ({points[0][0]:.0f}, {points[0][1] / 1e6:.2f})"
                      for points in zip(*(one.get("curve", ()) for one in found), strict=True))
    return (f"| {name}{f' (own: {min(own):.4f} to {max(own):.4f})' if own else ''} | {mean('loss'):.4f} "
            f"| {mean('more'):+.2%}{between} | {mean('bytes') / 1e6:.2f} | {fewer} | {mean('time'):.0f} "
            f"| {curve} | {PUBLISHED.get(name, '')} |")


if __name__ == "__main__":
    main()
