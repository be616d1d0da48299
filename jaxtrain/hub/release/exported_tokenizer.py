"""The tokenizer, chat template and generation_config.json of an exported model.

Those of the published model that a run began with are kept as they were, but for what the run's data has otherwise: the
tokens that begin and end its texts, and its chat template.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.config.family import config_class
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.vision_keys import DualEncoderConfig
from jaxtrain.data.tokenizers import published_tokens, tokenizer_folder
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.data.tokenizers.tokenizer_folder import record_of
from jaxtrain.errors import say
from jaxtrain.files import atomic_files
from jaxtrain.hf.dual_encoders import named_fillers
from jaxtrain.hf.hf_config import FILE
from jaxtrain.hub import chat_messages, trained_model
from jaxtrain.hub.folders import generation_config
from jaxtrain.hub.folders.published_files import (
    GENERATION,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    json_of,
    small_files,
    token,
)

if TYPE_CHECKING:
    from jaxtrain.data.tokenizers.tokenizer import Tokenizer


def write(workdir: Path, folder: Path, base: Path | None, described: JsonObject, model: ModelConfig) -> None:
    """Write all small files but config.json into a folder.

    Args:
        workdir: of the run.
        folder: to write into.
        base: the folder with the small files of the published model that the run began with, if any.
        described: what config.json says, to which tokens that begin and end a text are added if no file names them.
        model: its keys.
    """
    for path in small_files(base) if base else ():
        if path.name != FILE:
            shutil.copyfile(path, folder / path.name)
    kept = workdir / "tokenizer"
    if not kept.is_dir():
        if not any((folder / name).is_file() for name in (TOKENIZER, "tokenizer.model")):
            say("the workdir has no tokenizer; the folder has none either")
        return
    tokenizer, paired = load_tokenizer(f"{kept}"), isinstance(model, DualEncoderConfig)
    if not paired:
        chat = _write_template(workdir, folder, base, tokenizer)
        _write_generation(folder, base, described, tokenizer, chat)
    record = record_of(tokenizer)
    if record["file"] not in (TOKENIZER, "tokenizer.model"):
        say(f"transformers has no tokenizer of the kind {tokenizer.name!r}; the folder has one for jaxtrain only")
        tokenizer_folder.save(tokenizer, folder)
        return
    content = (kept / record["file"]).read_bytes()
    if base and (folder / TOKENIZER_CONFIG).is_file():
        _write_changed(folder, record, content, tokenizer.bos, paired)
    else:
        _write_anew(folder, record, content, tokenizer, model)


def _write_changed(folder: Path, record: JsonObject, content: bytes, begin: int | None,
                   paired: bool) -> None:
    """Write a published model's tokenizer, changed where the texts of the run begin or end with other tokens."""
    said, named = json_of(folder, TOKENIZER_CONFIG), dict[str, Any]()
    if record["eod"] and token(folder, "eos_token") not in ("", record["eod"]):
        named["eos_token"] = record["eod"]
    (folder / record["file"]).write_bytes(content)
    if record["bos"] != published_tokens.begin_of(folder) and not paired:
        named |= {"add_bos_token": bool(record["bos"])} | ({"bos_token": record["bos"]} if record["bos"] else {})
        if begin is not None and record["file"] == TOKENIZER:  # so that others put it in front of texts too
            content = published_tokens.beginning_with(content, record["bos"], begin)
            (folder / record["file"]).write_bytes(content)
    if named:
        atomic_files.write_json(folder / TOKENIZER_CONFIG, said | named)


def _write_anew(folder: Path, record: JsonObject, content: bytes, tokenizer: "Tokenizer",
                model: ModelConfig) -> None:
    """Write the tokenizer of a run that began with no published one."""
    json_file, paired = record["file"] == TOKENIZER, isinstance(model, DualEncoderConfig)
    if tokenizer.bos is not None and json_file and not paired:
        content = published_tokens.beginning_with(content, record["bos"], tokenizer.bos)
    (folder / record["file"]).write_bytes(content)
    named: dict[str, Any] = {"eos_token": record["eod"] or None, "bos_token": record["bos"] or None}
    if isinstance(model, DualEncoderConfig):
        named |= {"pad_token": named["eos_token"]} if model.text_pad in (-1, tokenizer.eod) else {}
        named |= named_fillers(model, json.loads(content)) if json_file else {}
    else:  # texts of one batch are padded with the token that ends them
        named |= {"add_bos_token": bool(record["bos"]), "pad_token": named["eos_token"]}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"} if json_file else {}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(named | kind, indent=1))


def _write_generation(folder: Path, base: Path | None, described: JsonObject, tokenizer: "Tokenizer",
                      chat: list[int]) -> None:
    """Write which tokens end a text: those of the published model, and those of the run's texts and answers."""
    ids = {"eos_token_id": tokenizer.eod, "bos_token_id": tokenizer.bos}
    known = {} if base is None else {key: x for key, x in json_of(base, FILE).items() if key.endswith("_token_id")}
    said = {} if base is None else json_of(base, GENERATION)
    ends = [] if base is None else generation_config.ends_of(base)
    if not ends:  # of no published model, or of one whose tokens are others
        described |= {key: ids[key] for key in ids.keys() - described.keys()}
        said |= ids | {"pad_token_id": tokenizer.eod} | ({"eos_token_id": chat} if chat else {})  # an answer ends, too
    elif more := {tokenizer.eod, *chat} - {*ends}:
        # With `_from_model_config`, transformers would take those of config.json.
        said = {key: x for key, x in known.items() if key not in said} | {
            key: x for key, x in said.items() if key != "_from_model_config"} | {"eos_token_id": [*ends, *sorted(more)]}
    else:
        return
    atomic_files.write_json(folder / GENERATION, said)


def _write_template(workdir: Path, folder: Path, base: Path | None, tokenizer: "Tokenizer") -> list[int]:
    """Write the chat template of the run's data, if it has one; return the tokens that end an answer, or []."""
    sections = trained_model.sections_of(workdir)
    if not config_class(sections["model"]["name"]).text:
        return []
    template = chat_messages.kept_template(workdir, sections).get("template")
    if not template:
        return []
    if template != _published_template(base):
        (folder / TEMPLATE).write_text(template)
        if "chat_template" in (said := json_of(folder, TOKENIZER_CONFIG)):  # by another template
            atomic_files.write_json(folder / TOKENIZER_CONFIG, {
                key: x for key, x in said.items() if key != "chat_template"})
    return chat_messages.chat_of(workdir, sections, tokenizer, "").ends()


def _published_template(base: Path | None) -> str | None:
    """Return the chat template of the published model, if it has one."""
    if base is None:
        return None
    if (base / TEMPLATE).is_file():
        return (base / TEMPLATE).read_text()
    found = json_of(base, TOKENIZER_CONFIG).get("chat_template")
    if isinstance(found, list):
        found = next((one.get("template") for one in found if isinstance(one, dict) and one.get("name") == "default"),
                     None)
    return found if isinstance(found, str) else None
