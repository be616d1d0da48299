"""Rows of several images: their patches one after the other, and with them their texts or labels.

Images are placed from the largest to the smallest, each into the row where it leaves the least room. Numbers of
images within a row begin at 1; 0 is padding.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jaxtrain.data.corpus.sequences import Sequences
from jaxtrain.errors import UserError


def pack(lengths: np.ndarray, room: int, most: int) -> list[list[int]]:
    """Return the numbers of the pieces in each row, none longer than `room` in all or of more than `most` pieces."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # the rows with so much room, and places for pieces
    rooms: list[int] = []  # that there are, in rising order
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        at = bisect.bisect_left(rooms, length)
        if at < len(rooms):
            left = rooms[at]
            row = by_room[left].pop()
            if not by_room[left]:
                del by_room[left], rooms[at]
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(number)
        if len(rows[row]) < most:
            if left - length not in by_room:
                bisect.insort(rooms, left - length)
            by_room.setdefault(left - length, []).append(row)
    return rows


@dataclass(frozen=True)
class ImageRows:
    """Rows with whole images of a corpus; the base of those with texts or labels beside them."""

    sequences: Sequences
    length: int  # of a row, in patches (or, where texts are among them, in tokens)
    most: int  # images in a row
    # Before the patches of each image there is a place in this row for a class token; None: there is none.
    class_at: int | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        """The places that each image takes."""
        return self.sequences.counts() + (self.class_at is not None)

    @cached_property
    def rows(self) -> list[list[int]]:
        """The numbers of the images in each row."""
        if len(self.lengths) and (longest := int(self.lengths.max())) > self.length:
            raise UserError("data.seq_len", f"a row of {self.length} does not hold the largest image, which takes "
                            f"{longest}", f"set it to {longest} or more, or prepare smaller images")
        return pack(self.lengths, self.length, self.most)

    @cached_property
    def row_of(self) -> np.ndarray:
        """The row of each image."""
        found = np.empty(len(self.lengths), np.int64)
        for row, numbers in enumerate(self.rows):
            found[numbers] = row
        return found

    @property
    def fill(self) -> float:
        """The share of places that are not padding."""
        return float(self.lengths.sum() / max(1, len(self) * self.length))

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        found = [self._with_class(self.sequences[number]) for number in self.rows[i]]
        shape = self.sequences.columns["patches"].shape
        row = {"patches": np.zeros((self.length, *shape), np.uint8), "images": np.zeros(self.length, np.int32),
               "places": np.zeros((self.length, 2), np.int32)}
        for number, (at, one) in enumerate(zip(self.starts(found), found, strict=True), 1):
            here = slice(at, at + len(one["patches"]))
            row["patches"][here], row["places"][here], row["images"][here] = one["patches"], one["places"], number
        return row | self.beside(found)

    def _with_class(self, one: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.class_at is None:
            return one
        return one | {"patches": np.pad(one["patches"], [(1, 0), (0, 0)]), "places": np.concatenate(
            [np.array([[self.class_at, 0]], np.int32), one["places"].astype(np.int32)])}

    def starts(self, found: Sequence[dict[str, np.ndarray]]) -> list[int]:
        """Return where the patches of each image of a row begin."""
        return np.cumsum([0, *(len(one["patches"]) for one in found[:-1])]).tolist()

    def beside(self, found: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return what a row has besides its patches."""
        return {"weights": (np.arange(self.most) < len(found)).astype(np.float32)}


@dataclass(frozen=True)
class LabelledImages(ImageRows):
    """Rows with a label for each image."""

    def beside(self, found: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return the labels, and which there are."""
        labels = np.zeros(self.most, np.int32)
        labels[:len(found)] = [int(one["label"][0]) for one in found]
        return {"labels": labels, **super().beside(found)}


@dataclass(frozen=True)
class PairedImages(ImageRows):
    """Rows with a text for each image, in places of its own: `text_len` for each, of which its text has the first."""

    text_len: int  # what is longer loses its end
    begin: int = -1  # the token in front of each text; -1: none
    end: int = -1  # likewise behind it
    pad: int = -1  # likewise what fills its places

    @property
    def room(self) -> int:
        """The most tokens of a text that its places hold."""
        return self.text_len - (self.begin >= 0) - (self.end >= 0)

    @property
    def cut(self) -> int:
        """The number of texts that are longer, and lose their ends."""
        return int((self.sequences.counts("target") > self.room).sum())

    def beside(self, found: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return the texts; an image whose text is empty does not count."""
        tokens, segments, positions = (np.zeros((self.most, self.text_len), np.int32) for _ in range(3))
        weights = np.zeros(self.most, np.float32)
        for n, one in enumerate(found):
            weights[n] = len(one["target"]) > 0
            ids = self._whole(one["target"]) if weights[n] else []
            tokens[n, :len(ids)], segments[n, :len(ids)] = ids, n + 1
            positions[n, :len(ids)] = np.arange(len(ids))
        return {"tokens": tokens.reshape(-1), "segments": segments.reshape(-1), "positions": positions.reshape(-1),
                "weights": weights}

    def _whole(self, ids: np.ndarray) -> list[int]:
        before, behind = ([token] * (token >= 0) for token in (self.begin, self.end))
        found = [*before, *ids[:self.room].tolist(), *behind]
        return found if self.pad < 0 else found + [self.pad] * (self.text_len - len(found))


@dataclass(frozen=True)
class CaptionedImages(ImageRows):
    """Rows of sequences to predict: an image's patches, each in a token's place, then its text and an end token.

    Weights are 1 where the next token is one of the text or its end.
    """

    end: int  # the id of the end token

    @cached_property
    def lengths(self) -> np.ndarray:  # pyrefly: ignore[bad-override]
        """Patches and tokens; the end token is predicted and never read."""
        return super().lengths + self.sequences.counts("target")

    def starts(self, found: Sequence[dict[str, np.ndarray]]) -> list[int]:
        """Return where each sequence begins, as its patches do."""
        return np.cumsum([0, *(len(one["patches"]) + len(one["target"]) for one in found[:-1])]).tolist()

    def beside(self, found: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return the tokens, the tokens to predict, which sequence each is of and where in it, and what it weighs."""
        row = {name: np.zeros(self.length, np.int32) for name in ("tokens", "targets", "segments", "positions")}
        weights = np.zeros(self.length, np.float32)
        for number, (at, one) in enumerate(zip(self.starts(found), found, strict=True), 1):
            patches, ids = len(one["patches"]), one["target"]
            stop, text = at + patches + len(ids), at + patches
            row["segments"][at:stop], row["positions"][at:stop] = number, np.arange(stop - at)
            row["tokens"][text:stop], row["targets"][text - 1:stop] = ids, [*ids, self.end]
            weights[text - 1:stop] = 1
        return {**row, "weights": weights}
