"""Keys and sections of earlier versions, which the config.json of their runs still has."""

from typing import Any

# The key, and what every run does now: what its default was.
REMOVED = {"resilience.straggler_factor": 1.25}
RENAMED = {"islands": "diloco", "reinforce": "rl"}  # sections


def as_named_now(sections: Any) -> Any:
    """Return what a config.json says, by the names that sections have now, without removed keys at their defaults.

    A removed key with another value is refused as any unknown key.
    """
    if not isinstance(sections, dict):
        return sections
    named = {RENAMED.get(section, section): keys for section, keys in sections.items()}
    gone = {tuple(key.split(".")) for key, default in REMOVED.items() if _said(named, *key.split(".")) == default}
    return {section: {key: value for key, value in keys.items() if (section, key) not in gone}
            if gone and isinstance(keys, dict) else keys for section, keys in named.items()}


def _said(sections: dict[str, Any], section: str, key: str) -> Any:
    keys = sections.get(section)
    return keys.get(key) if isinstance(keys, dict) else None
