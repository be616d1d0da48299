"""Find documents of a corpus by number, by the hash of their content, by their text, or by where they come from.

Numbers and places cost the same in a corpus of any size; hashes are looked for among those of all documents.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from jaxtrain.data.corpus.corpus import SPLITS, Corpus, Tokens
from jaxtrain.data.corpus.open import array
from jaxtrain.data.corpus.origins import PLACES, manifest_of, origin_at, pieces_of
from jaxtrain.data.formats.inputs import content_hash
from jaxtrain.data.tracing.stretches import Stretch
from jaxtrain.errors import UserError, nearest

_PLACE = re.compile(rf"(.*?)(?: group (\d+))?(?: (?:{'|'.join({*filter(None, PLACES.values()), 'line', 'document'})})"
                    r" (\d+))?")
_FIX = "give a number, a content hash of 32 digits, @FILE with its text, or a place as `jaxtrain inspect` prints it"


@dataclass(frozen=True)
class FoundDocument:
    """A document of a corpus, and its tokens, the end-of-document token included."""

    source: str  # of a mixture; "": the only one
    split: str
    number: int  # among those of the split of its source
    start: int  # its first token, in those of that split
    stop: int

    @property
    def name(self) -> str:
        """The name that `find` takes, with the split if it is not for training."""
        return f"{f'{self.source}:' if self.source else ''}{self.number}{' (eval)' if self.split == 'eval' else ''}"

    @property
    def stretch(self) -> Stretch:
        """All of its tokens."""
        return Stretch(self.source, self.start, self.stop)

    def origin(self, corpus: Corpus) -> str:
        """Return where it comes from: the input file, and the place within it."""
        return origin_at(corpus, self.split, self.source, self.start)


def find(corpus: Corpus, wanted: str) -> list[FoundDocument]:
    """Return the documents that these words name, in both splits; raise a UserError if there are none.

    `wanted`: a number, a hash in hexadecimal digits, `@FILE`, or a place such as "a.jsonl byte 12" or "a.txt"; in a
    mixture, behind the name of a source and a colon, or in any source.
    """
    before, colon, rest = wanted.partition(":")
    sources = list(corpus.parts) or [""]
    if colon and before in corpus.parts:
        sources, wanted = [before], rest.strip()
    if wanted.isdecimal() and len(wanted) < 20:
        found = _by_number(corpus, sources, int(wanted))
    elif wanted.startswith("@"):
        text = _content(wanted[1:])
        found = [one for source in sources for one in _by_key(
            corpus, source, {content_hash(text).hex(), sha256(text).hexdigest()})]
    elif re.fullmatch(r"[0-9a-f]{32}|[0-9a-f]{64}", wanted):
        found = [one for source in sources for one in _by_key(corpus, source, {wanted})]
    else:
        found = [one for source in sources for one in _by_place(corpus, source, wanted)]
    if not found:
        raise UserError("--document", f"no document is {wanted!r}", _FIX)
    return found


def document(corpus: Corpus, source: str, split: str, shard: int, number: int) -> FoundDocument:
    """Return a document by its number in a shard of a split."""
    tokens: Tokens = getattr(corpus.part(source), split)
    before, edges = tokens.shard_start(shard), tokens.shards[shard].offsets
    return FoundDocument(source, split, tokens.first_documents[shard] + number, before + int(edges[number]),
                         before + int(edges[number + 1]))


def numbered(corpus: Corpus, source: str, split: str, number: int) -> FoundDocument:
    """Return a document by its number in a split."""
    tokens: Tokens = getattr(corpus.part(source), split)
    shard = int(np.searchsorted(tokens.first_documents, number, "right")) - 1
    return document(corpus, source, split, shard, number - tokens.first_documents[shard])


def _by_number(corpus: Corpus, sources: list[str], number: int) -> list[FoundDocument]:
    if len(sources) > 1:
        raise UserError("--document", f"{number} may be of any source", f"write SOURCE:{number}, with one of "
                        f"{', '.join(sources)}")
    count = corpus.part(sources[0]).train.num_documents
    if number >= count:
        raise UserError("--document", f"there is no document {number}: training has {count:,}", "count from 0")
    return [numbered(corpus, sources[0], "train", number)]


def _content(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise UserError("--document", f"{path} cannot be read ({error.strerror})",
                        "name a file with the text") from None


def _by_key(corpus: Corpus, source: str, keys: set[str]) -> Iterator[FoundDocument]:
    """Yield documents whose content has one of these hashes; that of a conversation covers its prompt only."""
    part = corpus.part(source)
    manifest = manifest_of(part)
    if "splits" not in manifest:  # text tokenized on first use, whose documents are listed
        for split in SPLITS:
            for number, file in enumerate(manifest[split]["files"]):
                if file["sha256"] in keys:
                    yield numbered(corpus, source, split, number)
        return
    wanted = [np.frombuffer(bytes.fromhex(key), np.uint8) for key in keys if len(key) == 32]
    for split, shard, entry in _shards(manifest):
        path = part.path / f"{entry['name']}.keys.npy"
        if not path.exists():
            raise UserError("--document", f"{path} is not here: content hashes are not fetched with a remote corpus",
                            "give numbers or places, or a local copy of the corpus")
        hashes = array(path)
        for key in wanted if len(hashes) else ():
            first = np.flatnonzero(hashes[:, 0] == key[0])  # of the columns one is read whole
            for number in first[(hashes[first] == key).all(axis=1)].tolist():
                yield document(corpus, source, split, shard, number)


def _by_place(corpus: Corpus, source: str, wanted: str) -> Iterator[FoundDocument]:
    part = corpus.part(source)
    manifest = manifest_of(part)
    match = _PLACE.fullmatch(wanted)
    assert match  # all groups may be empty
    name, group, place = match[1], match[2], match[3]
    if "splits" not in manifest:
        files = {split: [file["name"] for file in manifest[split]["files"]] for split in SPLITS}
        for split in SPLITS:
            for number, file in enumerate(files[split]):
                if file == wanted.partition(" from byte ")[0]:
                    yield numbered(corpus, source, split, number)
        return
    tasks = {entry["task"] for *_, entry in _shards(manifest)}
    pieces = {(task, number) for task in tasks for number, piece in enumerate(pieces_of(manifest, task))
              if piece["name"] == name and (group is None or piece["start"] == int(group))}
    if not pieces:
        names = {piece["name"] for some in manifest["inputs"] for piece in some}
        raise UserError("--document", f"no document is {wanted!r}", nearest(name, names) if len(names) < 1000 else _FIX)
    with_it = {task for task, _ in pieces}
    for split, shard, entry in _shards(manifest):
        if entry["task"] in with_it:
            origins = array(part.path / f"{entry['name']}.origins.npy")
            there = np.isin(origins["piece"], [number for task, number in pieces if task == entry["task"]])
            there &= origins["place"] == int(place) if place else True
            for number in np.flatnonzero(there).tolist():
                yield document(corpus, source, split, shard, number)


def _shards(manifest: dict) -> Iterator[tuple[str, int, dict]]:
    for split in SPLITS:
        for shard, entry in enumerate(manifest["splits"][split]["shards"]):
            yield split, shard, entry
