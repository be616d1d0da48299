"""Render conversations by a chat template, in a process that has little memory and time."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.chat import template_limits as limits
from jaxtrain.data.chat.template_process import Ended, TemplateProcess, shared
from jaxtrain.data.formats.conversations import Messages, Unusable
from jaxtrain.errors import UserError, install_extra

KEY = "--chat_template"
T = TypeVar("T")


@dataclass(frozen=True)
class Talk:
    """A conversation, and which texts of it are wanted: of how many messages, and whether with an answer's prompt."""

    messages: Messages
    tools: Any
    texts: Sequence[tuple[int, bool]]


@dataclass(frozen=True)
class _Encoded:
    """A conversation as it is sent, and the processor time that it may take; with a reason, it is not sent."""

    content: bytes
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class Template:
    """A chat template."""

    name: str  # of its file, for errors
    source: str
    fix: str  # for errors

    def check(self) -> None:
        """Raise a UserError unless it can be compiled."""
        try:
            import jinja2  # noqa: F401 (used by the process that renders)
        except ImportError as error:
            raise UserError("--format", "chat templates need the package jinja2", install_extra("chat")) from error
        with shared() as process:
            answer = _answer(process, self._request([], {}), limits.SECONDS)
        if "invalid" in answer:
            raise UserError(KEY, f"{self.name} is not a template ({answer['invalid']})", self.fix)
        self._check_limit(answer, _Encoded(b"", limits.SECONDS))

    def each(self, talks: Iterable[Talk], variables: JsonObject,
             do: Callable[[int, list[str]], T]) -> list[T | Unusable]:
        """Return what `do` makes of each conversation, given its number and its texts, or why it has no texts.

        While the process renders some conversations, the next ones are taken from `talks`, and those before are done.
        Raises a UserError if the template takes too much time or memory.
        """
        found: list[T | Unusable] = []
        before: list[_Encoded] = []
        with shared() as process:
            for some in chain(_together(map(_encoded, talks)), [[]]):
                answers = self._received(process, before, variables)
                if any(one.content for one in some):
                    process.send(self._request(some, variables), sum(one.seconds for one in some))
                for one in before:
                    try:
                        found.append(do(len(found), self._texts(one, {} if one.reason else next(answers))))
                    except Unusable as reason:
                        found.append(reason)
                before = some
        return found

    def _request(self, some: Sequence[_Encoded], variables: JsonObject) -> bytes:
        head = json.dumps({"source": self.source, "variables": variables, "seconds": limits.SECONDS})[:-1].encode()
        return head + b', "conversations": [' + b",".join(one.content for one in some if one.content) + b"]}"

    def _received(self, process: TemplateProcess, sent: list[_Encoded], variables: JsonObject) -> Iterator[JsonObject]:
        """Return the answers to what was sent; if there is none for all together, ask for each by itself."""
        sent = [one for one in sent if one.content]
        if not sent:
            return iter(())
        try:
            return iter(process.receive()["conversations"])
        except (Ended, KeyError):
            answers = [_answer(process, self._request([one], variables), one.seconds) for one in sent]
            return iter([answer.get("conversations", [answer])[0] for answer in answers])

    def _texts(self, one: _Encoded, answer: JsonObject) -> list[str]:
        if one.reason:
            raise Unusable(one.reason)
        self._check_limit(answer, one)
        if "error" in answer:
            raise Unusable(f"the chat template fails, {answer['error']}")
        first, *others = answer["texts"]
        return [first, *(first[:shared] + rest for shared, rest in others)]

    def _check_limit(self, answer: JsonObject, one: _Encoded) -> None:
        if "limit" not in answer:
            return
        reason = {"depth": f"is nested deeper than {limits.CALLS:,} calls",
                  "memory": f"takes more than {limits.MEMORY >> 20:,} MB of memory",
                  "time": f"takes longer than {one.seconds:g} s",
                  "crash": "ends the process that renders it"}[answer["limit"]]
        if len(one.content) > limits.ORDINARY:
            raise Unusable(f"the chat template {reason} for a long conversation")
        raise UserError(KEY, f"{self.name} {reason}", self.fix)


def _answer(process: TemplateProcess, request: bytes, seconds: float) -> JsonObject:
    try:
        return process.ask(request, seconds)
    except Ended as why:
        return {"limit": f"{why}"}


def _encoded(talk: Talk) -> _Encoded:
    try:
        content = json.dumps(vars(talk), ensure_ascii=False).encode(errors="surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        return _Encoded(b"", 0, f"the chat template fails, messages that are not JSON: {error}")
    if len(content) > limits.RECORD:
        return _Encoded(b"", 0, f"a conversation of more than {limits.RECORD:,} bytes")
    return _Encoded(content, limits.SECONDS + limits.EACH_S * len(talk.texts))


def _together(talks: Iterable[_Encoded]) -> Iterator[list[_Encoded]]:
    """Yield some conversations at a time."""
    some: list[_Encoded] = []
    for one in talks:
        some.append(one)
        if len(some) == limits.TOGETHER or sum(len(one.content) for one in some) > limits.TOGETHER_BYTES:
            yield some
            some = []
    if some:
        yield some
