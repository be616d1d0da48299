"""Conversations of the model with an environment: all of a step's are continued together, turn by turn.

The first process asks the environment and encodes what it says; all processes get the tokens, and generate. Where a
server generates, the first process does all of it, on a thread beside the steps.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.config.sections.tuning_keys import RLConfig
from jaxtrain.data.chat.templates import Chat
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError
from jaxtrain.hub.generate import Generated
from jaxtrain.tuning.environments.conversation import Conversation
from jaxtrain.tuning.environments.protocol import KEY, Asked, Environment, Turn
from jaxtrain.tuning.environments.turn_tokens import TurnTokens

# What follows these tokens of the conversations in these places, in the turn of this number.
Answering = Callable[[list[list[int]], list[int], int], list[Generated]]
T = TypeVar("T")
_OF_ENVIRONMENTS = 1  # tells their seeds from those of sampling

_OURS = ("tokens", "reward", "finish_reason", "error")  # what is noted of a message, which no template is told


@dataclass
class _Talk:
    """A conversation that goes on."""

    asked: Asked
    begin: list[int] = field(default_factory=list)
    tools: list[JsonObject] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[JsonObject] = field(default_factory=list)
    why: str = ""  # it has ended: "stop" by the environment, "length" by what there was room for, "error"

    def heard(self, answer: Generated, text: str) -> None:
        """Add an answer of the model, and the token that ended it."""
        tokens, logprobs = list(answer.tokens), list(answer.logprobs or ())
        if answer.end is not None:
            tokens.append(answer.end[0])
            logprobs.append(answer.end[1])
        self.tokens += tokens
        self.logprobs += logprobs
        self.asked.answers.append(text)
        self.turns.append({"role": "assistant", "content": text, "tokens": len(tokens), "reward": 0.0,
                           "finish_reason": answer.finish_reason})

    def told(self, messages: Sequence[JsonObject], tokens: Sequence[int]) -> None:
        """Add what the environment said, which the last message has the tokens of."""
        self.turns += [{**message, "tokens": 0} for message in messages]
        self.turns[-1]["tokens"] = len(tokens)
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)

    def ended(self) -> Conversation:
        """Return what has become of it."""
        return Conversation(self.asked.answers[-1], tuple(self.tokens), tuple(self.logprobs), self.why,
                            begin=tuple(self.begin), turns=tuple(self.turns))


class Sharing(Protocol):
    """The way in which what the first process finds comes to all that take part."""

    def __call__(self, found: Callable[[], T], /) -> T:
        """Return it."""
        ...


def with_all(found: Callable[[], T]) -> T:
    """Return what the first process finds, in every process."""
    return exchange(None, lambda _: found())


def alone(found: Callable[[], T]) -> T:
    """Return what is found in this process, on whatever thread."""
    return found()


@dataclass
class Conversing:
    """Holds conversations with an environment."""

    environment: Environment
    tokenizer: Tokenizer
    chat: Chat | None
    rl: RLConfig
    room: int  # tokens of a conversation
    said: Callable[[str], None]  # tells the user
    seconds: float = field(default=0.0, init=False)  # that the environment has taken since this was set to 0

    def __post_init__(self):
        self._words, self._told = TurnTokens(self.tokenizer, self.chat), False

    def of_step(self, step: Sequence[int], records: Sequence[JsonObject], answering: Answering,
                shared: Sharing = with_all) -> tuple[list[Generated], dict[str, float]]:
        """Return the conversations of a step, whose groups begin alike, and the seconds that the environment took.

        `step`: numbers that it is known by, of which seeds are made.
        """
        size, self.seconds = self.rl.group_size, 0.0
        seeds = np.random.SeedSequence([*step, _OF_ENVIRONMENTS]).generate_state(len(records) // size)
        name = "/".join(map(str, step))
        found = self([f"{name}/{place}" for place in range(len(records))], records,
                     np.repeat(seeds, size).tolist(), answering, shared)
        return [*found], {"environment_s": self.seconds}

    def __call__(self, ids: Sequence[str], records: Sequence[JsonObject], seeds: Sequence[int],
                 answering: Answering, shared: Sharing) -> list[Conversation]:
        """Return a conversation about each record. With `with_all`, every process makes the call."""
        talks = [_Talk(Asked(*each, [])) for each in zip(ids, records, seeds, strict=True)]
        for talk, told in zip(talks, shared(lambda: self._begun(talks)), strict=True):
            talk.begin, talk.tools = told["tokens"], told["tools"]
            talk.turns = [{**message, "tokens": 0} for message in told["messages"]]
        for turn in range(self.rl.max_turns):
            if not (places := [place for place, talk in enumerate(talks) if not talk.why]):
                break
            live = [talks[place] for place in places]
            answers = answering([[*talk.begin, *talk.tokens] for talk in live], places, turn)
            for talk, answer in zip(live, answers, strict=True):
                talk.heard(answer, self._text(answer))
            last = turn == self.rl.max_turns - 1
            for talk, told in zip(live, shared(partial(self._continued, live)), strict=True):
                self._add(talk, told, last)
            self._tell_errors(live)
        shared(lambda: self.environment.release(talk.asked.id for talk in talks))
        if self._words.rewrites and not self._told:
            assert self.chat is not None
            self._told = True
            self.said(f"{self.chat.name} rewrites earlier answers, for example without the model's thoughts; "
                      "conversations keep the tokens that were sampled")
        return [talk.ended() for talk in talks]

    def _text(self, answer: Generated) -> str:
        """Return an answer as text, with special tokens, by which some models mark the calls of tools."""
        special = {*self.tokenizer.specials.values()} & {*answer.tokens}
        return self.tokenizer.decode(answer.tokens, specials=True) if special else answer.text

    def _begun(self, talks: Sequence[_Talk]) -> list[JsonObject]:
        """Have conversations begun; return their messages, and the tokens of these."""
        found, known = [], dict[str, list[int]]()
        for talk, turn in zip(talks, self._timed(talks), strict=True):
            said = talk.asked.record.get("prompt") if turn.observation is None else turn.observation
            if not said or not isinstance(said, str | list):
                raise UserError(KEY, f"{self.environment.name} returns nothing from reset, and its task has no prompt",
                                "let reset return text or messages")
            if (key := f"{said}{turn.tools}") not in known:  # a group begins alike
                known[key] = self._words.first(said, turn.tools)
            if len(known[key]) + self.rl.max_new_tokens > self.room:
                raise UserError(KEY, f"{self.environment.name} begins with {len(known[key])} tokens, and with "
                                f"rl.max_new_tokens={self.rl.max_new_tokens} they have to fit into {self.room}",
                                "raise data.seq_len, or let it say less")
            found.append({"messages": self._words.messages(said) if self.chat else [{"role": "user", "content": said}],
                          "tokens": known[key], "tools": turn.tools})
        return found

    def _continued(self, talks: Sequence[_Talk]) -> list[JsonObject]:
        """Have the environment go on; return what it said, and the tokens of that if the model is to answer."""
        found = []
        for talk, turn in zip(talks, self._timed(talks), strict=True):
            messages: list[JsonObject] = []
            if turn.observation:
                messages = (self._words.messages(turn.observation) if self.chat or not isinstance(turn.observation, str)
                            else [{"role": "user", "content": turn.observation}])
            tokens = []
            if not turn.done and turn.observation:
                before = [{key: value for key, value in one.items() if key not in _OURS}
                          for one in talk.turns]
                tokens = self._words.between(before, turn.observation, talk.turns[-1]["finish_reason"] == "stop",
                                             talk.tools)
            found.append({"messages": messages, "tokens": tokens, "reward": turn.reward, "done": turn.done,
                          "error": turn.error})
        return found

    def _add(self, talk: _Talk, told: JsonObject, last: bool) -> None:
        """Add what the environment said; its tokens only if the model answers them."""
        talk.turns[-1]["reward"] = told["reward"]
        size = len(talk.begin) + len(talk.tokens) + len(told["tokens"])
        full = size + self.rl.max_new_tokens > self.room
        talk.why = "error" if told["error"] else "stop" if told["done"] else "length" if last or full else ""
        if told["error"]:
            talk.turns[-1]["error"] = told["error"]
        if told["messages"]:
            talk.told(told["messages"], [] if talk.why else told["tokens"])

    def _tell_errors(self, talks: Sequence[_Talk]) -> None:
        """Tell the user of conversations that have just failed."""
        if errors := [talk.turns[-1]["error"] for talk in talks if talk.why == "error"]:
            self.said(f"{len(errors)} conversations are left out, the first by {errors[0]}")

    def _timed(self, talks: Sequence[_Talk]) -> list[Turn]:
        """Ask the environment about conversations."""
        began = time.perf_counter()
        found = self.environment.turns([talk.asked for talk in talks])
        self.seconds += time.perf_counter() - began
        return found
