"""Convert conversations to tokens and loss masks by chat templates, such as those that come with a tokenizer.json.

A template renders messages as text. The assistant's parts, up to the token that ends a turn, are marked; then the whole
text is encoded at once, as at inference, and an id is trained on if any part of it is marked.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.data.chat.loss_masks import Learnt, encode, probed, spans_of
from jaxtrain.data.chat.marks import BREAK, CLOSE, CODE, OPEN
from jaxtrain.data.chat.rendering import Talk, Template
from jaxtrain.data.formats.conversations import Example, Messages, Unusable
from jaxtrain.data.tokenizers.special_tokens import Specials
from jaxtrain.data.tokenizers.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, begun
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import read, user_json

TRAIN_ON = ("assistant", "last", "all")
_RESERVED = re.compile(f"[{OPEN}{CLOSE}{BREAK}{CODE}]")
_GENERATION = re.compile(r"{%[-+]?\s*generation\b")

BUILT_IN = {
    "plain": """{% for message in messages %}{{ message.role }}: {% if message.role == "assistant" %}
{% generation %}{{ message.content }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}
{% if add_generation_prompt or not loop.last %}{{ "\\n" }}{% endif %}{% endfor %}
{% if add_generation_prompt %}assistant: {% endif %}""",
    "chatml": """{% for message in messages %}{{ "<|im_start|>" + message.role + "\\n" }}
{% if message.role == "assistant" %}{% generation %}{{ message.content }}
{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ "<|im_end|>" }}{% endgeneration %}
{% else %}{{ message.content + "<|im_end|>" }}{% endif %}{{ "\\n" }}{% endfor %}
{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}""",
}
NEWEST = 1024  # examples
T = TypeVar("T")
NOTHING = "no turn to learn"
FIX = f"name a file with --chat_template, or one of our own: {', '.join(BUILT_IN)}"


class Chat:
    """A chat template and a tokenizer: encodes examples as ids and loss masks."""

    def __init__(self, tokenizer: Tokenizer, template: str = "", train_on: str = "assistant"):
        if not isinstance(tokenizer, JsonTokenizer | ByteTokenizer):
            raise UserError("--tokenizer", f"{tokenizer.name} does not tell the place of each id in the text, which "
                            "conversations need", "use a tokenizer.json, or bytes")
        self.tokenizer, self.train_on = tokenizer, train_on
        self.specials = Specials(tokenizer)
        config = _config(tokenizer)
        self.name, self.source, where = _find(tokenizer, template, config)
        self.variables = {"eos_token": getattr(tokenizer, "eod_token", "")} | {
            key: content for key, value in config.items() if key.endswith("_token") and isinstance(
                content := value.get("content") if isinstance(value, dict) else value, str)}
        if self.name == "chatml" and (lacks := {"<|im_start|>", "<|im_end|>"} - self.specials.ids.keys()):
            raise UserError("--chat_template", f"{tokenizer.name} has no special token {min(lacks)}",
                            "use plain, or train a tokenizer with --special_tokens '<|im_start|>' '<|im_end|>'")
        self._says = bool(_GENERATION.search(self.source))
        self._template = Template(where, self.source, FIX) if self.source else None
        if self._template:
            self._template.check()
        self._known: dict[bytes, list[str] | str] = {}  # the newest of what `marked_many` gave

    def identity(self) -> JsonObject:
        """Return everything but the messages that the text depends on."""
        return {"name": self.name, "sha256": hashlib.sha256(self.source.encode()).hexdigest(), "template": self.source,
                "special_tokens": self.variables}

    # ------------------------------------------------------------------------------------------------ text with marks

    def refuse_many(self, contents: list[bytes]) -> list[str]:
        """Return the reason to leave each example out, or an empty string."""
        def reason(texts: list[str] | str) -> str:
            if isinstance(texts, str):
                return texts
            return "" if all(any(start < stop for start, stop in spans_of(text)[1]) for text in texts) else NOTHING
        return list(map(reason, self.marked_many(contents)))

    def marked_many(self, contents: list[bytes]) -> list[list[str] | str]:
        """Return the text of each completion with its prompt, with marks around the trained parts, for each example.

        Or the reason why an example is dropped. The newest are kept, for the same examples are asked for before and
        after the search for duplicates.
        """
        new = [content for content in dict.fromkeys(contents) if content not in self._known]
        self._known |= zip(new, self._marked(new), strict=True)
        found = [self._known[content] for content in contents]
        for content in list(self._known)[:-NEWEST]:
            del self._known[content]
        return found

    def _marked(self, contents: list[bytes]) -> list[list[str] | str]:
        examples = [None if _RESERVED.search(content.decode()) else Example.from_bytes(content) for content in contents]
        spoken = iter(self._spoken(example for example in examples if example and not isinstance(example.prompt, str)))

        def of(example: Example | None) -> list[str] | str:
            if example is None:
                return "a character that Unicode keeps for programs (U+FDD0 to U+FDD3)"
            if isinstance(example.prompt, str):
                return [self._written(example.prompt, completion) for completion in example.completions]
            found = [next(spoken) for _ in example.completions]
            texts = [text for text in found if isinstance(text, str)]
            return texts if len(texts) == len(found) else next(str(one) for one in found if isinstance(one, Unusable))
        return list(map(of, examples))

    def _written(self, prompt: str, completion: Json) -> str:
        """Return plain text with marks."""
        said, answer = map(self.specials.guarded, (prompt, completion))
        return f"{OPEN}{said}{answer}{CLOSE}" if self.train_on == "all" else f"{said}{OPEN}{answer}{CLOSE}"

    def _spoken(self, examples: Iterable[Example]) -> list[str | Unusable]:
        """Return the text with marks of each completion with its prompt, both of which are messages."""
        guarded, asked = self.specials.guarded, []

        def talks() -> Iterator[Talk]:
            for example in examples:
                for completion in example.completions:
                    messages = guarded([*example.prompt, *completion])
                    turns = [i for i, message in enumerate(messages)
                             if i >= len(example.prompt) and message["role"] == "assistant"]
                    asked.append((messages, turns[-1:] if self.train_on == "last" else turns))
                    yield self._talk(messages, asked[-1][1], guarded(example.tools))

        def marked(number: int, texts: list[str]) -> str:
            messages, turns = asked[number]
            return self._mark(messages, turns, texts)
        return self._each(talks(), marked)

    def _mark(self, messages: Messages, turns: list[int], texts: list[str]) -> str:
        text, spans = self._spans(messages, turns, texts)
        if self.train_on == "all":
            return f"{OPEN}{text}{CLOSE}"
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        marks = [OPEN, CLOSE] * len(spans)
        return "".join(text[a:b] + mark for (a, b), mark in zip(pairwise(edges), [*marks, ""], strict=True))

    def _talk(self, messages: Messages, turns: list[int], tools: Json = None) -> Talk:
        """Return what is rendered of a conversation: all of it, and what shows where the given turns are."""
        cuts = () if self.train_on == "all" or self._says else (
            cut for turn in turns for cut in ((turn, True), (turn + 1, False)))
        return Talk(messages, tools, [(len(messages), False), *cuts])

    def _each(self, talks: Iterable[Talk], do: Callable[[int, list[str]], T]) -> list[T | Unusable]:
        if self._template:
            return self._template.each(talks, self.variables, do)
        for _ in talks:  # not needed for records of plain text
            raise UserError("--chat_template", f"{self.tokenizer.name} comes without a chat template", FIX)
        return []

    def _one(self, talk: Talk, do: Callable[[int, list[str]], T]) -> T:
        """Return what `do` makes of a conversation's texts; a template that does not take it is the user's mistake."""
        found, = self._each([talk], do)
        if isinstance(found, Unusable):
            raise UserError("--chat_template", str(found), FIX) from found
        return found

    def _spans(self, messages: Messages, turns: list[int], texts: list[str]) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered text, and the spans of the assistant's words in the given turns."""
        whole, *parts = texts
        if self.train_on == "all":
            return spans_of(whole)[0], []
        if self._says:
            text, found = spans_of(whole)
            spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            if len(spoken) != len(turns):
                if len(found) != len(spoken):
                    raise UserError("--chat_template", f"{self.name} has {len(found)} {{% generation %}} blocks for "
                                    f"{len(spoken)} assistant turns, so that single turns cannot be separated",
                                    "write one block per turn, or train on all turns")
                found = [span for i, span in zip(spoken, found, strict=True) if i in turns]
        else:
            text = whole
            found = [self._turn(whole, *both) for both in zip(parts[::2], parts[1::2], strict=True)]
        return text, [self._to_end(text, *span) for span in found if self._speech(text[slice(*span)])]

    def _speech(self, text: str) -> str:
        """Return the words of a turn without special tokens; a turn without words is not trained on."""
        return self.specials.pattern.sub("", text).replace(BREAK, "").strip()

    def _turn(self, whole: str, before: str, behind: str) -> tuple[int, int]:
        """Return the span of a turn: from the end of its generation prompt to the end of the text that includes it."""
        # White space after the end-of-turn token is not the assistant's, nor is text that only appears at the very end.
        stops = list(self._ends(behind, len(before), len(behind))) or [len(behind)]
        stop = next((stop for stop in stops if whole.startswith(behind[:stop])), None)
        if not behind.startswith(before) or stop is None:
            raise UserError("--chat_template", f"{self.name} does not only add to the text from turn to turn, so that "
                            "what the assistant said cannot be found", "put {% generation %} and {% endgeneration %} "
                            "around that in a copy of the template"
                            + ", or learn the last turn only with --train_on=last" * (self.train_on != "last"))
        return len(before), stop

    def _to_end(self, text: str, start: int, stop: int) -> tuple[int, int]:
        """Extend a span by the token that ends the turn, if a block left it out or it begins the next turn."""
        end = None if any(self._ends(text, start, stop)) else self.specials.pattern.match(text, stop)
        return start, end.end() if end else stop

    def _ends(self, text: str, start: int, stop: int) -> Iterator[int]:
        """Yield the ends of the special tokens at the end of a stretch, from the last one on, across white space."""
        while start < (stop := start + len(text[start:stop].rstrip())):
            special = next((one for one in self.specials.ids if text.endswith(one, start, stop)), None)
            if special is None:
                return
            yield stop
            stop -= len(special)

    # ------------------------------------------------------------------------------------------------------------- ids

    def prompt(self, messages: Messages, tools: Json = None) -> list[int]:
        """Return the ids of messages, and of what introduces the assistant's answer."""
        (ids, _, _), = self.specials.encode([self.text(messages, tools=tools)])
        written = len(ids) and ids[0] == self.tokenizer.bos  # by the template itself
        return (ids if written else begun(ids, self.tokenizer)).tolist()

    def text(self, messages: Messages, add_generation_prompt: bool = True, tools: Json = None) -> str:
        """Return messages as text, with what introduces the assistant's answer."""
        return self.texts(messages, [(len(messages), add_generation_prompt)], tools)[0]

    def texts(self, messages: Messages, wanted: Sequence[tuple[int, bool]], tools: Json = None) -> list[str]:
        """Return the text of so many messages each, and whether with what introduces the assistant's answer."""
        talk = Talk(self.specials.guarded(messages), self.specials.guarded(tools), wanted)
        return self._one(talk, lambda _, texts: [spans_of(text)[0] for text in texts])

    def ends(self) -> list[int]:
        """Return the special tokens that end a turn of the assistant."""
        messages = [{"role": role, "content": "x"} for role in ("user", "assistant")]
        text, spans = self._one(self._talk(messages, [1]), lambda _, texts: self._spans(messages, [1], texts))
        ends = [id for _, stop in spans for token, id in self.specials.ids.items() if text.endswith(token, 0, stop)]
        return sorted({*ends, self.tokenizer.eod})

    def encode_many(self, contents: list[bytes]) -> list[list[Learnt] | str]:
        """Return each example's documents, or the reason why it is dropped."""
        found = self.marked_many(contents)
        documents = iter(encode(self.specials, [text for one in found if not isinstance(one, str) for text in one]))
        done = [one if isinstance(one, str) else [next(documents) for _ in one] for one in found]
        return [one if isinstance(one, str) or all(document.trained.any() for document in one) else NOTHING
                for one in done]

    def probe(self, content: bytes) -> JsonObject:
        """Return the beginning of an example with its ids and mask, to be compared when the corpus is opened."""
        return probed(self.specials, self.marked_many([content])[0][0][:1000])


def refuse_useless_masks(splits: JsonObject, left_out: dict[str, int]) -> None:
    """Raise a UserError if nothing is trained on, or everything although only answers should be.

    In both cases the template does not fit the records.
    """
    for split, entry in splits.items():
        learnt = sum(shard["learnt"] for shard in entry["shards"])
        if learnt == entry["tokens"] and learnt:
            raise UserError("--train_on", f"every token of the {split} split would be trained on: prompts are empty",
                            "use --train_on=all if that is intended")
        if split == "train" and not learnt:
            reasons = ", ".join(f"{count:,} ({reason})" for reason, count in left_out.items()) or "there are no records"
            raise UserError("--input", f"nothing of the train split would be trained on; dropped: {reasons}",
                            "look at the records, --format and --chat_template, or use a smaller --eval_fraction")


# ----------------------------------------------------------------------------------------------------------- templates

def _config(tokenizer: Tokenizer) -> JsonObject:
    """Return the tokenizer_config.json next to tokenizer.json, or an empty dict."""
    path = tokenizer.path.with_name("tokenizer_config.json") if isinstance(tokenizer, JsonTokenizer) else None
    if not path:
        return {}
    return user_json(path, dict, "--tokenizer", "repair or remove it") or {}


def _find(tokenizer: Tokenizer, asked: str, config: JsonObject) -> tuple[str, str, str]:
    """Return the template's name, content and place: the one requested, else the tokenizer's own, else empty texts."""
    if asked in BUILT_IN:
        return asked, _joined(BUILT_IN[asked]), asked
    if "{%" in asked:  # kept in a corpus's manifest
        return "the template of the data", asked, "the template of the data"
    if asked:
        return Path(asked).name, _read(Path(asked).expanduser()), asked
    if not isinstance(tokenizer, JsonTokenizer):
        return "plain", _joined(BUILT_IN["plain"]), "plain"
    beside = tokenizer.path.with_name("chat_template.jinja")
    if beside.exists():
        return beside.name, _read(beside), str(beside)
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)
                 and isinstance(one.get("name"), str)}.get("default")
    place = f"the chat_template of {tokenizer.path.with_name('tokenizer_config.json')}"
    return ("the chat_template of tokenizer_config.json", found, place) if isinstance(found, str) else ("", "", "")


def _joined(source: str) -> str:
    return source.replace("\n", "")


def _read(path: Path) -> str:
    try:
        return read(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("--chat_template", f"{path} cannot be read ({error})", FIX) from error
