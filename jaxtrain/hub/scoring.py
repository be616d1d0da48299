"""Log-probabilities that a model gives to texts, rewards or values, in batches on the mesh it lives on.

Shape suffixes: B rows, T tokens, D embedding, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.hub.decoding import Decoding, decoding
from jaxtrain.kernels.functions import soft_capped
from jaxtrain.kernels.loss_head.biased_heads import for_head
from jaxtrain.models import lora
from jaxtrain.sharding import activations, axis_rules
from jaxtrain.train_step.state import Params

if TYPE_CHECKING:
    from jaxtrain.run import Run

Pair = tuple[Sequence[int], Sequence[int]]  # what is given, and what is scored behind it


@dataclass(frozen=True)
class Score:
    """The log-probability of a text after another one, and whether it is the greedy continuation."""

    logprobs: np.ndarray  # of each of its tokens
    greedy: bool  # whether each of them was the most probable one


def score(run: "Run", params: Params, pairs: Sequence[Pair], *, batch_size: int = 64,
          chosen: np.ndarray | None = None) -> list[Score]:
    """Score the second text of each pair behind the first; of pairs that are too long, the last tokens count.

    Args:
        run: with the model, on its mesh.
        params: trained and frozen ones, as `state.all_params`.
        pairs: of texts as tokens.
        batch_size: how many are scored at once.
        chosen: what each pair multiplies stacked adapters by, as `stacked_adapters.chosen` has it.
    """
    scorer, longest = _scorer(run), run.config.model.max_seq_len
    rows = [(list(given) + list(scored))[-longest - 1:] for given, scored in pairs]
    counts = [min(len(scored), len(row) - 1) for (_, scored), row in zip(pairs, rows, strict=True)]
    found: dict[int, Score] = {}
    for numbers in _batches(rows, batch_size):
        logps, tops = scorer.batch(params, [rows[n] for n in numbers], batch_size,
                                   chosen=None if chosen is None else chosen[numbers])
        for n, logp_T, top_T in zip(numbers, logps, tops, strict=False):
            behind = slice(len(rows[n]) - 1 - counts[n], len(rows[n]) - 1)
            found[n] = Score(logp_T[behind], bool(top_T[behind].all()))
    return [found[n] for n in range(len(rows))]


def rewards(run: "Run", params: Params, texts: Sequence[Sequence[int]], *, batch_size: int = 64) -> list[float]:
    """Return the reward of each text by a reward model, read out at its last token."""
    rows = [[*list(text)[-run.config.model.max_seq_len:], 0] for text in texts]  # a token to predict, as elsewhere
    return [float(found_T[-1]) for found_T in readouts(run, params, rows, batch_size=batch_size)]


def readouts(run: "Run", params: Params, rows: Sequence[Sequence[int]], *, batch_size: int = 64) -> list[np.ndarray]:
    """Return what the model's head of rewards or values reads out at each token of these texts but the last one."""
    scorer, found, texts = _scorer(run), {}, [list(row) for row in rows]
    for numbers in _batches(texts, batch_size):
        found_BT, = scorer.batch(params, [texts[n] for n in numbers], batch_size, readouts=True)
        found |= {n: found_T[:len(texts[n]) - 1] for n, found_T in zip(numbers, found_BT, strict=False)}
    return [found[n] for n in range(len(texts))]


def _batches(rows: list[list[int]], size: int) -> Iterator[list[int]]:
    """Yield the numbers of rows that are scored together, the longest first: their memory is needed at once or never.
    """
    order = sorted(range(len(rows)), key=lambda n: -len(rows[n]))
    yield from (order[at:at + size] for at in range(0, len(order), size))


@functools.lru_cache(maxsize=4)
def _scorer(run: "Run") -> "Scorer":
    return Scorer(decoding(run))


@dataclass(frozen=True, eq=False)
class Scorer:
    """The compiled program, once for each number of rows and tokens, which are rounded up."""

    programs: Decoding

    def shape(self, texts: int, longest: int) -> tuple[int, int]:
        """Return how many rows and tokens the program takes for this many texts of at most `longest` tokens."""
        return self.programs.rows * -(-texts // self.programs.rows), 1 << max(3, (longest - 2).bit_length())

    def batch(self, params: Params, rows: list[list[int]], most: int, readouts: bool = False,
              chosen: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """Return each token's log-probability, and whether it is the most probable one, [B, T]; or a head's number."""
        many, width = self.shape(min(most, max(len(rows), 1)), max(map(len, rows)))
        tokens = np.zeros((many, width + 1), np.int32)
        lengths = np.zeros(len(tokens), np.int32)
        for at, row in enumerate(rows):
            tokens[at, :len(row)], lengths[at] = row, len(row) - 1
        if chosen is not None:
            chosen = np.pad(chosen, [(0, len(tokens) - len(rows)), (0, 0)])
        with self.programs.context():
            place = self.programs.place
            program = self.readouts_program if readouts else self.logprobs_program
            return jax.tree.map(np.asarray, program(params, place(tokens[:, :-1]), place(tokens[:, 1:]),
                                                    place(lengths), None if chosen is None else place(chosen)))

    @functools.cached_property
    def logprobs_program(self):
        """The compiled function of parameters, tokens, targets and the rows' lengths, that gives log-probabilities."""
        return self._program(lambda model, x_BTD, targets_BT: _of_targets(
            x_BTD, activations.gather(model.head(), "embed", "vocab"), targets_BT, model.logit_cap))

    @functools.cached_property
    def readouts_program(self):
        """The compiled function of parameters, tokens, targets and the rows' lengths."""
        name = self.programs.run.config.scalar_head
        return self._program(lambda model, x_BTD, _: (getattr(model, name)(x_BTD),))

    def _program(self, read: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., tuple[jax.Array, ...]]:
        """Return what computes final activations, and what `read` makes of them."""
        def run(params, tokens_BT, targets_BT, lengths_B, chosen_BR=None):
            model = self.programs.model_of(params)
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
            positions_BT = activations.constrain(positions_BT, "batch", None)
            segments_BT = (positions_BT < lengths_B[:, None]).astype(jnp.int32)
            longest = self.programs.run.config.model.max_seq_len - 1  # padding may lie behind it
            with lora.choosing(chosen_BR):
                x_BTD = model.hidden(tokens_BT, segments_BT, jnp.minimum(positions_BT, longest))
            return jax.tree.map(lambda x: jax.reshard(x, P(None, None)), read(model, x_BTD, targets_BT))

        return jax.jit(run)


def _of_targets(x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array,
                cap: float) -> tuple[jax.Array, jax.Array]:
    """Return targets' log-probabilities, and whether each has the largest logit; logits exist for one row at a time."""
    rows, vocab, x_BTD = activations.split_by("batch"), activations.split_by("act_vocab"), for_head(x_BTD, head_DV)
    axes = axis_rules.axes_of(vocab)
    total, largest = (partial(f, axis_name=axes) if axes else lambda x: x for f in (lax.psum, lax.pmax))

    def local(x_BTD, head_DV, targets_BT):
        first = lax.axis_index(axes) * head_DV.shape[1] if axes else 0

        def row(each):
            x_TD, target_T = each
            logits_TV = soft_capped(jnp.dot(x_TD, head_DV, preferred_element_type=jnp.float32), cap)
            hit_TV = (target_T - first)[:, None] == jnp.arange(logits_TV.shape[1])
            top_T = largest(logits_TV.max(-1))
            target_logit_T = total(jnp.where(hit_TV, logits_TV, 0).sum(-1))
            partition_T = total(jnp.exp(logits_TV - top_T[:, None]).sum(-1))
            return target_logit_T - top_T - jnp.log(partition_T), target_logit_T >= top_T

        return lax.map(row, (x_BTD, targets_BT))

    return activations.manual_region(local, in_specs=(P(rows, None, None), P(None, vocab), P(rows, None)),
                                  out_specs=P(rows, None))(x_BTD, head_DV, targets_BT)
