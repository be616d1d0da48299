"""What a corpus was made of, and by which code: the part of the manifest that a datasheet needs."""

import hashlib
from pathlib import Path
from typing import Any

from jaxtrain.data import files
from jaxtrain.data.inputs import Piece
from jaxtrain.versions import git_commit, version_of

_WHOLE = ("parquet", "megatron")  # their pieces are no stretch of bytes


def digest(piece: Piece) -> str | None:
    """The sha256 of the stored bytes: of the piece, or with the first piece of the file; None: that one has it."""
    if piece.kind in _WHOLE:
        return files.file_digest(Path(piece.path)) if piece.start == 0 else None
    left, sha256 = piece.stop - piece.start, hashlib.sha256()
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        while left and (some := file.read(min(left, 2**20))):
            sha256.update(some)
            left -= len(some)
    return sha256.hexdigest()


def code() -> dict[str, Any]:
    """The commit, where there is one, and the versions of what has a say in a corpus."""
    packages = ("jaxtrain", "numpy", "tokenizers", "datatrove", "py3langid", "rensa")
    return {"git_commit": git_commit(), "versions": {name: version_of(name) for name in packages}}
