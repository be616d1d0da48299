"""Names of models on the Hugging Face Hub, written hf:ORG/NAME or hf:ORG/NAME@REVISION, as folders on this machine.

The download and the cache are those of huggingface_hub, which its environment variables configure (HF_HOME, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE).
"""

import os
import re
from pathlib import Path

from jaxtrain.errors import UserError, install_extra

PREFIX = "hf:"
_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}(?:@[\w./-]+)?")
_SMALL = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "LICENSE*", "NOTICE*", "USE_POLICY*"]
_FOLDERS = ["*/*"]  # other formats of the same weights


def is_name(text: str) -> bool:
    """Return whether a text can be ORG/NAME on the Hub, and is no path here: not even its first folder exists."""
    return text.count("/") == 1 and bool(_named(text)) and not Path(text.partition("/")[0]).exists()


def folder(text: str, key: str, weights: bool = True) -> str:
    """Return the folder of a model: the one that is named, or that of its download from the Hub.

    Args:
        text: a folder, or the name of a model on the Hub, without the prefix.
        key: of the config or the command line, for errors.
        weights: download the weights, too.
    """
    if Path(text).suffix.lower() == ".gguf":
        raise in_gguf(Path(text), key)
    if Path(text).exists():
        return text
    if not _named(text):
        raise UserError(key, f"there is no folder {text}", "give a folder that is there, or hf:ORG/NAME for a model on "
                        "the Hugging Face Hub")
    return _downloaded(text, key, weights)


def model_folder(text: str, key: str = "WORKDIR") -> str:
    """Return the folder of a model that is named as on the Hub, hf:ORG/NAME; any other text as it is."""
    return folder(text.removeprefix(PREFIX), key) if text.startswith(PREFIX) else text


def tokenizer_folder(name: str) -> str:
    """Return the folder of a tokenizer that is named as on the Hub; any other name as it is."""
    if not name.startswith(PREFIX) and not is_name(name):
        return name
    return folder(name.removeprefix(PREFIX), "data.tokenizer", weights=False)


def in_gguf(path: Path, key: str) -> UserError:
    """Return the error about a model in llama.cpp's format, which is often the form in which one is at hand."""
    return UserError(key, f"{path} is a model in GGUF, which jaxtrain does not read", "give the folder of the original "
                     "weights in safetensors (hf:FOLDER or hf:ORG/NAME), or convert it: transformers' "
                     "from_pretrained(FOLDER, gguf_file=FILE) and save_pretrained write such a folder")


def command(text: str) -> str:
    """Return the command that downloads a model."""
    name, _, revision = text.partition("@")
    chosen = f" --revision={revision}" if revision else ""
    return f"hf download {name}{chosen} --local-dir=models/{name.rpartition('/')[2]}"


def _named(text: str) -> bool:
    """Return whether the Hub allows such a name."""
    name = text.partition("@")[0]
    return bool(_NAME.fullmatch(text)) and not any(part in name for part in ("--", "..")) and not name.endswith(
        (".git", ".", "-")) and Path(name).suffix not in (".gguf", ".safetensors", ".json", ".py", ".bin")


def _downloaded(text: str, key: str, weights: bool) -> str:
    """Return the folder of a model in the cache of huggingface_hub, downloaded if it is not there."""
    name, _, revision = text.partition("@")
    here = f"models/{name.rpartition('/')[2]}"
    instead = f"{command(text)}, and give {'hf:' * (key == '--config')}{here}"
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(key, f"there is no folder {name}, and to download the model of this name needs the package "
                        "huggingface_hub", f"{install_extra('hub')}, or run {instead}") from error
    try:
        found = huggingface_hub.snapshot_download(name, revision=revision or None, ignore_patterns=_FOLDERS,
                                                  allow_patterns=[*_SMALL, *(["*.safetensors"] if weights else [])])
    except Exception as error:  # of the network, the server or the disk
        why, fix = _told(name, type(error).__name__, f"{error}".strip().partition("\n")[0], instead)
        raise UserError(key, why, fix) from error
    if weights and not any(Path(found).glob("*.safetensors")):  # without a network the cache is taken as it is
        raise UserError(key, f"{name} has no weights in safetensors in {found}, the cache of huggingface_hub, which "
                        "may have its tokenizer alone", f"where there is a network, run {instead}")
    return found


def _told(name: str, kind: str, said: str, instead: str) -> tuple[str, str]:
    """Return why a download failed, and what to do about it."""
    if kind == "GatedRepoError":
        return f"{name} is gated on the Hugging Face Hub", (
            f"accept its terms at https://huggingface.co/{name}, and log in with hf auth login")
    if kind == "RepositoryNotFoundError":
        return f"there is neither a folder {name} nor a public model of this name on the Hugging Face Hub", (
            "check the name, or log in with hf auth login if it is private")
    if kind == "RevisionNotFoundError":
        return f"{name} has no such revision on the Hugging Face Hub", "give one of its branches, tags or commits"
    if kind == "LocalEntryNotFoundError":
        why = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "the Hugging Face Hub cannot be reached"
        return f"{name} is not in the cache of huggingface_hub, and {why}", f"where there is a network, run {instead}"
    return f"{name} cannot be downloaded from the Hugging Face Hub ({kind}: {said[:200]})", (
        f"where there is a network, run {instead}")
