"""Keys that earlier versions had and wrote into the config.json of their runs, which can still be read."""

from typing import Any

# The key, and what every run does now: what its default was.
REMOVED = {"resilience.straggler_factor": 1.25}


def without_removed(sections: Any) -> Any:
    """Return what a config.json says, without removed keys at their defaults; another value is refused like any key."""
    gone = {tuple(key.split(".")) for key, default in REMOVED.items() if _said(sections, *key.split(".")) == default}
    return {section: {key: value for key, value in keys.items() if (section, key) not in gone}
            if isinstance(keys, dict) else keys for section, keys in sections.items()} if gone else sections


def _said(sections: Any, section: str, key: str) -> Any:
    keys = sections.get(section) if isinstance(sections, dict) else None
    return keys.get(key) if isinstance(keys, dict) else None
