"""Rewards of answers from a scorer behind a URL: a program of the user's own, on this machine or another."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import parsed
from jaxtrain.tuning.http_service import HttpService, timeout_of
from jaxtrain.tuning.rewards import KEY

MOST = 256  # answers in a request
LIMIT = 2**20  # bytes of a response


@dataclass(frozen=True)
class RemoteRewards:
    """A scorer that is asked by HTTP. The first process calls it."""

    url: str  # with its credentials
    timeout_s: float  # of a request

    def __post_init__(self):
        object.__setattr__(self, "_service", HttpService(KEY, "scorer", self.url, self.timeout_s, LIMIT))

    @classmethod
    def of(cls, config: Config, url: str) -> "RemoteRewards":
        """Return the scorer at a URL of a config."""
        return cls(url, timeout_of(config))

    def __call__(self, answers: Sequence[str], records: Sequence[JsonMapping]) -> list[float]:
        """Return the reward of each answer to a prompt, given the prompt's record."""
        found = []
        for first in range(0, len(answers), MOST):
            part = slice(first, first + MOST)
            found += self._rewards(answers[part], records[part])
        return found

    def _rewards(self, answers: Sequence[str], records: Sequence[JsonMapping]) -> list[float]:
        content = self._service.posted({"answers": answers, "records": records})
        try:
            found = parsed(content, {"rewards": [int | float]})["rewards"]
        except ValueError as error:
            raise UserError(KEY, f"what {self.url} answers cannot be read ({error})",
                            'let it answer {"rewards": [NUMBER, ...]}') from None
        if len(found) != len(answers):
            raise UserError(KEY, f"{self.url} gives {len(found)} rewards for {len(answers)} answers",
                            "let it give one for each")
        for answer, value in zip(answers, found, strict=True):
            if not abs(value) < 1e30:  # nor infinite in float32
                raise UserError(KEY, f"{self.url} gives {str(value)[:20]} for the answer {answer[:40]!r}",
                                "let it give numbers below 1e30")
        return [float(value) for value in found]
