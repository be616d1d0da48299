"""Suggest the key, or the config, that was meant."""

from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from jaxtrain.config import hub_names, published_config
from jaxtrain.config.families import FAMILIES
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError, nearest
from jaxtrain.files import bounded_files
from jaxtrain.synonyms import SYNONYMS


def nearest_key(word: str) -> str:
    """Return words that suggest a key, such as optimizer.learning_rate for "lr" or "optimiser.lr"; "" if none is near.
    """
    whole = [f"{section}.{name}" for section, cls in get_type_hints(Config).items() for name in get_type_hints(cls)]
    whole += [f"model.{field.name}" for cls in FAMILIES.values() for field in fields(cls)]
    name = word.rpartition(".")[2]
    meant = SYNONYMS.get(name, name)
    same = [key for key in whole if key.rpartition(".")[2] == meant]
    suggested = nearest(same[0] if same else name if " " in meant else word, whole)
    return "" if suggested.startswith("known") else suggested


def missing_config(file: Path, path: Path) -> UserError:
    """Return the error about a config that is no file: a workdir, a published folder and a model's name are none."""
    def meant(fix: str) -> UserError:
        return UserError("--config", f"there is no file {file}", fix)

    if path.suffix.lower() == ".gguf":
        return hub_names.in_gguf(path, "--config")
    if path.is_dir():
        own = path / published_config.FILE
        given = bounded_files.user_json(own, dict, "--config", "give the path of a config")
        if given is not None:
            return meant(f"give {own}, the config of its run" if isinstance(given.get("model"), dict)
                         else f"give hf:{path}")
        if (path / "adapter_config.json").is_file():
            return meant(f"{path} has adapters: give hf:FOLDER of their model, and --config.train.init_from={path}")
        return meant(f"{path} is a folder without a config.json: give a config such as configs/gpt.py, or hf:FOLDER")
    if hub_names.is_name(f"{path}") and path.suffix not in (".py", ".json"):
        return meant(f"give hf:{path} for a model on the Hugging Face Hub, or the path of a config such as "
                     "configs/gpt.py")
    return meant("give the path of a config such as configs/gpt.py")
