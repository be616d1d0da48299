"""Record what a corpus was made of, and by which code: the part of the manifest that a datasheet needs."""

import hashlib
from collections.abc import Sequence
from datetime import date
from typing import Any, cast

from jaxtrain import storage
from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.formats import token_files
from jaxtrain.data.formats.inputs import Piece, readable
from jaxtrain.errors import UserError, nearest
from jaxtrain.observe.versions import git_commit, version_of

# Fields for --describe: those of Croissant and its responsible-AI vocabulary; LISTS may have several values.
LISTS = ("keywords", "in_language", "data_collection_type", "data_biases", "data_limitations", "data_use_cases",
         "personal_sensitive_information", "data_annotation_protocol")
FIELDS = ("name", "description", "url", "version", "cite_as", "date_published", "creator", "data_collection",
          "data_collection_raw_data", "data_social_impact", "data_release_maintenance_plan", *LISTS)
_STRETCHES = ("text", "jsonl")  # other kinds of pieces are not stretches of bytes


def digest(piece: Piece) -> str | dict[str, str] | None:
    """Return the sha256 of the stored bytes of a piece.

    For kinds other than stretches of bytes, it is that of the file, at its first piece (None: later pieces). It is a
    dict by file name if the file is read together with another one.
    """
    if piece.kind not in _STRETCHES:
        if piece.start:
            return None
        found = {path.rpartition("/")[2]: _file_digest(path) for path in token_files.files_of(piece.path)}
        return found if len(found) > 1 else next(iter(found.values()))
    left, sha256 = piece.stop - piece.start, hashlib.sha256()
    with readable(piece.path), storage.open(piece.path) as file:
        file.seek(piece.start)
        while left and (some := file.read(min(left, 2**20))):
            sha256.update(some)
            left -= len(some)
    return sha256.hexdigest()


def _file_digest(path: str) -> str:
    with readable(path), storage.open(path) as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


def described(words: Sequence[str]) -> dict[str, str]:
    """Parse KEY=VALUE words for the datasheet."""
    told: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError("--describe", f"{word!r} is not KEY=VALUE", "write, for example, description='...'")
        if key not in FIELDS:
            raise UserError("--describe", f"a datasheet has no field {key!r}", nearest(key, FIELDS))
        if key == "date_published":
            try:
                date.fromisoformat(value)
            except ValueError as error:
                raise UserError("--describe", f"{word} is not a date", "write it as 2026-01-31") from error
        told[key] = value
    return told


def code(more: Sequence[str] = ()) -> JsonObject:
    """Return the git commit, if known, and the versions of the packages that affect a corpus."""
    packages = ("jaxtrain", "numpy", "tokenizers", "tiktoken", "sentencepiece", "jinja2", "datatrove", "py3langid",
                "rensa")
    return {"git_commit": git_commit(), "versions": {name: version_of(name) for name in (*packages, *more)}}
