"""Suggest the key, or the config, that was meant."""

from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from jaxtrain.config import hub_names
from jaxtrain.config.family import config_classes
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError, nearest
from jaxtrain.files import bounded_files
from jaxtrain.hf import hf_config
from jaxtrain.synonyms import SYNONYMS


def nearest_key(word: str) -> str:
    """Return words that suggest a key, such as optimizer.learning_rate for "lr" or "optimiser.lr"; "" if none is near.
    """
    whole = [f"{section}.{name}" for section, cls in get_type_hints(Config).items() for name in get_type_hints(cls)]
    whole += [f"model.{field.name}" for cls in config_classes().values() for field in fields(cls)]
    name = word.rpartition(".")[2]
    meant = SYNONYMS.get(name, name)
    same = [key for key in whole if key.rpartition(".")[2] == meant]
    suggested = nearest(same[0] if same else name if " " in meant else word, whole)
    return "" if suggested.startswith("known") else suggested


def missing_config(file: Path, path: Path) -> UserError:
    """Return the error about a config that is no file: a workdir, a published folder and a model's name are none."""
    if path.suffix.lower() == ".gguf":
        return hub_names.in_gguf(path, "--config")
    if path.is_dir():
        return UserError("--config", f"{path} is a folder", _config_in(path))

    fix = "give the path of a config such as configs/gpt.py"
    if hub_names.is_name(f"{path}") and path.suffix not in (".py", ".json"):
        fix = f"give hf:{path} for a model on the Hugging Face Hub, or the path of a config such as configs/gpt.py"
    return UserError("--config", f"there is no file {file}", fix)


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
