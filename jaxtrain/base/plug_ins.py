"""Parts of a kind, by name: jaxtrain's own, and those that other packages register as entry points (docs/extend.md).

Entry points are looked for only where a name is not one of jaxtrain's own: that reads the metadata of every installed
package.
"""

import dataclasses
import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jaxtrain.errors import UserError, nearest


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of part, such as optimizers.

    Args:
        what: how messages call one of them.
        group: the group of entry points.
        key: the key of a config that names one, or several.
        own: jaxtrain's own: name -> MODULE:NAME, imported when one is asked for.
        reserved: further names that another package may not register.
        accepts: whether an object is a part of this kind.
        alternative: what else the key takes, in words; "": names alone.
    """

    what: str
    group: str
    key: str
    own: Mapping[str, str] = field(default_factory=dict)
    reserved: Collection[str] = ()
    accepts: Callable[[Any], bool] = callable
    alternative: str = ""

    def names(self) -> list[str]:
        """Return the names of all parts: jaxtrain's own, and then those of other packages."""
        return [*self.own, *sorted(points(self.group).keys() - self.own.keys() - set(self.reserved))]

    def check(self, name: Any) -> None:
        """Refuse a name that no part of this kind has; a part of another package is not imported for it."""
        if not isinstance(name, str) or name not in self.own:
            self._point(name)

    def load(self, name: str) -> Any:
        """Return the part of this name."""
        if name in self.own:
            module, _, attribute = self.own[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        point = self._point(name)
        try:
            found = point.load()
        except Exception as error:  # of another author's code
            raise self._broken(point, f"cannot be imported ({type(error).__name__}: {error})") from error
        if not self.accepts(found):
            raise self._broken(point, f"is {_kind_of(found)}, which cannot be used as one")
        return found

    def section(self, name: str) -> type | None:
        """Return the dataclass of the options of another package's part; None: it has none, or jaxtrain has the name.
        """
        if not isinstance(name, str) or name in self.own or name not in self._points():
            return None
        return options_of(self.load(name))

    def made(self, name: str, options: Any = None) -> Any:
        """Return the part of this name with these options; None: its defaults."""
        part = self.load(name)
        if (section := options_of(part)) is None:
            return part() if isinstance(part, type) else part
        options = section() if options is None else options
        return dataclasses.replace(options) if section is part else part(options)  # as new: it may have a state

    def _points(self) -> Mapping[str, list[Any]]:
        """Return the entry points by name; refuses names that jaxtrain has."""
        found = points(self.group)
        if taken := [name for name in found if name in self.own or name in self.reserved]:
            raise UserError(self.key, f"the package {package_of(found[taken[0]][0])} registers the {self.what} "
                            f"{taken[0]!r}, and jaxtrain has one of this name", "rename it there, or uninstall it")
        return found

    def _point(self, name: Any) -> Any:
        """Return the entry point of this name; refuses one that is missing or not the only one."""
        found = self._points()
        if not isinstance(name, str) or name not in found:
            fix = nearest(f"{name}", self.names())
            fix = self.alternative if self.alternative and fix.startswith("known") else fix
            raise UserError(self.key, f"there is no {self.what} {name!r}", fix)
        if len(found[name]) > 1:
            packages = " and ".join(sorted(map(package_of, found[name])))
            raise UserError(self.key, f"the packages {packages} both register the {self.what} {name!r}",
                            "uninstall one of them")
        return found[name][0]

    def _broken(self, point: Any, why: str) -> UserError:
        return UserError(self.key, f"the {self.what} {point.name!r}, the entry point {point.value} of the package "
                         f"{package_of(point)}, {why}", "correct or uninstall that package")


@cache
def points(group: str) -> dict[str, list[Any]]:
    """Return the entry points of a group by name: more than one where several packages register it."""
    from importlib import metadata  # it takes a while to look at all packages

    found: dict[str, list[Any]] = {}
    for point in metadata.entry_points(group=group):
        others = found.setdefault(point.name, [])
        if all((other.value, package_of(other)) != (point.value, package_of(point)) for other in others):
            others.append(point)  # a package that is found in two folders of sys.path counts once
    return found


def package_of(point: Any) -> str:
    """Return the name of the package that registers an entry point."""
    return point.dist.name if point.dist is not None else point.value.partition(":")[0].partition(".")[0]


def options_of(part: Any) -> type | None:
    """Return the dataclass of a part's options: its `section`, or the part itself if all of its fields have defaults.
    """
    if (section := getattr(part, "section", None)) is not None:
        return section
    if not (isinstance(part, type) and dataclasses.is_dataclass(part) and dataclasses.fields(part)):
        return None
    missing = dataclasses.MISSING
    given = all(one.default is not missing or one.default_factory is not missing for one in dataclasses.fields(part))
    return part if given else None


def _kind_of(value: Any) -> str:
    return f"the class {value.__qualname__}" if isinstance(value, type) else f"of the type {type(value).__name__}"
