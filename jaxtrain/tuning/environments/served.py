"""An environment behind a URL: a program of the user's own, on this machine or another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import parsed
from jaxtrain.tuning.environments.protocol import KEY, Asked, Turn, tolerated, turn_of
from jaxtrain.tuning.http_service import HttpService

MOST = 256  # conversations in a request
LIMIT = 2**24  # bytes of a response


@dataclass(frozen=True)
class Served:
    """An environment that is asked by HTTP."""

    name: str  # its URL, with its credentials
    timeout_s: float  # of a request
    masks: bool = False  # turns that are none end their conversations, and not the run

    def __post_init__(self):
        service = HttpService(KEY, "server of environments", self.name, self.timeout_s, LIMIT)
        object.__setattr__(self, "_service", service)

    def turns(self, asked: Sequence[Asked]) -> list[Turn]:
        """Return the next turn of each conversation."""
        return [turn for first in range(0, len(asked), MOST) for turn in self._turns(asked[first:first + MOST])]

    def tasks(self) -> list[JsonObject]:
        """Return no tasks: they are in `rl.prompts`, or of the seed."""
        return []

    def release(self, ids: Iterable[str]) -> None:
        """Do nothing: the server knows which conversations have ended, and may forget any."""

    def end(self) -> None:
        """Do nothing."""

    def _turns(self, asked: Sequence[Asked]) -> list[Turn]:
        content = self._service.posted({"conversations": [vars(one) for one in asked]})
        try:
            found = parsed(content, {"turns": [dict]})["turns"]
        except ValueError as error:
            raise UserError(KEY, f"what {self.name} answers cannot be read ({error})",
                            'let it answer {"turns": [{"observation": TEXT, "reward": NUMBER, "done": BOOL}, ...]}'
                            ) from None
        if len(found) != len(asked):
            raise UserError(KEY, f"{self.name} gives {len(found)} turns for {len(asked)} conversations",
                            "let it give one for each")
        return [self._turn(turn, one) for turn, one in zip(found, asked, strict=True)]

    def _turn(self, found: JsonObject, asked: Asked) -> Turn:
        try:
            return turn_of(found, asked, self.name)
        except UserError as error:
            return tolerated(error, asked, self.masks)
