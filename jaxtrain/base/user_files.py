"""Load a function or a class from a file of the user's, by FILE.py:NAME."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from jaxtrain.errors import UserError


def defined_in(named: str, key: str, what: str, fix: str) -> Callable:
    """Return what FILE.py:NAME names, which can be called.

    `what`: "function" or "class", for messages; `fix`: what else the key takes.
    """
    file, _, name = named.rpartition(":")
    if not file.endswith(".py") or not name:
        raise UserError(key, f"{named!r} names no {what} of a file", fix)
    if not Path(file).is_file():
        raise UserError(key, f"there is no file {file}", "check the name")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's own code
        raise UserError(key, f"{file} cannot be imported ({type(error).__name__}: {error})", "repair it") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(key, f"{file} has no {what} {name!r}", "check the name")
    return found
