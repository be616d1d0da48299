"""Convert conversations to tokens and loss masks by chat templates, such as those that come with a tokenizer.json.

A template renders messages as text. The assistant's parts, up to the token that ends a turn, are marked; then the whole
text is encoded at once, as at inference, and an id is trained on if any part of it is marked.
"""

import datetime
import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxtrain.data.chat.loss_masks import CLOSE, OPEN, Learnt, encode, probed, spans_of
from jaxtrain.data.formats.conversations import Example, Messages, Unusable
from jaxtrain.data.tokenizers.special_tokens import BREAK, CODE, Specials
from jaxtrain.data.tokenizers.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, begun
from jaxtrain.errors import UserError, install_extra
from jaxtrain.files.bounded_files import read, user_json

TRAIN_ON = ("assistant", "last", "all")
_KEPT = re.compile(f"[{OPEN}{CLOSE}{BREAK}{CODE}]")
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
TODAY = datetime.date(2024, 7, 26)  # a fixed date, the one that Llama's templates use without a clock
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
        self.name, self.source = _find(tokenizer, template, config)
        self.variables = {"eos_token": getattr(tokenizer, "eod_token", "")} | {
            key: value["content"] if isinstance(value, dict) else value for key, value in config.items()
            if key.endswith("_token") and isinstance(value, str | dict)}
        if self.name == "chatml" and (lacks := {"<|im_start|>", "<|im_end|>"} - self.specials.ids.keys()):
            raise UserError("--chat_template", f"{tokenizer.name} has no special token {min(lacks)}",
                            "use plain, or train a tokenizer with --special_tokens '<|im_start|>' '<|im_end|>'")
        self._says = bool(_GENERATION.search(self.source))
        self._template = _compile(self.name, self.source) if self.source else None
        self.marked = lru_cache(1024)(self._marked)  # called both before and after the search for duplicates

    def identity(self) -> dict[str, Any]:
        """Return everything but the messages that the text depends on."""
        return {"name": self.name, "sha256": hashlib.sha256(self.source.encode()).hexdigest(), "template": self.source,
                "special_tokens": self.variables}

    # ------------------------------------------------------------------------------------------------ text with marks

    def refuses(self, content: bytes) -> str:
        """Return the reason to leave an example out, or an empty string."""
        try:
            texts = self.marked(content)
        except Unusable as reason:
            return str(reason)
        learns = [any(start < stop for start, stop in spans_of(text)[1]) for text in texts]
        return "" if all(learns) else NOTHING

    def _marked(self, content: bytes) -> list[str]:
        """Return the text of each completion with its prompt, with marks around the trained parts."""
        if _KEPT.search(content.decode()):
            raise Unusable("a character that Unicode keeps for programs (U+FDD0 to U+FDD3)")
        example = Example.from_bytes(content)
        return [self._mark(example.prompt, completion, example.tools) for completion in example.completions]

    def _mark(self, prompt: str | Messages, completion: str | Messages, tools: Any) -> str:
        guarded = self.specials.guarded
        if isinstance(prompt, str):
            said, answer = guarded(prompt), guarded(completion)
            return f"{OPEN}{said}{answer}{CLOSE}" if self.train_on == "all" else f"{said}{OPEN}{answer}{CLOSE}"
        messages = guarded([*prompt, *completion])
        turns = [i for i, message in enumerate(messages) if i >= len(prompt) and message["role"] == "assistant"]
        text, spans = self._render(messages, guarded(tools), turns[-1:] if self.train_on == "last" else turns)
        if self.train_on == "all":
            return f"{OPEN}{text}{CLOSE}"
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        marks = [OPEN, CLOSE] * len(spans)
        return "".join(text[a:b] + mark for (a, b), mark in zip(pairwise(edges), [*marks, ""], strict=True))

    def _render(self, messages: Messages, tools: Any, turns: list[int]) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered text, and the spans of the assistant's words in the given turns."""
        whole = self._text(messages, tools)
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
            text, found = whole, [self._turn(whole, messages, tools, turn) for turn in turns]
        return text, [self._to_end(text, *span) for span in found if self._speech(text[slice(*span)])]

    def _speech(self, text: str) -> str:
        """Return the words of a turn without special tokens; a turn without words is not trained on."""
        return self.specials.pattern.sub("", text).replace(BREAK, "").strip()

    def _turn(self, whole: str, messages: Messages, tools: Any, turn: int) -> tuple[int, int]:
        """Return the span of a turn: from the end of its generation prompt to the end of the text that includes it."""
        before = self._text(messages[:turn], tools, add_generation_prompt=True)
        behind = self._text(messages[:turn + 1], tools)
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

    def _text(self, messages: Messages, tools: Any, add_generation_prompt: bool = False) -> str:
        if not self._template:  # not needed for records of plain text
            raise UserError("--chat_template", f"{self.tokenizer.name} comes without a chat template", FIX)
        self._template.environment.used = 0
        try:
            return self._template.render(messages=messages, tools=tools, documents=None,
                                         add_generation_prompt=add_generation_prompt, **self.variables)
        except Exception as error:  # a template is a program, and a record can be unexpected in any way
            raise Unusable(f"the chat template fails, {type(error).__name__}: {error}") from error

    # ------------------------------------------------------------------------------------------------------------- ids

    def prompt(self, messages: Messages) -> list[int]:
        """Return the ids of messages, and of what introduces the assistant's answer."""
        (ids, _, _), = self.specials.encode([self.text(messages)])
        written = len(ids) and ids[0] == self.tokenizer.bos  # by the template itself
        return (ids if written else begun(ids, self.tokenizer)).tolist()

    def text(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """Return messages as text, with what introduces the assistant's answer."""
        try:
            text = self._text(self.specials.guarded(messages), None, add_generation_prompt)
        except Unusable as reason:
            raise UserError("--chat_template", str(reason), FIX) from reason
        return spans_of(text)[0]

    def ends(self) -> list[int]:
        """Return the special tokens that end a turn of the assistant."""
        messages = [{"role": role, "content": "x"} for role in ("user", "assistant")]
        try:
            text, spans = self._render(messages, None, [1])
        except Unusable as reason:
            raise UserError("--chat_template", str(reason), FIX) from reason
        ends = [id for _, stop in spans for token, id in self.specials.ids.items() if text.endswith(token, 0, stop)]
        return sorted({*ends, self.tokenizer.eod})

    def encode_many(self, contents: list[bytes]) -> list[list[Learnt] | str]:
        """Return each example's documents, or the reason why it is left out."""
        found: list[list[str] | str] = []
        for content in contents:
            try:
                found.append(self.marked(content))
            except Unusable as reason:
                found.append(str(reason))
        documents = iter(encode(self.specials, [text for one in found if not isinstance(one, str) for text in one]))
        done = [one if isinstance(one, str) else [next(documents) for _ in one] for one in found]
        return [one if isinstance(one, str) or all(document.trained.any() for document in one) else NOTHING
                for one in done]

    def probe(self, content: bytes) -> dict[str, Any]:
        """Return the beginning of an example with its ids and mask, to be compared when the corpus is opened."""
        return probed(self.specials, self.marked(content)[0][:1000])


def refuse_useless_masks(splits: dict[str, Any], left_out: dict[str, int]) -> None:
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
            raise UserError("--input", f"nothing of the train split would be trained on; left out: {reasons}",
                            "look at the records, --format and --chat_template, or use a smaller --eval_fraction")


# ----------------------------------------------------------------------------------------------------------- templates

def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokenizer_config.json next to tokenizer.json, or an empty dict."""
    path = tokenizer.path.with_name("tokenizer_config.json") if isinstance(tokenizer, JsonTokenizer) else None
    if not path:
        return {}
    return user_json(path, dict, "--tokenizer", "repair or remove it") or {}


def _find(tokenizer: Tokenizer, asked: str, config: dict[str, Any]) -> tuple[str, str]:
    """Return name and content of the template: the one requested, else the tokenizer's own, else empty strings."""
    if asked in BUILT_IN:
        return asked, _joined(BUILT_IN[asked])
    if "{%" in asked:  # kept in a corpus's manifest
        return "the template of the data", asked
    if asked:
        return Path(asked).name, _read(Path(asked).expanduser())
    if not isinstance(tokenizer, JsonTokenizer):
        return "plain", _joined(BUILT_IN["plain"])
    beside = tokenizer.path.with_name("chat_template.jinja")
    if beside.exists():
        return beside.name, _read(beside)
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get("default")
    return ("the chat_template of tokenizer_config.json", found) if isinstance(found, str) else ("", "")


def _joined(source: str) -> str:
    return source.replace("\n", "")


def _read(path: Path) -> str:
    try:
        return read(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("--chat_template", f"{path} cannot be read ({error})", FIX) from error


def _compile(name: str, source: str) -> Any:
    """Compile a template in jinja2's sandbox with the functions that Hugging Face offers, except for a fixed date."""
    try:
        from jinja2 import TemplateError, TemplateSyntaxError, nodes
        from jinja2.ext import Extension

        from jaxtrain.data.chat import sandbox
    except ImportError as error:
        raise UserError("--format", "chat templates need the package jinja2",
                        install_extra("chat")) from error

    class Generation(Extension):
        """The jinja2 extension for {% generation %} blocks, which surrounds their content with marks."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (OPEN, CLOSE))
            return nodes.Scope([begin, *body, end], lineno=line)

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(*args: Any, **keys: Any) -> str:
        return sandbox.tojson(*args, **keys).replace("\\ufdd2", BREAK)

    environment = sandbox.Sandbox(Generation, {"raise_exception": raise_exception, "strftime_now": TODAY.strftime})
    environment.filters["tojson"] = tojson
    try:
        return environment.compiled(source)
    except TemplateSyntaxError as error:
        raise UserError("--chat_template", f"{name} is not a template (line {error.lineno}: {error})", FIX) from error
