"""Answers drawn by the train step itself (`rl.exact`), so that its log-probabilities are the sampler's to the last bit.

A sampler with a cache and a train step compute the same numbers in other orders, and so differ by rounding: in bfloat16
enough for some tokens to be drawn from another distribution than the one that is trained. Here the sampler only makes
drafts. The compiled step, run on a copy of the state with the drafts as its batch, returns what it would have drawn at
each place with the same random numbers. Up to the first difference a draft is the step's own answer; there it takes the
step's token, and the sampler goes on. When nothing differs, the answers and their log-probabilities are the step's own,
on any mesh, since the batch that is trained on is the one that was read, by the same program.

Leviathan et al. (arXiv 2211.17192) verify drafts of a smaller model in one pass; with the random numbers in common, as
here, a draft is kept wherever both models draw the same token.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.hub.batching.continuations import text_of
from jaxtrain.hub.batching.texts import seeds_of
from jaxtrain.hub.generate import Generated
from jaxtrain.objectives.policy_gradient import VALUES
from jaxtrain.run import Run, compiled_step
from jaxtrain.sharding.host_memory import copied
from jaxtrain.train_step.state import TrainState
from jaxtrain.tuning.exact.exact_objective import DRAWN, KEYS, PLACE, SAID

Columns = dict[str, np.ndarray]
# (tokens to continue, seed, and of each the number of its answer and how many tokens of that are there) -> answers.
Sampled = Callable[[list[list[int]], int, list[tuple[int, int]]], list[Generated]]
# (numbers of answers, tokens that each begins with) -> answers that go on from these.
Draft = Callable[[Sequence[int], Sequence[Sequence[int]]], list[Generated]]


@dataclass(frozen=True)
class Ends:
    """The tokens and the length that end an answer."""

    tokens: frozenset[int]
    most: int  # tokens of an answer


def to_prompts(run: Run, state: TrainState, prompts: list[list[int]], columns: Callable[[Iterable[tuple]], Columns],
               sampled: Sampled, ends: Ends, seed: int, words: Tokenizer) -> tuple[list[Generated], dict[str, float]]:
    """Return the step's own answers to prompts, and what is measured of how they came about.

    Args:
        columns: makes the step's batch of prompts, answers, rewards, and what is known of tokens.
        sampled: makes drafts.
    """
    def draft(numbers: Sequence[int], begun: Sequence[Sequence[int]]) -> list[Generated]:
        if not numbers:
            return []
        drawn = [(n, len(begin)) for n, begin in zip(numbers, begun, strict=True)]
        whole = [[*prompts[n], *begin] for n, begin in zip(numbers, begun, strict=True)]
        return [joined(begin, answer, ends.most) for begin, answer in zip(
            begun, sampled(whole, seed, drawn), strict=True)]

    unknown = {name: 0.0 for name in run.objective.batch_spec.keys() & {"advantages", *VALUES}}
    answers, fields = draw(run, state, prompts, lambda found: columns(
        (prompt, answer, 0.0, unknown) for prompt, answer in zip(prompts, found, strict=True)), draft, ends, seed,
        words.vocab_size)
    return [replace(answer, text=text_of(words, prompt, answer.tokens))
            for prompt, answer in zip(prompts, answers, strict=True)], fields


def draw(run: Run, state: TrainState, prompts: Sequence[Sequence[int]],
         batch_of: Callable[[Sequence[Generated]], Columns], draft: Draft, ends: Ends, seed: int,
         known: int) -> tuple[list[Generated], dict[str, float]]:
    """Return the step's own answers to prompts, and how many passes of the step, changed tokens and seconds they took.

    Args:
        batch_of: makes the step's batch of answers.
        draft: the sampler.
        seed: of the random numbers, of which answer n has those of position n.
        known: how many tokens the tokenizer has.
    """
    numbers = list(range(len(prompts)))
    answers = draft(numbers, [()] * len(prompts))
    keys, changed, took = seeds_of(seed, numbers), 0, 0.0
    for passes in range(1, 2 + len(prompts) * ends.most):
        columns = batch_of(answers) | _to_draw(run, prompts, keys, ends.most, known)
        columns["weights"] = np.zeros_like(columns["weights"])
        began, batch = time.perf_counter(), run.sharded.place(columns)
        _, told = compiled_step(run, batch)(copied(state), batch)  # what the step makes of its state is not used
        said, drawn = (np.asarray(told[name]).reshape(len(prompts), -1) for name in (SAID, DRAWN))
        took += time.perf_counter() - began
        wrong = {}
        for n, answer in enumerate(answers):
            place = slice(len(prompts[n]) - 1, len(prompts[n]) - 1 + ends.most)
            answers[n], begin = _compared(answer, said[n, place], drawn[n, place].astype(int))
            if begin is not None:
                wrong[n] = begin
        if not wrong:
            return answers, {"exact_passes": passes, "exact_changed_tokens": changed, "exact_s": took}
        changed += len(wrong)
        open_ = {n: begin for n, begin in wrong.items() if begin[-1] not in ends.tokens and len(begin) < ends.most}
        for n, answer in zip(open_, draft(list(open_), list(open_.values())), strict=True):
            answers[n] = answer
        for n in wrong.keys() - open_.keys():
            answers[n] = _closed(answers[n], wrong[n], ends)
    raise UserError("rl.exact", "the answers of a step do not settle: its numbers change from one run to the next",
                    "set train.deterministic=true, or leave rl.exact out")


def places(rows: int, length: int) -> Columns:
    """Return the columns that a batch has besides a policy gradient's, where nothing is drawn."""
    empty = {name: np.zeros((rows, length), np.int32 if name == KEYS[-1] else np.uint32) for name in KEYS}
    return {PLACE: np.arange(rows * length, dtype=np.int32).reshape(rows, length), **empty}


def joined(begin: Sequence[int], answer: Generated, most: int) -> Generated:
    """Return an answer of what it begins with and what follows that, of so many tokens at most."""
    tokens = (*begin, *answer.tokens)
    whole = len(tokens) + (answer.end is not None) <= most
    logprobs = (*[0.0] * len(begin), *(answer.logprobs or ()))
    return replace(answer, tokens=tokens[:most], logprobs=logprobs[:most], end=answer.end if whole else None,
                   finish_reason=answer.finish_reason if whole else "length")


def _to_draw(run: Run, prompts: Sequence[Sequence[int]], keys: np.ndarray, most: int, known: int) -> Columns:
    """Return these columns with the keys that answers are drawn with."""
    columns = places(len(prompts), run.config.data.seq_len)
    words = np.asarray(_folded(keys, np.arange(most, dtype=np.uint32)))
    for n, prompt in enumerate(prompts):
        first = len(prompt) - 1
        for name, each in zip(KEYS, (*words[n].T, known), strict=True):
            columns[name][n, first:first + most] = each
    return columns


@jax.jit
def _folded(keys: ArrayLike, counts: ArrayLike) -> jax.Array:
    """Return the words of the key of each token [B, N, 2], from those of its answer."""
    def of(words, count):
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(words), count))

    return jax.vmap(lambda words: jax.vmap(lambda count: of(words, count))(counts))(jnp.asarray(keys))


def _compared(answer: Generated, said: np.ndarray, drawn: np.ndarray) -> tuple[Generated, list[int] | None]:
    """Return a draft with the step's log-probabilities, and how the step's answer begins where that is another."""
    end = [] if answer.end is None else [answer.end[0]]
    tokens = [*answer.tokens, *end]
    apart = np.flatnonzero(drawn[:len(tokens)] != tokens)
    if len(apart):
        return answer, [*tokens[:apart[0]], int(drawn[apart[0]])]
    logprobs = said[:len(tokens)].tolist()
    return replace(answer, logprobs=tuple(logprobs[:len(answer.tokens)]),
                   end=(end[0], logprobs[-1]) if end else None), None


def _closed(answer: Generated, tokens: Sequence[int], ends: Ends) -> Generated:
    """Return an answer of these tokens, of which the last one ends it."""
    ended = tokens[-1] in ends.tokens
    held = tuple(tokens[:-1] if ended else tokens)
    return replace(answer, tokens=held, logprobs=(0.0,) * len(held), end=(tokens[-1], 0.0) if ended else None,
                   finish_reason="stop" if ended else "length")
