"""Prompts that are answered once, as tokens."""

from collections.abc import Sequence

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.data.chat.templates import Chat
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.hub.trained_tokenizer import prompt_ids


def encoded(records: Sequence[JsonObject], tokenizer: Tokenizer, chat: Chat | None, room: int,
            in_pairs: bool) -> list[list[int]]:
    """Return the tokens of each record's prompt; refuses those that leave no room for an answer.

    `in_pairs`: a row has two answers, each behind the prompt.
    """
    found = []
    for record in records:
        prompt = _encoded(record["prompt"], tokenizer, chat)
        if not prompt:
            raise UserError("rl.prompts", "one is empty", "remove it, or begin it with a line's end")
        if len(prompt) > room:
            raise UserError("rl.prompts", f"{str(record['prompt'])[:40]!r} has {len(prompt)} tokens, and "
                            f"data.seq_len less rl.max_new_tokens leaves {room}"
                            f"{' for each answer of a pair' * in_pairs}", "raise data.seq_len, or remove it")
        found.append(prompt)
    return found


def _encoded(prompt: Json, tokenizer: Tokenizer, chat: Chat | None) -> list[int]:
    """Return the tokens of a text, or of messages through the chat template."""
    if isinstance(prompt, str):
        return prompt_ids(tokenizer, prompt)
    if chat is None:
        raise UserError("rl.prompts", "one is a list of messages, and the model has no chat template",
                        "give texts, or begin with a model that has one")
    return chat.prompt(prompt)
