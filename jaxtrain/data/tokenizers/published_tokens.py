"""The tokens that begin and end a text, as declared in the folder of a published tokenizer."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import user_json

CONFIG = "tokenizer_config.json"


Opened = TypeVar("Opened")


def first_known(folder: Path, load: Callable[[str, str], Opened]) -> Opened:
    """Return the tokenizer with the tokens that the folder names for a text's end and beginning, if it has these."""
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model")):
        raise UserError("data.tokenizer", f"{folder} has neither a tokenizer.json nor a tokenizer.model",
                        "copy one there, or name the tokenizer's own file or folder")
    eod, bos = end_of(folder), begin_of(folder)
    for named in dict.fromkeys([(eod, bos), ("", bos), (eod, "")]):
        if any(named):
            with contextlib.suppress(UserError):  # the vocabulary lacks it
                return load(*named)
    return load("", "")


def end_of(folder: Path) -> str:
    """Return the token that ends a text; "" if the folder does not name one."""
    return _content(_config(folder).get("eos_token"))


def begin_of(folder: Path) -> str:
    """Return the token that begins every text: by the config, or by the tokenizer's own template; "" without one."""
    said = _config(folder)
    if "add_bos_token" in said:
        return _content(said.get("bos_token")) if said["add_bos_token"] else ""
    content = user_json(folder / "tokenizer.json", dict, "data.tokenizer", "download it again", 2**28) or {}
    outer = content.get("post_processor") or {}
    for one in [outer, *(outer.get("processors") or [])]:  # of a sequence of them
        if one.get("type") == "TemplateProcessing" and one.get("single"):
            return one["single"][0].get("SpecialToken", {}).get("id", "")
    return ""


def beginning_with(content: bytes, bos: str, id: int) -> bytes:
    """Return a tokenizer.json whose tokenizer puts this token in front of every text."""
    described = json.loads(content)
    token, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [token, text],
                "pair": [token, text, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}}}
    before = described.get("post_processor")
    kept = [] if before is None or before.get("type") == "TemplateProcessing" else [before]
    described["post_processor"] = {"type": "Sequence", "processors": [*kept, template]} if kept else template
    return json.dumps(described, ensure_ascii=False).encode()


def _config(folder: Path) -> JsonObject:
    return user_json(folder / CONFIG, dict, "data.tokenizer", "repair or remove it") or {}


def _content(token: Json) -> str:
    """Return the text of a token, which may be described by an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
