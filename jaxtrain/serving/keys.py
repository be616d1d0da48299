"""The keys with which clients of a training service say who they are: read from a file, never written or logged.

A key's owner has a name that follows from it, by which the service tells apart what belongs to whom.
"""

import hashlib
import hmac
import os
import stat
from collections.abc import Sequence

from jaxtrain.errors import UserError

LOCAL = "local"  # the owner of everything where no keys are given
_LEAST = 20  # characters
_PREFIX = "tml-"  # the package tinker sends no other keys
_FIX = f"write one key a line, of at least {_LEAST} random characters that begin with {_PREFIX}, in a file of mode 0600"


class Keys:
    """The keys that are let in; without any, everybody is."""

    def __init__(self, keys: Sequence[str] = ()):
        self._digests = [(hashlib.sha256(key.encode()).digest(), owner_of(key)) for key in keys]

    @classmethod
    def read(cls, path: str) -> "Keys":
        """Return the keys in a file."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                about = os.fstat(handle)
                content = os.read(handle, 2**20).decode()
            finally:
                os.close(handle)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError("--keys", f"{path} cannot be read ({getattr(error, 'strerror', '') or 'not text'})",
                            _FIX) from None
        if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077:
            raise UserError("--keys", f"{path} can be read by others, or is not a plain file", _FIX)
        keys = [line.strip() for line in content.splitlines() if line.strip() and not line.startswith("#")]
        if not keys:
            raise UserError("--keys", f"{path} has none", _FIX)
        if any(len(key) < _LEAST or not key.startswith(_PREFIX) or not key.isascii() for key in keys):
            raise UserError("--keys", f"{path} has a key that can be guessed, or that the client does not send", _FIX)
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, given: str | None) -> str | None:
        """Return whose key it is; None: nobody's. Takes as long wherever keys differ."""
        if not self._digests:
            return LOCAL
        digest = hashlib.sha256((given or "").encode(errors="replace")).digest()
        found = None
        for known, owner in self._digests:
            if hmac.compare_digest(known, digest):
                found = owner
        return found if given else None


def owner_of(key: str) -> str:
    """Return the name of a key's owner, from which the key does not follow."""
    return hashlib.sha256(b"owner of " + key.encode()).hexdigest()[:16]
