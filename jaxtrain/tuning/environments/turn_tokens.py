"""The tokens of what an environment says, between two answers of the model.

A conversation is a list of tokens that only grows. The model's own are kept as they were sampled, and are never made
of text again: encoding a text need not give the tokens that spelled it. What lies between two answers is found by
rendering a conversation whose last answer is a mark, and taking what follows the turn with the mark.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.chat.templates import Chat
from jaxtrain.data.tokenizers.special_tokens import Specials
from jaxtrain.data.tokenizers.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.hub.trained_tokenizer import prompt_ids
from jaxtrain.tuning.environments.protocol import KEY

_MARK = "jaxtrain-answer"  # in place of an answer; longer where a text has it
Said = str | list[JsonObject]


@dataclass
class TurnTokens:
    """Encodes what an environment says, by the model's chat template or, without one, as plain text."""

    tokenizer: Tokenizer
    chat: Chat | None
    rewrites: bool = field(default=False, init=False)  # whether the template has told an answer otherwise than it was

    def messages(self, said: Said) -> list[JsonObject]:
        """Return what an environment says as messages: a text is one of the user's."""
        if isinstance(said, str):
            return [{"role": "user", "content": said}]
        if self.chat is None:
            raise UserError(KEY, "it says messages, and the model has no chat template",
                            "let it say text, or begin with a model that has one")
        return said

    def first(self, said: Said, tools: list[JsonObject] | None) -> list[int]:
        """Return the tokens of a conversation's beginning, up to the model's first answer."""
        if self.chat is None and isinstance(said, str):
            return prompt_ids(self.tokenizer, said)
        messages = self.messages(said)
        assert self.chat is not None
        return self.chat.prompt(messages, tools)

    def between(self, before: Sequence[JsonObject], said: Said, ended: bool,
                tools: list[JsonObject] | None) -> list[int]:
        """Return the tokens from the end of an answer up to where the model answers next.

        Args:
            before: all messages until now, the last of which is the answer.
            said: what the environment says then.
            ended: the answer has the token that ends a turn; otherwise that is among the tokens that are returned.
            tools: what the chat template is told of tools.
        """
        messages = self.messages(said)
        if self.chat is None:
            return self._encoded(f"{said}", guard=True)
        mark = _MARK
        while mark in f"{before}{messages}{tools}":
            mark += "-"
        marked = [*before[:-1], {"role": "assistant", "content": mark}, *messages]
        whole, begin = self.chat.texts(marked, [(len(marked), True), (len(before) - 1, True)], tools)
        if whole.count(mark) != 1:
            raise UserError(KEY, f"{self.chat.name} leaves the model's earlier answers out, or tells them twice",
                            "use a chat template that has each turn once, or rl.max_turns=1")
        if not self.rewrites:
            told = self.chat.text([*before, *messages], tools=tools)
            self.rewrites = whole.partition(mark)[0] != begin or f"{before[-1]['content']}".strip() not in told
        rest = whole.partition(mark)[2]
        if ended:
            end = self.chat.specials.pattern.match(rest, len(rest) - len(rest.lstrip()))
            rest = rest[end.end():] if end else rest
        return self._encoded(rest)

    def _encoded(self, text: str, guard: bool = False) -> list[int]:
        """Return the tokens of text in the middle of a conversation. `guard`: its special tokens are text."""
        if not isinstance(self.tokenizer, JsonTokenizer | ByteTokenizer):
            return prompt_ids(self.tokenizer, text, begin=False)
        specials = self.chat.specials if self.chat else Specials(self.tokenizer)
        (ids, _, _), = specials.encode([specials.guarded(text) if guard else text])
        return ids.tolist()
