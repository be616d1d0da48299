"""The small files of a published model, such as generation_config.json: kept by runs that begin with it, and exported.

Training changes weights. Everything else in the folder of a published model is copied into WORKDIR/published when a run
begins with it, so that the exported model has it too, even if that folder is gone by then.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import user_json
from jaxtrain.hf import generation_keys
from jaxtrain.hf.hf_config import FILE

if TYPE_CHECKING:
    from jaxtrain.data.tokenizers.tokenizer import Tokenizer

FOLDER = "published"  # of a workdir
GENERATION, TOKENIZER, TOKENIZER_CONFIG = generation_keys.FILE, "tokenizer.json", "tokenizer_config.json"
TEMPLATE, TOKENS = "chat_template.jinja", "special_tokens_map.json"
_ENDS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_LEGAL = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")  # beginnings of names; terms of use go on to apply
# Of the weights or of what wrote the folder, which are written anew.
_LEFT_OUT = ("export.json", "adapter_config.json", "tokenizer_record.json", "trainer_state.json")
_VOCABULARY = (TOKENIZER, "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt",
               "added_tokens.json")
_OF_TOKENS = (*_VOCABULARY, TOKENIZER_CONFIG, TOKENS, TEMPLATE, "chat_template.json")
_LARGEST = 2**28  # bytes; the largest vocabularies have 40 MB
_FIX = "copy it again"
# The tokens that transformers' own classes have where tokenizer_config.json names none.
_CLASS_TOKENS = {"Llama": "<s>", "CodeLlama": "<s>", "GPT2": "<|endoftext|>", "Gemma": "<bos>"}


def small_files(folder: Path) -> list[Path]:
    """Return the files of a published folder that are neither weights nor its model card."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.stat().st_size <= _LARGEST
            and (path.suffix in _ENDS or path.name.upper().startswith(_LEGAL))
            and path.name not in _LEFT_OUT and not path.name.endswith(".index.json")]


def keep(workdir: Path, source: Path, tokenizer: "Tokenizer | None" = None) -> None:
    """Copy the small files of the published model that a run begins with into its workdir.

    Args:
        workdir: of the run.
        source: a published folder, one of adapters, or the workdir of another run, which may have kept some.
        tokenizer: of the run's data, if it has one. What the model says of tokens is left out if it means others.
    """
    to, found = workdir / FOLDER, folder_of(source)
    shutil.rmtree(to, ignore_errors=True)
    if found is None:
        return
    same, known = _same_tokens(source, tokenizer)
    try:
        to.mkdir(parents=True)
        for path in small_files(found):
            if (known and (same or path.name not in _VOCABULARY)) or path.name not in _OF_TOKENS:
                shutil.copyfile(path, to / path.name)
        for name in () if known else (FILE, GENERATION):
            if said := json_of(found, name):
                atomic_files.write_json(to / name, without_tokens(said))
    except OSError as error:
        raise UserError("--workdir", f"{to} cannot be written ({error.strerror})",
                        "give a folder that can be") from None


def without_tokens(said: JsonMapping) -> JsonObject:
    """Return what a config says without the numbers of tokens."""
    return {key: value for key, value in said.items() if not key.endswith(("_token_id", "_tokens"))}


def _same_tokens(source: Path, ours: "Tokenizer | None") -> tuple[bool, bool]:
    """Return whether the tokenizer of a model is that of the data, and whether its special tokens are known there."""
    from jaxtrain.hub.trained_tokenizer import tokenizer_of  # imports JAX, which merging does without

    try:
        theirs = tokenizer_of(source)
    except UserError:  # it has none
        return True, True
    if ours is None or theirs.fingerprint.partition(":")[0] == ours.fingerprint.partition(":")[0]:
        return True, True
    return False, bool(theirs.specials) and theirs.specials.items() <= ours.specials.items() and (
        theirs.vocab_size <= ours.vocab_size and type(theirs) is type(ours))


def folder_of(source: str | Path) -> Path | None:
    """Return the folder that has the small files of the published model that this one is or began with, if any.

    `source`: a published folder, one of adapters, or the workdir of a run.
    """
    source = Path(source)
    if (source / "adapter_config.json").is_file() and not (source / FILE).is_file():
        from jaxtrain.hub.adapters import adapter_files

        return folder_of(adapter_files.base_of(source))
    said = user_json(source / FILE, dict, "WORKDIR", _FIX)
    if said is None:
        return None
    if not isinstance(said.get("model"), dict):
        return source
    train = said.get("train")
    began = train.get("init_from") if isinstance(train, dict) else ""
    if not isinstance(began, str) or not began:
        return None
    if (source / FOLDER / FILE).is_file():
        return source / FOLDER
    folder = Path(began)  # of a run by a version that kept no files
    return folder_of(folder) if folder.is_dir() and not (folder / "checkpoints").is_dir() else None


def json_of(folder: Path | None, name: str) -> JsonObject:
    """Return what a JSON file of a published folder says; {} without one."""
    return {} if folder is None else user_json(folder / name, dict, f"{folder / name}", _FIX, _LARGEST) or {}


def token(folder: Path | None, name: str) -> str:
    """Return the special token of a name such as "bos_token", as transformers finds it; "" without one."""
    said = json_of(folder, TOKENIZER_CONFIG)
    found = said[name] if name in said else json_of(folder, TOKENS).get(name)
    if found is None and name not in said and name in ("bos_token",):
        found = _CLASS_TOKENS.get(f"{said.get('tokenizer_class')}".removesuffix("Fast").removesuffix("Tokenizer"))
    found = found.get("content") if isinstance(found, Mapping) else found
    return found if isinstance(found, str) else ""


def prefix_of(folder: str | Path, tokenizer: "Tokenizer") -> int:
    """Return the token in front of texts without a context, as lm-evaluation-harness takes it.

    It is the one that begins texts. Many published tokenizers name such a token and put it in front of no text.
    """
    if tokenizer.bos is not None:
        return tokenizer.bos
    return tokenizer.specials.get(token(folder_of(folder), "bos_token"), tokenizer.eod)
