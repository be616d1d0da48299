"""Recognize .json files that hold an array of records, which is neither text nor JSON lines."""

import re

from jaxtrain import storage

_BEGIN = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")


def is_array_of_records(path: str, size: int) -> bool:
    """Return whether a file or object of this size is a JSON array of objects, by its name and how it begins."""
    return path.lower().endswith(".json") and bool(_BEGIN.match(storage.read(path, 0, min(4096, size))))
