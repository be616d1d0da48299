"""Convert images to sequences of square patches, of whatever height and width they have.

An image is a file, a member of a tar archive, or a value in a column of Parquet. Its caption may be next to it
(`a.png`, `a.txt`) or in another column, or its folder's name may be its label.
"""

import functools
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from jaxtrain import storage
from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.corpus.sequences import TOKENIZER, Column, Columns
from jaxtrain.data.corpus.shard_writer import Origin
from jaxtrain.data.formats import inputs
from jaxtrain.data.formats.inputs import Piece
from jaxtrain.data.formats.tar_members import Member, content_of, members
from jaxtrain.data.prepare.tasks import Task
from jaxtrain.data.prepare_sequences.text_beside import TEXT_BYTES, text_beside, with_texts
from jaxtrain.data.tokenizers import tokenizer_folder
from jaxtrain.data.tokenizers.tokenizer import load_tokenizer
from jaxtrain.errors import UserError, nearest

FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")  # some others start programs
TARGETS = ("none", "text", "folder")
CHANNELS = 3
PIXELS = 2**26  # an image of more is dropped, since a small file can hold any number
IMAGE_BYTES = 2**29  # so is a file or a member of an archive that is larger


def grid(height: int, width: int, patch: int, most: int, side: int) -> tuple[int, int]:
    """Return how many patches an image is to be high and wide: its shape, but no more than `most` nor a `side`."""
    scale = min(1.0, (most * patch**2 / (height * width)) ** 0.5, side * patch / max(height, width)) / patch
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    while rows * columns > most:
        rows, columns = (rows - 1, columns) if rows >= columns else (rows, columns - 1)
    return rows, columns


def to_patches(pixels_HWC: np.ndarray, patch: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut an image into patches, row by row: their values, and the row and the column of each."""
    rows, columns = pixels_HWC.shape[0] // patch, pixels_HWC.shape[1] // patch
    cut = pixels_HWC.reshape(rows, patch, columns, patch, -1).transpose(0, 2, 1, 3, 4)
    return cut.reshape(rows * columns, -1), np.indices((rows, columns)).reshape(2, -1).T


def from_patches(values_TP: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return the image [height, width, channels] of patches in the order of `to_patches`."""
    patch = int((values_TP.shape[-1] // CHANNELS) ** 0.5)
    cut = values_TP.reshape(rows, columns, patch, patch, -1).transpose(0, 2, 1, 3, 4)
    return cut.reshape(rows * patch, columns * patch, -1)


_tokenizer = functools.cache(load_tokenizer)


@dataclass(frozen=True)
class Found:
    """One image of the input, as it is stored."""

    name: str
    content: bytes
    caption: str | None
    origin: Origin


@dataclass(frozen=True)
class Images:
    """A source of sequences from images: `patches`, their `places`, and the requested target."""

    target: str = "none"  # text: `target` holds the ids of an image's caption; folder: `label`, the folder's number
    tokenizer: str = "bytes"
    patch_size: int = 16
    most_patches: int = 256  # of an image; larger ones are scaled down
    patches_per_side: int = 64  # likewise
    image_field: str = "image"  # the column of Parquet with the images, and that
    text_field: str = "text"  # with their captions
    square: int = 0  # pixels a side of the square that every image becomes, as published encoders read it; 0: none
    crop_square: bool = False  # with `square`, what is longer than it is cut off on both sides, in place of squeezed
    eval_fraction: float = 0.005
    task_bytes: int = 2**26
    labels: tuple[str, ...] = ()  # set by `ready`

    kind = "images"
    packages = ("pillow", "tokenizers")

    def __post_init__(self):
        if self.target not in TARGETS:
            raise UserError("--label", f"{self.target!r} is not known", nearest(self.target, TARGETS))
        for name in ("patch_size", "most_patches", "patches_per_side"):
            if not 1 <= getattr(self, name) < 2**15:
                raise UserError(f"--{name}", f"{getattr(self, name)} is not possible", "use 1 or more")
        if self.square and not self.patch_size <= self.square < 2**15:
            raise UserError("--square", f"{self.square} is not possible with patches of {self.patch_size} pixels",
                            "use the side of an image in pixels, such as 224")
        if self.crop_square and not self.square:
            raise UserError("--crop_square", "it is read with --square only", "give that, too")

    @property
    def columns(self) -> dict[str, Column]:
        """The columns."""
        target = {"none": {}, "text": {"target": Column("<i4", per="own")},
                  "folder": {"label": Column("<i4", per="sequence")}}
        return {"patches": Column("<u1", (self.patch_size**2 * CHANNELS,)), "places": Column("<u2", (2,)),
                **target[self.target]}

    def identity(self) -> JsonObject:
        """Return what determines the sequences, besides the input."""
        fields = {"image": self.image_field, "text": self.text_field}
        more = {"square": self.square, "crop_square": self.crop_square, "patches_per_side": self.square // (
            self.patch_size)} if self.square else {}
        return {"target": self.target, "tokenizer": self._ids.fingerprint if self.target == "text" else None,
                "patch_size": self.patch_size, "most_patches": self.most_patches, "fields": fields,
                "patches_per_side": self.patches_per_side, "eval_fraction": self.eval_fraction, **more}

    def find_tasks(self, sources: Sequence[str]) -> list[Task]:
        """Return tasks of images in order of name, each file followed by its caption; archives stay whole."""
        found = inputs.find_pieces(sources, self.task_bytes, ends=(*FILES, ".tar", ".parquet"))
        if not found:
            raise UserError("--input", f"{', '.join(sources)} has no images",
                            f"name files or folders of {', '.join((*FILES, '.tar', '.parquet'))}")
        groups = with_texts(found, _is_image, "caption") if self.target == "text" else [(piece,) for piece in found]
        return inputs.cut(groups, self.task_bytes)

    def ready(self, tasks: Sequence[Task], output: Any, workers: int,
              say: Callable[..., None]) -> tuple["Images", list[Task]]:
        """Return the source with the names of all folders as labels, and the tasks."""
        if self.target == "text":
            tokenizer_folder.save(self._ids, output / TOKENIZER)
        if self.target != "folder":
            return self, list(tasks)
        names = (name for task in tasks for piece in task for name in _names(piece))
        return replace(self, labels=tuple(sorted({_folder(name) for name in names}))), list(tasks)

    def read(self, number: int, task: Task, output: Any, left_out: dict[str, int],
             ) -> Iterator[tuple[Columns, Origin]]:
        """Yield the sequences of a task, and where each comes from."""
        for found in self._found(task):
            pixels, caption = self._pixels(found.content), (found.caption or "").strip()
            if isinstance(pixels, str) or (self.target == "text" and not caption):
                reason = pixels if isinstance(pixels, str) else "without a caption"
                left_out[reason] = left_out.get(reason, 0) + 1
                continue
            values, places = to_patches(pixels, self.patch_size)
            sequence: dict[str, Any] = {"patches": values, "places": places}
            if self.target == "text":
                sequence["target"] = self._ids.encode(caption.encode())
            elif self.target == "folder":
                sequence["label"] = [self.labels.index(_folder(found.name))]
            yield sequence, found.origin

    def manifest(self) -> JsonObject:
        """Return the size of patches and, if there are any, the labels, for the manifest."""
        found: dict[str, Any] = {"patch_size": self.patch_size}
        if self.target == "folder":
            found["labels"] = list(self.labels)
        if self.target == "text":
            found["captions"] = {"tokenizer": self.tokenizer, "vocab_size": self._ids.vocab_size, "end": self._ids.eod}
        return found

    @property
    def _ids(self) -> Any:
        return _tokenizer(self.tokenizer)

    def _found(self, task: Task) -> Iterator[Found]:
        """Yield a task's images as they are stored."""
        for i, piece in enumerate(task):
            if piece.kind == "parquet":
                yield from self._rows(i, piece)
            elif _is_archive(piece.name):
                yield from _members(i, piece, self.target == "text")
            elif _is_image(piece.name):
                beside = text_beside(task, i) if self.target == "text" else None
                caption = _content(beside, TEXT_BYTES).decode(errors="replace") if beside else None
                yield Found(piece.name, _content(piece, IMAGE_BYTES), caption, Origin(i, 0))

    def _rows(self, i: int, piece: Piece) -> Iterator[Found]:
        if self.target == "folder":
            raise UserError("--label", f"{piece.name} has no folders", "use --label=text or --label=none")
        wanted = [self.image_field, *([self.text_field] if self.target == "text" else [])]
        file = inputs.parquet_file(piece.path)
        for name in wanted:
            if name not in file.schema_arrow.names:
                raise UserError("--image_field" if name == self.image_field else "--text_field",
                                f"{piece.name} has no column {name!r}", f"it has {', '.join(file.schema_arrow.names)}")
        for row, record in enumerate(inputs.row_group(piece, wanted, file).to_pylist()):
            image, caption = record[self.image_field], record.get(self.text_field)
            if not isinstance(caption, str | None):
                raise UserError("--text_field", f"row {row} of {piece.name} has no text but {type(caption).__name__}",
                                "name a column of text")
            content = image.get("bytes", image) if isinstance(image, dict) else image
            if not isinstance(content, bytes | None):
                raise UserError("--image_field", f"row {row} of {piece.name} has no bytes of an image but "
                                f"{type(content).__name__}", "write the files' bytes into it, or name another column")
            yield Found(piece.name, content or b"", caption, Origin(i, row))

    def _pixels(self, content: bytes) -> np.ndarray | str:
        """Decode an image, upright and in three channels, in a size of whole patches; or say why it is dropped."""
        pil, ops = (inputs.extra(f"PIL.{name}", "images", group="images") for name in ("Image", "ImageOps"))
        try:
            pil.init()
            with pil.open(io.BytesIO(content), formats=[one for one in FORMATS if one in pil.OPEN]) as image:
                if image.width * image.height > PIXELS:
                    return f"more than {PIXELS:,} pixels"
                upright = _in_8_bits(ops.exif_transpose(image)).convert("RGB")
        except Exception:  # decoders raise whatever they like: OSError, ValueError, SyntaxError, struct.error
            return "not readable as an image"
        if self.square:
            return self._squared(upright, pil.Resampling.BICUBIC)
        rows, columns = grid(upright.height, upright.width, self.patch_size, self.most_patches, self.patches_per_side)
        size = columns * self.patch_size, rows * self.patch_size
        return np.asarray(upright if upright.size == size else upright.resize(size, pil.Resampling.BICUBIC))

    def _squared(self, image: Any, how: Any) -> np.ndarray | str:
        """Return an image as a square, squeezed or cut, without the pixels beyond the last whole patch.

        Or why it is dropped: a line of pixels would become very long before it is cut.
        """
        side, width, height = self.square, image.width, image.height
        if self.crop_square:
            short = min(width, height)
            if (side * width // short) * (side * height // short) > PIXELS:
                return f"more than {PIXELS:,} pixels"
            image = image.resize((side * width // short, side * height // short), how)
            left, top = (image.width - side) // 2, (image.height - side) // 2
        else:
            image, left, top = image.resize((side, side), how), 0, 0
        kept = side // self.patch_size * self.patch_size
        return np.asarray(image)[top:top + kept, left:left + kept]


def _in_8_bits(image: Any) -> Any:
    """Return a grey image of 16 bits in 8; Pillow's conversion makes all values above 255 of 65,535 white."""
    if image.mode[0] != "I":
        return image
    return image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")  # from either order of bytes


def _is_image(name: str) -> bool:
    return name.lower().endswith(FILES)


def _is_archive(name: str) -> bool:
    return name.lower().endswith(".tar")


def _names(piece: Piece) -> list[str]:
    """Return the names of the images in a piece, from the headers of an archive."""
    if not _is_archive(piece.name):
        return [piece.name] if _is_image(piece.name) else []
    with inputs.readable(piece.path), storage.open(piece.path) as file:
        return [member.name for member in members(file, piece.path) if member.is_file and _is_image(member.name)]


def _members(i: int, piece: Piece, with_text: bool) -> Iterator[Found]:
    """Yield the images of an archive; with their captions, each when both have come: that of `a.png` is `a.txt`."""
    with inputs.readable(piece.path), storage.open(piece.path) as file:
        def found(place: int, member: Member, caption: str | None) -> Found:
            return Found(member.name, content_of(file, member), caption, Origin(i, place))

        texts: dict[str, str] = {}
        waiting: dict[str, list[tuple[int, Member]]] = {}
        for place, member in enumerate(members(file, piece.path)):
            stem, _, end = member.name.rpartition(".")
            if not member.is_file or member.size > (TEXT_BYTES if end == "txt" else IMAGE_BYTES):
                continue
            if _is_image(member.name):
                if not with_text or stem in texts:
                    yield found(place, member, texts.get(stem))
                else:
                    waiting.setdefault(stem, []).append((place, member))
            elif with_text and end == "txt":
                texts[stem] = content_of(file, member).decode(errors="replace")
                yield from (found(*one, texts[stem]) for one in waiting.pop(stem, ()))
        yield from (found(*one, None) for images in waiting.values() for one in images)


def _folder(name: str) -> str:
    """Return the name of the folder that an image is in."""
    if not (folder := PurePosixPath(name).parent.name):
        raise UserError("--label", f"{name} is not in a folder",
                        "name the folder that contains the label folders as --input")
    return folder


def _content(piece: Piece, most: int) -> bytes:
    """Return the content of a file, or of one that is larger nothing, which is no image or caption."""
    if piece.size > most:
        return b""
    with inputs.readable(piece.path):  # an error, since the file may be readable the next time
        return storage.read(piece.path)
