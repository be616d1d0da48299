"""Read conversations (messages, instructions, prompt and completion, preferences, labelled answers) into one form.

An example is a prompt, which is only context, and completions, which may be trained on: one, or the chosen and the
rejected one. Both are plain text, or messages as chat templates take them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, TypeAlias

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import parsed

Messages: TypeAlias = list[dict[str, Any]]

FORMATS = ("text", "messages", "alpaca", "prompt_completion", "preference", "labelled")
FIELDS = {"messages": ("messages", "conversations", "system", "tools"),
          "alpaca": ("instruction", "input", "output", "system", "history", "tools"),
          "prompt_completion": ("prompt", "completion", "tools"),
          "preference": ("prompt", "chosen", "rejected", "tools"),
          "labelled": ("prompt", "completion", "label", "tools")}
ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool", "function")} | {
    "human": "user", "observation": "tool", **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant")}
CALL = "function_call"  # ShareGPT's role of a turn that is a call, written as JSON


class Unusable(ValueError):
    """Raised with the reason why a record is dropped."""


@dataclass(frozen=True)
class Example:
    """One example; `prompt` and each of `completions` are of the same kind, text or messages."""

    prompt: str | Messages
    completions: list[str] | list[Messages]
    tools: list[Any] | None
    desirable: bool | None = None  # the label of the completion, if it has one

    def to_bytes(self) -> bytes:
        """Serialise the example; equal examples give equal bytes."""
        label = [] if self.desirable is None else [self.desirable]
        return json.dumps([self.prompt, self.completions, self.tools, *label], ensure_ascii=False,
                          separators=(",", ":")).encode(errors="replace")

    @staticmethod
    def from_bytes(content: bytes) -> "Example":
        """Return the example that `to_bytes` serialised."""
        return Example(*json.loads(content))

    def texts(self) -> Iterator[str]:
        """Yield all texts of the example."""
        for part in (self.prompt, *self.completions):
            if isinstance(part, str):
                yield part
            else:
                yield from (message["content"] for message in part if message.get("content"))

    def spoken(self) -> str:
        """Return what user and assistant say, without system messages, which many examples share."""
        return "\n".join(text for part in (self.prompt, *self.completions) for text in (
            [part] if isinstance(part, str) else
            (message["content"] + (json.dumps(message["tool_calls"]) if message.get("tool_calls") else "")
             for message in part if message["role"] in ("user", "assistant"))))


def format_of(fields: set[str], field: str, where: str) -> str:
    """Return the format of a record with these fields."""
    fits = [name for name, there in (
        ("text", field in fields), ("messages", bool(fields & {"messages", "conversations"})),
        ("alpaca", {"instruction", "output"} <= fields),
        ("prompt_completion", {"prompt", "completion"} <= fields and "label" not in fields),
        ("labelled", {"prompt", "completion", "label"} <= fields),
        ("preference", {"chosen", "rejected"} <= fields)) if there]
    if len(fits) > 1:
        raise UserError("--format", f"{where} fits several formats: {', '.join(fits)}", "name one with --format")
    if not fits and (half := next(((there, lacking) for there, lacking in _PAIRS if there in fields), None)):
        there, lacking = half
        raise UserError("--input", f"{where} has the field {there!r} and no {lacking!r}", f"add {lacking!r}, or name "
                        "the field of text with --text_field")
    return fits[0] if fits else "text"


# Fields of which a record needs both: the one that it has, and the one that it lacks.
_PAIRS = (("chosen", "rejected"), ("rejected", "chosen"), ("completion", "prompt"), ("prompt", "completion"))


def example_of(record: Json, form: str, where: str) -> bytes:
    """Convert a record to the common form, as bytes; raise Unusable if there is nothing to train on."""
    if not isinstance(record, dict):
        raise UserError("--input", f"{where} is not a JSON object", "repair it")
    tools = record.get("tools") or None
    if isinstance(tools, str):
        tools = _parsed(tools)
    if form == "messages":
        said = [record[name] for name in ("messages", "conversations") if name in record]
        if not said:
            raise _missing("messages", where)
        return Example([], [[*_system(record), *_messages(said[0])] if "conversations" in record
                            else _messages(said[0])], tools).to_bytes()
    if form == "alpaca":
        return Example(*_instruction(record, where), tools).to_bytes()
    names = ("chosen", "rejected") if form == "preference" else ("completion",)
    for name in FIELDS[form][form == "preference":-1]:  # a preference may have its prompt in both answers
        if name not in record:
            raise _missing(name, where)
    label = record["label"] if form == "labelled" else None
    if form == "labelled" and not isinstance(label, bool):
        raise UserError("--input", f"{where} has the label {label!r}", "write true or false, or leave labels unread "
                        "with --format=prompt_completion")
    parts = [_part(record[name]) for name in names]
    prompt = record.get("prompt")
    if form == "preference":
        if parts[0] == parts[1]:
            raise Unusable("chosen and rejected are equal")
        prompt, parts = _common(None if prompt is None else _part(prompt), parts)
    prompt, *parts = _alike([_part(prompt), *parts])
    return Example(prompt, parts, tools, label).to_bytes()


def _instruction(record: JsonObject, where: str) -> tuple[Messages, list[Messages]]:
    """Return the prompt and the completion of a record of Alpaca, as LLaMA-Factory reads them.

    The instruction and its input, each on lines of its own, are what the user says. Turns before them, in `history`,
    are learnt like the last one: the prompt is what comes before the first answer.
    """
    for name in ("instruction", "output"):
        if name not in record:
            raise _missing(name, where)
    turns = [*_turns(record.get("history")), (record["instruction"], record.get("input"), record["output"])]
    messages = _system(record)
    for asked, given, answer in turns:
        if not isinstance(asked, str) or not isinstance(given, str | None) or not isinstance(answer, str):
            raise Unusable("an instruction, input or output that is not text")
        messages += [{"role": "user", "content": "\n".join(part for part in (asked, given) if part)},
                     {"role": "assistant", "content": answer}]
    first = len(messages) - 2 * len(turns) + 1
    return messages[:first], [messages[first:]]


def _turns(history: Json) -> list[tuple[Json, None, Json]]:
    """Return the earlier turns of a record of Alpaca: pairs of what was asked and answered."""
    history = _parsed(history) if isinstance(history, str) and history else history
    if not isinstance(history or [], list) or not all(isinstance(one, list) and len(one) == 2 for one in history or []):
        raise Unusable("a history that is not a list of pairs")
    return [(asked, None, answer) for asked, answer in history or []]


def _system(record: JsonObject) -> Messages:
    """Return the message of the field `system`, which ShareGPT and Alpaca have beside the turns, if it is there."""
    if not isinstance(said := record.get("system") or "", str):
        raise Unusable("a system prompt that is not text")
    return [{"role": "system", "content": said}] if said else []


def _missing(name: str, where: str) -> UserError:
    return UserError("--input", f"{where} has no field {name!r}", "repair it, or name their format with --format")


def _part(value: object) -> str | Messages:
    return value if isinstance(value, str) else _messages(value)


def _alike(parts: list[Json]) -> list[Json]:
    """Convert text among messages to a message: first of the user, then of the assistant."""
    if all(isinstance(part, str) for part in parts):
        return parts
    return [[{"role": "assistant" if i else "user", "content": part}] if isinstance(part, str) else part
            for i, part in enumerate(parts)]


def _common(prompt: Json, parts: list[Json]) -> tuple[Json, list[Json]]:
    """Split off the prompt if both completions repeat it, or if it stands only in them."""
    whole = all(isinstance(part, list) and part[0]["role"] != "assistant" for part in parts)
    if prompt is not None and not whole:
        return prompt, parts
    if all(isinstance(part, str) for part in parts):
        shared = commonprefix(parts)  # noqa: RUF071 (comparing by character is intended)
        size = max(map(shared.rfind, " \n\t")) + 1  # not within a word
        return parts[0][:size], [part[size:] for part in parts]
    if not whole:
        return [], _alike(["", *parts])[1:]
    size = 0
    while size < min(map(len, parts)) and parts[0][size] == parts[1][size]:
        size += 1
    return parts[0][:size], [part[size:] for part in parts]


def _messages(said: Json) -> Messages:
    if isinstance(said, str):
        said = _parsed(said)
    if not isinstance(said, list) or not all(isinstance(one, dict) for one in said):
        raise Unusable("not a list of messages")
    if not said:
        raise Unusable("no messages")
    return [_message(one) for one in said]


def _message(said: JsonObject) -> JsonObject:
    """Convert a message to OpenAI's form: ShareGPT's `from` and `value` are renamed, and null values dropped."""
    role = said.get("role", said.get("from"))
    if role == CALL:
        return {"role": "assistant", "content": "", "tool_calls": _called(said.get("content", said.get("value")))}
    if not isinstance(role, str) or role not in ROLES:
        raise Unusable(f"role {role!r} is not known")
    content = said.get("content", said.get("value"))
    if "from" in said and content is None:
        raise Unusable("a turn without 'value'")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Unusable("content that is not text")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise Unusable("content that is not text")
    rest = {key: value for key, value in said.items()
            if key not in ("role", "from", "content", "value") and value is not None}
    if calls := rest.get("tool_calls"):
        calls = _parsed(calls) if isinstance(calls, str) else calls
        if not isinstance(calls, list):
            raise Unusable("tool_calls that are not a list")
        rest["tool_calls"] = [_call(call) for call in calls]
    if content is None and not calls and ROLES[role] != "assistant":
        raise Unusable("content that is not text")
    return {"role": ROLES[role], "content": content or "", **rest}


def _called(said: Json) -> list[Json]:
    """Return the calls that a turn of ShareGPT's role for them has as JSON: one, or a list."""
    calls = _parsed(said) if isinstance(said, str) else said
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise Unusable("a function_call that is not JSON with a name and arguments")
    return [{"type": "function", "function": _call(call)} for call in calls]


def _call(call: Json) -> Json:
    """Parse a call's arguments if they are a JSON string, as OpenAI has them: templates write the JSON themselves."""
    if isinstance(call, dict) and isinstance(function := call.get("function", call), dict) \
            and isinstance(arguments := function.get("arguments"), str):
        function = function | {"arguments": _parsed(arguments)}
        return call | {"function": function} if "function" in call else function
    return call


def _parsed(text: str) -> Json:
    try:
        return parsed(text, object)
    except ValueError:
        return text
