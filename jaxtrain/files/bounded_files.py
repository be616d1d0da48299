"""Read small files safely: regular files only, at most this many bytes, and JSON of the form expected.

A file may be damaged, replaced by a folder, a pipe or a device, or be written by others. Reading it ends in a moment
with its content or with an `OSError` or `ValueError`, never in an endless wait or without memory left.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxtrain.base.annotations import Json
from jaxtrain.errors import UserError

SMALL = 2**26  # bytes: settings and records
LARGE = 2**30  # bytes: lists of files, of which a large run or corpus has many
PART = 2**20  # bytes that are read at a time
LINE = 2**24  # bytes: a line of a log
HOLE = 2**27  # bytes: what is not lines, in the middle of a log
DEPTH = 100  # levels of nested JSON
_NAMES = {dict: "an object", list: "a list", str: "text", int: "a whole number", float: "a number"}


class Refused(OSError, ValueError):
    """Raised for what is not a regular file, or is too large."""


def appended(path: str | Path) -> BinaryIO:
    """Open a regular file, which need not exist yet, to append to it without a buffer."""
    return opened(path, "ab", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def opened(path: str | Path, mode: str = "rb", flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a regular file; refuses anything else without waiting for it, such as for the other end of a pipe."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        kind = os.fstat(handle).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise Refused(errno.EINVAL, "Not a regular file", str(path))
        return open(handle, mode, buffering=0 if "a" in mode else -1)  # type: ignore[return-value]
    except BaseException:
        os.close(handle)
        raise


def read(path: str | Path, limit: int = SMALL) -> bytes:
    """Return the content of a file of at most `limit` bytes."""
    with opened(path) as file:
        content = bytearray()
        if os.fstat(file.fileno()).st_size <= limit:
            while len(content) <= limit and (part := file.read(PART)):  # a size given is allocated at once
                content += part
            if len(content) <= limit:
                return bytes(content)
        raise Refused(errno.EFBIG, f"Larger than {limit:,} bytes", str(path))


def exceeds_memory(size: int) -> bool:
    """Return whether a file of this size, which may be sparse, is larger than the memory of this machine."""
    return size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def whole_lines(path: str | Path, start: int = 0) -> Iterator[bytes]:
    """Yield a log's lines with their ends from byte `start` on, without those that are cut off or too long."""
    yield from (line for line, _ in lines_with_ends(path, start) if line)


def lines_with_ends(path: str | Path, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield a log's lines from byte `start` on, and at which byte each ends; b"" in place of one that is too long.

    Stops at a line that is cut off, or has no end within `HOLE` bytes, as in a sparse file.
    """
    with opened(path) as file:
        file.seek(start)
        while line := file.readline(LINE):
            part, size = line, len(line)
            while not part.endswith(b"\n"):
                part = file.readline(LINE)
                size += len(part)
                if not part or size > HOLE:
                    return
            start += size
            yield line if size == len(line) else b"", start

Form = Any  # of a JSON value: a type, or a list, a tuple or a dict of forms, see `misfit`


def parsed(content: bytes | str, form: Form = dict,
           pairs: Callable[[list[tuple[str, Json]]], Json] | None = None) -> Json:
    """Return what JSON text holds; raises ValueError if it is invalid, nested too deeply or not of this `form`.

    `pairs`: makes an object of its keys and values, which may be there more than once; None: the last ones count.
    """
    try:
        value = json.loads(content, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    _check_depth(value, content)
    if wrong := misfit(value, form):
        raise ValueError(f"is not of the form expected: {wrong}")
    return value


def read_json(path: str | Path, form: Form = dict, limit: int = SMALL) -> Json:
    """Return what a JSON file holds, of this `form`."""
    return parsed(read(path, limit), form)


def user_json(path: str | Path, form: Form, key: str, fix: str, limit: int = SMALL) -> Json:
    """Return what a JSON file holds, or None if there is no such file; all else that is wrong is a `UserError`."""
    try:
        return read_json(path, form, limit)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(key, f"{path} {reason(error)}", fix) from error


def json_lines(path: str | Path, form: Form = dict) -> Iterator[Json]:
    """Yield what the lines of a log hold, without damaged lines; nothing, if it cannot be read."""
    with contextlib.suppress(OSError):
        for line in whole_lines(path):
            with contextlib.suppress(ValueError):
                yield parsed(line, form)


def misfit(value: object, form: Form, at: str = "") -> str:
    """Return which part of a value is not of the form expected, as a phrase, or "".

    A form is a type or a union of types; `[form]`, a list of such values; `(form, form)`, a list of exactly these;
    `{str: form}`, an object with such values; or `{"name": form, "other?": form}`, an object with at least these keys,
    of which those that end with `?` may be missing.
    """
    what = at or "it"
    if not isinstance(form, dict | list | tuple):
        return "" if isinstance(value, form) and (type(value) is not bool or form is bool) else (
            f"{what} is not {_NAMES.get(form, form)}")
    kind: Any = dict if isinstance(form, dict) else list
    if not isinstance(value, kind) or (isinstance(form, tuple) and len(value) != len(form)):
        return f"{what} is not {_NAMES[kind]}" + f" of {len(form)}" * isinstance(form, tuple)
    if isinstance(form, dict):
        named = {name: part for name, part in form.items() if name is not str}
        if missing := [name for name in named if not name.endswith("?") and name not in value]:
            return f"{what} has no {missing[0]!r}"
        parts = [(key, value[key], part) for name, part in named.items() if (key := name.removesuffix("?")) in value]
        parts += [(key, part, form[str]) for key, part in (value.items() if str in form else ())]  # pyrefly: ignore
    else:
        parts = [(i, part, form[i if isinstance(form, tuple) else 0]) for i, part in enumerate(value)]
    return next(filter(None, (misfit(part, wanted, f"{at}.{key}".lstrip(".")) for key, part, wanted in parts)), "")


def reason(error: BaseException) -> str:
    """Return why a file is not valid, as a phrase to follow its name."""
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error})"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "is not valid JSON"
    text = f"{error}".splitlines()[0][:200] if str(error) else type(error).__name__
    return text if type(error) is ValueError and text.startswith("is ") else f"cannot be read ({text})"


def _check_depth(value: object, content: bytes | str) -> None:
    brackets = (b"[", b"{") if isinstance(content, bytes) else ("[", "{")
    if sum(map(content.count, brackets)) <= DEPTH:  # type: ignore[arg-type]
        return
    level = [value]
    for _ in range(DEPTH):
        level = [part for one in level if isinstance(one, dict | list)
                 for part in (one.values() if isinstance(one, dict) else one)]
    if any(isinstance(one, dict | list) for one in level):
        raise ValueError("is nested too deeply")
