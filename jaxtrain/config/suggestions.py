"""Suggest the key of a config that was meant."""

from dataclasses import fields
from typing import get_type_hints

from jaxtrain.config.families import FAMILIES
from jaxtrain.config.schema import Config
from jaxtrain.errors import nearest
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
