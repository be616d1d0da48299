"""Messages of a chat, and the chat template of a run or of a published model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import user_json

if TYPE_CHECKING:
    from jaxtrain.data.chat.templates import Chat
    from jaxtrain.data.tokenizers.tokenizer import Tokenizer


Messages = list[dict[str, Any]]
EXAMPLE = '[{"role": "user", "content": "Hello"}]'


def read_messages(said: Any, key: str, where: str) -> Messages:
    """Return messages from a user's file, after a check of their form."""
    said = said.get("messages") if isinstance(said, dict) else said
    fits = isinstance(said, list) and said and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in said)
    if not fits:
        raise UserError(key, f"{where} is not a list of messages with a role and a content", f"write {EXAMPLE}")
    return said


def chat_of(folder: str | Path, config: dict[str, Any], words: "Tokenizer", template: str) -> "Chat":
    """Return the chat template of a run's data, or the one that is asked for."""
    from jaxtrain.data.chat.templates import Chat

    kept: dict[str, Any] = {} if template else kept_template(folder, config)
    chat = Chat(words, template or kept.get("template") or "")
    chat.variables |= kept.get("special_tokens", {})
    return chat


def kept_template(folder: str | Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return what a run has kept of its data's chat template, or the data's manifest says of it; {}: there is none."""
    from jaxtrain.data.corpus.open import read_manifest
    from jaxtrain.data.tokenizers.tokenizer_folder import CHAT

    if kept := user_json(Path(folder) / "tokenizer" / CHAT, dict, "WORKDIR", "copy it again from the run"):
        return kept
    source = Path(config.get("data", {}).get("source", ""))
    return read_manifest(source).get("chat") or {} if (source / "manifest.json").is_file() else {}
