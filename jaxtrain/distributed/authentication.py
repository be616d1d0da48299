"""Authenticate what the processes of a run tell each other, with a secret that only they have.

The secret is the content of a file that only its owner can read, JAXTRAIN_SECRET_FILE; the supervisor makes one in the
workdir. JAXTRAIN_SECRET may hold it instead. It never passes through the network: values are sent with a code (HMAC
with SHA-256) that depends on it. Without a secret there is only a token in JAX's coordination service, which whoever
reaches that can read: docs/security.md says what follows.
"""

import contextlib
import functools
import hashlib
import hmac
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import Json
from jaxtrain.errors import UserError
from jaxtrain.redaction import redacted

_LEAST = 16  # characters
_FIX = "put at least 16 random characters into a file of mode 0600, the same on every host"


class Forged(OSError):
    """Raised when a value was not sent by a process of this run."""

    def __init__(self, what: str):
        super().__init__(0, f"{what} does not come from a process of this run")


@functools.cache
def secret() -> bytes:
    """Return the run's secret; empty if it has none."""
    if path := os.environ.get("JAXTRAIN_SECRET_FILE"):
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                about = os.fstat(file)
                found = os.read(file, 4096).strip()
            finally:
                os.close(file)
        except OSError as error:
            raise UserError("JAXTRAIN_SECRET_FILE", f"{path} cannot be read ({error.strerror})", _FIX) from None
        if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077 or about.st_uid not in (0, os.geteuid()):
            raise UserError("JAXTRAIN_SECRET_FILE", f"{path} can be read by others, or is not a plain file", _FIX)
    else:
        found = os.environ.get("JAXTRAIN_SECRET", "").encode()
    if found and len(found) < _LEAST:
        raise UserError("JAXTRAIN_SECRET", f"{len(found)} characters can be guessed", _FIX)
    return found


def make_secret(path: Path) -> None:
    """Write a new secret into a file that only this user can read, unless there is one; safe on several hosts at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".secret-")  # of mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(os.urandom(32).hex().encode() + b"\n")
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


def find_secret(workdir: Path) -> None:
    """Use the secret that a supervisor made in the workdir, where the environment names none: to read its snapshots."""
    path = workdir.absolute() / "secret"
    with contextlib.suppress(OSError):
        if not os.environ.keys() & {"JAXTRAIN_SECRET", "JAXTRAIN_SECRET_FILE"} and not path.stat().st_mode & 0o077:
            os.environ["JAXTRAIN_SECRET_FILE"] = str(path)


def derive(*parts: Any) -> bytes:
    """Return a key for one purpose, made from the secret."""
    return bytes.fromhex(code(secret(), *parts))


def code(key: bytes, *parts: Any) -> str:
    """Return the authentication code of these values, as hexadecimal text."""
    return hmac.new(key, json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def matches(given: object, wanted: str) -> bool:
    """Compare codes in a time that does not depend on where they differ; anything but text never matches."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


def sealed(name: str, value: object) -> str:
    """Return a value as JSON without credentials, after a code of it and of the name under which it is published."""
    text = json.dumps(redacted(value))
    return f"{code(derive('value'), name, text) if secret() else '-'} {text}"


def opened(name: str, content: str) -> Json:
    """Return the value that `sealed` was given; raises `Forged` if it was published by a stranger."""
    given, _, text = content.partition(" ")
    if secret() and not matches(given, code(derive("value"), name, text)):
        raise Forged(f"the value of {name} in the coordination service")
    return json.loads(text)
