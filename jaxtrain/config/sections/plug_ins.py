"""The extensions that other packages register by entry points: each has a section of its name in a config."""

import functools
from typing import Any, get_type_hints

from jaxtrain.config.schema import Config

GROUP = "jaxtrain.extensions"


@functools.cache
def names() -> dict[str, Any]:
    """Return the entry points by name."""
    from importlib import metadata  # takes a while to look at all packages

    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def extension(name: str) -> Any:
    """Return the class of the extension that is registered under a name."""
    return names()[name].load()


def section(name: str) -> type | None:
    """Return the class of the section of that extension; None if there is no such extension."""
    return extension(name).section if name in names() else None


def sections() -> dict[str, type]:
    """Return the class of every section of a config, by name, with those of other packages."""
    own = {name: cls for name, cls in get_type_hints(Config).items() if name != "extensions"}
    return own | {name: cls for name in names() if (cls := section(name))}
