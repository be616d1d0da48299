"""A teacher behind a URL: the log-probabilities that an OpenAI-compatible server gives to tokens.

A request to `/completions` has texts as token ids, with `echo` and `logprobs`: so the server returns the
log-probability of each token of the text too, as vLLM does and as lm-evaluation-harness asks for it. The one token that
it generates is left out.
"""

import itertools
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

from jaxtrain.base.annotations import JsonObject
from jaxtrain.config.schema import Config
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import parsed
from jaxtrain.hub.generate import Generated
from jaxtrain.tuning.http_service import HttpService, timeout_of

KEY = "rl.teacher"
MOST, AT_ONCE = 32, 8  # texts in a request, and requests
LIMIT = 2**28  # bytes of a response: for each token its text, its log-probability and the likeliest one


@dataclass(frozen=True)
class RemoteTeacher:
    """A model that a server holds under a name; "": the only one. The first process asks it."""

    service: HttpService
    model: str
    checkpoint: ClassVar[JsonObject] = {}  # which weights the server has is not known here

    @staticmethod
    def is_meant(teacher: str) -> bool:
        """Return whether a value of rl.teacher names one, and no folder."""
        return teacher.startswith(("http://", "https://"))

    @classmethod
    def of(cls, config: Config) -> "RemoteTeacher":
        """Return the teacher that URL or URL#MODEL names."""
        url = urllib.parse.urlsplit(config.rl.teacher)
        asked = url._replace(path=f"{url.path.rstrip('/')}/completions", fragment="").geturl()
        return cls(HttpService(KEY, "server", asked, timeout_of(config), LIMIT), url.fragment)

    def __call__(self, prompts: Sequence[Sequence[int]], answers: Sequence[Generated]) -> list[list[float]]:
        """Return the log-probability of each token of each answer behind its prompt, its end included."""
        return exchange(None, lambda _: self._asked(prompts, answers))

    def _asked(self, prompts: Sequence[Sequence[int]], answers: Sequence[Generated]) -> list[list[float]]:
        texts = [[*prompt, *answer.tokens, *(answer.end or ())[:1]]
                 for prompt, answer in zip(prompts, answers, strict=True)]
        parts = [texts[first:first + MOST] for first in range(0, len(texts), MOST)]
        with ThreadPoolExecutor(AT_ONCE) as pool:  # a step waits for about as long as for one of them
            found = itertools.chain.from_iterable(pool.map(self._logprobs, parts))
            return [each[len(prompt):] for each, prompt in zip(found, prompts, strict=True)]

    def _logprobs(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        asked: JsonObject = {"prompt": texts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        content = self.service.posted(asked | ({"model": self.model} if self.model else {}))
        try:
            choices = parsed(content, {"choices": [dict]})["choices"]
            found = [choice["logprobs"]["token_logprobs"] for choice in sorted(choices, key=lambda one: one["index"])]
            if len(found) != len(texts):
                raise ValueError(f"{len(found)} choices for {len(texts)} texts")
            return [_of_text(each, len(text)) for each, text in zip(found, texts, strict=True)]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(KEY, f"what {self.service.url} answers has no log-probability of each token of the text "
                            f"({error or type(error).__name__})", "use a server whose completions support echo with "
                            "logprobs for token ids, such as vLLM") from None


def _of_text(logprobs: Sequence[float | None], size: int) -> list[float]:
    """Return the log-probabilities of a text's tokens, which one that the server generated may follow.

    The first token has none.
    """
    if not size <= len(logprobs) <= size + 1:
        raise ValueError(f"{len(logprobs)} log-probabilities for {size} tokens")
    found = [0.0, *(float(x) for x in logprobs[1:size] if x is not None)]
    if len(found) != size or not all(-1e30 < x <= 1e-3 for x in found):
        raise ValueError("one is missing, or is not a log-probability")
    return found
