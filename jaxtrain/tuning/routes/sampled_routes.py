"""The routes of answers' tokens as an array of a batch, and in files."""

import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxtrain.files import atomic_files
from jaxtrain.hub.generate import Generated
from jaxtrain.models.experts.given_routes import ROUTES


def routes_of(answers: Sequence[Generated], sizes: Sequence[int], length: int) -> dict[str, np.ndarray]:
    """Return the array of a batch that has the routes of answers, each of so many tokens with its prompt."""
    first = answers[0].routes
    assert first is not None
    found = np.full((len(answers), length, *first.shape[1:]), -1, np.int16)
    for row, answer, size in zip(found, answers, sizes, strict=True):
        assert answer.routes is not None
        row[:size] = answer.routes[:size]
    return {ROUTES: found}


def write(path: Path, answers: Sequence[Generated], durable: bool) -> None:
    """Write the routes of answers beside the file of these."""
    arrays = {str(at): answer.routes for at, answer in enumerate(answers) if answer.routes is not None}
    with atomic_files.written(_beside(path), durable=durable, shared=False) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def read(path: Path, answers: Sequence[Generated]) -> list[Generated]:
    """Return answers with their routes; a ValueError says what is wrong with the file."""
    try:
        with np.load(_beside(path)) as found:
            return [replace(answer, routes=found[str(at)]) for at, answer in enumerate(answers)]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"its routes, {_beside(path).name}: {error}") from error


def _beside(path: Path) -> Path:
    return path.with_suffix(".routes.npz")
