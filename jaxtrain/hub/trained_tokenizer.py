"""The tokenizer of a trained model: the one that a run has kept, or that a published folder has."""

import json
from pathlib import Path
from typing import Any

from jaxtrain.data.tokenizers.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import user_json

CONFIG = "tokenizer_config.json"


def tokenizer_of(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a workdir or a published folder, with the tokens around texts that it was trained with.
    """
    kept, published = Path(folder) / "tokenizer", Path(folder)
    if kept.is_dir():
        return load_tokenizer(f"{kept}")
    if not any((published / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise UserError("WORKDIR", f"{kept} is not there", "copy it from where the run was trained")
    said = user_json(published / CONFIG, dict, "WORKDIR", "repair or remove it") or {}
    plain = load_tokenizer(f"{published}")
    end = _content(said.get("eos_token"))
    end = end if end in plain.specials else ""
    return load_tokenizer(f"{published}", end, _first(plain, said) if end or plain.eod is not None else "")


def _first(plain: Tokenizer, said: dict[str, Any]) -> str:
    """Return the token that begins every text, by the tokenizer's own template or its config; "" without one."""
    asked = _content(said.get("bos_token")) if said.get("add_bos_token") else ""
    if not asked and "add_bos_token" not in said and isinstance(plain, JsonTokenizer):
        processors = [json.loads(plain.content).get("post_processor") or {}]
        processors += processors[0].get("processors") or []  # of a sequence of them
        begins = [one["single"][0] for one in processors if one.get("type") == "TemplateProcessing" and one["single"]]
        asked = next((one["SpecialToken"]["id"] for one in begins if "SpecialToken" in one), "")
    return asked if asked in plain.specials else ""


def _content(token: Any) -> str:
    """Return the text of a token, which may be described by an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
