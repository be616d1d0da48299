"""Answers with more than the sampler tells of them: values, and conversations of several turns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.hub.generate import Generated


@dataclass(frozen=True)
class Valued(Generated):
    """An answer, and what its reward was expected to be before each of its tokens and before its end."""

    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Conversation(Valued):
    """All that follows a conversation's beginning: answers of the model, and what was said between them.

    `tokens` and `logprobs` are of both; a token that the model did not sample has a log-probability of 0, and `end` is
    not used: the tokens that end turns are among the others. `text` is the last answer.
    """

    begin: tuple[int, ...] = ()  # tokens up to the first answer
    # Messages, with the number of `tokens` of each (0: of the beginning, or before another one that has them all).
    # Those of the model have its `reward` and `finish_reason` too.
    turns: tuple[JsonObject, ...] = ()

    @property
    def rewards(self) -> list[float]:
        """The reward that the environment gave for each answer."""
        return [turn["reward"] for turn in self.turns if "reward" in turn]

    @property
    def numbers(self) -> np.ndarray:
        """The number of each token's answer, from 0 on; -1: the model did not sample it."""
        found, answer = [], -1
        for turn in self.turns:
            answer += "reward" in turn
            found += [answer if "reward" in turn else -1] * turn["tokens"]
        return np.array(found, int)


def earned(answers: Sequence[Generated], group_size: int) -> list[float]:
    """Return what environments gave for each conversation; one that failed counts as the mean of its group."""
    found = [sum(answer.rewards) for answer in answers if isinstance(answer, Conversation)]
    for first in range(0, len(found), group_size):
        group = range(first, first + group_size)
        whole = [found[n] for n in group if answers[n].finish_reason != "error"]
        for n in group:
            if answers[n].finish_reason == "error":
                found[n] = sum(whole) / max(1, len(whole))
    return found


def measured(answers: Sequence[Generated]) -> dict[str, float]:
    """Return what is measured of conversations for a step's line of metrics; nothing of single answers."""
    talks = [answer for answer in answers if isinstance(answer, Conversation)]
    if not talks:
        return {}
    ends = [talk.finish_reason for talk in talks]
    return {"turns": float(np.mean([len(talk.rewards) for talk in talks])),
            "cut_off": ends.count("length") / len(ends), "environment_errors": ends.count("error") / len(ends),
            "answer_tokens": float(np.mean([(talk.numbers >= 0).sum() for talk in talks]))}


FORM = {"begin": [int], "turns": [{"role": str, "content": str, "tokens": int, "reward?": float | int}],
        "values": [float]}


def sampled_tokens(answer: Generated) -> np.ndarray:
    """Return whether the model sampled each token of an answer, its end included."""
    if isinstance(answer, Conversation):
        return answer.numbers >= 0
    return np.ones(len(answer.tokens) + (answer.end is not None), bool)
