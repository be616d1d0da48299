"""Answers by the mesh that trains, between two steps."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.hub.decoding import decoding
from jaxtrain.hub.generate import Generated, generate
from jaxtrain.train_step import partition

if TYPE_CHECKING:
    from jaxtrain.run import Run
    from jaxtrain.train_step.state import TrainState

Columns = Callable[[Iterable[tuple]], dict[str, np.ndarray]]  # a batch of rows


@dataclass
class OwnMesh:
    """A run's own mesh, and how it is to answer."""

    run: "Run"
    tokenizer: Tokenizer
    ends: list[int]  # tokens that end answers, beside the end of a document
    rows: int  # answers at once, at most
    fields: dict[str, float] = field(default_factory=dict)  # what was measured

    def sampled(self, state: "TrainState", prompts: list[list[int]], seed: int,
                drawn: list[tuple[int, int]] | None = None) -> list[Generated]:
        """Return what follows these prompts. `drawn`: as `generate` takes it."""
        c = self.run.config.rl
        return generate(self.run, state, prompts, max_new_tokens=c.max_new_tokens, seed=seed, stop=self.ends,
                        logprobs=True, batch_size=self.rows, tokenizer=self.tokenizer, temperature=c.temperature,
                        tempered=True, drawn=drawn)

    def exact(self, state: "TrainState", prompts: list[list[int]], seed: int, columns: Columns) -> list[Generated]:
        """Return the answers that the step draws, of drafts by the sampler."""
        from jaxtrain.tuning.exact import exact_answers

        sampled = partial(self.sampled, self.laid_out(state))
        ends = exact_answers.Ends(frozenset([*self.ends, self.tokenizer.eod]), self.run.config.rl.max_new_tokens)
        answers, fields = exact_answers.to_prompts(self.run, state, prompts, columns, sampled, ends, seed,
                                                   self.tokenizer)
        self.fields |= fields
        return answers

    def laid_out(self, state: "TrainState") -> "TrainState":
        """Return the state with weights as decoding uses them, in a copy that lives while the model answers."""
        if not self.run.config.rl.gather_weights:
            return state
        began, params = time.perf_counter(), partition.without(state.all_params, self.run.objective.frozen_axes)
        copy = jax.block_until_ready(decoding(self.run).laid_out(params))
        self.fields["layout_s"] = self.fields.get("layout_s", 0) + time.perf_counter() - began
        self.fields["layout_bytes"] = sum(w.addressable_data(0).nbytes for w in jax.tree.leaves(copy))
        return replace(state, params=copy, frozen={})

    def pop_fields(self) -> dict[str, float]:
        """Return what was measured since the last call."""
        found, self.fields = self.fields, {}
        return found
