"""Files by path or by URL (s3://, gs://, whatever fsspec supports), with retries against network failures.

Temporary errors (timeouts, lost connections, a busy server, a truncated body) are retried with growing pauses;
permanent ones (no such object, no permission) are reported at once. Paths never use fsspec.

Credentials may stand in a URL: `s3://KEY:SECRET@bucket/...`, `https://USER:PASSWORD@host/...` or the query of a signed
one. They are used, and hidden in whatever is reported. Those that the storage libraries find by themselves are better.
"""

import builtins
import contextlib
import datetime
import errno
import functools
import inspect
import io
import random
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from jaxtrain.errors import UserError, install_extra
from jaxtrain.files import bounded_files
from jaxtrain.redaction import is_hidden, redacted

TRIES = 8
PAUSE = 0.2, 20.0  # seconds: the first, doubled each time, and the longest
BLOCK = 2**23  # bytes of a URL that sequential readers read at a time

_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, NotImplementedError,
            ValueError, TypeError)
_LASTING_NUMBERS = {errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, getattr(errno, "EREMCHG", None)}
_LASTING_NAMES = {"NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "SSOError", "ProfileNotFound",
                  "ParamValidationError", "DefaultCredentialsError"}  # of botocore and google.auth
_S3 = "s3", "s3a"
_STAMPS = "ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "updated", "mtime", "created"
_random = random.Random()  # not the module's own generator, whose state the user may rely on
T = TypeVar("T")


class Gone(UserError):
    """Raised when there is no such object."""


@dataclass(frozen=True)
class Found:
    """A file in a listing."""

    name: str  # relative to the listed folder, with forward slashes
    path: str
    size: int


def is_url(path: str | Path) -> bool:
    """Return whether a path is a URL, for fsspec."""
    return "://" in str(path)


def refuse_unusable(url: str | Path) -> None:
    """Raise a UserError for a URL of a kind that cannot be used here; the store itself is not asked."""
    if is_url(url):
        _filesystem(url)


def is_web(path: str | Path) -> bool:
    """Return whether a path is a URL of the web, which may have a query."""
    return str(path).lower().startswith(("http://", "https://"))


def join(folder: str | Path, name: str) -> str:
    """Return the path or URL of a file in a folder; the query of a signed URL stays at its end."""
    place, query, signature = str(folder).partition("?") if is_web(folder) else (str(folder), "", "")
    return f"{place.rstrip('/')}/{name}{query}{signature}"


def size(path: str | Path) -> int:
    """Return the size of a file in bytes."""
    found = _info(path).get("size") if is_url(path) else Path(path).stat().st_size
    if found is None:
        raise UserError(str(path), "its server does not tell its size", "copy it to a folder, or to s3:// or gs://")
    return found


def exists(path: str | Path) -> bool:
    """Return whether there is such a file."""
    if not is_url(path):
        return Path(path).exists()
    try:
        return bool(_info(path))
    except Gone:
        return False


def stamp(path: str | Path) -> int | str:
    """Return a value that differs between versions of a file: its time, or the store's equivalent."""
    if not is_url(path):
        return Path(path).stat().st_mtime_ns
    info = _info(path)
    return " ".join([str(info["size"]), *(f"{key}={_plain(info[key])}" for key in _STAMPS if info.get(key))])


def find(url: str) -> list[Found]:
    """Return all files below a URL, or the one it names, sorted by name and without hidden ones."""
    fs, plain = _filesystem(url)
    root = fs._strip_protocol(plain).rstrip("/")
    listed = _tried(url, lambda: fs.find(plain, detail=True))
    found = []
    for path, info in listed.items():
        name = path[len(root) + 1:] if path != root else _last(path)
        if info.get("type", "file") == "file" and not any(part.startswith(".") or not part for part in name.split("/")):
            whole = join(url, name) if path != root else url
            found.append(Found(name, whole, info["size"] if info.get("size") is not None else size(whole)))
    return sorted(found, key=lambda file: file.name)


def read(path: str | Path, start: int = 0, stop: int | None = None) -> bytes:
    """Read bytes `start` to `stop`, all of them; fewer are an error after several retries."""
    if not is_url(path):
        with builtins.open(path, "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)
    end = size(path) if stop is None else stop
    fs, plain = _filesystem(path)

    def get() -> bytes:
        content = fs.cat_file(plain, start=start, end=end) if end > start else b""
        if len(content) != end - start:
            raise EOFError(f"{len(content)} bytes came instead of {end - start}")
        return content

    return _tried(path, get)


def read_small(path: str | Path, limit: int = bounded_files.SMALL) -> bytes:
    """Read a file of at most `limit` bytes; raises OSError for a larger one."""
    if not is_url(path):
        return bounded_files.read(path, limit)
    if (there := size(path)) > limit:
        raise bounded_files.Refused(errno.EFBIG, f"Larger than {limit:,} bytes", str(path))
    return read(path, 0, there)


def open(path: str | Path) -> BinaryIO:
    """Open a file for reading, with seeking."""
    if not is_url(path):
        return builtins.open(path, "rb")
    return io.BufferedReader(_Object(path), BLOCK)


def fetched(path: str | Path) -> BinaryIO:
    """Open a file that can be mapped; the content of a URL is copied to an unnamed temporary file."""
    if not is_url(path):
        return builtins.open(path, "rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115 (for the caller)
    with open(path) as source:
        shutil.copyfileobj(source, file, BLOCK)
    file.flush()
    file.seek(0)
    return cast(BinaryIO, file)


def here(path: str | Path) -> Path:
    """Return a local path to a file, under its own name; a URL is downloaded."""
    return _copied(str(path), stamp(path))[0] if is_url(path) else Path(path)


@functools.lru_cache(maxsize=4)
def _copied(url: str, version: int | str) -> tuple[Path, Any]:
    """Download each version of an object once; the folder is deleted when it is no longer referenced."""
    folder = tempfile.TemporaryDirectory(prefix="jaxtrain-")
    local = Path(folder.name, _last(url))
    with builtins.open(local, "wb") as file, open(url) as source:
        shutil.copyfileobj(source, file, BLOCK)
    return local, folder


def put(local: Path, url: str) -> None:
    """Upload a file; stores show an object only when it is complete."""
    fs, plain = _filesystem(url)

    def send() -> None:
        if url.startswith(("file:", "local:")):  # where folders must exist first
            fs.makedirs(fs._parent(url), exist_ok=True)
        fs.put_file(str(local), plain)

    _tried(url, send, "written")


def names(url: str) -> list[str]:
    """Return the names of files and folders directly inside a folder's URL; empty if it does not exist."""
    fs, plain = _filesystem(url)
    try:
        return sorted(_last(path.rstrip("/")) for path in _tried(url, lambda: fs.ls(plain, detail=False)))
    except Gone:
        return []


def folders(url: str) -> list[str]:
    """Return the names of the folders directly inside a folder's URL; empty if it does not exist."""
    fs, plain = _filesystem(url)
    try:
        found = _tried(url, lambda: fs.ls(plain, detail=True))
    except Gone:
        return []
    return sorted(_last(entry["name"].rstrip("/")) for entry in found if entry["type"] == "directory")


def remove(url: str) -> None:
    """Delete a file, or a folder with its content; it need not exist."""
    fs, plain = _filesystem(url)
    with contextlib.suppress(Gone):
        _tried(url, lambda: fs.rm(plain, recursive=True), "removed")


class _Object(io.RawIOBase):
    """The content of a URL as a file."""

    def __init__(self, url: str | Path):
        self._url, self._size, self._at = url, size(url), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        content = read(self._url, self._at, max(self._at, min(self._at + len(buffer), self._size)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def _info(path: str | Path) -> dict[str, Any]:
    fs, plain = _filesystem(path)
    return _tried(path, lambda: fs.info(plain))


def _last(path: str) -> str:
    """Return the last part of a path or URL, without the query of one of the web."""
    return (path.partition("?")[0] if is_web(path) else path).rpartition("/")[2]


def refuse_hidden(url: str | Path) -> None:
    """Raise a UserError for a URL without its credentials, as it stands in what a run wrote."""
    if is_url(url) and is_hidden(str(url)):
        raise UserError(str(url), "its credentials are not written down", "give the whole URL again")


def _filesystem(url: str | Path) -> tuple[Any, str]:
    """Return the file system that a URL is of, connected by its credentials, and the URL as it takes it."""
    refuse_hidden(url)
    protocol, _, rest = str(url).partition("://")
    has_keys = protocol in _S3 and "@" in rest and ":" in rest.partition("/")[0].partition("@")[0]
    user, _, place = rest.partition("@") if has_keys else ("", "", rest)
    key, _, secret = user.partition(":")
    return _of_protocol(str(url), protocol, *map(urllib.parse.unquote, (key, secret))), f"{protocol}://{place}"


@functools.lru_cache(maxsize=8)
def _connected(protocol: str, key: str = "", secret: str = "") -> Any:
    import fsspec.config

    options: dict[str, Any] = {"use_listings_cache": False}  # a cached listing would hide changes
    if key:
        options |= {"key": key, "secret": secret}
    if protocol in _S3:  # the default is ten connections, which threads would wait for
        said = fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
        options["config_kwargs"] = {"max_pool_connections": 64, **said}
    asked = inspect.signature(fsspec.get_filesystem_class(protocol).__init__).parameters.values()
    if lacking := [one.name for one in list(asked)[1:] if one.default is one.empty and one.kind < one.VAR_POSITIONAL]:
        raise ValueError(f"it needs {' and '.join(lacking)}, which a URL does not give")
    fs = fsspec.filesystem(protocol, **options)
    if hasattr(fs, "retries"):
        fs.retries = 1  # s3fs would otherwise retry within each of our tries
    return fs


def _of_protocol(url: str, protocol: str, *credentials: str) -> Any:
    try:
        return _connected(protocol, *credentials)
    except ImportError as error:
        extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(protocol)
        fix = install_extra(extra) if extra else "install it"
        raise UserError(url, f"{protocol}:// needs a package that is not installed ({error})", fix) from error
    except (ValueError, TypeError, OSError) as error:
        raise UserError(url, f"{protocol}:// cannot be used ({error})", "use s3:// or gs://") from error


def _tried(url: str | Path, do: Callable[[], T], what: str = "read") -> T:
    first, longest = PAUSE
    for attempt in range(TRIES):
        try:
            return do()
        except Exception as error:  # every store has its own exceptions
            cause = error if redacted(str(url)) == str(url) else None  # a traceback would show what it says
            if _lasts(error):
                raise _refusal(url, error, what) from cause
            if attempt == TRIES - 1:
                raise UserError(str(url), f"cannot be {what}: {_words(url, error)}, in {TRIES} attempts",
                                "check that the store is up, then run again") from cause
        time.sleep(min(longest, first * 2**attempt) * _random.uniform(0.5, 1))
    raise AssertionError


def _lasts(error: Exception) -> bool:
    """Return whether an error is permanent; unknown errors may be temporary."""
    if isinstance(error, OSError) and (error.errno in _LASTING_NUMBERS or str(error).startswith("Forbidden")):
        return True  # the word is how gcsfs reports it
    return isinstance(error, _LASTING) or any(cls.__name__ in _LASTING_NAMES for cls in type(error).__mro__)


def _refusal(url: str | Path, error: Exception, what: str) -> UserError:
    if isinstance(error, FileNotFoundError):
        return Gone(str(url), f"is not there ({_words(url, error)})", "check its name")
    return UserError(str(url), f"cannot be {what} ({_words(url, error)})", "check the credentials and what they permit")


def _words(url: str | Path, error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    for one in (str(url), str(url).partition("://")[2]):  # libraries name it without s3://, too
        text = text.replace(one, redacted(str(url)))
    text = redacted(text)  # before it is cut, after which a part of a URL might not be recognized
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime.datetime) else str(value)
