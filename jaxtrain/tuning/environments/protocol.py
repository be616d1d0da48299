"""The protocol of environments: questions of the trainer, and the answers that it takes.

A question has everything that the answer depends on: the record, the seed, and all answers of the model so far. So a
question may be asked twice, of another process or server too, and a conversation goes on where it was.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import misfit

KEY = "rl.environment"
LONGEST = 2**20  # characters of what an environment says at once
MESSAGE = 2**23  # bytes of a reply
NOTHING = "let it give text, or a list of messages with a role and a content"


@dataclass(frozen=True)
class Asked:
    """A conversation to be begun, or to be continued after the last of the model's answers."""

    id: str  # the same for all questions of a conversation
    record: JsonObject  # the task: a line of `rl.prompts`, or one of the environment's own
    seed: int  # the same for a group, whose conversations begin alike
    answers: list[str]


@dataclass(frozen=True)
class Turn:
    """An answer of an environment: what it says, and the reward."""

    observation: str | list[JsonObject] | None  # text, or messages; None: nothing, at first the record's prompt
    reward: float = 0.0  # of the last answer
    done: bool = False
    tools: list[JsonObject] | None = None  # what the chat template is told of tools, at first
    error: str = ""  # why there is none; the conversation is over


class Own(Protocol):
    """One conversation with an environment that a user wrote, or that an adapter stands for."""

    def reset(self, record: JsonObject, seed: int) -> str | list[JsonObject] | None:
        """Begin; return what the model is told."""
        ...

    def step(self, answer: str) -> tuple[str | list[JsonObject], float, bool]:
        """Return what is said to an answer, its reward, and whether the conversation is over."""
        ...


Made = Callable[[], Own]  # one for each conversation


class Environment(Protocol):
    """An environment as the trainer sees it, with all conversations. The first process calls it."""

    @property
    def name(self) -> str:
        """The name by which messages call it."""
        ...

    def turns(self, asked: Sequence[Asked]) -> list[Turn]:
        """Return the next turn of each conversation."""
        ...

    def tasks(self) -> list[JsonObject]:
        """Return the tasks that the environment brings; []: none."""
        ...

    def release(self, ids: Iterable[str]) -> None:
        """Drop what is kept of conversations that have ended."""
        ...

    def end(self) -> None:
        """End its processes. It may be asked again."""
        ...


def tolerated(error: UserError, asked: Asked, masks: bool) -> Turn:
    """Return the end of a conversation whose environment has failed; raises the error unless failures are tolerated.

    One that fails as a conversation begins is not: there is nothing yet to leave out.
    """
    if not masks or not asked.answers:
        raise error
    return Turn(None, done=True, error=f"{error}")


def turn_of(found: Json, asked: Asked, name: str) -> Turn:
    """Return what an environment answered, after a check of its form."""
    if wrong := misfit(found, {"observation?": str | list | None, "reward?": float | int, "done?": bool,
                             "tools?": list | None}):
        raise UserError(KEY, f"what {name} answers is not of the form expected: {wrong}",
                        'let it answer {"observation": TEXT, "reward": NUMBER, "done": BOOL}')
    said, reward, after = found.get("observation"), found.get("reward", 0.0), _after(asked)
    if not (said is None or isinstance(said, str) or not misfit(said, [{"role": str, "content": str}])):
        raise UserError(KEY, f"{name} says {f'{said}'[:40]!r}{after}", NOTHING)
    if (size := _size(said)) > LONGEST:
        raise UserError(KEY, f"{name} says {size:,} characters{after}", f"let it say {LONGEST:,} at most")
    if not abs(reward) < 1e30:  # nor infinite in float32
        raise UserError(KEY, f"{name} gives the reward {f'{reward}'[:20]}{after}", "let it give numbers below 1e30")
    done, tools = found.get("done", False), found.get("tools")
    if tools is not None and (misfit(tools, [dict]) or len(f"{tools}") > LONGEST):
        raise UserError(KEY, f"the tools of {name} are not a list of objects", "give their JSON schemas")
    if not asked.answers and (done or reward):
        raise UserError(KEY, f"{name} {'ends' if done else 'rewards'} a conversation that has just begun",
                        "let it wait for an answer")
    if asked.answers and not done and not said:
        raise UserError(KEY, f"{name} says nothing{after} and is not done", NOTHING)
    return Turn(said, float(reward), done, tools)


def _after(asked: Asked) -> str:
    return f" after the answer {asked.answers[-1][:40]!r}" if asked.answers else " at first"


def _size(said: str | list[JsonObject] | None) -> int:
    return len(said) if isinstance(said, str) else sum(len(f"{one}") for one in said or ())
