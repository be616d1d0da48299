"""Keys and sections of earlier versions, which the config.json of their runs still has."""

from typing import Any

from jaxtrain.base.annotations import JsonObject

# The key, and what every run does now: what its default was.
REMOVED = {"resilience.straggler_factor": 1.25}
RENAMED = {"islands": "diloco", "reinforce": "rl"}  # sections
RENAMED_KEYS = {"model": {"pictures_per_row": "images_per_row"} | {
    f"picture_{end}": f"image_{end}" for end in ("layers", "embed_dim", "heads", "mlp_dim", "norm_eps", "size")}}
RENAMED_FAMILIES = {"picture_flow": "image_flow"}
# Parts of the paths of parameters, which checkpoints and patterns such as train.freeze=["picture/*"] have.
RENAMED_PARAMETERS = {"picture": "image", "picture_head": "image_head"}


def as_named_now(sections: Any) -> Any:
    """Return what a config.json says, by the names of today, without removed keys at their defaults.

    A removed key with another value is refused as any unknown key.
    """
    if not isinstance(sections, dict):
        return sections
    named = {RENAMED.get(section, section): keys for section, keys in sections.items()}
    named = {section: _keys(section, keys) if isinstance(keys, dict) else keys for section, keys in named.items()}
    gone = {tuple(key.split(".")) for key, default in REMOVED.items() if _said(named, *key.split(".")) == default}
    return {section: {key: value for key, value in keys.items() if (section, key) not in gone}
            if gone and isinstance(keys, dict) else keys for section, keys in named.items()}


def _keys(section: str, keys: JsonObject) -> JsonObject:
    renamed = RENAMED_KEYS.get(section, {})
    keys = {renamed.get(key, key): value for key, value in keys.items()}
    if section == "model" and isinstance(name := keys.get("name"), str):
        keys["name"] = RENAMED_FAMILIES.get(name, name)
    if section == "train" and isinstance(patterns := keys.get("freeze"), list | tuple):
        keys["freeze"] = [_pattern(each) if isinstance(each, str) else each for each in patterns]
    return keys


def _pattern(pattern: str) -> str:
    return "/".join(RENAMED_PARAMETERS.get(part, part) for part in pattern.split("/"))


def _said(sections: JsonObject, section: str, key: str) -> Any:
    keys = sections.get(section)
    return keys.get(key) if isinstance(keys, dict) else None
