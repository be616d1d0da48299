"""The request for one answer, and the answer in a response: token ids on both sides, and nothing is tokenized."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.hub.batching.continuations import text_of
from jaxtrain.hub.generate import Generated

# What follows these prompts, with a seed for each.
Answering = Callable[[Sequence[Sequence[int]], Sequence[int]], list[Generated]]


class Unfinished(Exception):
    """Raised for an answer that the server cut off itself, such as one whose request it dropped."""


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, and the seed of its answer."""

    prompt: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Terms:
    """The terms of sampling for all answers of a run, and what they are checked by."""

    max_new_tokens: int
    temperature: float
    ends: tuple[int, ...]  # tokens that end an answer
    vocabulary: int
    words: Tokenizer

    def request(self, one: Question, model: str) -> JsonObject:
        """Return the request for an answer, which leaves nothing to the server's own defaults."""
        return {"prompt": list(one.prompt), "max_tokens": self.max_new_tokens, "temperature": self.temperature,
                "seed": one.seed, "stop_token_ids": list(self.ends), "ignore_eos": True, "logprobs": 0,
                "return_token_ids": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False, "n": 1,
                "top_p": 1.0, "top_k": 0, "min_p": 0.0,
                "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
                **({"model": model} if model else {})}

    def answer(self, one: Question, response: JsonMapping) -> Generated:
        """Return the answer in a response; raise ValueError where it is not one to what was asked."""
        choice = _choice(response)
        tokens, reason = choice.get("token_ids"), choice["finish_reason"]
        if tokens is None or choice.get("prompt_token_ids") is None:
            raise ValueError("it has no token_ids, or no prompt_token_ids, though return_token_ids was asked for")
        if reason not in ("stop", "length"):
            raise Unfinished(f"ends an answer with {str(reason)[:40]!r}")
        if choice["prompt_token_ids"] != list(one.prompt):
            raise ValueError("its prompt_token_ids are not those of the prompt that was asked")
        logprobs = _logprobs(choice, len(tokens))
        if not 0 < len(tokens) <= self.max_new_tokens:
            raise ValueError(f"it has {len(tokens)} tokens, and max_tokens was {self.max_new_tokens}")
        if bad := [token for token in tokens if not 0 <= token < self.vocabulary]:
            raise ValueError(f"its token {bad[0]} is outside of the vocabulary of {self.vocabulary}")
        ended = tokens[-1] in self.ends
        whole = ended or len(tokens) == self.max_new_tokens
        if ended != (reason == "stop") or _early(tokens, self.ends) or not whole:
            raise ValueError(f"it ends with token {tokens[-1]} after {len(tokens)} for the reason {reason!r}, and the "
                             f"run's answers end with one of {list(self.ends)}, or after {self.max_new_tokens}")
        kept = tuple(tokens[:-1]) if ended else tuple(tokens)
        return Generated(text_of(self.words, one.prompt, kept), kept, tuple(logprobs[:len(kept)]), reason,
                         (tokens[-1], logprobs[-1]) if ended else None)


def _choice(response: JsonMapping) -> JsonObject:
    choices = response.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ValueError("it has not one choice")
    choice = choices[0]
    for name in ("token_ids", "prompt_token_ids"):
        ids = choice.get(name)
        if ids is not None and not (isinstance(ids, list) and all(type(n) is int for n in ids)):
            raise ValueError(f"its {name} are not a list of whole numbers")
    if not isinstance(choice.get("finish_reason"), str):
        raise ValueError("it has no finish_reason")
    return choice


def _logprobs(choice: JsonMapping, size: int) -> list[float]:
    found = choice.get("logprobs")
    found = found.get("token_logprobs") if isinstance(found, dict) else None
    if not isinstance(found, list) or len(found) != size:
        raise ValueError("it has no log-probability of each token")
    for x in found:
        if not isinstance(x, float | int) or not -1e30 < x <= 1e-3:
            raise ValueError(f"{str(x)[:20]} is not a log-probability")
    return [float(x) for x in found]


def _early(tokens: Sequence[int], ends: Collection[int]) -> bool:
    return any(token in ends for token in tokens[:-1])
