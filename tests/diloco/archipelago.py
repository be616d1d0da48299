"""Islands one after the other in one process: each makes its steps, then all offer, then all apply what came of it."""

from dataclasses import replace

import jax
import numpy as np

from jaxtrain.diloco.outer_exchange import Exchange
from jaxtrain.train_step.optimizers import outer


class Archipelago:
    """A group of islands around one meeting; `runs` may be the same run several times."""

    def __init__(self, runs, steps, starts, meeting, batch, **keys):
        """`steps`: the compiled step of each run; `batch`: of (step, island); `keys`: of the config's section."""
        self.runs, self.steps, self.states, self.meeting, self.batch = runs, steps, list(starts), meeting, batch
        section = replace(runs[0].config.diloco, **keys)
        self.exchanges = [Exchange(replace(section, index=i), run.abstract, run.layout.axes, meeting)
                          for i, run in enumerate(runs)]
        self.done, self.config, self.losses = 0, section, []
        for i, exchange in enumerate(self.exchanges):
            self.states[i] = exchange.begin(0, self.states[i])

    def train(self, steps):
        """Run so many steps of every island, with the exchanges that are due."""
        for _ in range(steps):
            self.done += 1
            losses = []
            for i, (run, step) in enumerate(zip(self.runs, self.steps, strict=True)):
                self.states[i], metrics = step(self.states[i], run.sharded.place(self.batch(self.done - 1, i)))
                losses.append(float(metrics["loss"]))
            self.losses.append(losses)
            here = self.done % self.config.interval
            if self.config.overlap and here == self.config.overlap and self.done > here:
                self.everyone(Exchange.finish)
            if not here:
                self.everyone(Exchange.offer)
                if not self.config.overlap:
                    self.everyone(Exchange.finish)

    def everyone(self, do):
        for i, exchange in enumerate(self.exchanges):
            self.states[i] = do(exchange, self.done, self.states[i])


def numbers(tree):
    return jax.tree.map(np.asarray, jax.device_get(tree))


def outer_state(state):
    return numbers(state.extras[outer.NAME])
