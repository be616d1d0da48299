"""Suggest the key, or the config, that was meant."""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from jaxtrain.config import hub_names
from jaxtrain.config.family import config_classes
from jaxtrain.config.sections import plug_in_sections
from jaxtrain.errors import UserError, nearest
from jaxtrain.files import bounded_files, shipped_configs
from jaxtrain.hf import hf_config
from jaxtrain.synonyms import SYNONYMS

# Values and a flag that other frameworks have as keys.
_INSTEAD = {value: f"{key}={value}" for key, values in {
    "train.precision": "float32 bfloat16 float16", "train.attention": "cudnn", "train.remat": "full",
    "optimizer.name": "adamw", "lora.quantize": "nf4 int8", "pipeline.schedule": "interleaved zb_v",
    "preference.loss": "dpo"}.items() for value in values.split()} | {"workdir": "--workdir"}


def nearest_key(word: str) -> str:
    """Return words that suggest a key, such as optimizer.learning_rate for "lr" or "optimiser.lr"; "" if none is near.
    """
    if meant := _of_another_name(word):
        return meant
    suggested = nearest(word, _keys())
    return "" if suggested.startswith("known") else suggested


def nearest_in(section: str, name: str, known: Iterable[str]) -> str:
    """Return words that suggest a key in place of one that a section lacks: of the same section or another, or all."""
    meant = _of_another_name(f"{section}.{name}")
    return meant.replace(f" '{section}.", " '") or nearest(name, known)


def _of_another_name(word: str) -> str:
    """Return words that suggest the key of this name, or of what other frameworks call so, in any section; "": none."""
    section, _, name = word.rpartition(".")
    meant = SYNONYMS.get(name.lower().replace("-", "_"), name)
    if " " in meant:
        return meant
    found = [key for key in _keys() if meant in (key, key.rpartition(".")[2])]
    found += [_INSTEAD[meant]] if meant in _INSTEAD else []
    found.sort(key=lambda key: not key.startswith(f"{section}."))
    return f"did you mean {found[0]!r}?" if found else ""


def _keys() -> list[str]:
    """Return all keys, each behind its section."""
    sections = plug_in_sections.sections().items()
    whole = [f"{section}.{field.name}" for section, cls in sections for field in fields(cls)]
    return whole + [f"model.{field.name}" for cls in config_classes().values() for field in fields(cls)]


def missing_config(text: str) -> UserError:
    """Return the error about a config that is no file: a workdir, a published folder and a model's name are none."""
    path, file = Path(text), Path(f"{text.partition('.py:')[0].removesuffix('.py')}.py")
    if path.suffix.lower() == ".gguf":
        return hub_names.in_gguf(path, "--config")
    if path.is_dir():
        return UserError("--config", f"{path} is a folder", _config_in(path))
    if "/" not in text and path.suffix not in (".py", ".json") and ".py:" not in text:
        name = text.partition(":")[0]
        return UserError("--config", f"there is no config {name!r}",
                         f"{nearest(name, shipped_configs.names())} (or give the path of a file)")
    fix = "give the name of a config such as gpt, or its path"
    if path.suffix != ".json" and file.stem in shipped_configs.names():
        variant = text.partition(".py:")[2]
        fix = f"write {file.stem}{variant and ':'}{variant} for the config of this name that comes with jaxtrain"
    elif hub_names.is_name(text) and path.suffix not in (".py", ".json"):
        fix = f"give hf:{path} for a model on the Hugging Face Hub, or the path of a config such as configs/gpt.py"
    return UserError("--config", f"there is no file {path if path.suffix == '.json' else file}", fix)


def _config_in(folder: Path) -> str:
    """Return what to give in place of a folder: workdirs and published folders have a config, too."""
    own = folder / hf_config.FILE
    given = bounded_files.user_json(own, dict, "--config", "give the path of a config")
    if given is not None:
        return f"give {own}, the config of its run" if isinstance(given.get("model"), dict) else f"give hf:{folder}"
    if (folder / "adapter_config.json").is_file():
        return f"it has adapters: give hf:FOLDER of their model, and --config.train.init_from={folder}"
    names = [f"{folder / file.name}" for file in sorted(folder.glob("*.py")) if not file.name.startswith("_")][:3]
    return f"give the path of a config such as {' or '.join(names) or 'configs/gpt.py'}"
