"""The sections of a config that parts of other packages have: the options of each, under the name of the part."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_origin, get_type_hints

from jaxtrain.base.plug_ins import Kind, options_of, points
from jaxtrain.config import part_tables
from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError

OWN = tuple(field.name for field in fields(Config)[:-1])  # jaxtrain's sections
# An extension is asked for by its section; the other parts are named by a key.
EXTENSIONS = Kind("extension", "jaxtrain.extensions", "extensions", reserved=OWN,
                  accepts=lambda part: isinstance(part, type) and options_of(part) is not None)
NAMED = (part_tables.OPTIMIZERS, part_tables.SCHEDULES, part_tables.OBJECTIVES, part_tables.TRACKERS,
         part_tables.ENVIRONMENTS, part_tables.CONVERSATIONS)


def sections() -> dict[str, type]:
    """Return the class of every section of a config, by name, with those of other packages that can be imported."""
    found = {name: cls for name, cls in get_type_hints(Config).items() if name in OWN}
    for kind in (EXTENSIONS, *NAMED):
        for name in points(kind.group):
            try:
                cls = kind.section(name)
            except UserError:  # told where it is asked for
                continue
            if cls is not None:
                found.setdefault(name, cls)
    return found


def asked(given: Mapping[str, Mapping[str, Any]], unknown: Iterable[str]) -> dict[str, type]:
    """Return the class of each section that parts of other packages have in a config.

    Args:
        given: what the config says in jaxtrain's own sections.
        unknown: the names of further sections that it has.
    """
    named = {name: kind for kind in NAMED for name in _names(given, kind)}
    found = {name: cls for name, kind in named.items() if (cls := kind.section(name)) is not None}
    if taken := found.keys() & set(OWN):
        name = min(taken)
        raise UserError(named[name].key, f"the {named[name].what} {name!r} has options, and a section of this name is "
                        "jaxtrain's", "rename it in its package")
    for name in dict.fromkeys(unknown):
        if cls := EXTENSIONS.section(name):
            if name in found:
                raise UserError(name, f"it would be the section of an extension and of the {named[name].what} of this "
                                "name", "rename one of them in its package")
            found[name] = cls
        elif name not in found and (kind := next((kind for kind in NAMED if kind.section(name)), None)):
            raise UserError(name, f"nothing reads it, since {kind.key} does not name the {kind.what} {name!r}",
                            f"set {kind.key}={name}, or leave it out")
    return found


def check(name: str, cls: type, types: Mapping[str, Any], keys: Collection[str]) -> None:
    """Refuse a section whose fields no config can give, and the lack of a key without a default."""
    for field in fields(cls):
        if (get_origin(types[field.name]) or types[field.name]) not in (int, float, bool, str, list, dict):
            raise UserError(f"{name}.{field.name}", f"its type in {cls.__qualname__} is {types[field.name]}",
                            "declare it as int, float, bool, str, list or dict")
        if field.name not in keys and field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"{name}.{field.name}", "it is missing, and has no default", "give it")


def _names(given: Mapping[str, Mapping[str, Any]], kind: Kind) -> Iterator[str]:
    """Yield the names at the key of a kind, of what may be parts of other packages."""
    section, _, key = kind.key.partition(".")
    value = given.get(section, {}).get(key, ())
    for name in value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else ():
        if isinstance(name, str) and name.strip().isidentifier():
            yield name.strip()
