"""A folder of compiled programs: a manifest, signed with the run's secret, that has the sha256 of each.

An executable is code, so bytes that the manifest does not vouch for are never deserialized: the code (HMAC with
SHA-256) of the manifest is checked before it is parsed, and the hash of the bytes that were read before they are
loaded.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.distributed.authentication import Forged, opened, sealed, secret
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files, bounded_files

MANIFEST = "manifest"
AGAIN = "compile it again with jaxtrain compile, or leave --compiled out"
_NAME = "compiled programs"  # what the code of a manifest is for
_LARGEST = 2**36  # bytes of a program


def need_secret() -> None:
    """Refuse to write or read such a folder without a secret to sign it with."""
    if not secret():
        raise UserError("JAXTRAIN_SECRET_FILE", "compiled programs are signed, and this run has no secret",
                        "name a file of mode 0600 with at least 16 random characters in it, or put the one that "
                        "jaxtrain compile made into the workdir")


def check_free(folder: Path, overwrite: bool) -> None:
    """Make a folder to write to; refuse one that has something else in it, or compiled programs without `overwrite`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in folder.iterdir() if path.is_file())
        folders = [path.name for path in folder.iterdir() if not path.is_file()]
    except OSError as error:
        raise UserError("--output", f"{folder} cannot be written ({error.strerror})", "give another folder") from None
    if others := folders + [name for name in found if name != MANIFEST and not name.endswith(".program")]:
        raise UserError("--output", f"{folder} has other files in it, such as {others[0]}", "give an empty folder")
    if MANIFEST in found and not overwrite:
        raise UserError("--output", f"{folder} has compiled programs in it", "give another folder, or --overwrite")
    for name in found:  # without a manifest they are those of a command that was stopped
        (folder / name).unlink()


def write(folder: Path, about: JsonObject, programs: Iterable[tuple[str, Json, bytes]]) -> None:
    """Write programs (name, shape of the batch, bytes) into a folder, and then the manifest, without which it is none.

    `about`: what else is in the manifest.
    """
    entries = []
    for number, (name, shape, content) in enumerate(programs):
        file = f"{number:03}-{name.replace(' ', '-')}.program"
        with atomic_files.written(folder / file, shared=False) as out:
            out.write(content)
        entries.append({"name": name, "batch": shape, "file": file, "bytes": len(content),
                        "sha256": hashlib.sha256(content).hexdigest()})
    atomic_files.write(folder / MANIFEST, sealed(_NAME, {**about, "programs": entries}))


def read(folder: Path) -> JsonObject:
    """Return the manifest; a `UserError` unless it was signed with the secret of this run."""
    need_secret()
    try:
        return opened(_NAME, bounded_files.read(folder / MANIFEST).decode())
    except (Forged, UnicodeDecodeError):
        raise UserError("--compiled", f"{folder} is not signed with the secret of this run, so nothing in it is loaded",
                        "give the run the secret that it was compiled with, or compile it again") from None
    except OSError as error:
        raise UserError("--compiled", f"{folder} {bounded_files.reason(error)}",
                        "give the folder that jaxtrain compile wrote") from None


def content(folder: Path, entry: JsonObject) -> bytes:
    """Return the bytes of a program that is in the manifest; a `UserError` if they are not those that it names."""
    try:
        found = bounded_files.read(folder / entry["file"], min(entry["bytes"], _LARGEST))
    except (OSError, ValueError) as error:
        raise UserError("--compiled", f"{folder / entry['file']} {bounded_files.reason(error)}", AGAIN) from None
    if hashlib.sha256(found).hexdigest() != entry["sha256"]:
        raise UserError("--compiled", f"{folder / entry['file']} is not what was signed, and it is not loaded", AGAIN)
    return found
