"""Find where the documents of a row come from: the input file, and the place within it."""

import functools
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.corpus.corpus import Corpus, Tokens
from jaxtrain.data.corpus.open import array, read_manifest
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import LARGE, read_json

PLACES = {"text": "", "jsonl": "byte", "parquet": "row"}  # the unit of a place, by kind of input; "document" for others


def origins(corpus: Corpus, split: str, source: str, rows: Any, number: int | None) -> list[str]:
    """Return the origin of each document in row `number` of `rows` (the rows of one source), as text for the user."""
    if number is None or not hasattr(rows, "places"):
        return []
    return [origin_at(corpus, split, source, place) for place in rows.places(number)]


def origin_at(corpus: Corpus, split: str, source: str, place: int) -> str:
    """Return the origin of the document at token `place` of a source's split, or of all sources end to end."""
    for name, part in corpus.parts.items():
        tokens: Tokens = getattr(part, split)
        if name == source or (not source and place < tokens.num_tokens):
            return f"{name}: {_origin(part, split, *tokens.document(place))}"
        place -= 0 if source else tokens.num_tokens
    return _origin(corpus, split, *getattr(corpus, split).document(place))


def _origin(corpus: Corpus, split: str, shard: int, document: int) -> str:
    manifest = manifest_of(corpus)
    if "splits" not in manifest:  # text tokenised on first use: a document is a file, or a part of one
        file = manifest[split]["files"][document]
        return file["name"] + (f" from byte {file['start']}" if file["start"] else "")
    entry = manifest["splits"][split]["shards"][shard]
    path = corpus.path / f"{entry['name']}.origins.npy"
    try:
        origin = array(path)[document]
        piece = pieces_of(manifest, entry["task"])[origin["piece"]]
        name, kind, place = f"{piece['name']}", f"{piece['kind']}", int(origin["place"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError("data.source", f"{path} does not tell where its document {document} comes from",
                        "prepare the corpus again") from error
    if kind == "jsonl" and name.endswith((".gz", ".zst")):
        return f"{name} line {place}"
    group = f" group {piece['start']}" if kind == "parquet" else ""
    return f"{name}{group} {PLACES.get(kind, 'document')} {place}".removesuffix("  0")


@functools.lru_cache(maxsize=8)
def manifest_of(corpus: Corpus) -> JsonObject:
    """Return the manifest of a prepared corpus, checked once, or of text that was tokenised on first use."""
    found = read_json(corpus.path / "manifest.json", limit=LARGE)
    return read_manifest(corpus.path, found.get("format")) if "splits" in found else found


def pieces_of(manifest: JsonObject, task: int) -> list[JsonObject]:
    """Return the input pieces that the origins of a task's documents are numbers of."""
    inputs = manifest["inputs"]
    return [piece for some in inputs for piece in some] if manifest.get("kind") == "events" else inputs[task]
